"""Checks the Mosaic kernel of decode_attention with segments of several rows: chains and trees of drafts."""

import dataclasses
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_attention import (
    Segments,
    bench,
    bench_runs,
    compute_sm90,
    decode_attention,
    make_work,
    masks_sm90,
    mosaic_sm90,
    plan,
    reference,
)
from pallas_kernels.decode_attention.cases import SEGMENT_CASES, Case
from pallas_kernels.decode_attention.config import check_supported, choose_config, most_queries
from pallas_kernels.decode_attention.shape_sm90 import REDUCTIONS
from pallas_kernels.decode_attention.work import max_slots, query_chunks
from pallas_kernels.hopper.hopper import SHARED_MEMORY
from pallas_kernels.hopper.smem_sm90 import shared_bytes
from tests.kernels.helpers import TOLERANCE, error, logits_of, missed, poison, same_bits, thinned, visible_slots
from tests.kernels.interpreter import FIND_RACES
from tests.kernels.test_decode_attention_mosaic import NARROW, TINY, items_of, partial_results, shapes, small
from tests.kernels.test_segments import queries, random_trees, words

ALONE = {"heads": (1, 1), "k_format": "f16", "v_format": "f16", "dtype": "float16"}
THREE = dataclasses.replace(TINY, sms=3)


def segments_of(rows, width: int, tree: bool, seed: int = 0) -> Segments:
    masks = jnp.asarray(random_trees(np.random.default_rng(seed), rows, width)) if tree else None
    return Segments(jnp.asarray(rows, jnp.int32), masks)


def poisoned(case: Case, segments: Segments, width: int):
    """Returns the case's inputs, with NaN wherever nothing may be read, and tables that point nowhere before the
    window. NaN is in queries that are not in use, and in keys that no row sees."""
    rows = np.asarray(segments.rows)
    _, pages, table, lengths = case.inputs()
    ends = np.where(rows > 0, lengths, 0)
    firsts = ends - rows + 1 - (10**6 if case.window is None else case.window)
    starts = np.where(rows > 0, np.maximum(firsts, 0), 0)
    pages = poison(pages, visible_slots(table, starts, ends.tolist(), pages.k.num_pages, case.page_size))
    hidden = np.arange(table.shape[1])[None] < starts[:, None] // case.page_size
    unused = (np.arange(width) >= rows[:, None]).reshape(-1)
    q = jnp.where(unused[:, None, None], jnp.nan, queries(case, width))
    return q, pages, jnp.asarray(np.where(hidden, -1, table), jnp.int32), lengths


def interpreted(case: Case, arguments, segments, config=TINY, call=mosaic_sm90.decode_attention, **logits):
    """Runs the kernel under the GPU interpreter; a race fails."""
    options = {"config": config, "interpret": FIND_RACES} | logits
    return jax.block_until_ready(call(*arguments, case.scale, case.window, None, segments, **options))


def formula(case: Case, arguments, segments: Segments, **logits) -> np.ndarray:
    parts = segments.rows, segments.ancestors
    return reference.decode_attention(*arguments, case.scale, case.window, *parts, **logits)


