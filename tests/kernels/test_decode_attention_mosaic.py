"""Checks the Mosaic GPU kernel: interpreted on the CPU with race detection, lowered for CUDA, and run on a GPU."""

import dataclasses
import operator
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_attention import decode_attention, make_work, mosaic_sm90, reference
from pallas_kernels.decode_attention.cases import BENCH_CASES, CASES, Case
from pallas_kernels.decode_attention.config import ROWS, Config, check_supported, choose_config
from pallas_kernels.decode_attention.lanes_sm90 import CHUNK, swizzle_of, swizzled_place
from pallas_kernels.decode_attention.shape_sm90 import REDUCTIONS
from pallas_kernels.decode_attention.work import max_slots, query_chunks, reach, row_splits
from pallas_kernels.formats.kv_formats import parse_format
from pallas_kernels.formats.kv_pages import KVPages, allocate
from pallas_kernels.hopper.hopper import SHARED_MEMORY
from pallas_kernels.hopper.smem_sm90 import shared_bytes
from tests.kernels.helpers import (
    TOLERANCE,
    error,
    logits_of,
    missed,
    poison,
    same_bits,
    swap_entries,
    thinned,
    visible_slots,
)
from tests.kernels.interpreter import FIND_RACES
from tests.kernels.test_decode_attention import first_visible

SMALL = Case(
    lengths=(130, 0, 1, 200),
    heads=(4, 2),
    head_dim=64,
    page_size=16,
    k_format="bf16",
    v_format="bf16",
    dtype="bfloat16",
)
TINY = Config(split=64, most_splits=8, per_sm=1, sms=2, stages=2)  # threads are what race detection takes long for
NARROW = dataclasses.replace(TINY, computing=1)


def poisoned(case: Case):
    """Returns the case's inputs with NaN wherever the pages can hold one, and tables that point nowhere before the
    window."""
    q, pages, table, lengths = case.inputs()
    starts = first_visible(lengths, case.window)
    pages = poison(pages, visible_slots(table, starts, lengths.tolist(), pages.k.num_pages, case.page_size))
    hidden = np.arange(table.shape[1])[None] < np.array(starts)[:, None] // case.page_size
    return q, pages, jnp.asarray(np.where(hidden, -1, table), jnp.int32), lengths


def interpreted(case: Case, arguments, config: Config = TINY, **logits):
    """Runs the kernel under the GPU interpreter; a race fails."""
    options = {"config": config, "interpret": FIND_RACES} | logits
    return jax.block_until_ready(mosaic_sm90.decode_attention(*arguments, case.scale, case.window, **options))


def small(**changes) -> Case:
    return dataclasses.replace(SMALL, **changes)


INTERPRETED = [
    (small(window=100), dataclasses.replace(TINY, sms=3)),
    (small(lengths=(300,), heads=(2, 2), page_size=128, head_dim=128, k_format="int8-g8", v_format="int4-g32"), TINY),
    (
        small(lengths=(9, 140), heads=(9, 1), page_size=8, k_format="bf16", v_format="f16", dtype="float16"),
        dataclasses.replace(TINY, computing=1, split=256),
    ),
    (small(lengths=(140,), heads=(1, 1), page_size=32, head_dim=256, k_format="fp8", v_format="int8-g256"), NARROW),
    (
        small(lengths=(70, 300), heads=(4, 2), k_format="fp8", v_format="int4-g8"),
        dataclasses.replace(TINY, by_warps=False, sms=3),
    ),
    (small(lengths=(70,), heads=(71, 1), page_size=64, window=1, k_format="f16"), NARROW),
    (small(lengths=(300, 30), heads=(4, 2), k_format="int8-g8", v_format="fp8"), dataclasses.replace(TINY, sms=3)),
    (small(lengths=(70, 0, 20), heads=(4, 4), page_size=8, k_format="int4-g8", v_format="int8-g16"), TINY),
    (small(lengths=(100,), heads=(3, 1), k_format="int8-g64", v_format="fp8", dtype="float16", window=50), NARROW),
    (  # a scale and a zero a token and head
        small(lengths=(70, 300), k_format="int4-g64-zp", v_format="int8-g64-zp", window=140),
        dataclasses.replace(TINY, sms=3),
    ),
    (  # cut, so that what is merged is rotated back, too
        small(lengths=(300, 30), k_format="int4-g32-h", v_format="int4-g64-zp-h", dtype="float16"),
        dataclasses.replace(TINY, sms=3),
    ),
    (small(lengths=(70,), heads=(2, 1), page_size=8, k_format="bf16-h", v_format="int4-g16-zp-h"), NARROW),
    (
        small(lengths=(9, 140), heads=(4, 2), k_format="int8-g8-zp", v_format="fp8-h"),
        dataclasses.replace(TINY, by_warps=False),
    ),
    (
        small(lengths=(140,), heads=(4, 2), k_format="int4-g64-zp-h", v_format="int8-g32-zp"),
        dataclasses.replace(TINY, by_warps=False),
    ),
]


