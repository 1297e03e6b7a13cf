"""Keeps compiled programs in files, so that a later start on the same device neither traces nor compiles them.

JAX's persistent cache looks up lowered programs, but with kernels, tracing and lowering take most of a start's time.
These files are looked up by everything that decides about a program (key.py). The two caches don't combine: XLA cannot
serialize a program that came from JAX's cache.
"""

import contextlib
import functools
import os
import pickle
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from jllm.programs.key import NoKey, arguments_content, check_unedited, content, digest, reached, settings, surroundings
from pallas_kernels.all_reduce import make_calls_known
from pallas_kernels.backends import tell_where_kernels_link
from pallas_kernels.one_writer import only_writer

# Modules of jllm.speculative whose values a step may take.
DRAFTERS = ("draft_model", "eagle", "medusa", "ngram", "quantized_copy")
KEPT_DAYS = 30  # without use
DAY = 86400  # seconds
NOT_KEPT = "(a|no) compiled (step|program) (is|could not be) "  # a pattern of the warnings below
UNKEPT = (  # errors of serializing, for example of programs that call back into Python
    OSError, ValueError, TypeError, AttributeError, NotImplementedError, pickle.PicklingError,
    jax.errors.JaxRuntimeError,
)  # fmt: skip


@dataclass(frozen=True)
class Executables:
    """Holds compiled programs of one module's function in `folder`, for one device or for a whole mesh.

    JAX loads a program only on the devices that it was compiled for. So each replica has its own files. The files are
    pickles: anyone who can write to the folder can run code here. JAX's own cache has the same risk.
    """

    folder: Path
    devices: tuple[jax.Device, ...]  # in a mesh's order
    module: str = "jllm.programs.packed_step"
    sources: Mapping[str, Path] = field(init=False, repr=False)  # files of the modules that decide about programs
    basis: str = field(init=False, repr=False)  # a hash of the sources, the compilers and the device

    def __post_init__(self):
        device = self.devices[0]
        sources, basis = _basis(self.module, device)
        object.__setattr__(self, "sources", sources)
        object.__setattr__(self, "basis", basis)
        if device.platform == "gpu":
            tell_where_kernels_link()
            if len(self.devices) > 1:
                make_calls_known()

    def path(self, arguments: object, static: object) -> Path | None:
        """Returns the path of a program for arguments (a pytree of arrays or shapes) and static arguments.

        Returns None, with a warning, if they have no key. Call it in the thread that traces, whose JAX settings count.
        """
        try:
            check_unedited(self.sources.values())
            of_arguments = arguments_content(arguments, self.devices, self.sources)
            places = [device.id for device in self.devices]
            key = repr((self.basis, places, settings(), of_arguments, content(static, self.sources)))
        except NoKey as why:
            warnings.warn(f"a compiled step is not kept in {self.folder}: {why}", stacklevel=2)
            return None
        return self.folder / f"{digest(key.encode())}.pickle"

    def load(self, path: Path) -> jax.stages.Compiled | None:
        """Returns the program in a file, or None if there is no file or it cannot be used."""
        try:
            stat = path.stat()
            found = _read(path, stat.st_mtime_ns, stat.st_size, self.devices)
            if stat.st_mtime < time.time() - DAY:
                with contextlib.suppress(OSError):  # another user's
                    os.utime(path)  # used
            return found
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:  # pickle alone names eight kinds, and a damaged file may raise any
            warnings.warn(f"{path} cannot be used ({type(error).__name__}); compiling again", stacklevel=2)
            with contextlib.suppress(OSError):
                path.unlink()
            return None

    @contextlib.contextmanager
    def claim(self, path: Path) -> Iterator[bool]:
        """Yields whether no other engine compiles this program in the block. A process that ends claims nothing. Nobody
        waits for a program that could not be kept."""
        with contextlib.ExitStack() as stack:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                alone = _unkept(path).exists()
                mine = alone or stack.enter_context(only_writer(path.with_suffix(".claim")))
            except OSError:  # save() says that it cannot be written
                mine = True
            yield mine

    def save(self, path: Path, compiled: jax.stages.Compiled) -> None:
        """Writes a program's file, wholly or not at all. A program that cannot be kept is compiled again at the next
        start."""
        try:
            content = pickle.dumps(serialize(compiled))
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder, suffix=".part", delete=False) as part:
                part.write(content)
            os.replace(part.name, path)
        except UNKEPT as error:
            warnings.warn(f"a compiled program could not be kept in {self.folder}: {error}", stacklevel=2)
            with contextlib.suppress(OSError):
                _unkept(path).touch()
        self._forget()

    def _forget(self) -> None:
        """Removes files of other versions and of models no longer run, and parts whose writer was killed."""
        for path in self.folder.glob("*"):
            with contextlib.suppress(OSError):  # another process was quicker
                if path.stat().st_mtime < time.time() - KEPT_DAYS * DAY:
                    path.unlink()


def _unkept(path: Path) -> Path:
    """Returns the path of an empty file, which says that a program could not be kept."""
    return path.with_suffix(".unkept")


@functools.cache
def _basis(module: str, device: jax.Device) -> tuple[Mapping[str, Path], str]:
    """Returns sources and basis. They are computed once a process: loaded code stays as it is (see check_unedited)."""
    sources = reached([module, *(f"jllm.speculative.{drafter}" for drafter in DRAFTERS)])
    return sources, digest(repr(tuple(surroundings(device, sources))).encode())


@functools.lru_cache(maxsize=64)
def _read(path: Path, changed: int, size: int, devices: tuple[jax.Device, ...]) -> jax.stages.Compiled:
    """Returns the program in a file. It is cached for the process while the file stays the same, as jit caches
    programs."""
    serialized, in_tree, out_tree = pickle.loads(path.read_bytes())
    return deserialize_and_load(serialized, in_tree, out_tree, backend=devices[0].client, execution_devices=devices)


def jax_cache_is_on() -> bool:
    """Returns whether a compiled program may have come from JAX's own persistent cache."""
    return bool(jax.config.jax_compilation_cache_dir) and jax.config.jax_enable_compilation_cache
