"""Packs values for other processes of this machine: pickles, and a file of their arrays that all of them map.

The file has no name and lies in shared memory where that has room. So it costs its memory once, and it goes when the
last process that has it ends, however that comes.
"""

import io
import mmap
import os
import pickle
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import FunctionType
from typing import Any, BinaryIO

import jax
import numpy as np

from jllm.errors import ConfigError
from jllm.parallel.memory import is_host

SHARED = Path("/dev/shm")
ALIGNED = 64  # bytes, so that a CPU device uses an array where it lies
ROOM = 1 << 28  # bytes of shared memory that are left to others


class Packed:
    """Holds named values, pickled one by one, and the file of their arrays. Raises ConfigError for a value that cannot
    be pickled, and for arrays on an accelerator, with its name."""

    def __init__(self, values: Mapping[str, Any]):
        self._arrays: list[np.ndarray] = []
        self._size = 0
        self.pickles = {name: self._pickled(name, value) for name, value in values.items()}
        self.file = _nameless(self._size)
        for array in self._arrays:
            self.file.seek(-self.file.tell() % ALIGNED, os.SEEK_CUR)
            self.file.write(memoryview(array.reshape(-1).view(np.uint8)))
        self.file.flush()
        self._arrays.clear()

    def place_of(self, array: np.ndarray) -> int:
        """Returns where in the file an array will be."""
        place = self._size + -self._size % ALIGNED
        self._arrays.append(array)
        self._size = place + array.nbytes
        return place

    def _pickled(self, name: str, value: Any) -> bytes:
        text = io.BytesIO()
        try:
            _Pickler(text, self).dump(value)
        except Exception as error:  # an object of the caller may raise anything
            raise ConfigError(f"{name} cannot go to the process of an engine: {error}") from None
        return text.getvalue()


class _Pickler(pickle.Pickler):
    def __init__(self, text: io.BytesIO, packed: Packed):
        super().__init__(text, protocol=5)
        self._packed = packed

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, jax.Array) and (odd := sorted(str(d) for d in value.devices() if not is_host(d))):
            how = "pass its directory, 'package.module:NAME' or a function that makes it, or threads=True"
            raise pickle.PicklingError(f"it lies on {odd[0]}, which an engine's process needs: {how}")
        if not isinstance(value, jax.Array | np.ndarray) or value.dtype == object:
            return None
        array = np.ascontiguousarray(value)
        return self._packed.place_of(array), value.shape, array.dtype

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | FunctionType) and value.__module__ == "__main__":
            raise pickle.PicklingError(f"{value.__qualname__} is defined in the main program: define it in a module")
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, text: bytes, arrays: mmap.mmap | bytes):
        super().__init__(io.BytesIO(text))
        self._arrays = arrays

    def persistent_load(self, pid: Any) -> np.ndarray:
        place, shape, dtype = pid
        count = int(np.prod(shape, dtype=np.int64))
        if count == 0:  # the file may end before its place
            return np.zeros(shape, dtype)
        return np.frombuffer(self._arrays, np.uint8, count * dtype.itemsize, place).view(dtype).reshape(shape)


def unpacked(pickles: Mapping[str, bytes], file: int) -> dict[str, Any]:
    """Returns the values. Their arrays are read-only and lie in the file with this descriptor. Raises ConfigError for a
    value that this process cannot load, with its name."""
    size = os.fstat(file).st_size
    arrays = mmap.mmap(file, size, prot=mmap.PROT_READ) if size else b""
    values = {}
    for name, text in pickles.items():
        try:
            values[name] = _Unpickler(text, arrays).load()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{name} cannot be loaded in the process of an engine ({why})") from None
    return values


def _nameless(size: int) -> BinaryIO:
    """Returns a file without a name that has room for `size` bytes."""
    shared = SHARED.is_dir() and os.access(SHARED, os.W_OK) and shutil.disk_usage(SHARED).free - ROOM > size
    return tempfile.TemporaryFile(dir=SHARED if shared else None)
