import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats import kv_pages
from pallas_kernels.formats.kv_formats import KVFormat, bytes_per_token, decode, encode, parse_format
from pallas_kernels.formats.kv_pages import allocate
from pallas_kernels.formats.reference_pages import read_row, to_numpy, write_row

pytest.importorskip("hypothesis")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.extra import numpy as stnp  # noqa: E402

write, gather = jax.jit(kv_pages.write), jax.jit(kv_pages.gather, static_argnums=2)
D = 32
NAMES = ("bf16", "f16", "f32", "f64", "fp8", "int8-g8", "int8-g32", "int4-g8", "int4-g16", "int4-g32")
GROUPED = tuple(name for name in NAMES if name.startswith("int"))
ZEROED = ("int8-g8-zp", "int8-g32-zp", "int4-g16-zp", "int4-g32-zp")
ROTATED = ("f64-h", "fp8-h", "int8-g8-h", "int4-g32-h", "int4-g32-zp-h")


@cache
def coder(name):
    fmt = parse_format(name, D)

    def run(x):
        values, scales = encode(x, fmt)
        return values, scales, decode(values, scales, fmt, jnp.float32)

    return jax.jit(run)


def roundtrip(name, x):
    values, scales, out = coder(name)(x)
    return *(None if part is None else np.asarray(part) for part in (values, scales)), np.asarray(out)


def test_formats_by_name():
    assert parse_format("bf16", 64) == KVFormat("bfloat16")
    assert parse_format("fp8", 64) == KVFormat("float8_e4m3fn")
    assert parse_format("int8-g16", 64) == KVFormat("int8", 16)
    assert parse_format("int4-g64", 64) == KVFormat("int4", 64)
    assert parse_format("int4-g64-zp", 64) == KVFormat("int4", 64, zero_point=True)
    assert parse_format("int8-g32-zp-h", 64) == KVFormat("int8", 32, zero_point=True, hadamard=True)
    assert parse_format("bf16-h", 64) == KVFormat("bfloat16", hadamard=True)
    assert [parse_format(name, D).name for name in (*NAMES, *ZEROED, *ROTATED)] == [*NAMES, *ZEROED, *ROTATED]


@pytest.mark.parametrize("name", ["int8-g128", "int4-g24", "int8-g4", "int8-g12"])
def test_a_group_that_does_not_divide_the_head_dim(name):
    with pytest.raises(ValueError, match=f"group {name[6:]} must be a multiple of 8 that divides the head dim 64"):
        parse_format(name, 64)


@pytest.mark.parametrize(
    "name",
    ["int8", "int2-g8", "bfloat16", "int8-g", "int8-g08", "int8-g-8", "", "int8-g8 ", "bf16-zp", "int4-g8-h-zp", "-h"],
)
def test_unknown_formats(name):
    with pytest.raises(ValueError, match="unknown KV format .*; formats: bf16, f16, f32, f64, fp8, int8-gN, int4-gN"):
        parse_format(name, 64)


@pytest.mark.parametrize("k_name", [*NAMES, *ZEROED, *ROTATED])
def test_bytes_a_token_are_those_allocated(k_name):
    with jax.enable_x64(True):
        formats = parse_format(k_name, D), parse_format("int4-g8", D)
        shapes = jax.eval_shape(lambda: allocate(5, 3, 16, D, *formats))
        pages = allocate(5, 3, 16, D, *formats)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(lambda x: (x.shape, x.dtype), pages)
    assert not any(np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(pages))
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(pages)) == 5 * 16 * bytes_per_token(D, 3, *formats)


def test_bytes_a_token_by_hand():
    assert bytes_per_token(128, 8, KVFormat("bfloat16"), KVFormat("bfloat16")) == 4096
    assert bytes_per_token(128, 8, KVFormat("int8", 8), KVFormat("int4", 32)) == 8 * (128 + 32 + 64 + 8)
    assert bytes_per_token(128, 8, parse_format("int4-g128-zp", 128), KVFormat("int4", 128)) == 8 * (64 + 4 + 64 + 2)


def test_nibbles_are_in_the_order_of_a_bitcast():
    x = jnp.arange(-7, 9, dtype=jnp.float32).at[-1].set(0)[None]  # absmax 7: scale 1
    values, scales = encode(x, KVFormat("int4", 16))
    assert scales.tolist() == [[1]]
    assert np.asarray(values)[0].tolist() == [
        (low & 15) | (high & 15) << 4 for low, high in x[0].astype(int).reshape(-1, 2)
    ]
    nibbles = jax.lax.bitcast_convert_type(values, jnp.int4).reshape(1, -1)
    assert np.array_equal(np.asarray(nibbles).astype(np.float32), np.asarray(x))
    assert np.array_equal(np.asarray(decode(values, scales, KVFormat("int4", 16), jnp.float32)), np.asarray(x))