@pytest.mark.parametrize("number", thinned(range(len(INTERPRETED)), (0, 1, 2, 3, 4, 5, 8, 9, 10, 13)))
def test_matches_the_formula_and_reads_nothing_else(number):
    case, config = INTERPRETED[number]
    arguments, logits = poisoned(case), logits_of(number, case.heads[0], case.dtype)
    out = interpreted(case, arguments, config, **logits)
    assert out.dtype == case.dtype
    expected = reference.decode_attention(*arguments, case.scale, case.window, **logits)
    assert error(out, expected) < TOLERANCE[case.dtype]


def test_sinks_of_minus_infinity_change_no_bit():
    for kv in ("bf16", "fp8"):
        case = small(lengths=(70,), heads=(1, 1), k_format=kv, v_format=kv)
        both = None, jnp.full(1, -jnp.inf, case.dtype)
        assert same_bits(*(interpreted(case, poisoned(case), NARROW, sinks=sinks) for sinks in both))


@pytest.mark.parametrize(("kv", "changes"), [("bf16", {"sms": 5}), ("fp8", {"sms": 3, "computing": 1})], ids=str)
def test_bits_depend_neither_on_the_run_nor_on_company_nor_on_where_heads_are_cut(kv, changes):
    case = small(lengths=(300, 40), heads=(2, 2), k_format=kv, v_format=kv)
    run = partial(interpreted, case, **logits_of(0, 2, case.dtype))
    q, pages, table, lengths = case.inputs()
    out = run((q, pages, table, lengths))
    assert same_bits(out, run((q, pages, table, lengths)))
    alone = run((q[:1], pages, table[:1], lengths[:1]), dataclasses.replace(TINY, **changes))
    assert same_bits(out[:1], alone)


RUNS = {  # the pages of two rows, of 9 and 5
    "one run a row": ([*range(3, 12)], [*range(20, 25)]),
    "a run into the other row's pages": ([*range(9)], [*range(9, 14)]),
    "broken within tiles": ([4, 5, 7, 8, 12, 13, 14, 16, 15], [20, 21, 22, 24, 23]),
    "begun and ended within tiles": ([24, 2, 3, 4, 5, 6, 7, 8, 0], [18, 10, 11, 12, 13]),
    "backwards": ([*range(8, -1, -1)], [*range(13, 8, -1)]),
    "every other": ([*range(0, 18, 2)], [*range(1, 11, 2)]),
}


def with_runs(case: Case, runs):
    """Returns the case's inputs, their pages moved to where `runs` has them; pages without an owner are NaN."""
    q, pages, table, lengths = case.inputs()
    source = np.zeros(25, np.int32)
    moved = np.full(table.shape, 2**30, np.int32)
    owned = np.zeros(25, bool)
    for row, numbers in enumerate(runs):
        moved[row, : len(numbers)] = numbers
        source[numbers], owned[numbers] = np.asarray(table)[row, : len(numbers)], True

    def move(x):
        x = x[source]
        hidden = jnp.asarray(~owned).reshape(-1, *(1,) * (x.ndim - 1))
        return jnp.where(hidden, jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 0x7F, x).astype(x.dtype)

    return q, jax.tree.map(move, pages), jnp.asarray(moved), lengths


