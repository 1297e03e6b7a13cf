"""Keys of compiled programs: what decides about a program changes its key, and what no key can hold has none."""

import collections
import contextlib
import importlib
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jllm.config import RopeScaling
from jllm.model.cache import make_cache, parse_kv_cache
from jllm.model.param_specs import abstract_params
from jllm.programs import key as program_key
from jllm.programs.key import (
    PACKAGES,
    ROOT,
    NoKey,
    arguments_content,
    check_unedited,
    content,
    reached,
    settings,
    surroundings,
)
from jllm.programs.packed_step import Layout, packed_step
from jllm.step.buckets import Bucket
from jllm.step.state import State, Variant, make_slots
from pallas_kernels import LOADED
from pallas_kernels.formats.kv_formats import KVFormat
from pallas_kernels.formats.kv_pages import allocate
from tests.tiny import CONFIG

SOURCES = reached(["jllm.programs.packed_step"])
DEVICE = jax.devices()[0]


@dataclass(frozen=True)
class Users:
    """From a module that no key knows."""

    dtype: str = "int8"
    group: int | None = 8


@dataclass(frozen=True)
class UsersFormat(KVFormat):
    """With methods of its own."""


class UsersEnum(Enum):
    ONE = 1


UsersTuple = collections.namedtuple("UsersTuple", "a b")


def test_what_differs_has_another_content_and_what_is_equal_has_not():
    layout = Layout(Bucket(2, 6, 2), 9)
    values = [
        None, False, 0, 0.0, -0.0, "", b"", "0", (), (0,), ((0,),), (0, 0), [0], {}, {"a": 0}, frozenset(),
        frozenset("ab"), "('tuple', ())", KVFormat("int8", 8), KVFormat("int8", 16), layout, replace(layout, bias=1),
        Variant(), Variant(logprobs=True), CONFIG, replace(CONFIG, rope_scaling=RopeScaling("linear", 2.0)),
        *map(jnp.dtype, ("int8", "uint8", "bfloat16", "float8_e4m3fn", "float8_e5m2")),
    ]  # fmt: skip
    found = [repr(content(value, SOURCES)) for value in values]
    assert len(set(found)) == len(values)
    assert repr(content(frozenset("ba"), SOURCES)) == found[values.index(frozenset("ab"))]
    assert content(Layout(Bucket(2, 6, 2), 9), SOURCES) == content(layout, SOURCES)


@pytest.mark.parametrize(
    "value",
    [
        lambda x: x, partial(int, 2), len, np.int64(3), np.zeros(2), jnp.float32, Users(), UsersFormat("int8", 8),
        Users, UsersEnum.ONE, UsersTuple(1, 2), SimpleNamespace(), {1}, KVFormat(Users()), (0, {"a": [Users()]}),
        np.dtype([("a", "int8")]), KVFormat(lambda: 1),
    ],
    ids=lambda value: type(value).__name__,  # the same in every process, as addresses are not
)  # fmt: skip
def test_what_no_key_can_hold_has_none(value):
    with pytest.raises(NoKey, match="has no content that a key could hold"):
        content(value, SOURCES)


def test_a_class_whose_source_does_not_count_has_no_content():
    """Its methods may be traced all the same."""

    def without(module: str) -> dict[str, Path]:
        return {name: path for name, path in SOURCES.items() if name != f"pallas_kernels.{module}"}

    with pytest.raises(NoKey, match="kv_formats.KVFormat"):
        content(KVFormat("int8", 8), without("formats.kv_formats"))
    pages = allocate(1, 1, 8, 8, KVFormat("int8", 8), KVFormat("bfloat16"))
    with pytest.raises(NoKey, match="container"):
        arguments_content(pages, [DEVICE], without("formats.kv_pages"))


def test_arguments_differ_by_structure_shape_dtype_and_format():
    f32 = partial(jax.ShapeDtypeStruct, dtype=np.float32)
    formats = [KVFormat("int8", 8), KVFormat("int8", 16)]
    arguments = [
        f32((3,)), f32((4,)), jax.ShapeDtypeStruct((3,), np.int32), (f32((3,)),), [f32((3,))], {"a": f32((3,))},
        {"b": f32((3,))}, None, (f32((3,)), None), (None, f32((3,))), jnp.zeros(3, jnp.float32),
        *(jax.eval_shape(partial(allocate, 1, 1, 8, 16, fmt, formats[0])) for fmt in formats),
    ]  # fmt: skip
    found = [arguments_content(argument, [DEVICE], SOURCES) for argument in arguments]
    assert len(set(map(repr, found))) == len(arguments)
    assert arguments_content(np.zeros(3, np.float32), [DEVICE], SOURCES) == found[0]


def test_other_containers_and_other_devices_have_no_key():
    f32 = jnp.zeros(4, jnp.float32)
    spread = jax.device_put(f32, NamedSharding(Mesh(np.array([DEVICE]), "x"), PartitionSpec("x")))
    for argument, why in (
        (UsersTuple(f32, f32), "test_program_key.UsersTuple is a container"),
        (jax.tree_util.Partial(len), "Partial is a container"),
        (spread, "sharding NamedSharding"),
    ):
        with pytest.raises(NoKey, match=why):
            arguments_content([argument], [DEVICE], SOURCES)
    with pytest.raises(NoKey, match="is not on another device alone"):
        arguments_content(f32, ["another device"], SOURCES)


