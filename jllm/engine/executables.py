"""Compiled programs in files: a later start on the same device neither traces nor compiles them.

JAX's persistent cache is asked with a lowered program, and tracing and lowering are most of what a start with kernels
takes. Here the question is what decides about the program: the sources, versions and settings, the device, and the
arguments' shapes. The two don't go together: what JAX's cache has had XLA cannot serialize a second time.
"""

import contextlib
import hashlib
import os
import pickle
import platform
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.experimental.serialize_executable import deserialize_and_load, serialize

KEPT_DAYS = 30  # without use
ROOT = Path(__file__).parents[2]
PACKAGES = ("jllm", "pallas_kernels")
UNKEPT = (  # what serializing raises: among others for programs that call back into Python
    OSError, ValueError, TypeError, AttributeError, NotImplementedError, pickle.PicklingError,
    jax.errors.JaxRuntimeError,
)  # fmt: skip
NO_MATTER = ("jax_compilation_cache", "jax_persistent_cache", "jax_log")  # how names of settings begin


@dataclass(frozen=True)
class Executables:
    """Compiled programs under `folder`, for one device. Files are pickles: whoever can write to the folder can run code
    here, as with JAX's own cache."""

    folder: Path
    device: jax.Device
    basis: str = field(init=False, repr=False)  # a hash of sources, versions and the device

    def __post_init__(self):
        object.__setattr__(self, "basis", _digest(repr(tuple(_surroundings(self.device))).encode()))
        if self.device.platform == "gpu":
            _tell_where_kernels_link()

    def path(self, arguments: Any, static: Any) -> Path:
        """Of the program for arguments (a pytree of arrays or of shapes) and static ones (with a faithful repr). To be
        asked in the thread that traces: JAX's settings may be a thread's own."""
        leaves, tree = jax.tree.flatten(arguments)
        shapes = [(x.shape, str(x.dtype), getattr(x, "weak_type", False), getattr(x, "sharding", None)) for x in leaves]
        question = repr((self.basis, _settings(), str(tree), shapes, static))
        return self.folder / f"{_digest(question.encode())}.pickle"

    def load(self, path: Path) -> jax.stages.Compiled | None:
        """None if there is none, or none that can be used."""
        try:
            with path.open("rb") as file:
                serialized, in_tree, out_tree = pickle.load(file)
            with contextlib.suppress(OSError):  # somebody else's
                os.utime(path)  # used
            client, devices = self.device.client, [self.device]
            return deserialize_and_load(serialized, in_tree, out_tree, backend=client, execution_devices=devices)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:  # pickle alone names eight kinds, and a damaged file may raise any
            warnings.warn(f"{path} cannot be used ({type(error).__name__}); compiling anew", stacklevel=2)
            return None

    def save(self, path: Path, compiled: jax.stages.Compiled) -> None:
        """Whole or not at all. What cannot be kept is compiled again next time."""
        try:
            content = pickle.dumps(serialize(compiled))
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder, suffix=".part", delete=False) as part:
                part.write(content)
            os.replace(part.name, path)
        except UNKEPT as error:
            warnings.warn(f"a compiled program could not be kept in {self.folder}: {error}", stacklevel=2)
        self._forget()

    def _forget(self) -> None:
        """Files of other versions, of models that nobody runs any more, and parts whose writer was killed."""
        for path in self.folder.glob("*"):
            with contextlib.suppress(OSError):  # another process was quicker
                if path.stat().st_mtime < time.time() - KEPT_DAYS * 86400:
                    path.unlink()


def _tell_where_kernels_link() -> None:
    """A Mosaic GPU kernel's host code, when it is loaded, looks up the library that launches kernels, whose place JAX
    names as it imports what lowers kernels: a start that lowers nothing would not import it."""
    with contextlib.suppress(ImportError):  # JAX for another maker's GPU
        import jax.experimental.mosaic.gpu  # noqa: F401


def jax_cache_is_on() -> bool:
    """Whether JAX's own persistent cache may have had what is compiled."""
    return bool(jax.config.jax_compilation_cache_dir) and jax.config.jax_enable_compilation_cache


def _surroundings(device: jax.Device) -> Iterator[Any]:
    yield jax.__version__, jaxlib.__version__, platform.machine()
    yield device.platform, device.device_kind, device.client.platform_version
    yield _processor() if device.platform == "cpu" else None
    yield os.environ.get("XLA_FLAGS")
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield str(path.relative_to(ROOT)), _digest(path.read_bytes())


def _settings() -> list[tuple[str, str]]:
    """JAX's, as they are in this thread."""
    values = jax.config.values
    return sorted((k, repr(getattr(jax.config, k, values[k]))) for k in values if not k.startswith(NO_MATTER))


def _processor() -> str:
    """What it can do: XLA compiles for just that."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
