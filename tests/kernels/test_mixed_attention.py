"""Checks decode rows and prompt chunks that read one array of queries, and write one array of results."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.decode_attention import mosaic_sm90 as decode_sm90
from pallas_kernels.decode_attention.cases import Case
from pallas_kernels.prefill_attention import mosaic_sm90 as prefill_sm90
from pallas_kernels.prefill_attention import prefill_attention
from tests.kernels.helpers import same_bits
from tests.kernels.interpreter import FIND_RACES
from tests.kernels.test_decode_attention_mosaic import TINY
from tests.kernels.test_prefill_attention_mosaic import FEW

# Four rows of decoding, one of them unused, and two chunks that continue two of the sequences, on 24 rows of which 4
# are no chunk's.
CASE = Case((130, 1, 0, 64), (4, 2), 64, 16, "bf16", "bf16", "bfloat16")
ROWS, CHUNK_ROWS, OWNED = 4, 24, 20
CHUNKS = (jnp.asarray([0, 5, OWNED], jnp.int32), jnp.asarray([60, 15], jnp.int32))


def inputs(case: Case = CASE, rows: int = CHUNK_ROWS) -> tuple:
    """Returns q of all rows, pages, page table and lengths of the decode rows, and the page table of the chunks."""
    q, pages, table, lengths = case.inputs()
    of_chunks = np.random.default_rng(1).normal(size=(rows, *q.shape[1:]))
    return jnp.concatenate([q, jnp.asarray(of_chunks, q.dtype)]), pages, table, lengths, table[jnp.asarray([3, 0])]


def apart(decode, prefill, q, pages, table, lengths, of_chunks):
    """Returns the two parts, each with queries of its own, put together."""
    return jnp.concatenate(
        [decode(q[: len(lengths)], pages, table, lengths), prefill(q[len(lengths) :], pages, of_chunks, *CHUNKS)]
    )


def together(decode, prefill, q, pages, table, lengths, of_chunks, rows=None):
    out = decode(q, pages, table, lengths, **({"rows": 1} if rows is None else rows))
    return prefill(q, pages, of_chunks, *CHUNKS, into=out, first=len(lengths))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_together_they_give_what_they_give_apart(dtype):
    q, *rest = inputs()
    both = [partial(f, scale=CASE.scale, backend="xla") for f in (decode_attention, prefill_attention)]
    out = together(*both, q.astype(dtype), *rest)
    assert same_bits(out, apart(*both, q.astype(dtype), *rest))
    assert not out[ROWS + OWNED :].any()


def test_interpreted_kernels_give_what_they_give_apart():
    """Puts NaN in the chunks' rows, where decoding leaves anything."""
    options = {"scale": CASE.scale, "window": None, "interpret": FIND_RACES}
    kernels = (decode_sm90.decode_attention, TINY), (prefill_sm90.prefill_attention, FEW)
    both = [partial(kernel, config=config, **options) for kernel, config in kernels]
    q, *rest = inputs()

    def decode(*args, **rows):
        out = both[0](*args, **rows)
        return out if not rows else out.at[ROWS:].set(jnp.nan)

    assert same_bits(together(decode, both[1], q, *rest, rows={"width": 1}), apart(*both, q, *rest))


@pytest.mark.parametrize("rows", [60, 256])
def test_lowered_kernels_have_no_copy_between_them(rows):
    case = Case((130, 1, 0, 64), (32, 8), 128, 16, "bf16", "bf16", "bfloat16")
    both = [partial(f, scale=case.scale, backend="mosaic") for f in (decode_attention, prefill_attention)]
    lowered = jax.jit(partial(together, *both)).trace(*inputs(case, rows)).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count("custom_call @mosaic_gpu") == 2
    copies = re.findall(r"stablehlo\.(?:pad|slice|dynamic_slice|dynamic_update_slice|concatenate)[^\n]*x128xbf16", text)
    assert not copies


def test_rows_that_do_not_fit_are_refused():
    q, pages, table, lengths, of_chunks = inputs()
    decode, prefill = (partial(f, scale=CASE.scale) for f in (decode_attention, prefill_attention))
    with pytest.raises(ValueError, match="rows is 8, expected 1 to 64 of each of 4 in 28 queries"):
        decode(q, pages, table, lengths, rows=8)
    with pytest.raises(ValueError, match="first is 4 without into"):
        prefill(q, pages, of_chunks, *CHUNKS, first=4)
    with pytest.raises(ValueError, match=r"into is bfloat16\[24, 4, 64\] and first 4, expected bfloat16\[28, 4, 64\]"):
        prefill(q, pages, of_chunks, *CHUNKS, first=4, into=q[4:])


@pytest.mark.gpu
@pytest.mark.parametrize("kv", ["bf16", "fp8", "int8-g8", "int4-g32"])
def test_gpu_kernels_give_what_they_give_apart(kv):
    case = Case((130, 1, 0, 700), (32, 8), 128, 16, kv, kv, "bfloat16")
    both = [partial(f, scale=case.scale, backend="mosaic") for f in (decode_attention, prefill_attention)]
    compiled = jax.jit(partial(together, *both)).lower(*inputs(case, 200)).compile()
    assert same_bits(compiled(*inputs(case, 200)), jax.jit(partial(apart, *both))(*inputs(case, 200)))