def test_settings_of_this_thread_count_and_a_mesh_has_no_key():
    base = settings()
    with jax.default_matmul_precision("float32"):
        assert settings() != base
    assert settings() == base
    with jax.set_mesh(Mesh(np.array([DEVICE]), "x")), pytest.raises(NoKey, match="a mesh is set"):
        settings()


# Sources


def test_modules_that_tracing_cannot_reach_do_not_count():
    assert not [name for name in SOURCES if name.startswith(("jllm.cli", "jllm.engine", "jllm.quant", "jllm.files"))]
    assert [name for name in SOURCES if name.startswith("jllm.programs.")] == ["jllm.programs.packed_step"]
    assert {"jllm.generate", "jllm.analysis.lm_eval", "jllm.api", "pallas_kernels.bench.measure"}.isdisjoint(SOURCES)
    assert {"jllm.step.merge", "jllm.model.backbone", "pallas_kernels.decode_attention.mosaic_sm90"} <= SOURCES.keys()


@pytest.mark.parametrize(("platform", "backend"), [("cpu", None), ("cuda", "mosaic")])
def test_all_that_runs_while_a_step_is_traced_counts(platform, backend):
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 384, "num_heads": 4, "head_dim": 64}
    config = replace(CONFIG, num_layers=1, **sizes)
    formats = parse_kv_cache("int8-g8", config, jnp.bfloat16)
    layout = Layout(Bucket(2, 67, 2), 9)
    state = jax.eval_shape(lambda: State(make_cache(config, 8, 16, formats), make_slots(2, 4)))
    arguments = abstract_params(config, jnp.bfloat16), state, jax.ShapeDtypeStruct((layout.size,), np.int32)
    with files_that_run() as ran:
        traced = packed_step.trace(*arguments, config=config, layout=layout, variant=Variant(), backend=backend)
        traced.lower(lowering_platforms=(platform,))
    packages = tuple(str(ROOT / package) for package in PACKAGES)
    ours = {Path(file) for file in ran if file.startswith(packages)}
    assert len(ours) > 15
    assert ours <= set(SOURCES.values())


@contextlib.contextmanager
def files_that_run() -> Iterator[set[str]]:
    """Of the functions that begin meanwhile."""
    ran: set[str] = set()
    tool, start = sys.monitoring.PROFILER_ID, sys.monitoring.events.PY_START

    def note(code, offset):
        ran.add(code.co_filename)
        return sys.monitoring.DISABLE  # once is enough

    sys.monitoring.use_tool_id(tool, "files_that_run")
    sys.monitoring.register_callback(tool, start, note)
    sys.monitoring.restart_events()
    sys.monitoring.set_events(tool, start)
    try:
        yield ran
    finally:
        sys.monitoring.set_events(tool, 0)
        sys.monitoring.free_tool_id(tool)


TREE = {
    "jllm/__init__.py": "if TYPE_CHECKING:\n    import jllm.cli",
    "jllm/step/__init__.py": "",
    "jllm/model/__init__.py": "",
    "jllm/step/merge.py": "import jllm.model.backbone\ndef step():\n"
    "  try:\n    from pallas_kernels import op\n  except E: pass",
    "jllm/model/backbone.py": "import numpy\nimport pallas_kernels.late as late\n"
    "from pallas_kernels.op import run, xla",
    "jllm/cli.py": "import jllm.step.merge",
    "pallas_kernels/__init__.py": "",
    "pallas_kernels/op/__init__.py": "from .api import run",
    "pallas_kernels/op/api.py": "def run():\n    from ..shared import x",
    "pallas_kernels/op/xla.py": "",
    "pallas_kernels/op/bench.py": "",
    "pallas_kernels/late.py": "",
    "pallas_kernels/shared.py": "x = 1",
    "pallas_kernels/other.py": "",
}  # fmt: skip


@pytest.fixture
def tree(tmp_path) -> Path:
    for name, text in TREE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def basis(root: Path, device=DEVICE) -> str:
    return repr(tuple(surroundings(device, reached(["jllm.step.merge"], root))))


def test_imports_are_followed_wherever_they_stand(tree):
    unseen = {"jllm/cli.py", "pallas_kernels/op/bench.py", "pallas_kernels/other.py"}
    found = reached(["jllm.step.merge"], tree)
    assert set(found.values()) == {tree / name for name in TREE.keys() - unseen}
    both = reached(["jllm.step.merge", "pallas_kernels.other"], tree)
    assert both.items() - found.items() == {("pallas_kernels.other", tree / "pallas_kernels/other.py")}


