"""Checks Triton kernels: interpreted against the references, compiled for GPUs of four kinds, and run on a GPU."""

import sys
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backends import choose
from pallas_kernels.formats.quantized_rows import quantize_rows
from pallas_kernels.norm_quant import api as norm_api
from pallas_kernels.norm_quant import cases as norm_cases
from pallas_kernels.norm_quant import norm_quant, reference
from pallas_kernels.norm_quant import xla as norm_xla
from pallas_kernels.silu_mul_quant import api as silu_api
from pallas_kernels.silu_mul_quant import cases as silu_cases
from pallas_kernels.silu_mul_quant import reference as silu_reference
from pallas_kernels.silu_mul_quant import silu_mul_quant
from pallas_kernels.triton.triton_call import typed_call
from tests.kernels.helpers import TOLERANCE, error, same_bits
from tests.kernels.row_helpers import units_apart
from tests.kernels.test_norm_quant import exact, numbers, tolerance
from tests.kernels.triton_tools import CAPABILITIES, SHARED_MEMORY, cases_of, compile_for

pytest.importorskip("triton")  # of extras and development, for Linux alone

NORMS = [case for case in norm_cases.CASES if case.dtype != "float32"]
SILUS = [case for case in silu_cases.CASES if case.dtype != "float32"]
WIDEST_NORMS = [norm_cases.Case(1, 16384, "bfloat16", kind) for kind in norm_cases.KINDS]
BACKENDS = ("triton", "xla")
WIDEST_SILUS = [silu_cases.Case(1, 32768, "bfloat16", kind) for kind in silu_cases.KINDS]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_case_compiles(capability, tmp_path, monkeypatch):
    """Compiles for compute capability 8.0, 8.6, 8.9 and 9.0: within a block's shared memory, and nothing spilled."""
    from pallas_kernels.norm_quant import triton as norm
    from pallas_kernels.silu_mul_quant import triton as silu

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = {}
    for case in cases_of(capability, (*WIDEST_NORMS, *NORMS)):
        x = jax.ShapeDtypeStruct((case.rows, case.width), case.dtype)
        launches[case] = norm.launch(x, case.residual, norm_cases.EPS, case.kind), [x.dtype] * (2 + case.residual)
    for case in cases_of(capability, (*WIDEST_SILUS, *SILUS)):
        gate_up = jax.ShapeDtypeStruct((case.rows, 2 * case.width), case.dtype)
        launches[case] = silu.launch(gate_up, case.kind), [gate_up.dtype]
    for case, (launch, inputs) in launches.items():
        made = compile_for(launch, inputs, capability)
        assert f".target sm_{capability}" in made.ptx
        assert made.shared <= SHARED_MEMORY[capability], case
        assert made.spilled == 0, case
        assert made.registers * 32 * launch.num_warps <= 65536, case


@pytest.mark.parametrize("kind", norm_cases.KINDS)
def test_the_call_has_the_shapes_of_xla(kind, monkeypatch):
    """Traces with jax_triton's parameters: its import needs a GPU's plugin."""
    seen = []

    def call(*arrays, kernel, out_shape, grid, name, num_warps, num_stages, input_output_aliases, **metaparams):
        assert metaparams.pop("compute_capability") == 89
        assert kernel.arg_names == [*kernel.arg_names[: len(arrays) + len(out_shape)], *metaparams]
        hash((grid, name, num_warps, num_stages, *input_output_aliases.items(), *metaparams.items()))
        seen.append(name)
        return [jnp.zeros(out.shape, out.dtype) for out in out_shape]

    fake = ModuleType("jax_triton")
    vars(fake).update(__spec__=ModuleSpec("jax_triton", None), triton_call=call)
    monkeypatch.setitem(sys.modules, "jax_triton", fake)
    monkeypatch.setitem(sys.modules, "pallas_kernels.triton.triton_lowering", ModuleType("triton_lowering"))
    monkeypatch.setattr("pallas_kernels.triton.triton_call.capability", lambda: "8.9")
    x = jax.ShapeDtypeStruct((3, 256), jnp.bfloat16)
    weight, gate_up = jax.ShapeDtypeStruct((256,), jnp.bfloat16), jax.ShapeDtypeStruct((3, 512), jnp.bfloat16)
    for shapes, run in (
        ((x, weight, x), lambda x, w, r, name: norm_quant(x, w, residual=r, eps=1e-5, kind=kind, backend=name)),
        ((x, weight), lambda x, w, name: norm_quant(x, w, eps=1e-5, kind=kind, backend=name)),
        ((gate_up,), lambda gate_up, name: silu_mul_quant(gate_up, kind=kind, backend=name)),
    ):
        triton, xla = (jax.eval_shape(lambda *a, run=run, name=name: run(*a, name), *shapes) for name in BACKENDS)
        assert triton == xla
    assert len(set(seen)) == 3


