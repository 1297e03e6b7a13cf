"""linear() on every kind of leaf, against the formula in float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jllm.model import fused_linear
from jllm.model import linear as module
from jllm.model.fused_linear import norm, silu_mul
from pallas_kernels.formats import quantized_weights
from pallas_kernels.formats.quantized_rows import QuantizedRows
from pallas_kernels.formats.quantized_weights import QuantizedWeight
from pallas_kernels.formats.weight_formats import parse_weight_format

STATIC = 0.02  # scale of inputs: the largest of normal ones are clipped
FORMATS = [
    "w8a8",
    "fp8",
    "fp8-b128",
    "w8a8-tensor",
    "w8a8-act-g32",
    "llm-int8-t2",
    "w8a16",
    "fp8-weight",
    "uint8-zp",
    "w4a16-g32",
    "w4a16-g64-zp",
    "nf4",
    "nf4-dq",
]
FIXED = ["w8a8-static", "fp8-static"]
EPS = 1e-5
# Compiled whole, as the model compiles them: op by op they take ten times as long.
encode = jax.jit(quantized_weights.encode, static_argnums=1)
decode = jax.jit(quantized_weights.decode, static_argnums=1)
embed = jax.jit(module.embed, static_argnums=2)
linear = jax.jit(module.linear, static_argnames=("out_dtype", "backend"))


def normal(seed, *shape, dtype="float64"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def quantized(w: jax.Array, name: str) -> QuantizedWeight:
    """In the format called `name`, with a fixed scale of its inputs where that ends so."""
    found = encode(w, parse_weight_format(name.removesuffix("-static")))
    scale = STATIC if name.startswith("w8a8") else STATIC / 4  # clips from 2.54 or 2.24 on
    return replace(found, input_scale=jnp.asarray([scale], "float32")) if name in FIXED else found


def fake_quantized(x: np.ndarray, name: str) -> np.ndarray:
    """What rows stand for once they are quantized, from the definition."""
    kind = parse_weight_format(name.removesuffix("-static")).activations
    if kind is None:
        return x
    if name == "w8a8-static":
        scale = float(np.float32(STATIC))
        return np.clip(np.round(x / scale), -128, 127) * scale
    if name == "fp8-static":
        scale = float(np.float32(STATIC / 4))
        return np.clip(x / scale, -448, 448).astype(jnp.float8_e4m3fn).astype(np.float64) * scale
    if name == "llm-int8-t2":
        large = np.abs(x) >= 2
        return np.where(large, x, fake_quantized(np.where(large, 0, x), "w8a8"))
    if (group := parse_weight_format(name).row_group) is not None:
        wide = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % group)])
        parts = fake_quantized(wide.reshape(*x.shape[:-1], -1, group), "w8a8" if kind == "int8" else "fp8")
        return parts.reshape(wide.shape)[..., : x.shape[-1]]
    largest = 127 if kind == "int8" else 448
    absmax = np.abs(x).max(axis=None if name.endswith("tensor") else -1, keepdims=True)
    codes = x / (absmax / largest)
    if kind == "int8":
        return np.round(codes) * absmax / largest
    return codes.astype(jnp.float8_e4m3fn).astype(np.float64) * absmax / largest


def relative(a, b) -> float:
    return float(np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b))


@pytest.fixture(params=["float64", "float32"])
def dtype(request):
    with jax.enable_x64(request.param == "float64"):
        yield request.param


@pytest.mark.parametrize("name", FORMATS + FIXED)
def test_products(name, dtype):
    added = dtype == "float64"
    fmt = parse_weight_format(name.removesuffix("-static"))
    N, K = (
        (150, 200) if fmt.in_blocks else (96, 128) if fmt.group else (70, 96) if fmt.row_group else (70, 52)
    )  # the others are padded
    w = quantized(normal(0, N, K, dtype=dtype), name)
    x = normal(1, 2, 5, K, dtype=dtype)
    bias, residual = (normal(2, N, dtype=dtype), normal(3, 2, 5, N, dtype=dtype)) if added else (None, None)
    got = linear(x, w, bias, residual=residual)
    assert got.dtype == x.dtype
    want = fake_quantized(np.asarray(x, np.float64), name) @ np.asarray(decode(w, dtype), np.float64).T
    if added:
        want = want + np.asarray(bias, np.float64) + np.asarray(residual, np.float64)
    # float64: scales of rows are float32 in files, and decoded as they are. float32: a code may round to its neighbour.
    assert relative(got, want) < (1e-12 if dtype == "float64" else 1e-3 if fmt.activations else 1e-5)


@pytest.mark.parametrize(
    "name", [None, "w8a8", "fp8", "w8a8-tensor", "w8a8-act-g64", "llm-int8-t2", "w4a16-g32", *FIXED]
)
def test_norm_and_silu_give_what_the_reader_takes(name, dtype):
    """One pass quantizes; the rows are those of quantizing afterwards."""
    reader: QuantizedWeight | jax.Array = normal(0, 64, 128, dtype=dtype)
    if name is not None:
        reader = quantized(reader, name)
    x, weight, gate_up = normal(1, 6, 128, dtype=dtype), normal(2, 128, dtype=dtype), normal(3, 6, 256, dtype=dtype)
    normed = norm(x, weight, EPS, reader)
    gated = silu_mul(gate_up, reader)
    assert isinstance(normed, QuantizedRows) == isinstance(gated, QuantizedRows) == (name in ("w8a8", "fp8"))
    y = np.asarray(x, np.float64)
    y = y / np.sqrt((y**2).mean(-1, keepdims=True) + EPS) * np.asarray(weight, np.float64)
    gate, up = np.split(np.asarray(gate_up, np.float64), 2, axis=1)
    z = gate / (1 + np.exp(-gate)) * up
    plain = np.asarray(reader, np.float64) if name is None else np.asarray(decode(reader, dtype), np.float64)
    for rows, inputs in ((normed, y), (gated, z)):
        got = linear(rows, reader, out_dtype=x.dtype)
        want = (inputs if name is None else fake_quantized(inputs, name)) @ plain.T
        assert relative(got, want) < (
            1e-12 if dtype == "float64" else 5e-3 if isinstance(rows, QuantizedRows) else 1e-2
        )


def test_an_mlp_whose_down_projection_takes_groups(dtype):
    w, reader = (
        quantized(normal(0, 192, 64, dtype=dtype), "w8a8"),
        quantized(normal(1, 64, 96, dtype=dtype), "w8a8-act-g32"),
    )
    x, weight, bias = normal(2, 6, 64, dtype=dtype), normal(3, 64, dtype=dtype), normal(4, 64, dtype=dtype)
    got = fused_linear.silu_linear(fused_linear.norm_linear(x, weight, w, eps=EPS), reader, bias, residual=x)
    y = np.asarray(x, np.float64)
    y = y / np.sqrt((y**2).mean(-1, keepdims=True) + EPS) * np.asarray(weight, np.float64)
    gate, up = np.split(fake_quantized(y, "w8a8") @ np.asarray(decode(w, dtype), np.float64).T, 2, axis=1)
    z = fake_quantized(gate / (1 + np.exp(-gate)) * up, "w8a8-act-g32")
    want = (
        z @ np.asarray(decode(reader, dtype), np.float64).T + np.asarray(bias, np.float64) + np.asarray(x, np.float64)
    )
    assert got.dtype == x.dtype
    assert relative(got, want) < (1e-12 if dtype == "float64" else 5e-3)


@pytest.mark.parametrize("name", [None, "w8a8", "fp8", "uint8-zp", "w4a16-g64-zp", "nf4", "nf4-dq"])
def test_embeddings(name):
    table = normal(0, 50, 128, dtype="float32")
    tokens = jnp.asarray([[0, 49], [7, 60]], jnp.int32)
    w = table if name is None else encode(table, parse_weight_format(name))
    want = table if name is None else decode(w)
    np.testing.assert_array_equal(embed(w, tokens, jnp.float32), np.asarray(want)[[[0, 49], [7, 49]]])


@pytest.mark.parametrize("name", ["w8a8", "fp8", "w8a8-tensor", "w8a8-act-g64", "nf4", "uint8-zp", "w4a16-g32", *FIXED])
def test_zero_tokens_and_channels_give_zeros(name):
    x, w = normal(1, 4, 128, dtype="float32").at[2].set(0), normal(0, 64, 128, dtype="float32").at[5].set(0)
    got = np.asarray(linear(x, quantized(w, name)))
    assert np.isfinite(got).all()
    assert not got[2].any()
    assert not got[:, 5].any()


def test_gradients_go_through_plain_weights():
    w, x, weight = normal(0, 8, 16, dtype="float32"), normal(1, 3, 16, dtype="float32"), jnp.ones(16, jnp.float32)

    def loss(w, x):
        return jnp.sum(linear(norm(x, weight, EPS, w, backend="xla"), w, residual=x[:, :8], backend="xla") ** 2)

    dw, dx = jax.grad(loss, (0, 1))(w, x)
    step = 1e-3 * normal(2, 8, 16, dtype="float32")
    assert float(loss(w + step, x) - loss(w - step, x)) / 2 == pytest.approx(float(jnp.sum(dw * step)), rel=1e-2)
    assert float(jnp.abs(dx).min()) > 0
