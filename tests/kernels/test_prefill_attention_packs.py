"""Checks short chunks that share a warpgroup of the Mosaic kernel: interpreted on the CPU, and run on a GPU."""

import dataclasses
from functools import partial
from itertools import accumulate, pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.prefill_attention import make_work, prefill_attention, reference
from pallas_kernels.prefill_attention.cases import Case
from pallas_kernels.prefill_attention.config import Config, choose_config, packings
from tests.kernels.helpers import error, logits_of, missed, same_bits, swap_entries, thinned
from tests.kernels.test_prefill_attention_mosaic import ALONE, FEW, HALF, SMALL, interpreted, poisoned, tolerance

# Chunks that share a warpgroup by eight, four and two, and one that needs it for itself, out of order: starts of
# sequences and continued ones, full slots and others, and more than one pack of a kind.
PACKED = dataclasses.replace(
    SMALL, q_lens=(8, 16, 30, 3, 1, 40, 0, 7, 20, 1), kv_lens=(8, 16, 30, 3, 12, 100, 5, 7, 64, 33), heads=(2, 2),
    page_size=16,
)  # fmt: skip
FEW_CHUNKS = dataclasses.replace(PACKED, q_lens=(8, 3, 5, 9), kv_lens=(8, 3, 20, 9))  # the last two in one pack
MIXED = dataclasses.replace(PACKED, q_lens=(8, 70, 3, 5, 9), kv_lens=(8, 150, 3, 20, 9))  # one that is not short