def check_runs(case: Case, run, one_by_one) -> None:
    arguments = case.inputs()
    shuffled = run(arguments)
    expected = reference.decode_attention(*arguments, case.scale, case.window)
    assert error(shuffled, expected) < TOLERANCE[case.dtype]
    for runs in RUNS.values():
        moved = with_runs(case, runs)
        assert same_bits(shuffled, run(moved))
        assert same_bits(shuffled, one_by_one(moved))


@pytest.mark.parametrize(
    ("settings", "config"),
    thinned(
        [
            ({}, TINY),
            ({"k_format": "int8-g8", "v_format": "int4-g8"}, dataclasses.replace(TINY, by_warps=False)),
            ({"k_format": "fp8"}, NARROW),
        ],
        (0, 2),
    ),
    ids=str,
)
def test_pages_with_consecutive_numbers(settings, config):
    """Expects the same results in every bit, wherever pages are."""
    case = small(lengths=(140, 70), heads=(2, 2), **settings)
    apart = with_runs(case, RUNS["every other"])
    expected = interpreted(case, apart, config)
    assert error(expected, reference.decode_attention(*apart, case.scale, None)) < TOLERANCE[case.dtype]
    for runs in RUNS.values():
        assert same_bits(expected, interpreted(case, with_runs(case, runs), config))


def test_weights_times_the_smallest_scales_keep_their_bits():
    """Checks that weights are lifted before a token's only scale multiplies them: float16 has few bits far below
    one."""
    case = small(lengths=(100,), heads=(1, 1), k_format="fp8", v_format="int8-g64", dtype="float16")
    q, pages, table, lengths = case.inputs()
    scales = jnp.full_like(pages.v.scales, jnp.finfo(jnp.float16).smallest_normal)
    arguments = q, dataclasses.replace(pages, v=dataclasses.replace(pages.v, scales=scales)), table, lengths
    expected = reference.decode_attention(*arguments, case.scale, None)
    assert error(interpreted(case, arguments, NARROW), expected) < 2 * TOLERANCE["float16"]


def test_seeded_faults_are_caught():
    case = small(lengths=(130,), heads=(2, 2), window=100)
    q, pages, table, lengths = case.inputs()
    expected = reference.decode_attention(q, pages, table, lengths, case.scale, case.window)

    def wrong_by(pages=pages, table=table, lengths=lengths, expected=expected):
        config = dataclasses.replace(TINY, sms=1)
        return error(interpreted(case, (q, pages, table, lengths), config), expected)

    assert wrong_by() < TOLERANCE[case.dtype]
    longer = reference.decode_attention(q, pages, table, lengths, case.scale, case.window + 1)
    faults = {
        "swapped table entries": wrong_by(table=swap_entries(table, 0, 5, 8)),
        "one key too few": wrong_by(lengths=lengths - 1),
        "a shorter window": wrong_by(expected=longer),
        "K for V": wrong_by(pages=KVPages(pages.v, pages.k)),
    }
    assert not missed(faults, TOLERANCE[case.dtype])


def items_of(work):
    """Returns every item of a work list, as (worker, used row, head, split), by walking it as the kernel does."""
    splits = np.asarray(row_splits(work.lengths, work.log2_splits, reach(work.window, work.segments))[-1])
    for worker, count in enumerate(np.asarray(work.items)):
        used, head, split = (int(x) for x in np.asarray(work.first)[:, worker])
        for _ in range(count):
            yield worker, used, head, split
            split += 1
            if split == splits[used]:
                head, split = head + 1, 0
            if head == work.heads:
                used, head = used + 1, 0