@pytest.mark.parametrize("name", GROUPED)
@settings(max_examples=60)
@given(data=st.data())
def test_error_is_at_most_half_a_step(name, data):
    element = st.floats(-60000, 60000, width=32)
    x = data.draw(stnp.arrays(np.float32, (3, D), elements=element)) * np.float32(data.draw(st.sampled_from([1, 1e-6])))
    values, scales, out = roundtrip(name, jnp.asarray(x))
    fmt = parse_format(name, D)
    largest = {"int8": 127, "int4": 7}[fmt.dtype]
    assert np.all(scales >= np.finfo(np.float16).smallest_normal)
    assert np.all(np.isfinite(scales))
    steps = np.repeat(scales.astype(np.float64), fmt.group, axis=-1)
    assert np.all(np.abs(out - x) <= 0.5 * steps * (1 + 1e-6))
    assert np.all(np.abs(out) <= largest * steps)
    groups = np.abs(x.reshape(3, -1, fmt.group)).max(axis=-1)
    assert np.all(scales <= np.maximum(groups / largest * 1.001, 2.0**-14))  # no coarser than asked
    assert not np.any(out.reshape(3, -1, fmt.group)[groups == 0])
    assert np.array_equal(roundtrip(name, jnp.asarray(-x))[2], -out)  # symmetric


@pytest.mark.parametrize("name", GROUPED)
def test_scales_stay_in_the_normal_range_of_float16(name):
    fmt = parse_format(name, D)
    largest = {"int8": 127, "int4": 7}[fmt.dtype]
    huge = np.linspace(-3e7, 3e7, D, dtype=np.float32)[None]
    _, scales, out = roundtrip(name, jnp.asarray(huge))
    assert scales.max() == 65504
    assert out[0, 0] == -65504.0 * largest  # clipped, not wrapped
    _, scales, out = roundtrip(name, jnp.asarray(np.full((1, D), 1e-9, np.float32)))
    assert np.all(scales == np.float16(2**-14))
    assert not np.any(out)


def test_values_are_quantized_with_the_rounded_scale():
    x = np.full((1, D), 100.52, np.float32)
    x[0, 0] = 127.05  # scale 1.0004, which rounds to 1; by the scale unrounded the others would be 100
    values, scales, _ = roundtrip("int8-g32", jnp.asarray(x))
    assert scales[0, 0] == 1
    assert values[0].tolist() == [127] + [101] * (D - 1)


def test_fp8_saturates():
    x = jnp.asarray([[0, 1, -1e6, 448, 460, 1e9, 0.3, -(2.0**-9)]], jnp.float32)
    values, _ = encode(x, KVFormat("float8_e4m3fn"))
    out = decode(values, None, KVFormat("float8_e4m3fn"), jnp.float32)
    assert values.dtype == jnp.uint8
    assert out[0].tolist() == [0, 1, -448, 448, 448, 448, 0.3125, -(2.0**-9)]


@pytest.mark.parametrize("name", ZEROED)
@settings(max_examples=60)
@given(data=st.data())
def test_error_with_zero_points_is_at_most_half_a_step(name, data):
    """Adds what the zero's rounding to float16 leaves out of the range."""
    element = st.floats(-1000, 1000, width=32)
    shift = np.float32(data.draw(st.sampled_from([0, 1, -300])))
    x = data.draw(stnp.arrays(np.float32, (3, D), elements=element)) + shift
    values, numbers, out = roundtrip(name, jnp.asarray(x))
    fmt = parse_format(name, D)
    scales, zeros = np.split(numbers.astype(np.float64), 2, axis=-1)
    groups = x.astype(np.float64).reshape(3, -1, fmt.group)
    least = groups.min(axis=-1)
    assert np.array_equal(zeros, np.where(np.abs(least) < 2**-14, 0, least).astype(np.float16))
    lost = np.abs(groups.min(axis=-1) - zeros)[..., None] * (1 + 1e-3)
    assert np.all(np.abs(out.reshape(groups.shape) - groups) <= 0.51 * scales[..., None] + lost + 1e-4)
    assert np.all(
        scales <= np.maximum((groups.max(axis=-1) - zeros) / {"int8": 255, "int4": 15}[fmt.dtype], 2**-14) * 1.001
    )


def test_a_zero_point_uses_all_codes():
    x = np.arange(5, 21, dtype=np.float32)[None]
    values, numbers = encode(jnp.asarray(x), KVFormat("int4", 16, zero_point=True))
    assert numbers.tolist() == [[1, 5]]
    assert np.asarray(values)[0].tolist() == [((i - 8) & 15) | ((i - 7) & 15) << 4 for i in range(0, 16, 2)]
    assert np.array_equal(decode(values, numbers, KVFormat("int4", 16, zero_point=True), jnp.float32), x)