INTERPRETED = [
    (PACKED, FEW),
    (
        dataclasses.replace(PACKED, heads=(4, 1), page_size=8, window=6, **HALF),
        dataclasses.replace(FEW, heads=2, block_kv=64, stages=1, ctas=1),
    ),
    (
        dataclasses.replace(PACKED, heads=(2, 1), head_dim=128, page_size=64, window=20),
        dataclasses.replace(FEW, **ALONE, stack=2, ctas=1),
    ),
    (
        dataclasses.replace(PACKED, head_dim=128, k_format="int8-g8", v_format="int4-g32"),
        dataclasses.replace(FEW, block_kv=64, ctas=1),
    ),
    (
        dataclasses.replace(MIXED, heads=(4, 2), page_size=8, k_format="fp8", v_format="bf16"),
        dataclasses.replace(FEW, block_kv=64),
    ),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize("number", range(len(INTERPRETED)))
def test_short_chunks_share_a_warpgroup(number):
    case, config = INTERPRETED[number]
    arguments, logits = poisoned(case), logits_of(number, case.heads[0], case.dtype)
    q, pages, _, *lengths = arguments
    count = np.asarray(make_work(q, pages, *lengths, window=case.window, config=config).count)
    short = [n for n, kv in zip(case.q_lens, case.kv_lens) if n <= 64 and kv <= config.block_kv]
    assert count[1:].sum() == sum(-(-n // min(config.tile_rows, 64)) for n in short) > 3
    out = interpreted(case, config, *arguments, **logits)
    expected = reference.prefill_attention(*arguments, case.scale, case.window, **logits)
    assert error(out, expected) < tolerance(case)


def rows_of(case: Case) -> list[slice]:
    bounds = [0, *accumulate(case.q_lens)]
    return [slice(begin, end) for begin, end in pairwise(bounds)]


def test_a_short_chunk_is_the_same_alone():
    q, pages, table, cu_q_lens, kv_lens = PACKED.inputs()
    together = interpreted(PACKED, FEW, q, pages, table, cu_q_lens, kv_lens)
    for i in (4, 7, 8):  # none of them in the first slot
        rows = rows_of(PACKED)[i]
        count = rows.stop - rows.start
        alone = jnp.roll(q, -rows.start, axis=0), pages, table[i : i + 1], jnp.asarray([0, count], jnp.int32)
        assert same_bits(interpreted(PACKED, FEW, *alone, kv_lens[i : i + 1])[:count], together[rows]), i


def test_a_chunk_is_the_same_packed_and_not_and_stacked_with_another_head():
    case = dataclasses.replace(FEW_CHUNKS, heads=(2, 1))
    configs = FEW, dataclasses.replace(FEW, pack=False), dataclasses.replace(FEW, **ALONE, stack=2)
    logits = logits_of(0, 2, case.dtype)
    first, *others = (interpreted(case, config, *case.inputs(), **logits) for config in configs)
    assert all(same_bits(first, other) for other in others)


def test_packing_is_compiled_in_where_chunks_are_short_on_average():
    q, pages, *_ = FEW_CHUNKS.inputs()
    assert [choose_config(q, pages, n).pack for n in (0, 1, 4, None)] == [False, len(q) < 64, True, True]


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("value", thinned([np.nan, np.inf], (0,)))
def test_what_is_not_finite_stays_in_its_chunk(value):
    q, pages, table, cu_q_lens, kv_lens = FEW_CHUNKS.inputs()
    run = partial(interpreted, FEW_CHUNKS, FEW)
    sound = run(q, pages, table, cu_q_lens, kv_lens)
    for broken in ("k", "v"):
        pool = getattr(pages, broken)
        pool = dataclasses.replace(pool, values=pool.values.at[table[3, 0], :, 3, 5].set(value))  # token 3 of chunk 3
        out = run(q, dataclasses.replace(pages, **{broken: pool}), table, cu_q_lens, kv_lens)
        rows = rows_of(FEW_CHUNKS)[3]
        assert same_bits(out[: rows.start], sound[: rows.start])
        assert same_bits(out[rows.start : rows.start + 3], sound[rows.start : rows.start + 3])  # before the token
        if broken == "v":
            assert not jnp.isfinite(out[rows.start + 3 : rows.stop]).any()
        assert same_bits(out[rows.stop :], sound[rows.stop :])


def test_seeded_faults_in_short_chunks_are_caught():
    case = dataclasses.replace(FEW_CHUNKS, window=7)
    q, pages, table, cu_q_lens, kv_lens = case.inputs()
    run = partial(interpreted, case, FEW)
    expected = reference.prefill_attention(q, pages, table, cu_q_lens, kv_lens, case.scale, case.window)
    longer = reference.prefill_attention(q, pages, table, cu_q_lens, kv_lens, case.scale, case.window + 1)

    def wrong_by(table=table, cu_q_lens=cu_q_lens, kv_lens=kv_lens, expected=expected):
        return error(run(q, pages, table, cu_q_lens, kv_lens), expected)

    assert wrong_by() < tolerance(case)
    faults = {
        "another chunk's page": wrong_by(table=table.at[3, 0].set(table[0, 0])),
        "swapped table entries": wrong_by(table=swap_entries(table, 2, 0, 1)),
        "one key too few": wrong_by(kv_lens=kv_lens.at[2].add(-1)),
        "one key too many": wrong_by(kv_lens=kv_lens.at[3].add(1)),
        "a query of the next chunk": wrong_by(cu_q_lens=cu_q_lens.at[2].add(1)),
        "a shorter window": wrong_by(expected=longer),
    }
    assert not missed(faults, tolerance(case))


def test_what_may_share_a_warpgroup():
    for config, num_heads, page_size, expected in (
        (Config(), 32, 16, (1, 2, 4, 8)),
        (Config(), 32, 8, (1, 2, 4, 8)),
        (Config(), 32, 64, (1, 2)),
        (Config(block_kv=64), 32, 8, (1, 2, 4)),  # no fewer keys than wgmma sums at once
        (Config(block_kv=64), 32, 128, (1,)),
        (Config(), 3, 16, ()),  # a head for each warpgroup
        (Config(block_kv=192), 32, 16, ()),
        (Config(pack=False), 32, 16, ()),
    ):
        assert packings(config, num_heads, page_size) == expected


@pytest.mark.gpu
def test_gpu_what_is_not_finite_stays_in_its_short_chunk():
    q, pages, table, cu_q_lens, kv_lens = dataclasses.replace(MIXED, head_dim=128).inputs()
    attend = jax.jit(partial(prefill_attention, scale=MIXED.scale, backend="mosaic"))
    sound, rows = attend(q, pages, table, cu_q_lens, kv_lens), rows_of(MIXED)
    for value in (np.nan, np.inf):
        values = pages.v.values.at[table[4, 0], :, 3, 5].set(value)  # token 3 of chunk 4
        broken = dataclasses.replace(pages, v=dataclasses.replace(pages.v, values=values))
        out = attend(q, broken, table, cu_q_lens, kv_lens)
        seeing = slice(rows[4].start + 3, rows[4].stop)
        assert not jnp.isfinite(out[seeing]).any()
        assert same_bits(out.at[seeing].set(0), sound.at[seeing].set(0))


@pytest.mark.gpu
def test_gpu_a_short_chunk_is_the_same_alone():
    case = dataclasses.replace(PACKED, head_dim=128)
    q, pages, table, cu_q_lens, kv_lens = case.inputs()
    logits = logits_of(0, 2, case.dtype)
    attend = jax.jit(partial(prefill_attention, scale=case.scale, backend="mosaic", **logits))
    together = attend(q, pages, table, cu_q_lens, kv_lens)
    for i, rows in enumerate(rows_of(case)):
        count = rows.stop - rows.start
        bounds = jnp.asarray([0, count], jnp.int32)
        alone = attend(jnp.roll(q, -rows.start, axis=0), pages, table[i : i + 1], bounds, kv_lens[i : i + 1])
        assert same_bits(alone[:count], together[rows]), i