def partial_results(work) -> dict[int, tuple[int, int, range]]:
    """Returns what the kernel writes to each slot: (row, head, splits) of sums of heads that a worker doesn't have
    whole."""
    splits = np.asarray(row_splits(work.lengths, work.log2_splits, reach(work.window, work.segments))[-1])
    of_worker = {}
    for worker, *item in items_of(work):
        of_worker.setdefault(worker, []).append(item)
    written = {}
    for worker, items in of_worker.items():
        slot = int(work.slots[worker])
        for count, (used, head, split) in enumerate(items):
            begun, last = split <= count, split == splits[used] - 1
            if not begun or (not last and count == len(items) - 1):
                assert slot not in written
                written[slot] = int(work.rows[used]), head, range(0 if begun else split, split + 1)
                slot += 1
    return written


@pytest.mark.parametrize(
    ("seed", "window"),
    [(0, None), (0, 1), (1, None), (1, 300), (2, None), (2, 3000), (3, None), (3, 100), (4, 1), (4, 300)],
)
def test_the_work_list_has_every_item_once_and_is_balanced(seed, window):
    rng = np.random.default_rng(seed)
    longest = (60, 600, 5000, 300, 2000)[seed]
    lengths = np.where(rng.random(9) < 0.3, 0, rng.integers(1, longest, 9)).astype(np.int32)
    config = dataclasses.replace(TINY, sms=(1, 5, 16, 40, 100)[seed])
    work = jax.jit(partial(make_work, window=window, config=config), static_argnums=(1, 2, 3))(lengths, 6, 6, 64)
    expected, of_row, starts, size = [], {}, {}, {}
    for row, length in enumerate(lengths.tolist()):
        starts[row] = 0 if window is None else max(length - window, 0)
        size[row] = config.split * (2 if length - starts[row] <= 2 * config.split else 1)
        while length - starts[row] > config.most_splits * size[row]:
            size[row] *= 2
        of_row[row] = -(-length // size[row]) - starts[row] // size[row]
        expected += [(row, head, split) for head in range(3) for split in range(of_row[row])]
    items = [(worker, int(work.rows[used]), head, split) for worker, used, head, split in items_of(work)]
    assert sorted(item[1:] for item in items) == sorted(expected)
    loads = np.zeros(config.workers)
    for worker, row, _, split in items:
        split += starts[row] // size[row]
        low, high = max(starts[row], split * size[row]), min(int(lengths[row]), (split + 1) * size[row])
        loads[worker] += -(-high // ROWS) - low // ROWS
    assert loads.max() - loads.mean() <= max(size.values()) // ROWS

    written = partial_results(work)
    assert sorted(written) == list(range(len(written)))
    most, slots = max_slots(len(lengths), int(lengths.max()), 3, window, config)
    assert len(written) <= slots
    merged = set()
    for row, head, slot, count in np.asarray(work.cuts).T[np.asarray(work.cuts)[3] > 0].tolist():
        parts = [written[slot + i] for i in range(count)]
        assert {part[:2] for part in parts} == {(row, head)}
        assert [split for part in parts for split in part[2]] == list(range(of_row[row]))
        assert 2 <= count <= most
        merged |= {slot + i for i in range(count)}
    assert merged == set(written)


def test_a_work_list_of_another_batch_is_refused():
    q, pages, table, lengths = SMALL.inputs()
    work = make_work(lengths, *SMALL.heads, SMALL.head_dim, window=5, config=TINY)
    with pytest.raises(ValueError, match="window 5"):
        mosaic_sm90.decode_attention(q, pages, table, lengths, SMALL.scale, None, work)


def test_an_odd_number_of_heads_has_no_pairs():
    with pytest.raises(ValueError, match=r"expected 1 for an odd number of heads \(3\)"):
        make_work(jnp.ones(2, jnp.int32), 6, 3, 64, config=TINY)
    for chosen, heads in ((2, 8), (1, 3), (1, 1)):
        assert make_work(jnp.ones(2, jnp.int32), 2 * heads, heads, 64).config.computing == chosen


def shapes(case: Case):
    """Returns the types of case.inputs(), without the inputs."""
    pages_needed = -(-max(case.lengths) // case.page_size)
    formats = (parse_format(name, case.head_dim) for name in (case.k_format, case.v_format))
    num_pages = pages_needed * len(case.lengths) + 1
    pages = jax.eval_shape(lambda: allocate(num_pages, case.heads[1], case.page_size, case.head_dim, *formats))
    rows = len(case.lengths)
    q = jax.ShapeDtypeStruct((rows, case.heads[0], case.head_dim), case.dtype)
    return q, pages, *(jax.ShapeDtypeStruct(shape, "int32") for shape in ((rows, pages_needed), (rows,)))


def supported(case: Case) -> bool:
    try:
        check_supported(*shapes(case)[:2])
    except NotImplementedError:
        return False
    return True


def lower(case: Case, function=decode_attention, **logits) -> str:
    f = jax.jit(partial(function, scale=case.scale, window=case.window, backend="mosaic", **logits))
    return f.trace(*shapes(case)).lower(lowering_platforms=("cuda",)).as_text()


# Each way in which K or V of a format comes to a product, with a page in parts, whole, or several to a tile, one
# computing warpgroup or two, rows that are split; and what is benchmarked. The kernel is cut by these alone.
NAMES = ("k_format", "v_format", "page_size", "head_dim", "heads", "window", "dtype")
LOWERED = [
    small(lengths=(1300, 5), **dict(zip(NAMES, settings)))
    for settings in (
        ("bf16", "f16", 8, 64, (4, 4), 1, "bfloat16"),
        ("f16", "bf16", 16, 256, (16, 1), None, "float16"),
        ("fp8", "int8-g8", 128, 128, (6, 2), 40, "bfloat16"),
        ("int8-g16", "fp8", 8, 256, (4, 1), None, "float16"),
        ("int8-g64", "int4-g8", 16, 64, (71, 1), 129, "bfloat16"),
        ("int4-g32", "int8-g64", 32, 128, (4, 2), None, "bfloat16"),
        ("int4-g64", "int4-g64", 64, 64, (4, 2), None, "float16"),
        ("int4-g16", "int8-g128", 128, 256, (71, 1), None, "bfloat16"),
        ("int8-g8", "int8-g8", 16, 128, (3, 3), None, "bfloat16"),
        ("bf16", "bf16", 16, 128, (12, 3), 200, "bfloat16"),
        ("int4-g128-zp", "int4-g128-zp", 16, 128, (4, 4), None, "bfloat16"),
        ("int8-g8-zp-h", "int4-g64-zp", 8, 64, (40, 1), None, "float16"),
        ("bf16-h", "int4-g32-h", 16, 128, (4, 2), None, "bfloat16"),
    )
] + [
    dataclasses.replace(case, lengths=(100, 100))
    for case in {(case.heads, case.k_format): case for case in BENCH_CASES}.values()
    if case.heads == (32, 32) or case.k_format == "bf16"
]  # fmt: skip


@pytest.mark.parametrize("number", thinned(range(len(LOWERED)), (0, 2, 3, 4, 6, 10, 11, 12, len(LOWERED) - 1)))
def test_lowers_for_cuda(number):
    case = LOWERED[number]
    assert "mosaic_gpu" in lower(case, **logits_of(number, case.heads[0], case.dtype))


@pytest.mark.parametrize(
    ("kv", "page_size", "head_dim"),
    [("fp8", 16, 128), ("int8-g8", 8, 64), ("int8-g64", 128, 256), ("int4-g32", 16, 128), ("int4-g32", 8, 64)],
)
def test_lanes_copy_narrow_formats(kv, page_size, head_dim):
    """Expects lanes to copy K, V and their scales; TMA brings the queries alone."""
    case = small(lengths=(300,), page_size=page_size, head_dim=head_dim, k_format=kv, v_format=kv)
    text = lower(case)
    assert "nvvm.cp.async.shared.global" in text
    assert "nvvm.cp.async.mbarrier.arrive" in text


@pytest.mark.parametrize(("row", "width"), [(32, 32), (64, 64), (128, 128), (256, 128), (64 * 3, 64)])
def test_lanes_put_chunks_where_tma_would(row, width):
    """Lays rows in tiles of 8, `width` bytes wide. Bits 4 and up of an address are xored with bits 7 and up: as many
    bits as a width has chunks."""

    class Numbers:
        add, mul, div, rem, xor = operator.add, operator.mul, operator.floordiv, operator.mod, operator.xor

    data = np.arange(64 * row // CHUNK).reshape(8, 8, row // width, width // CHUNK)
    tiles = data.transpose(0, 2, 1, 3).reshape(-1)  # by address, before swizzling
    address = np.arange(tiles.size) * CHUNK
    memory = np.zeros_like(tiles)
    memory[(address ^ (address >> 3 & width - CHUNK)) // CHUNK] = tiles
    assert swizzle_of(row) == width
    for chunk in range(tiles.size):
        assert memory[swizzled_place(chunk, row, Numbers) // CHUNK] == chunk


@pytest.mark.parametrize(
    ("k_format", "v_format", "head_dim", "by_warps"),
    thinned(
        [
            (*case, by_warps)
            for case in (
                ("fp8", "int4-g8", 64), ("int8-g8", "fp8", 256), ("int8-g64", "int4-g64", 64),
                ("int4-g8", "int8-g128", 256),
            )
            for by_warps in (True, False)
        ],
        (0, 3, 5, 6),
    ),
)  # fmt: skip
def test_narrow_formats_lower_for_cuda_by_warps_and_by_warpgroups(k_format, v_format, head_dim, by_warps):
    case = small(lengths=(100,), k_format=k_format, v_format=v_format, head_dim=head_dim)
    config = dataclasses.replace(choose_config(head_dim, 2, 2), by_warps=by_warps)
    f = jax.jit(lambda *a: mosaic_sm90.decode_attention(*a, case.scale, None, config=config))
    text = f.trace(*shapes(case)).lower(lowering_platforms=("cuda",)).as_text()
    assert ("mma.sync" in text) == by_warps


@pytest.mark.parametrize("step", thinned((7, 1), (0,)))
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_supported_call_fits_shared_memory(head_dim, step):
    """Expects at least two tiles in flight for each worker, with the default configuration."""
    groups = [f"{kind}-g{group}" for kind in ("int8", "int4") for group in (8, 32, head_dim)]
    groups.append("int8-g8-zp")
    formats = ("bf16", "f16", "fp8", *groups)
    tried = 0
    heads = [(1, 1), (9, 1), (17, 1), (64, 1), (2, 2), (32, 2)]
    calls = product(("bfloat16", "float16"), heads, (8, 128), formats)
    for dtype, (num_heads, kv_heads), page_size, k_format in list(calls)[::step]:
        for v_format, by_warps in ((k_format, True), (k_format, False), ("bf16", True), ("int8-g8", True)):
            case = small(heads=(num_heads, kv_heads), head_dim=head_dim, page_size=page_size, dtype=dtype,
                         k_format=k_format, v_format=v_format)  # fmt: skip
            if not supported(case):
                continue
            q, pages, *_ = shapes(case)
            chunks, queries = query_chunks(num_heads, kv_heads, head_dim)
            config = dataclasses.replace(choose_config(head_dim, queries, kv_heads * chunks), by_warps=by_warps)
            shape = mosaic_sm90.shape_of(q, pages, case.scale, None, 512, config)
            scratch = mosaic_sm90.fitting_scratch(shape, q.dtype, ("k", "v", "k_scales", "v_scales"))
            assert shared_bytes(scratch, REDUCTIONS) <= SHARED_MEMORY
            tried += 1
    assert tried > 200 // step


def test_unsupported_arguments_name_what_is_supported():
    for change, message in (
        ({"dtype": "float32"}, "bfloat16, float16"),
        ({"head_dim": 32}, "64, 128, 256"),
        ({"page_size": 4}, "8, 16, 32, 64, 128"),
        (
            {"dtype": "float16", "head_dim": 128, "heads": (9, 1)},
            "9 queries a KV head .* supported: up to 8",
        ),
    ):
        with pytest.raises(NotImplementedError, match=message):
            lower(small(**change))


def test_configurations_say_what_is_wrong():
    for changes, message in (
        ({"computing": 3}, "expected 1 or 2"),
        ({"split": 32}, "at least a tile of 64"),
        ({"split": 384}, "power of two"),
        ({"stages": 1}, "at least 2"),
        ({"sms": 0}, "sms is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            Config(**changes)


def test_32_layers_share_one_kernel():
    def layers(q, *arguments, **options):
        for _ in range(32):
            q = decode_attention(q, *arguments, **options)
        return q

    text = lower(small(lengths=(100,)), layers)
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1


ON_DEVICE = [
    small(lengths=(1300, 1, 0, 300), k_format=kv, v_format=kv, heads=heads, head_dim=head_dim)
    for kv, heads, head_dim in (
        ("int4-g128-zp", (4, 4), 128), ("int4-g32-h", (8, 2), 128), ("int8-g8-zp-h", (4, 2), 64),
        ("bf16-h", (4, 2), 128), ("int8-g256-zp", (32, 2), 256), ("bf16", (32, 1), 128), ("int8-g8", (24, 1), 64),
    )
]  # fmt: skip


FAMILIES = [  # heads of gpt-oss, whose every other layer has this window, and of Gemma 2
    small(lengths=(1300, 1, 0, 300), k_format=kv, v_format=kv, heads=heads, head_dim=head_dim, window=window)
    for kv in ("bf16", "fp8")
    for heads, head_dim, window in (((64, 8), 64, 128), ((64, 8), 64, None), ((8, 4), 256, None))
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "number"),
    [*product([*ON_DEVICE, *filter(supported, CASES)], [1]), *product([*ON_DEVICE, *FAMILIES], [0, 2])],
    ids=str,
)
def test_on_the_device(case, number):
    case = dataclasses.replace(case, lengths=(*case.lengths, 1100))  # that every default splits
    arguments, logits = poisoned(case), logits_of(number, case.heads[0], case.dtype)
    run = jax.jit(partial(decode_attention, scale=case.scale, window=case.window, backend="mosaic", **logits))
    out = run(*arguments)
    both_narrow = arguments[1].narrow and case.dtype == "float16"  # then codes times scales are rounded to it as well
    turned = case.k_format.endswith("-h") or case.v_format.endswith("-h")  # queries or results are rounded once more
    tolerance = 7e-4 if both_narrow else (1.5 if turned else 1) * TOLERANCE[case.dtype]
    assert error(out, reference.decode_attention(*arguments, case.scale, case.window, **logits)) < tolerance
    assert same_bits(out, run(*arguments))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "changes", [{"by_warps": False}, {"computing": 1, "sms": 3}, {"computing": 1, "per_sm": 2}], ids=str
)
@pytest.mark.parametrize("kv", ["fp8", "int8-g8", "int8-g128", "int4-g32"])
def test_other_configurations_on_the_device(kv, changes):
    case = small(lengths=(1300, 1, 0, 300), heads=(4, 2), head_dim=128, k_format=kv, v_format=kv)
    arguments = poisoned(case)
    expected = reference.decode_attention(*arguments, case.scale, case.window)
    plain = choose_config(case.head_dim, 2, 2, narrow=True)
    outs = []
    for config in (plain, dataclasses.replace(plain, **changes)):
        outs.append(mosaic_sm90.decode_attention(*arguments, case.scale, case.window, config=config))
        assert error(outs[-1], expected) < TOLERANCE[case.dtype]
    few = mosaic_sm90.decode_attention(*arguments, case.scale, None, config=dataclasses.replace(config, sms=5))
    assert same_bits(outs[-1], few)  # wherever heads are cut
    assert "computing" not in changes or same_bits(*outs)  # a head's sum is a warpgroup's own
