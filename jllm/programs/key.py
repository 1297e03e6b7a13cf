"""Makes the key of a compiled program's file: text of everything that decides about the program.

A loaded program is not traced, so its key must hold everything that could have changed it. The key has the sources of
every module that tracing can reach, and the versions of compilers. It has the device, the settings and the arguments.
Only listed types are supported. A value of another type has no key, and its program is never kept or loaded.
"""

import ast
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.tree_util import PyTreeDef

from pallas_kernels import LOADED

ROOT = Path(__file__).parents[2]
PACKAGES = ("jllm", "pallas_kernels")
PLAIN = (bool, int, float, str, bytes, NoneType)
NODES = (tuple, list, dict, NoneType)
# Prefixes of names: packages that compile, JAX's settings that change no program, and variables that change one.
DISTRIBUTIONS = ("jax", "nvidia", "triton", "numpy", "ml-dtypes", "ml_dtypes")
NO_MATTER = ("jax_compilation_cache", "jax_persistent_cache", "jax_log")
VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "MOSAIC_GPU_", "TRITON_", "JLLM_COMPUTE_")
PLACES = re.compile("MOSAIC_GPU_.*_(PATH|ROOT)")  # set by JAX's import; only the content of the tools there counts
TOOLS = ("bin/ptxas", "bin/nvlink", "nvvm/libdevice/libdevice.10.bc")


class NoKey(Exception):
    """Raised when something that decides about a program has no content for a key. The message names it."""


def content(value: Any, modules: Collection[str]) -> object:
    """Returns a value's content as nested tuples of plain values, which have a faithful repr.

    Supports plain values, dtypes and meshes, and tuples, lists, dicts and frozensets of them. Supports enums and frozen
    dataclasses of `modules` too. Raises NoKey for anything else.
    """
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind in (tuple, list, frozenset):
        parts = (content(item, modules) for item in value)
        return kind.__name__, tuple(sorted(parts, key=repr) if kind is frozenset else parts)
    if kind is dict:
        return "dict", tuple((content(k, modules), content(v, modules)) for k, v in value.items())
    if isinstance(value, np.dtype) and value.fields is None:
        return "dtype", value.name, value.str
    if kind is Mesh:  # a loaded program runs only on the devices that it was compiled for
        return "mesh", value.axis_names, value.devices.shape, tuple(device.id for device in value.devices.flat)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind.__module__ in modules:
        if isinstance(value, Enum):
            return name, value.name
        if dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            fields = dataclasses.fields(kind)
            return name, tuple((f.name, content(getattr(value, f.name), modules)) for f in fields)
    raise NoKey(f"a {name} has no content that a key could hold")


def arguments_content(arguments: object, devices: Sequence[jax.Device], modules: Collection[str]) -> object:
    """Returns the content of a function's arguments, a pytree of shapes and of arrays.

    The arrays are on this device, or sharded over a mesh of these devices. Raises NoKey for arrays elsewhere, and for
    containers that are not of `modules`.
    """
    leaves, tree = jax.tree.flatten(arguments)
    return _tree(tree, modules), tuple(_leaf(leaf, devices, modules) for leaf in leaves)


def _tree(tree: PyTreeDef, modules: Collection[str]) -> object:
    data = tree.node_data()
    if data is None:
        return "leaf"
    kind, static = data
    if kind not in NODES and kind.__module__ not in modules:
        raise NoKey(f"a {kind.__module__}.{kind.__qualname__} is a container that a key cannot hold")
    children = tuple(_tree(child, modules) for child in tree.children())
    return f"{kind.__module__}.{kind.__qualname__}", content(static, modules), children


def _leaf(leaf: Any, devices: Sequence[jax.Device], modules: Collection[str]) -> object:
    sharding, layout = getattr(leaf, "sharding", None), getattr(getattr(leaf, "format", None), "layout", None)
    place = None if sharding is None else _place(sharding, devices, modules)
    weak = getattr(leaf, "weak_type", False)
    return leaf.shape, content(np.dtype(leaf.dtype), modules), weak, place, None if layout is None else str(layout)


def _place(sharding: jax.sharding.Sharding, devices: Sequence[jax.Device], modules: Collection[str]) -> object:
    if isinstance(sharding, jax.sharding.SingleDeviceSharding) and [*sharding.device_set] == [*devices]:
        return sharding.memory_kind
    spread = isinstance(sharding, jax.sharding.NamedSharding) and len(devices) > 1
    if not spread or [*sharding.mesh.devices.flat] != [*devices]:  # type: ignore[attr-defined]
        where = f"{devices[0]} alone" if len(devices) == 1 else f"a mesh of {', '.join(map(str, devices))}"
        raise NoKey(f"an array is not on {where}, but has the sharding {sharding}")
    return sharding.memory_kind, content(sharding.mesh, modules), str(sharding.spec)  # type: ignore[attr-defined]