def test_an_untyped_call_becomes_jaxlibs_typed_one():
    def call(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.ffi.ffi_call(
            "triton_kernel_call", shape, input_output_aliases={0: 0}, custom_call_api_version=2,
            legacy_backend_config=b"x\x9c\x00\xff",
        )(x)  # fmt: skip

    module = jax.jit(call).trace(jnp.ones(4)).lower().compiler_ir()
    (operation,) = (op for op in module.body.operations[0].body.blocks[0].operations if "custom_call" in op.name)
    typed_call(operation)
    assert module.operation.verify()
    said = str(operation)
    assert "@triton_kernel_call_ffi" in said
    assert "api_version = 4" in said
    assert r'backend_config = {opaque = "x\9C\00\FF"}' in said
    assert "output_operand_aliases" in said


@pytest.mark.gpu
def test_graphs_take_triton_kernels_in():
    """Expects typed calls: XLA leaves others, or ones that can't be recorded, out of its command buffers."""
    pytest.importorskip("jax_triton")
    run = partial(norm_quant, weight=jnp.ones(256, jnp.bfloat16), eps=1e-5, backend="triton")
    compiled = jax.jit(lambda x: run(run(x)[0])[0]).lower(jnp.ones((2, 256), jnp.bfloat16)).compile()
    assert compiled.as_text().count('custom_call_target="triton_kernel_call_ffi"') == 2


@pytest.mark.parametrize(("capability", "expected"), [("8.0", "triton"), ("8.9", "triton"), ("7.5", "xla")])
def test_it_is_what_ampere_and_ada_run_unasked(monkeypatch, capability, expected):
    monkeypatch.setattr("pallas_kernels.backends.capability", lambda: capability)
    for each, arguments in ((norm_api, ("bfloat16", 2, 128)), (silu_api, (None, "bfloat16", 2, 128))):
        assert choose(each.BACKENDS, None, *arguments) is each.BACKENDS[expected]
        assert choose(each.BACKENDS, "ampere", *arguments) is each.BACKENDS["triton"]
    assert choose(silu_api.BACKENDS, "hopper", None, "bfloat16", 2, 100) is silu_api.BACKENDS["xla"]


def test_what_is_refused(monkeypatch):
    x = jnp.zeros((2, 256), jnp.bfloat16)
    for arguments, message in (
        (x.astype("float32"), "dtype float32 is not supported by backend triton, which does bfloat16, float16"),
        (jnp.zeros((1, 65538), jnp.bfloat16), "F=32769 is not supported by backend triton, which does up to 32768"),
        (x[:0], "T=0 is not supported by backend triton, which does at least one row"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            silu_mul_quant(arguments, backend="triton")
    monkeypatch.setattr("pallas_kernels.triton.triton_call.importlib.util.find_spec", lambda _: None)
    with pytest.raises(NotImplementedError, match="needs jax-triton, which the extras cuda12 and cuda13 install"):
        silu_mul_quant(x, backend="triton")


@pytest.mark.parametrize(("capability", "named"), [("", jax.default_backend), ("7.5", lambda: "7.5")])
def test_a_device_without_triton_kernels_is_named(monkeypatch, capability, named):
    """Raises before jax_triton is imported, which says without a GPU's plugin that JAX is badly installed."""
    monkeypatch.setattr("pallas_kernels.triton.triton_call.capability", lambda: capability)
    message = f"backend triton is for GPUs of compute capability 8.0 and later, not for {named()}"
    with pytest.raises(NotImplementedError, match=message):
        norm_quant(jnp.ones((2, 256), "bfloat16"), jnp.ones(256, "bfloat16"), eps=1e-5, backend="triton")


def on_host(rows, kind):
    """Returns rows in eight bits as the definition has them: XLA divides on a GPU to within two units in the last
    place."""
    return rows if kind is None else quantize_rows(jax.device_put(rows, jax.devices("cpu")[0]), kind)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*NORMS, *WIDEST_NORMS, norm_cases.Case(33, 4096, "bfloat16", "int8")], ids=str)
def test_gpu_norm_quant_matches_the_definition(case):
    x, weight, residual = case.inputs()
    rows, summed = norm_quant(x, weight, residual=residual, backend="triton", **case.options())
    again = norm_quant(x, weight, residual=residual, backend="triton", **case.options())
    plain, _ = norm_quant(x, weight, residual=residual, backend="triton", eps=norm_cases.EPS)
    _, expected_sum = reference.norm_quant(x, weight, residual=residual, eps=norm_cases.EPS)
    assert error(numbers(rows), exact(case, x, weight, residual)) < tolerance(case)
    assert same_bits((rows, summed), again)
    assert same_bits(summed, jnp.asarray(expected_sum))
    assert same_bits(rows, on_host(plain, case.kind))
    other, _ = norm_xla.norm_quant(x, weight, residual=residual, eps=norm_cases.EPS)
    units = units_apart(plain, other)
    assert units.max() <= 1
    assert np.mean(units > 0) < 5e-3
    alone = None if residual is None else residual[-1:]
    last, _ = norm_quant(x[-1:], weight, residual=alone, backend="triton", **case.options())
    assert same_bits(last, jax.tree.map(lambda a: a[-1:], rows))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*SILUS, *WIDEST_SILUS, silu_cases.Case(33, 11008, "bfloat16", "int8")], ids=str)
def test_gpu_silu_mul_quant_matches_the_definition(case):
    gate_up = case.inputs()
    rows = silu_mul_quant(gate_up, kind=case.kind, backend="triton")
    plain = silu_mul_quant(gate_up, backend="triton")
    assert error(numbers(plain), silu_reference.silu_mul(gate_up)) < 2 * TOLERANCE[case.dtype]
    assert same_bits(rows, silu_mul_quant(gate_up, kind=case.kind, backend="triton"))
    assert same_bits(rows, on_host(plain, case.kind))
    last = silu_mul_quant(gate_up[-1:], kind=case.kind, backend="triton")
    assert same_bits(last, jax.tree.map(lambda a: a[-1:], rows))