def pairwise():
    """Yields each kind of format of K with two kinds of V, and of the rest what meets."""
    kinds = (("bf16", "f16"), ("fp8", "fp8"), ("int8-g8", "int8-g64"), ("int4-g32", "int4-g8"))
    for i, j in ((0, 0), (0, 1), (1, 1), (1, 2), (2, 2), (2, 3), (3, 3), (3, 0)):
        width, heads = (2, 4, 5, 8)[(i + j) % 4], ((2, 2), (4, 2), (6, 2), (3, 1))[(i + 2 * j + j // 2) % 4]
        case = small(
            lengths=(140, 9), heads=heads, k_format=kinds[i][j % 2], v_format=kinds[j][i % 2],
            window=(None, 3, 50, 1)[(2 * i + j + i // 2) % 4], page_size=(8, 16, 64, 128)[(i + 2 * j) % 4],
            dtype=("bfloat16", "float16")[(i + j // 2) % 2],
        )  # fmt: skip
        rows = (width - (i + j) // 4, (3 * i + j) % (width + 1))
        yield case, width, bool((i // 2 + j) % 2), rows, (THREE if i % 2 else TINY) if heads[1] == 2 else NARROW


INTERPRETED = [
    *pairwise(),
    (small(lengths=(150,), heads=(1, 1), head_dim=256, window=70), 16, True, (14,), NARROW),
    (small(lengths=(150, 64), **ALONE, page_size=64, window=30), 40, True, (40, 33), NARROW),
    (small(lengths=(129,), **ALONE), 64, True, (64,), NARROW),
    (small(lengths=(65,), heads=(9, 1), k_format="int8-g8", v_format="int8-g8"), 8, False, (8,), NARROW),
    (small(lengths=(300,), heads=(2, 2), k_format="fp8", v_format="fp8", window=70), 8, False, (7,), THREE),
    (small(lengths=(300, 66), heads=(2, 2)), 4, False, (4, 2), dataclasses.replace(TINY, sms=5)),
]


@pytest.mark.parametrize("number", thinned(range(len(INTERPRETED)), (0, 3, 5, 7, 8, 10, 11, 12)))
def test_matches_the_formula_and_reads_nothing_else(number):
    case, width, tree, rows, config = INTERPRETED[number]
    segments, logits = segments_of(rows, width, tree), logits_of(number, case.heads[0], case.dtype)
    arguments = poisoned(case, segments, width)
    out = interpreted(case, arguments, segments, config, **logits)
    assert out.dtype == case.dtype
    assert error(out, formula(case, arguments, segments, **logits)) < TOLERANCE[case.dtype]
    unused = np.arange(width) >= np.asarray(rows)[:, None]
    assert not np.asarray(out).reshape(len(rows), width, -1)[unused].any()


@pytest.mark.parametrize(("kv", "window"), [("bf16", None), ("int8-g8", 70)])
def test_rows_of_a_chain_are_plain_decoding_bit_for_bit(kv, window):
    """Takes lengths whose splits are of one size."""
    case, width = small(lengths=(200,), heads=(1, 1), k_format=kv, v_format=kv, window=window), 3
    q, run = queries(case, width), partial(interpreted, case, **logits_of(0, 1, case.dtype))
    _, pages, table, lengths = case.inputs()
    together = run((q, pages, table, lengths), None, dataclasses.replace(NARROW, sms=3))
    for i in (0, width - 1):
        alone = run((q[i : i + 1], pages, table, lengths - width + i + 1), None, NARROW)
        assert same_bits(together[i : i + 1], alone)


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_what_a_row_does_not_see_changes_none_of_its_bits(kv):
    """Tries any keys, and any values that are numbers."""
    case, width, leaf = small(lengths=(130,), heads=(1, 1), k_format=kv, v_format=kv), 5, 3
    segments = Segments(jnp.asarray([width], jnp.int32), jnp.asarray(words([[0b1, 0b11, 0b101, 0b1011, 0b10101]])))
    q = queries(case, width)
    _, pages, table, lengths = case.inputs()
    place = 130 - width + leaf
    page, slot = int(table[0, place // case.page_size]), place % case.page_size

    def drafted(pool, value):
        return dataclasses.replace(pool, values=pool.values.at[page, :, slot].set(value))

    nan, large = (0x7F, 0x70) if kv == "fp8" else (jnp.nan, 1e4)
    other = dataclasses.replace(pages, k=drafted(pages.k, nan), v=drafted(pages.v, large))
    one, another = (interpreted(case, (q, each, table, lengths), segments, NARROW) for each in (pages, other))
    rest = np.arange(width) != leaf
    assert same_bits(one[rest], another[rest])
    assert not np.isfinite(np.asarray(another[leaf], np.float32)).any()


def test_faults_of_the_kernel_are_caught(monkeypatch):
    case, width = small(lengths=(134, 20), heads=(2, 1), window=12), 4  # the first window has keys of two splits
    chains, trees = (segments_of((4, 3), width, tree, seed=2) for tree in (False, True))
    arguments = [poisoned(case, kind, width) for kind in (chains, trees)]
    logits = {"sinks": jnp.asarray([1.0, 2.0], case.dtype)}
    expected = [formula(case, each, kind, **logits) for each, kind in zip(arguments, (chains, trees))]
    bounds, seen, row = masks_sm90.bounds_of, masks_sm90.visible, masks_sm90._row_of_column
    with_sinks, sum_of_sinks = compute_sm90.with_sinks, compute_sm90.sum_of_sinks

    def wrong(name=None, fault=None, module=compute_sm90, tree=False, segments=None):
        kind, call = segments or (trees if tree else chains), mosaic_sm90.decode_attention
        with monkeypatch.context() as patch:
            if name is not None:
                patch.setattr(module, name, fault)
                call = call.__wrapped__  # past the cache of the jit
            return error(interpreted(case, arguments[tree], kind, NARROW, call, **logits), expected[tree])

    def moved(low: int, high: int):
        def fault(*of):
            found = bounds(*of)
            return masks_sm90.Bounds(found.low + low, found.high + high)

        return fault

    def later(shape, item, *rest):
        return seen(shape, dataclasses.replace(item, committed=item.committed + 1), *rest)

    def in_each_split(shape, item, *sums):
        return with_sinks(shape, dataclasses.replace(item, first=jnp.bool_(True)), *sums)

    def of_another_head(shape, item, sinks_ref):
        return sum_of_sinks(dataclasses.replace(shape, heads=1), item, sinks_ref)

    for tree in (False, True):
        assert wrong(tree=tree) < TOLERANCE[case.dtype]
    swapped = trees.ancestors.at[0, 3].set(trees.ancestors[0, 2] | 8)
    assert not same_bits(swapped, trees.ancestors)
    faults = {
        "a key too many": wrong("bounds_of", moved(0, 1)),
        "a key too few": wrong("bounds_of", moved(0, -1)),
        "a shorter window": wrong("bounds_of", moved(1, 0)),
        "a shorter window of a tree": wrong("bounds_of", moved(1, 0), tree=True),
        "rows exchanged": wrong("_row_of_column", lambda shape: shape.width - 1 - row(shape), masks_sm90),
        "masks off by one": wrong("visible", later, tree=True),
        "another parent": wrong(tree=True, segments=dataclasses.replace(trees, ancestors=swapped)),
        "rows ignored": wrong("without_unused", lambda shape, item, total: total),
        "rows of a tree ignored": wrong("without_unused", lambda shape, item, total: total, tree=True),
        "sinks forgotten": wrong("with_sinks", lambda shape, item, sinks, own: own),
        "sinks in each split": wrong("with_sinks", in_each_split),
        "a sink of another head": wrong("sum_of_sinks", of_another_head),
        "a row too few": wrong(segments=dataclasses.replace(chains, rows=chains.rows - 1)),
    }
    assert not missed(faults, TOLERANCE[case.dtype])


@pytest.mark.parametrize(
    ("seed", "width", "window"),
    [(0, 2, None), (1, 8, None), (2, 64, 1), (3, 3, 1), (4, 8, 300), (5, 64, 128), (6, 5, 3000), (7, 33, 511)],
)
def test_the_work_list_covers_what_rows_see(seed, width, window):
    rng = np.random.default_rng(seed)
    rows = np.where(rng.random(7) < 0.3, 0, rng.integers(1, width + 1, 7))
    lengths = (rows + rng.integers(0, 3000, 7)).astype(np.int32)
    config = dataclasses.replace(TINY, sms=(3, 16, 40)[seed % 3])
    segments = segments_of(rows, width, False)
    work = make_work(jnp.asarray(lengths), 4, 4, 64, window=window, width=width, segments=segments, config=config)
    covered = {row: set() for row in range(7)}
    for _, used, head, split in items_of(work):
        row, size = int(work.rows[used]), 1 << int(work.log2_splits[used])
        start = 0 if window is None else max(0, int(lengths[row] - rows[row]) + 1 - window)
        if head == 0:
            low = max((start // size + split) * size, start)
            assert low < lengths[row]
            covered[row] |= set(range(low, min((start // size + split + 1) * size, int(lengths[row]))))
    for row, keys in covered.items():
        start = 0 if window is None else max(0, int(lengths[row] - rows[row]) + 1 - window)
        assert keys == (set(range(start, int(lengths[row]))) if rows[row] else set())
    most, slots = max_slots(7, int(lengths.max()), work.heads, window, config, width)
    assert sorted(partial_results(work)) == list(range(len(partial_results(work))))
    assert len(partial_results(work)) <= slots
    assert int(work.cuts[3].max()) <= most


def lower(case: Case, width: int, tree: bool) -> str:
    q, pages, table, lengths = shapes(case)
    R, *of_query = q.shape
    masks = jax.ShapeDtypeStruct((R, width, -(-width // 32)), "uint32") if tree else None
    segments = Segments(jax.ShapeDtypeStruct((R,), "int32"), masks)

    def planned(q, pages, table, lengths, segments):
        work = plan(q, pages, lengths, window=case.window, segments=segments, backend="mosaic")
        options = {"scale": case.scale, "window": case.window, "backend": "mosaic"}
        return decode_attention(q, pages, table, lengths, segments=segments, work=work, **options)

    arguments = (jax.ShapeDtypeStruct((R * width, *of_query), q.dtype), pages, table, lengths, segments)
    return jax.jit(planned).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("heads", "width", "kv", "window"),
    thinned(
        [
            ((32, 32), 4, "bf16", None), ((32, 32), 8, "int8-g8", 40), ((32, 32), 4, "fp8", 3),
            ((32, 8), 2, "int4-g32", None), ((32, 8), 4, "fp8", 3), ((32, 8), 2, "bf16", None),
            ((71, 1), 5, "int8-g8", 40), ((71, 1), 5, "int4-g32", None),
        ],
        (1, 4, 5, 7),
    ),
)  # fmt: skip
def test_lowers_for_cuda(heads, width, kv, window):
    case = small(lengths=(1300, 5), heads=heads, head_dim=128, k_format=kv, v_format=kv, window=window)
    assert "mosaic_gpu" in lower(case, width, tree=(width + len(kv)) % 2 == 0)


@pytest.mark.parametrize(("head_dim", "width"), thinned([(64, 64), (128, 64), (256, 16)], (0, 2)))
def test_the_widest_trees_lower_for_cuda(head_dim, width):
    assert "mosaic_gpu" in lower(small(lengths=(1300, 5), head_dim=head_dim, window=9), width, tree=True)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_supported_call_fits_shared_memory(head_dim):
    formats = ("bf16", "f16", "fp8", "int8-g8", f"int4-g{head_dim}")
    heads, tried = [(1, 1), (3, 1), (9, 1), (4, 2), (8, 2), (64, 1)], 0
    every = product(("bfloat16", "float16"), heads, (2, 5, 8, 16, 33, 64), formats, (True, False))
    for dtype, (num_heads, kv_heads), width, kv, by_warps in every:
        case = small(heads=(num_heads, kv_heads), head_dim=head_dim, dtype=dtype, k_format=kv, v_format=kv)
        q, pages, *_ = shapes(case)
        try:
            check_supported(q, pages, width)
        except NotImplementedError:
            continue
        chunks, each = query_chunks(num_heads, kv_heads, head_dim, width)
        config = choose_config(head_dim, each * width, kv_heads * chunks, pages.narrow)
        config = dataclasses.replace(config, by_warps=by_warps)
        q = jax.ShapeDtypeStruct((q.shape[0] * width, *q.shape[1:]), dtype)
        shape = mosaic_sm90.shape_of(q, pages, case.scale, None, 512, config, width, 1)
        scratch = mosaic_sm90.fitting_scratch(shape, q.dtype, ("k", "v", "k_scales", "v_scales"))
        assert shared_bytes(scratch, REDUCTIONS) <= SHARED_MEMORY
        assert shape.columns <= most_queries(head_dim)
        tried += 1
    assert tried > 100


def test_what_is_not_supported_says_so():
    q, pages, _, lengths = shapes(small(head_dim=256, heads=(4, 1)))
    check_supported(q, pages, 16)
    with pytest.raises(NotImplementedError, match="segments of 17 rows of head dim 256 .* only of up to 16"):
        check_supported(q, pages, 17)
    q, pages, *_ = shapes(small(head_dim=128, heads=(4, 1), dtype="float16"))
    check_supported(q, pages, 2)
    with pytest.raises(NotImplementedError, match="with 12 queries a KV head .heads times rows.; supported: up to 8"):
        check_supported(q, pages, 3)


def test_a_work_list_of_other_rows_is_refused():
    q, pages, table, lengths = small().inputs()
    work = make_work(lengths, 4, 2, 64, config=TINY)
    with pytest.raises(ValueError, match="4 segments of 1 rows, 1 items .* has 4 of 2"):
        mosaic_sm90.decode_attention(jnp.tile(q, (2, 1, 1)), pages, table, lengths, 1.0, None, work)
    trees = segments_of((2, 0, 1, 2), 2, True)
    work = make_work(lengths, 4, 2, 64, config=TINY, width=2, segments=trees)
    with pytest.raises(ValueError, match="for trees, the call's segments are not"):
        mosaic_sm90.decode_attention(jnp.tile(q, (2, 1, 1)), pages, table, lengths, 1.0, None, work)


BENCHMARKED = [
    dataclasses.replace(case, lengths=(100,)) for case in SEGMENT_CASES if len(case.lengths) == 128 and case.width > 1
]


@pytest.mark.parametrize("case", [*BENCHMARKED[::4], BENCHMARKED[-1]], ids=str)  # heads x formats, and each width
def test_what_is_benchmarked_lowers_for_cuda(case):
    run = bench_runs.paged(case, "mosaic")
    arguments = jax.eval_shape(run.make, bench_runs.random_key())
    assert arguments[0].shape[0] == case.width
    assert "mosaic_gpu" in jax.jit(run.attend).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def test_bars_compare_segments_with_one_row():
    row = {"peer": "mosaic", "H": 32, "K": 8, "R": 1, "length": 1024, "kv": "int8-g8"}
    rows = [{**row, "Q": width, "us": us} for width, us in ((1, 100.0), (2, 104.0), (4, 150.0))]
    (found,) = bench.bars(rows)
    assert (found["value"], found["bar"], found["met"]) == (104.0, 105.0, True)


ON_DEVICE = [
    (kv, heads, width, tree, window, dtype)
    for kv in ("bf16", "fp8", "int8-g8", "int4-g32")
    for heads, width, tree, window in (
        ((4, 4), 4, False, None), ((8, 2), 2, True, None), ((4, 4), 8, True, 40), ((8, 2), 4, False, 300),
        ((4, 4), 64, True, None),
    )
    for dtype in ("bfloat16", "float16")
    if dtype == "bfloat16" or kv != "bf16"
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("of", "number"), [*product(ON_DEVICE, [1]), *product(ON_DEVICE[::3], [0])], ids=str)
def test_on_the_device(of, number):
    kv, heads, width, tree, window, dtype = of
    lengths = (1300, width, 0, 300, 129)
    case = small(lengths=lengths, heads=heads, head_dim=128, k_format=kv, v_format=kv, window=window, dtype=dtype)
    segments = segments_of((width, width, 0, 1, width // 2), width, tree)
    arguments = poisoned(case, segments, width)
    logits = logits_of(number, heads[0], dtype)
    options = {"scale": case.scale, "window": window, "segments": segments, "backend": "mosaic"}
    run = jax.jit(partial(decode_attention, **options, **logits))
    out, most = run(*arguments), {"float16": 7e-4, "bfloat16": 4e-3}  # the share of a lone key is rounded
    assert error(out, formula(case, arguments, segments, **logits)) < most[dtype]
    assert same_bits(out, run(*arguments))
