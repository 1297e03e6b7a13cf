"""Checks that debug=True names the row that is wrong instead of reading what is not its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.formats.kv_formats import parse_format
from pallas_kernels.formats.kv_pages import allocate
from pallas_kernels.prefill_attention import prefill_attention

FORMAT = parse_format("f32", 16)
PAGES = allocate(6, 2, 8, 16, FORMAT, FORMAT)  # 6 pages of 8 tokens
TABLE = jnp.asarray([[0, 1, -7], [5, 99, 99]], jnp.int32)  # what no length reaches may be anything


def ints(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


def decode(table, lengths, **options):
    return decode_attention(jnp.ones((2, 4, 16)), PAGES, table, lengths, scale=0.25, debug=True, **options)


def prefill(table, cu, lengths, **options):
    return prefill_attention(jnp.ones((9, 4, 16)), PAGES, table, cu, lengths, scale=0.25, debug=True, **options)


def test_what_is_right_passes():
    assert decode(TABLE, ints(16, 8)).shape == (2, 4, 16)
    assert decode(TABLE, ints(0, 0)).shape == (2, 4, 16)
    assert prefill(TABLE, ints(0, 3, 8), ints(16, 8)).shape == (9, 4, 16)
    assert prefill(TABLE, ints(0, 0, 8), ints(500, 8)).shape == (9, 4, 16)  # an empty chunk reads nothing


def test_a_window_hides_pages():
    table = jnp.asarray([[-1, 1, 2], [5, 0, 0]], jnp.int32)
    decode(table, ints(20, 8), window=12)
    prefill(table, ints(0, 3, 4), ints(20, 8), window=10)
    with pytest.raises(ValueError, match="row 0 has page -1 at index 0"):
        decode(table, ints(20, 8), window=13)
    with pytest.raises(ValueError, match="chunk 0 has page -1 at index 0"):
        prefill(table, ints(0, 3, 4), ints(20, 8), window=11)


@pytest.mark.parametrize(
    ("lengths", "says"),
    [
        ((17, 8), "row 0 has page -7 at index 2, expected one of the pool's 6"),
        ((16, 9), "row 1 has page 99 at index 1, expected one of the pool's 6"),
        ((25, 8), "row 0 has length 25, expected 0 to 24: 3 pages of 8 tokens"),
        ((16, -1), "row 1 has length -1, expected 0 to 24"),
    ],
)
def test_decode(lengths, says):
    with pytest.raises(ValueError, match=says):
        decode(TABLE, ints(*lengths))


@pytest.mark.parametrize(
    ("cu", "lengths", "says"),
    [
        ((0, 3, 8), (17, 8), "chunk 0 has page -7 at index 2"),
        ((0, 3, 8), (16, 25), "chunk 1 has length 25, expected 0 to 24"),
        ((0, 3, 8), (2, 8), "chunk 0 has 3 queries and kv_lens 2, expected at least as many keys"),
        ((0, 5, 3), (16, 8), "cu_q_lens falls from 5 to 3 at chunk 1"),
        ((1, 3, 8), (16, 8), "cu_q_lens runs from 1 to 8, expected from 0 to at most 9 rows"),
        ((0, 3, 10), (16, 8), "cu_q_lens runs from 0 to 10, expected from 0 to at most 9 rows"),
    ],
)
def test_prefill(cu, lengths, says):
    with pytest.raises(ValueError, match=says):
        prefill(TABLE, ints(*cu), ints(*lengths))


def test_values_are_not_there_under_jit():
    with pytest.raises(NotImplementedError, match="debug=True reads values: call it outside jit"):
        jax.jit(decode)(TABLE, ints(16, 8))
    assert np.isfinite(np.asarray(decode(TABLE, ints(16, 8)))).all()
