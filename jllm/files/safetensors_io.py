"""Reads and writes safetensors files: an 8-byte little-endian header length, a JSON header, then the tensors' bytes.

It uses plain file calls, piece by piece. Mapped pages would count as resident memory, and a damaged file should give a
clear error. Format: https://github.com/huggingface/safetensors#format
"""

import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jllm.errors import CheckpointError, OutputError

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
CODES = {  # further dtypes of quantized checkpoints
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I16": np.dtype(np.int16),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
STORED = DTYPES | CODES
NAMES = {dtype: name for name, dtype in STORED.items()}
LFS = b"version https://git-lfs.github.com/spec/"  # the beginning of the pointer that Git leaves for a large file
_MAX_HEADER = 100_000_000  # the format's own limit
_PIECE = 16 << 20  # bytes read at a time for a conversion


@dataclass(frozen=True)
class StoredTensor:
    """Holds the place of one tensor: `nbytes` bytes from `offset` of file `path`."""

    name: str
    path: Path
    dtype: str  # as the format spells it, e.g. "BF16"
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a file by name. Raises CheckpointError unless they fill the file exactly, without gap or
    overlap."""
    try:
        raw, length, size = _read_json(path)
        tensors = [_entry(path, 8 + length, name, entry) for name, entry in raw.items() if name != "__metadata__"]
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: garbled safetensors header") from None
    end = 8 + length
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.offset != end:
            problem = "overlaps the one before it" if tensor.offset < end else "leaves a gap before it"
            raise CheckpointError(f"{path}: garbled safetensors header: tensor {tensor.name} {problem}")
        end += tensor.nbytes
    if size < end:
        raise CheckpointError(f"{path}: truncated: {size} bytes, but its header describes {end}")
    if size > end:
        raise CheckpointError(f"{path}: {size - end} bytes too long: {size} bytes, but its header describes {end}")
    return {tensor.name: tensor for tensor in tensors}


def read_metadata(path: Path) -> dict[str, str]:
    """Returns the metadata of a file. Raises CheckpointError for a file of another format."""
    try:
        found = _read_json(path)[0].get("__metadata__", {})
        return {str(key): str(value) for key, value in found.items()}
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: garbled safetensors header") from None


def _read_json(path: Path) -> tuple[dict[str, Any], int, int]:
    """Returns the header, its length in bytes, and the length of the whole file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        check_fetched(path)
        if not 2 <= length <= min(size - 8, _MAX_HEADER):
            raise CheckpointError(f"{path}: not a safetensors file, or truncated within its header ({size} bytes)")
        return json.loads(file.read(length)), length, size


def check_fetched(path: Path) -> None:
    """Raises CheckpointError for the pointer that Git leaves in place of a file that Git LFS has not fetched."""
    with path.open("rb") as file:
        if file.read(len(LFS)) == LFS:
            raise CheckpointError(
                f"{path}: is a git-LFS pointer, not the file itself: run `git lfs pull` in its folder"
            )


def _entry(path: Path, data_start: int, name: str, entry: dict[str, Any]) -> StoredTensor:
    dtype, shape, (begin, end) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
    if any(type(n) is not int or n < 0 for n in (*shape, begin, end)):
        raise ValueError
    if dtype in STORED and end - begin != math.prod(shape) * STORED[dtype].itemsize:
        raise CheckpointError(f"{path}: tensor {name}: {dtype} of shape {list(shape)} cannot take {end - begin} bytes")
    return StoredTensor(name, path, dtype, shape, data_start + begin, end - begin)


def read_tensor(tensor: StoredTensor, out: np.ndarray, progress: Callable[[int], object] = lambda n: None) -> None:
    """Reads a tensor into the C-contiguous array `out` of the same shape, and converts it to its dtype.

    Converting holds at most one piece of the stored bytes besides `out`. `progress` is called with numbers of bytes
    read. Raises CheckpointError if the file ends early or a value is out of the new dtype's range.
    """
    stored, flat = DTYPES[tensor.dtype], out.reshape(-1)
    buffer = np.empty(0 if stored == out.dtype else min(_PIECE // stored.itemsize, flat.size), stored)
    step = max(1, _PIECE // stored.itemsize)
    with tensor.path.open("rb", buffering=0) as file:
        file.seek(tensor.offset)
        for start in range(0, flat.size, step):
            target = flat[start : start + step]
            source = target if stored == out.dtype else buffer[: target.size]
            _read_exactly(file, source, tensor)
            if source is not target:
                cast_into(target, source, tensor)
            progress(source.nbytes)


def cast_into(target: np.ndarray, source: np.ndarray, tensor: StoredTensor) -> None:
    """Writes values of a tensor to an array of another float dtype. Raises CheckpointError for values that are out of
    its range."""
    with np.errstate(over="ignore"):
        target[:] = source.reshape(target.shape)
    narrower = ml_dtypes.finfo(target.dtype).maxexp < ml_dtypes.finfo(source.dtype).maxexp
    if narrower and np.isfinite(source).all() and not np.isfinite(target).all():
        raise CheckpointError(
            f"{tensor.path}: tensor {tensor.name} has values beyond the range of {target.dtype}; "
            "load it as bfloat16 or float32"
        )


def read_as_stored(tensor: StoredTensor, progress: Callable[[int], object] = lambda n: None) -> np.ndarray:
    """Returns a tensor of any dtype of `STORED`, bit for bit. Raises CheckpointError if the file ends early."""
    out = np.empty(tensor.shape, STORED[tensor.dtype])
    flat, step = out.reshape(-1), max(1, _PIECE // out.itemsize)
    with tensor.path.open("rb", buffering=0) as file:
        file.seek(tensor.offset)
        for start in range(0, flat.size, step):
            _read_exactly(file, flat[start : start + step], tensor)
            progress(flat[start : start + step].nbytes)
    return out


def read_bytes(tensor: StoredTensor, start: int, count: int) -> bytes:
    """Returns bytes start .. start + count of a tensor as they are stored. Raises CheckpointError if the file ends
    early."""
    out = np.empty(count, np.uint8)
    with tensor.path.open("rb", buffering=0) as file:
        file.seek(tensor.offset + start)
        _read_exactly(file, out, tensor)
    return out.tobytes()


def _read_exactly(file: Any, out: np.ndarray, tensor: StoredTensor) -> None:
    view = memoryview(out.view(np.uint8))
    while len(view):
        count = file.readinto(view)
        if not count:
            raise CheckpointError(f"{tensor.path}: truncated within tensor {tensor.name}")
        view = view[count:]


def write_file(path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> None:
    """Writes arrays of dtypes in `STORED` by name. The file gets its name once it is complete. Raises OutputError if it
    cannot be written."""
    header = encode_header(((name, x.dtype, x.shape) for name, x in arrays.items()), metadata)
    partial_path = path.with_name(path.name + ".partial")
    try:
        with partial_path.open("wb") as file:
            file.write(header)
            for x in arrays.values():
                file.write(memoryview(np.ascontiguousarray(x).reshape(-1).view(np.uint8)))
        os.replace(partial_path, path)
    except OSError as error:
        partial_path.unlink(missing_ok=True)
        raise OutputError(f"{path}: cannot be written: {error.strerror}") from None


def encode_header(
    tensors: Iterable[tuple[str, np.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Returns the header bytes of a file that holds `tensors` (name, dtype, shape) one after another."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}  # transformers wants the format
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the start of the data
    return struct.pack("<Q", len(text)) + text
