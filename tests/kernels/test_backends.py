"""Checks which backend an operation chooses, and that JAX asks ptxas once."""

import ast
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import jax._src.lib
import pytest

import jllm
from pallas_kernels import backends
from pallas_kernels.backends import BACKEND_NAMES, DETERMINISTIC, DEVICES, OF_MODELS, Backend, choose

hypothesis = pytest.importorskip("hypothesis")  # device tests are collected without development packages
given, st = hypothesis.given, hypothesis.strategies

REASONS = st.sampled_from([None, "too wide"])
OPERATIONS = [
    "all_reduce", "cache_update", "causal_attention", "decode_attention", "head_logprobs", "matmul", "move_tokens",
    "norm_quant", "prefill_attention", "sample", "scaled_matmul", "silu_mul_quant", "swiglu", "weight_only_matmul",
]  # fmt: skip


def backend(name: str, reason: str | None, slower: str | None = None) -> Backend:
    def check(unasked: bool = False):
        if reason or (unasked and slower):
            raise NotImplementedError(f"{name}: {reason or slower}")

    return Backend(lambda: name, check, lambda: check(True))


def registry(mosaic: str | None, slower: str | None, xla: str | None) -> dict[str, Backend]:
    return {"mosaic": backend("mosaic", mosaic, slower), "xla": backend("xla", xla)}


@given(mosaic=REASONS, slower=REASONS, xla=REASONS)
def test_a_name_is_that_backend_or_refused(mosaic, slower, xla):
    for name, reason in (("mosaic", mosaic), ("xla", xla)):
        found = registry(mosaic, slower, xla)
        if reason is None:
            assert choose(found, name).run() == name
        else:
            with pytest.raises(NotImplementedError, match=f"^{name}: {reason}$"):
                choose(found, name)


@given(mosaic=REASONS, slower=REASONS, xla=REASONS, hopper=st.booleans())
def test_no_name_is_the_first_of_the_device_that_runs_the_arguments_unasked(mosaic, slower, xla, hopper):
    found = registry(mosaic, slower, xla)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "on_hopper", lambda: hopper)
        names = (None, "hopper") if hopper else (None,)
        for name in names:
            if hopper and not (mosaic or slower):
                assert choose(found, name).run() == "mosaic"
            elif xla is None:
                assert choose(found, name).run() == "xla"
            else:
                with pytest.raises(NotImplementedError, match="xla: too wide$" if hopper else "^xla: too wide$"):
                    choose(found, name)


def test_supports_gives_the_reason():
    each = backend("mosaic", None, "slower")
    assert each.supports() is None
    assert each.supports(unasked=True) == "mosaic: slower"
    assert Backend(lambda: None).supports(1, 2, 3) is None


def test_names_that_there_are_not():
    only = {"xla": backend("xla", None)}
    with pytest.raises(NotImplementedError, match="no mosaic kernel yet; backends: xla"):
        choose(only, "mosaic")
    for name in ("reference", "pallas", ""):
        with pytest.raises(
            ValueError, match=f"unknown backend '{name}'; backends: xla, mosaic, triton, deterministic, hopper, ampere"
        ):
            choose(only, name)


OWN_NAMES = {"all_reduce": ["peer"], "causal_attention": ["cudnn"]}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_registries_have_known_names_in_order_of_choice(operation):
    found = list(import_module(f"pallas_kernels.{operation}.api").BACKENDS)
    assert set(found) <= {*OF_MODELS, *OWN_NAMES.get(operation, ())}
    for order in DEVICES.values():
        assert [name for name in found if name in order] == [name for name in order if name in found]


def test_deterministic_is_an_entry_of_its_own_or_what_the_device_would_have():
    found = registry(None, None, None)
    assert choose(found, DETERMINISTIC).run() == choose(found, None).run() == "xla"
    found |= {DETERMINISTIC: backend(DETERMINISTIC, None)}
    assert choose(found, DETERMINISTIC).run() == DETERMINISTIC
    assert choose(found, None).run() == "xla"
    found |= {DETERMINISTIC: backend(DETERMINISTIC, "too wide")}
    with pytest.raises(NotImplementedError, match="^deterministic: too wide$"):
        choose(found, DETERMINISTIC)


def test_jllm_names_no_backend_and_no_kind_of_device():
    for path in sorted(Path(jllm.__file__).parent.rglob("*.py")):
        if path.name == "key.py":  # it names a Python package
            continue
        names = {node.value for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Constant)}
        assert not names & {*BACKEND_NAMES, *DEVICES}, path


def test_ptxas_is_asked_once(monkeypatch: pytest.MonkeyPatch):
    asked = []
    binding = SimpleNamespace(_get_ptxas_isa_version=lambda: asked.append(None) or 88)
    plugin = ModuleType("jax._src.lib.mosaic_gpu")
    plugin._mosaic_gpu_ext = binding  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jax._src.lib.mosaic_gpu", plugin)
    monkeypatch.setattr(jax._src.lib, "mosaic_gpu", plugin, raising=False)
    choose(registry(None, None, None), "xla")
    assert not hasattr(binding._get_ptxas_isa_version, "cache_info")
    choose(registry(None, None, None), "mosaic")
    first = binding._get_ptxas_isa_version
    choose(registry(None, None, None), "mosaic")
    assert binding._get_ptxas_isa_version is first
    assert [binding._get_ptxas_isa_version() for _ in range(3)] == [88] * 3
    assert len(asked) == 1


def test_a_jax_that_does_not_ask_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch):
    plugin = ModuleType("jax._src.lib.mosaic_gpu")
    plugin._mosaic_gpu_ext = SimpleNamespace()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jax._src.lib.mosaic_gpu", plugin)
    monkeypatch.setattr(jax._src.lib, "mosaic_gpu", plugin, raising=False)
    choose(registry(None, None, None), "mosaic")
    assert vars(plugin._mosaic_gpu_ext) == {}


@pytest.mark.gpu
def test_gpu_jax_asks_what_is_remembered():
    from jax._src.lib import mosaic_gpu

    choose(registry(None, None, None), "mosaic")
    assert mosaic_gpu._mosaic_gpu_ext._get_ptxas_isa_version.cache_info().maxsize is None