def test_rotation_spreads_one_large_channel():
    x = np.random.default_rng(0).standard_normal((64, D)).astype(np.float32)
    x[:, 5] = 16
    plain, turned = (roundtrip(name, jnp.asarray(x))[2] for name in ("int4-g32", "int4-g32-h"))
    others = np.arange(D) != 5
    assert np.linalg.norm((turned - x)[:, others]) < 0.5 * np.linalg.norm((plain - x)[:, others])


@pytest.mark.parametrize("name", ROTATED)
def test_rotated_against_the_layout(name):
    """Expects equal values in float64, up to the order of sums in a rotation."""
    with jax.enable_x64(True):
        x = np.random.default_rng(1).standard_normal((4, 2, D))
        fmt = parse_format(name, D)
        pool = allocate(2, 2, 8, D, fmt, fmt)
        slots = jnp.asarray([0, 1, 1, 0], jnp.int32), jnp.asarray([0, 7, 3, 1], jnp.int32)
        written, by_hand = write(pool.k, jnp.asarray(x), *slots), to_numpy(pool)
        for t, head in np.ndindex(4, 2):
            write_row(by_hand.k, int(slots[0][t]), head, int(slots[1][t]), x[t, head])
        if fmt.storage_dtype == jnp.uint8 or fmt.group:
            assert jax.tree.all(jax.tree.map(np.array_equal, written, by_hand.k))
        tokens = gather(written, jnp.asarray([[0, 1]], jnp.int32), jnp.float64)
        stored = gather(written.as_stored, jnp.asarray([[0, 1]], jnp.int32), jnp.float64)
        for t, head in np.ndindex(4, 2):
            page, offset = int(slots[0][t]), int(slots[1][t])
            expected = read_row(by_hand.k, page, head, offset)
            np.testing.assert_allclose(tokens[0, head, 8 * page + offset], expected, atol=1e-12)
            np.testing.assert_allclose(np.linalg.norm(stored[0, head, 8 * page + offset]), np.linalg.norm(expected))
        unrotated = dataclasses.replace(by_hand.k, format=dataclasses.replace(fmt, hadamard=False))
        assert np.linalg.norm(read_row(unrotated, 0, 0, 0) - x[0, 0]) > np.linalg.norm(x[0, 0]) / 2


@pytest.mark.parametrize("name", [*NAMES, *ZEROED])
def test_write_and_gather_against_the_layout(name):
    """Expects equal bits in float64, where both sides round the same numbers."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        fmt = parse_format(name, D)
        pool = allocate(6, 2, 8, D, fmt, fmt)
        x = rng.standard_normal((7, 2, D)) * np.exp(rng.normal(0, 3, (7, 2, 1)))
        page, offset = np.array([0, 5, 5, 2, 6, -1, 2**30]), np.array([0, 7, 0, 3, 1, 1, 2])
        written = write(pool.k, jnp.asarray(x), jnp.asarray(page, jnp.int32), jnp.asarray(offset, jnp.int32))
        by_hand = to_numpy(pool)
        for t in range(4):  # the others are dropped
            for head in range(2):
                write_row(by_hand.k, page[t], head, offset[t], x[t, head])
        assert jax.tree.all(jax.tree.map(np.array_equal, written, by_hand.k))
        tokens = np.asarray(gather(written, jnp.asarray([[5, 2], [0, 4]], jnp.int32), jnp.float64))
        assert tokens.shape == (2, 2, 16, D)
        for w, pages in enumerate(((5, 2), (0, 4))):
            for head, token in np.ndindex(2, 16):
                expected = read_row(by_hand.k, pages[token // 8], head, token % 8)
                assert np.array_equal(tokens[w, head, token], expected)


def test_reference_sees_seeded_faults_of_the_layout():
    rng = np.random.default_rng(0)
    fmt = parse_format("int4-g8", D)
    pages = to_numpy(allocate(1, 1, 8, D, fmt, fmt))
    x = rng.standard_normal(D)
    write_row(pages.k, 0, 0, 3, x)
    right = read_row(pages.k, 0, 0, 3)
    assert np.linalg.norm(right - x) < 0.15 * np.linalg.norm(x)
    nibbles = dataclasses.replace(pages.k, values=(pages.k.values >> 4) | (pages.k.values << 4))
    scales = dataclasses.replace(pages.k, scales=pages.k.scales[..., ::-1])
    for fault in (nibbles, scales):
        assert np.linalg.norm(read_row(fault, 0, 0, 3) - x) > 0.5 * np.linalg.norm(x)
