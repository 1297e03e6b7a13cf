"""Checks weight_only_matmul: the xla backend against float64, and what both refuse."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backends
from pallas_kernels.formats.quantized_weights import decode, encode
from pallas_kernels.formats.weight_formats import parse_weight_format
from pallas_kernels.weight_only_matmul import reference, weight_only_matmul
from pallas_kernels.weight_only_matmul.cases import CASES, ODD_CASES, Case
from pallas_kernels.weight_only_matmul.config import check_faster
from tests.kernels.helpers import TOLERANCE, error, missed, same_bits


def run(case: Case, **options):
    x, w, bias, residual = case.inputs()
    return weight_only_matmul(x, w, bias=bias, residual=residual, out_dtype=case.out_dtype, **options)


def row_error(out, expected) -> float:
    """Returns the largest error of a row relative to its norm."""
    return error(*(np.asarray(y).astype(np.float64).reshape(-1, 1, np.shape(y)[-1]) for y in (out, expected)))


@pytest.mark.parametrize("case", CASES + ODD_CASES, ids=str)
def test_matches_the_definition(case):
    expected = reference.weight_only_matmul(*case.inputs())
    out = run(case, backend="xla")
    assert out.dtype == (case.out_dtype or case.dtype)
    assert row_error(out, expected) < TOLERANCE[str(out.dtype)]


@pytest.mark.parametrize("case", CASES[::3] + ODD_CASES, ids=str)
def test_float64_throughout(case):
    with jax.enable_x64():
        x, w, bias, residual = replace(case, dtype="float64").inputs()
        out = weight_only_matmul(x, w, bias=bias, residual=residual, backend="xla")
        assert out.dtype == jnp.float64
        assert row_error(out, reference.weight_only_matmul(x, w, bias, residual)) < TOLERANCE["float64"]


@pytest.mark.parametrize("case", CASES + ODD_CASES, ids=str)
def test_the_reference_decodes_as_the_formats_say(case):
    _, w, _, _ = case.inputs()
    expected = np.asarray(decode(replace(w, columns=None))).astype(np.float64)
    got = reference.decoded(w)[:, : w.shape[1]]
    assert np.abs(got - expected).max() <= 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize("name", ["w8a16", "uint8-zp", "fp8-weight"])
def test_padding_is_not_read(name):
    """Expects nothing of padded rows, and zeros for padded columns to meet, whatever finite they hold."""
    x, w, _, _ = Case((3,), 33, 50, name, "float32").inputs()
    values = w.values.astype(jnp.float32).at[33:].set(99).at[:, 50:].set(-77).astype(w.values.dtype)
    poisoned = replace(w, values=values, scales=w.scales.at[33:].set(jnp.nan))
    assert same_bits(weight_only_matmul(x, poisoned, backend="xla"), weight_only_matmul(x, w, backend="xla"))


def test_seeded_faults_are_caught():
    x, w, _, _ = Case((4,), 64, 256, "w4a16-g64-zp", "float32").inputs()
    expected = reference.weight_only_matmul(x, w, None, None)
    scales, zeros = np.array(w.scales), np.array(w.zeros)
    faults = {
        "two groups' scales swapped": replace(w, scales=jnp.asarray(scales[[1, 0, 2, 3]])),
        "a group dropped": replace(w, scales=jnp.asarray(scales).at[2].set(0)),
        "zeros off by one": replace(w, zeros=jnp.asarray(zeros + 1)),
        "nibbles swapped": replace(w, values=w.values << 4 | w.values >> 4),
        "columns out of order": replace(w, columns=jnp.arange(256, dtype=jnp.int32)[::-1]),
    }
    errors = {name: row_error(weight_only_matmul(x, bad, backend="xla"), expected) for name, bad in faults.items()}
    assert not missed(errors, TOLERANCE["float32"])


def test_activations_of_the_format_are_ignored():
    x, w, _, _ = Case((4,), 64, 128, "w8a8").inputs()
    plain = replace(w, format=parse_weight_format("w8a16"))
    assert same_bits(weight_only_matmul(x, w), weight_only_matmul(x, plain))


@pytest.mark.parametrize(("residual", "sums"), [(False, "bf16"), (True, "f32")])
def test_on_a_gpu_xla_multiplies_as_it_does_unquantized_weights(residual, sums):
    """Expects the matmul's own epilogue to round its sums where nothing is to be added to them."""
    x, w, _, addend = Case((48,), 64, 128, "w4a16-g64", residual=residual).inputs()
    traced = jax.jit(lambda x, w, r: weight_only_matmul(x, w, residual=r, backend="xla")).trace(x, w, addend)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (product,) = [line for line in text.splitlines() if "dot_general" in line]
    assert product.strip().endswith(f"(tensor<48x128xbf16>, tensor<64x128xbf16>) -> tensor<48x64x{sums}>")