def test_a_source_counts_where_it_is_reached(tree):
    before = basis(tree)
    for name in ("jllm/cli.py", "pallas_kernels/op/bench.py"):
        (tree / name).write_text("x = 2")
        assert basis(tree) == before
    for name in ("jllm/step/merge.py", "pallas_kernels/shared.py", "pallas_kernels/op/__init__.py"):
        (tree / name).write_text(TREE[name] + "\ny = 2")
        assert basis(tree) != before
        (tree / name).write_text(TREE[name])
    assert basis(tree) == before
    (tree / "jllm/model/backbone.py").write_text(TREE["jllm/model/backbone.py"] + "\nimport pallas_kernels.other")
    assert (tree / "pallas_kernels/other.py") in reached(["jllm.step.merge"], tree).values()


def test_a_source_edited_after_it_was_loaded_has_no_key(tmp_path):
    source = tmp_path / "a.py"
    source.write_text("")
    os.utime(source, (LOADED - 60, LOADED - 60))
    check_unedited([source])
    os.utime(source, (LOADED + 60, LOADED + 60))
    gone = "a.py was edited or removed after it had been loaded"
    with pytest.raises(NoKey, match=gone):
        check_unedited([source])
    source.unlink()  # another branch was checked out, say
    with pytest.raises(NoKey, match=gone):
        check_unedited([source])


def test_the_time_of_loading_is_before_the_first_module():
    """In a notebook the engine is imported when it is first asked for, long after the model perhaps."""
    assert runpy.run_path(program_key.__file__)["LOADED"] == LOADED
    subprocess.run([sys.executable, "-c", "import jllm, sys; assert 'pallas_kernels' in sys.modules"], check=True)


# What compiles


def client(version: str = "13", count: int = 8, process: int = 0) -> SimpleNamespace:
    return SimpleNamespace(platform_version=version, device_count=lambda: count, process_index=lambda: process)


GPU = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", client=client())


@pytest.mark.parametrize("name", ["jax-cuda13-plugin", "jax_cuda12_pjrt", "jax-triton", "triton", "nvidia-cuda-nvcc"])
def test_versions_of_what_compiles_count(tree, monkeypatch, name):
    found = {basis(tree)}
    monkeypatch.syspath_prepend(tree)
    for version in ("1.0", "1.1"):
        info = tree / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        importlib.invalidate_caches()
        found.add(basis(tree))
        shutil.rmtree(info)
    assert len(found) == 3


def test_a_distribution_that_was_half_removed_counts_for_nothing(tree, monkeypatch):
    before = basis(tree)
    monkeypatch.syspath_prepend(tree)
    (tree / "~umpy-2.0.dist-info").mkdir()  # as an interrupted `pip install` leaves it
    importlib.invalidate_caches()
    assert basis(tree) == before


PTXAS, LIBDEVICE = "bin/ptxas", "nvvm/libdevice/libdevice.10.bc"


@pytest.mark.parametrize(
    ("tool", "place"), [*product([PTXAS, LIBDEVICE], ["variable", "flag", "package"]), (PTXAS, "path")]
)
def test_tools_count_by_their_content(tree, monkeypatch, tool, place):
    root = tree / "nvidia" / "cuda_nvcc"
    (root / tool).parent.mkdir(parents=True)
    if place == "variable":
        monkeypatch.setenv("CUDA_ROOT", str(root))
    elif place == "flag":
        monkeypatch.setenv("XLA_FLAGS", f"--xla_gpu_cuda_data_dir={root}")
    elif place == "package":
        monkeypatch.syspath_prepend(tree)
    else:
        monkeypatch.setenv("PATH", str(root / "bin"))
    found = {basis(tree, GPU)}
    for text in ("12.8", "12.9", "12.8"):
        (root / tool).write_text(text)
        (root / tool).chmod(0o755)
        found.add(basis(tree, GPU))
    assert len(found) == 3


def test_variables_count_that_change_code(tree, monkeypatch, tmp_path):
    flags = tmp_path / "flags"
    found = [basis(tree)]
    for name, value in (
        ("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false"), ("MOSAIC_GPU_LINE_INFO", "1"), ("XLA_FLAGS", str(flags)),
        ("TRITON_PTXAS_PATH", "/elsewhere/ptxas"), ("XLA_FLAGS", " --xla_" * 100),  # longer than a file's name may be
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
        found.append(basis(tree))
    monkeypatch.setenv("XLA_FLAGS", str(flags))
    flags.write_text("--xla_gpu_enable_triton_gemm=false")
    found.append(basis(tree))
    assert len(set(found)) == len(found)
    for name in ("MOSAIC_GPU_CUDA_ROOT", "MOSAIC_GPU_RUNTIME_LIB_PATH", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, "0.5")
        assert basis(tree) == found[-1]


def test_the_device_counts(tree):
    devices = [replace_device(**change) for change in ({}, {"device_kind": "NVIDIA H100"}, {"platform": "tpu"})]
    devices += [replace_device(client=other) for other in (client("12"), client(count=1), client(process=1))]
    assert len({basis(tree, device) for device in devices}) == len(devices)


def replace_device(**changes) -> SimpleNamespace:
    return SimpleNamespace(**vars(GPU) | changes)