def settings() -> list[tuple[str, str]]:
    """Returns the names and values of JAX's settings in this thread. Raises NoKey under a mesh."""
    if not jax.sharding.get_abstract_mesh().empty:
        raise NoKey("a mesh is set")
    values = jax.config.values
    return sorted((k, repr(getattr(jax.config, k, values[k]))) for k in values if not k.startswith(NO_MATTER))


# Sources


def reached(modules: Iterable[str], root: Path = ROOT) -> dict[str, Path]:
    """Returns the modules of the two packages that tracing a function of `modules` can run, each with its file.

    It follows imports at the top of a module and in functions, to any depth. Imports only for type checkers don't
    count.
    """
    found: dict[str, Path] = {}
    todo = set(modules)
    while todo:
        name = todo.pop()
        path = _file(name, root)
        if path is not None and name not in found:
            found[name] = path
            todo.update(_imported(name, path, root))
            todo.add(name.rpartition(".")[0])
    return found


def check_unedited(files: Iterable[Path], loaded: float = LOADED) -> None:
    """Raises NoKey if a file was edited or removed since a process loaded it (default: this process). The key would
    then describe other code than the traced one."""
    for path in files:
        if not path.exists() or path.stat().st_mtime > loaded:
            raise NoKey(f"{path} was edited or removed after it had been loaded")


def _file(module: str, root: Path) -> Path | None:
    if module.partition(".")[0] not in PACKAGES:
        return None
    place = root.joinpath(*module.split("."))
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


def _imported(name: str, path: Path, root: Path) -> Iterator[str]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in _imports(ast.parse(path.read_bytes()).body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            parts = {alias.name: _file(f"{base}.{alias.name}", root) for alias in node.names}
            yield from (base if part is None else f"{base}.{name}" for name, part in parts.items())


def _imports(nodes: Iterable[ast.AST]) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from _imports(node.orelse)
        elif isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _imports(ast.iter_child_nodes(node))


# Compilers and devices


def surroundings(device: jax.Device, sources: Mapping[str, Path]) -> Iterator[object]:
    """Yields everything that decides about programs besides the arguments and settings."""
    yield platform.machine(), platform.python_version()
    yield device.platform, device.device_kind, device.client.platform_version
    yield device.client.device_count(), device.client.process_index()  # a program may belong to what JAX sees
    yield _processor() if device.platform == "cpu" else None
    yield sorted(_versions())
    yield sorted(_variables())
    if device.platform == "gpu":
        yield tuple(_tools())
    for module, path in sorted(sources.items()):
        yield module, digest(path.read_bytes())


def _versions() -> Iterator[tuple[str, str]]:
    """Yields the versions of JAX, its plugins, Triton, and the vendors' compilers and libraries."""
    for found in importlib.metadata.distributions():
        name = found.metadata.get("Name") or ""  # a half removed distribution has none
        if name.lower().startswith(DISTRIBUTIONS):
            yield name, found.version


def _variables() -> Iterator[tuple[str, str]]:
    for name, value in os.environ.items():
        if name.startswith(VARIABLES) and not PLACES.fullmatch(name):
            # XLA_FLAGS may name a file of flags: XLA reads it as one unless it begins with a dash.
            in_file = name == "XLA_FLAGS" and value.strip()[:1] not in ("", "-") and Path(value).is_file()
            yield name, Path(value).read_text() if in_file else value


def _tools() -> Iterator[tuple[str, str]]:
    """Yields the names and content hashes of the tools that XLA and Mosaic GPU may find. Looks on the path, where
    variables or flags point, in NVIDIA's packages, and in the usual places."""
    named = [os.environ.get(name, "") for name in ("CUDA_ROOT", "CUDA_HOME", "CUDA_PATH")]
    named += re.findall(r"--xla_gpu_cuda_data_dir=(\S+)", os.environ.get("XLA_FLAGS", ""))
    roots = [Path(root) for root in (*named, "cuda_sdk_lib", "/usr/local/cuda", "/opt/cuda") if root]
    package = importlib.util.find_spec("nvidia")
    for place in (package.submodule_search_locations or ()) if package else ():
        roots += sorted(Path(place).iterdir())
    for tool in TOOLS:
        on_path = shutil.which(Path(tool).name)
        for path in ([Path(on_path)] if on_path else []) + [root / tool for root in roots]:
            if path.is_file():
                yield tool, digest(path.read_bytes())


def _processor() -> str:
    """Returns the processor's features, since XLA compiles for exactly these."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