def test_gradient_of_x():
    x, w, _, _ = Case((4,), 64, 128, "nf4", "float32").inputs()
    found = jax.grad(lambda x: weight_only_matmul(x, w, backend="xla").sum())(x)
    expected = np.broadcast_to(reference.decoded(w).sum(0), (4, 128))
    assert row_error(found, expected) < TOLERANCE["float32"]


def test_no_rows():
    _, w, _, _ = Case((4,), 64, 128, "nf4").inputs()
    assert weight_only_matmul(jnp.zeros((0, 128), jnp.bfloat16), w).shape == (0, 64)


def test_what_is_refused():
    x, w, _, _ = Case((4,), 64, 128, "w4a16-g32", "float32").inputs()
    with pytest.raises(ValueError, match=r"x has shape \(4, 96\), expected \[..., K\] with K=128"):
        weight_only_matmul(x[:, :96], w)
    with pytest.raises(ValueError, match=r"bias has shape \(32,\), expected \(64,\)"):
        weight_only_matmul(x, w, bias=jnp.zeros(32))
    with pytest.raises(ValueError, match=r"residual has shape \(64,\), expected \(4, 64\)"):
        weight_only_matmul(x, w, residual=jnp.zeros(64))
    with pytest.raises(ValueError, match="x has dtype int32"):
        weight_only_matmul(x.astype(jnp.int32), w)
    with pytest.raises(ValueError, match="out_dtype is int8"):
        weight_only_matmul(x, w, out_dtype=jnp.int8)
    with pytest.raises(NotImplementedError, match="no float32 inputs; supported: bfloat16, float16"):
        weight_only_matmul(x, w, backend="mosaic")
    half = x.astype(jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="no K=128 for w4a16-g32; supported: multiples of 256"):
        weight_only_matmul(half, w, backend="mosaic")
    odd = encode(jnp.ones((32, 256)), parse_weight_format("w4a16-g8"))
    with pytest.raises(NotImplementedError, match="int4 in groups of 8 is not supported by .* does 32, 64, 128"):
        weight_only_matmul(jnp.ones((1, 256), jnp.bfloat16), odd, backend="mosaic")


@pytest.mark.parametrize(
    ("name", "most"),
    [("w4a16-g128", 4096), ("w4a16-g32-zp", 4096), ("nf4", 4096), ("w8a16", 1024), ("fp8-weight", 1024)],
)
def test_the_kernel_is_chosen_where_it_is_the_faster_one(monkeypatch, name, most):
    """Expects it by default on a Hopper GPU: up to `most` rows, of what the kernel takes."""
    fmt = parse_weight_format(name)
    for m in (1, 16, 64, most):
        check_faster("bfloat16", m, 12288, 4096, fmt)
    with pytest.raises(NotImplementedError, match=f"up to {most} rows of {name} unless named, not M={most + 1}"):
        check_faster("bfloat16", most + 1, 12288, 4096, fmt)
    with pytest.raises(NotImplementedError, match="no float32 inputs"):
        check_faster("float32", 1, 12288, 4096, fmt)

    monkeypatch.setattr(backends, "on_hopper", lambda: True)
    found = {}
    for m in (1, most, most + 1):
        x, w = jax.eval_shape(lambda m=m: (jnp.zeros((m, 512), jnp.bfloat16), encode(jnp.zeros((64, 512)), fmt)))
        traced = jax.jit(lambda x, w: weight_only_matmul(x, w)).trace(x, w)
        found[m] = "@mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
    assert found == {1: True, most: True, most + 1: False}
