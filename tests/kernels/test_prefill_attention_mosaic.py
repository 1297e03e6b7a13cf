"""Checks the Mosaic GPU kernel: interpreted on the CPU with race detection, lowered for CUDA, and run on a GPU."""

import dataclasses
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats.hadamard import hadamard
from pallas_kernels.formats.kv_formats import parse_format
from pallas_kernels.formats.kv_pages import allocate
from pallas_kernels.hopper.hadamard_sm90 import turn
from pallas_kernels.hopper.hopper import SHARED_MEMORY
from pallas_kernels.hopper.smem_sm90 import shared_bytes
from pallas_kernels.prefill_attention import (
    compute_sm90,
    make_work,
    mosaic_sm90,
    pack_sm90,
    parts_sm90,
    prefill_attention,
    reference,
    rows_sm90,
)
from pallas_kernels.prefill_attention.cases import CASES, MOSAIC_CASES, Case
from pallas_kernels.prefill_attention.config import WARPGROUP_ROWS, Config, choose_config, packings
from pallas_kernels.prefill_attention.plan_sm90 import Plan
from pallas_kernels.prefill_attention.work import AREAS, CUT, HEAD, PART, ROW
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


def tolerance(case: Case) -> float:
    """Allows for probabilities, which the kernel rounds, too, and for what it converts to the queries' dtype."""
    converts = any(parse_format(name, case.head_dim).dtype != case.dtype for name in (case.k_format, case.v_format))
    return (2 if converts else 1.4) * TOLERANCE[case.dtype]


# A chunk of a tile and a bit, an empty one, one token far in, the start of a sequence, and unused rows.
SMALL = Case(
    q_lens=(70, 0, 1, 5), kv_lens=(150, 9, 129, 5), unused=5, heads=(2, 1), head_dim=64, page_size=32,
    k_format="bf16", v_format="bf16", dtype="bfloat16",
)  # fmt: skip
HALF = {"dtype": "float16", "k_format": "f16", "v_format": "f16"}
SHORT = {"q_lens": (3, 66), "kv_lens": (70, 66), "unused": 0}
FEW = Config(ctas=2)
ALONE = {"warpgroups": 1, "alternate": False}


def poisoned(case: Case) -> tuple:
    """Returns the case's inputs with NaN in every slot that no query sees, and no page where none is seen."""
    q, pages, table, cu_q_lens, kv_lens = case.inputs()
    used = [kv if n else 0 for n, kv in zip(case.q_lens, case.kv_lens)]
    window = max(case.kv_lens) if case.window is None else case.window
    starts = [max(0, kv - n - window + 1) for n, kv in zip(case.q_lens, case.kv_lens)]
    pages = poison(pages, visible_slots(table, starts, used, pages.k.num_pages, case.page_size))
    unseen = np.arange(table.shape[1])[None] < np.array(starts)[:, None] // case.page_size
    return q, pages, jnp.asarray(np.where(unseen, 2**30, table), jnp.int32), cu_q_lens, kv_lens


def interpreted(case: Case, config: Config, *arguments, run=mosaic_sm90.prefill_attention, **logits) -> jax.Array:
    """Runs the kernel under the GPU interpreter; a race fails."""
    options = {"config": config, "interpret": FIND_RACES} | logits
    return jax.block_until_ready(run(*arguments, case.scale, case.window, **options))


INTERPRETED = [
    (SMALL, FEW),
    (dataclasses.replace(SMALL, heads=(4, 1)), dataclasses.replace(FEW, **ALONE, stack=4)),
    (
        dataclasses.replace(SMALL, kv_lens=(330, 9, 129, 5), heads=(4, 2), page_size=8, window=150, **HALF),
        dataclasses.replace(FEW, heads=2, block_kv=64, stages=3, ctas=1),
    ),
    (
        dataclasses.replace(SMALL, q_lens=(70,), kv_lens=(70,), unused=0, head_dim=128, page_size=128),
        dataclasses.replace(FEW, alternate=False, warpgroups=3, ctas=1),
    ),
    (
        dataclasses.replace(SMALL, q_lens=(3, 2), kv_lens=(70, 2), unused=0, head_dim=256, page_size=64, window=1),
        dataclasses.replace(FEW, alternate=False, warpgroups=1, block_kv=64, ctas=1),
    ),
    (
        dataclasses.replace(SMALL, page_size=64, k_format="int8-g8", v_format="int4-g32", head_dim=128),
        dataclasses.replace(FEW, block_kv=64, ctas=1, **ALONE, stack=2, converters=2),
    ),
    (
        dataclasses.replace(SMALL, page_size=8, k_format="fp8", v_format="int8-g8", window=40, **SHORT),
        dataclasses.replace(FEW, block_kv=64, ctas=1),
    ),
    (
        dataclasses.replace(SMALL, page_size=128, k_format="int4-g64", v_format="f16", **SHORT),
        dataclasses.replace(FEW, block_kv=64, ctas=1, stages=1, warpgroups=1, alternate=False),
    ),
    (  # few scales a page and head: copied with those of the next KV heads
        dataclasses.replace(SMALL, heads=(4, 4), page_size=16, k_format="int8-g32", v_format="int4-g64", **SHORT),
        dataclasses.replace(FEW, block_kv=64, ctas=1),
    ),
    (  # padded, as a whole page has fewer than a copy moves
        dataclasses.replace(SMALL, page_size=16, k_format="int8-g64", v_format="int4-g32", **SHORT),
        dataclasses.replace(FEW, block_kv=64, ctas=1, alternate=False),
    ),
    (
        dataclasses.replace(SMALL, page_size=16, k_format="int4-g64-zp", v_format="int8-g8-zp-h", **SHORT),
        dataclasses.replace(FEW, block_kv=64, ctas=1),
    ),
    (
        dataclasses.replace(SMALL, page_size=16, k_format="bf16", v_format="fp8", window=100, **SHORT),
        dataclasses.replace(FEW, block_kv=128, ctas=1, alternate=False),
    ),
    (
        dataclasses.replace(SMALL, heads=(2, 2), page_size=32, k_format="bf16-h", v_format="int4-g32-h", **SHORT),
        dataclasses.replace(FEW, block_kv=64, ctas=1, alternate=False),
    ),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # keys of NaN, masked afterwards
@pytest.mark.parametrize("number", thinned(range(len(INTERPRETED)), {*range(len(INTERPRETED))} - {3, 7, 11}))
def test_matches_the_formula_and_reads_nothing_else(number):
    case, config = INTERPRETED[number]
    arguments, logits = poisoned(case), logits_of(number, case.heads[0], case.dtype)
    out = interpreted(case, config, *arguments, **logits)
    assert out.dtype == arguments[0].dtype
    expected = reference.prefill_attention(*arguments, case.scale, case.window, **logits)
    assert error(out, expected) < tolerance(case)


def test_company_and_order_change_no_bit():
    """Attends a chunk alone, and among others at other rows of q, on other CTAs, all heads together or one by one.
    Attends a part of a chunk, whose first row has the window that another one has in the whole."""
    case = dataclasses.replace(SMALL, heads=(2, 2), window=100)
    q, pages, table, cu_q_lens, kv_lens = case.inputs()
    run = partial(interpreted, case, **logits_of(0, 2, case.dtype))
    together = run(FEW, q, pages, table, cu_q_lens, kv_lens)
    apart = run(dataclasses.replace(FEW, together=1), q, pages, table, cu_q_lens, kv_lens)
    assert same_bits(together, apart)
    for first, last, chunk in ((71, 76, 3), (50, 66, 0)):
        bounds, length = jnp.asarray([0, last - first], jnp.int32), kv_lens[chunk] - cu_q_lens[chunk + 1] + last
        alone = q[first:last], pages, table[chunk : chunk + 1], bounds, length[None]
        assert same_bits(run(dataclasses.replace(FEW, ctas=1), *alone), together[first:last])


@pytest.mark.parametrize(
    ("k_format", "v_format", "window", "with_sinks"),
    thinned(
        [("int8-g8", "int8-g8", 150, True), ("fp8", "int4-g32-h", 150, False), ("bf16", "bf16", None, True)], (1, 2)
    ),
)
def test_parts_of_a_row_add_up_to_the_same_bits_wherever_they_are_computed(k_format, v_format, window, with_sinks):
    """Attends a text of several parts in one call. Then it attends rows of it one by one: cut, and each by one CTA.
    Then come seven at once, behind rows of another operation. Rows with a single part have the bits of no parts."""
    case = dataclasses.replace(
        SMALL,
        q_lens=(300,),
        kv_lens=(300,),
        unused=0,
        heads=(2, 1),
        window=window,
        k_format=k_format,
        v_format=v_format,
    )
    q, pages, table, cu_q_lens, kv_lens = case.inputs()
    logits = {"sinks": jnp.asarray([3.0, -1.0], case.dtype)} if with_sinks else {}
    run = partial(interpreted, case, **logits)
    wide = dataclasses.replace(FEW, block_kv=64, heads=2, part=128)
    few = dataclasses.replace(wide, **ALONE, heads=1, stack=2, converters=2)
    whole = run(wide, q, pages, table, cu_q_lens, kv_lens)
    expected = reference.prefill_attention(q, pages, table, cu_q_lens, kv_lens, case.scale, window, **logits)
    assert error(whole, expected) < tolerance(case)
    at = jnp.asarray([299, 256, 255, 127, 20], jnp.int32)
    rows = q[at], pages, jnp.tile(table, (len(at), 1)), jnp.arange(len(at) + 1, dtype=jnp.int32), at + 1
    for ctas in (16, 1):
        config = dataclasses.replace(few, ctas=ctas)
        assert (make_work(*rows[:2], *rows[3:], window=window, config=config).parts[CUT] > 0) == (ctas > 1)
        assert same_bits(run(config, *rows), whole[at])
    undivided = run(dataclasses.replace(few, part=None), *rows)
    assert same_bits(undivided[3:], whole[at[3:]])
    assert not same_bits(undivided[:1], whole[at[:1]])
    some = q[250:260], pages, table, jnp.asarray([0, 7], jnp.int32), jnp.asarray([260], jnp.int32)
    into = jnp.ones_like(some[0])
    assert same_bits(run(dataclasses.replace(few, ctas=4), *some, into=into, first=3), into.at[3:].set(whole[253:260]))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_both_kernels_rotate_a_row_to_the_same_bits(head_dim):
    """A sum of numbers that are not exact depends on the order in which columns are added."""
    rows = np.random.default_rng(0).standard_normal((WARPGROUP_ROWS, head_dim)).astype(np.float32)

    def rotate(x, together, alone):
        whole = plgpu.load(x, layout=plgpu.Layout.WGMMA, optimized=False)
        together[...] = turn(whole, plgpu.Layout.WGMMA, head_dim, lanes=4, rows=2)
        for row in range(2):
            layout = parts_sm90.row_layout(head_dim)
            alone[row] = turn(plgpu.load(x.at[row], layout=layout, optimized=False), layout, head_dim, lanes=32)

    shapes = [jax.ShapeDtypeStruct((count, head_dim), jnp.float32) for count in (WARPGROUP_ROWS, 2)]
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    together, alone = plgpu.kernel(rotate, out_type=shapes, compiler_params=params, interpret=FIND_RACES)(rows)
    assert error(together, rows @ hadamard(head_dim)) < 1e-6
    assert same_bits(alone, together[:2])


def test_seeded_faults_are_caught(monkeypatch):
    case = dataclasses.replace(SMALL, q_lens=(66, 5), kv_lens=(130, 40), unused=1, heads=(2, 1), window=90)
    q, pages, table, cu_q_lens, kv_lens = case.inputs()
    logits = {"sinks": jnp.asarray([3.0, 5.0], case.dtype)}
    formula = partial(reference.prefill_attention, q, pages, table, cu_q_lens, kv_lens, case.scale, **logits)
    expected, longer = formula(case.window), formula(case.window + 1)
    run = partial(interpreted, case, dataclasses.replace(FEW, ctas=1), **logits)
    uncached = mosaic_sm90.prefill_attention.__wrapped__
    first_peak, first_total = rows_sm90.first_peak, rows_sm90.first_total

    def wrong_by(table=table, cu_q_lens=cu_q_lens, kv_lens=kv_lens, expected=expected, **kernel):
        return error(run(q, pages, table, cu_q_lens, kv_lens, **kernel), expected)

    def planted(name, fault):
        with monkeypatch.context() as patch:
            for module in (compute_sm90, pack_sm90):
                patch.setattr(module, name, fault)
            return wrong_by(run=uncached)

    def of_another_head(plan, refs, heads):
        return first_peak(plan, refs, lambda row: (1 - heads(row)[0], heads(row)[1]))

    assert wrong_by() < tolerance(case)
    (unowned,) = set(range(pages.k.num_pages)) - set(np.asarray(table).flat)
    faults = {
        "a dropped page": wrong_by(table=table.at[0, 3].set(unowned)),
        "swapped table entries": wrong_by(table=swap_entries(table, 0, 2, 3)),
        "one key too few": wrong_by(kv_lens=kv_lens.at[1].add(-1)),
        "one key too many": wrong_by(kv_lens=kv_lens.at[0].add(1)),
        "a query of the next chunk": wrong_by(cu_q_lens=cu_q_lens.at[1].add(1)),
        "a shorter window": wrong_by(expected=longer),
        "sinks forgotten": planted("first_total", lambda refs, p, decay: p.sum(axis=1)),
        "sinks counted twice": planted("first_total", lambda refs, p, decay: first_total(refs, p, decay) + decay),
        "a sink of another head": planted("first_peak", of_another_head),
    }
    assert not missed(faults, tolerance(case))


def test_the_work_list_covers_every_row_once_longest_first():
    rng = np.random.default_rng(0)
    for chunks in (1, 7):
        q_lens = rng.integers(0, 400, chunks) * (rng.random(chunks) < 0.8)
        kv_lens = q_lens + rng.integers(0, 900, chunks)
        bounds = np.concatenate([[0], np.cumsum(q_lens)])
        rows = int(bounds[-1]) + int(rng.integers(0, 300))
        for window, config in ((None, Config()), (100, Config(heads=2)), (None, Config(pack=False))):
            q, pages, *_ = shapes(dataclasses.replace(SMALL, q_lens=(rows,), unused=0))
            lengths = jnp.asarray(bounds, jnp.int32), jnp.asarray(kv_lens, jnp.int32)
            work = jax.jit(partial(make_work, q, pages, window=window, config=config))(*lengths)
            counts = np.asarray(work.count)
            tiles = np.asarray(work.tiles)[: counts.sum()]
            positions = np.full(rows, -1)
            for chunk, row, count, position, keys in tiles:
                assert 0 < count <= config.tile_rows
                assert np.all(positions[row : row + count] == -1)
                positions[row : row + count] = position + np.arange(count)
                assert keys == (kv_lens[chunk] if chunk < chunks else 0)
                assert chunk == chunks or bounds[chunk] <= row < row + count <= bounds[chunk + 1]
            expected = [kv - n + i for n, kv in zip(q_lens, kv_lens) for i in range(n)]
            assert np.array_equal(positions[: bounds[-1]], expected)
            assert np.all(positions[bounds[-1] :] < 0)
            assert len(positions) == rows
            read = tiles[:, 3] + tiles[:, 2]
            read = read if window is None else np.minimum(read, tiles[:, 2] + window - 1)
            assert np.all(np.diff(read[: counts[0]]) <= 0)
            kinds = packings(config, 2, SMALL.page_size)
            assert len(counts) == 1 + (3 if config.pack else 0) == 1 + len(kinds)
            for slots, some in zip(kinds, np.split(tiles, np.cumsum(counts))[1:]):
                assert np.all(some[:, 2] <= 64 // slots)
                assert np.all(some[:, 4] <= config.block_kv // slots)
                fuller = (some[:, 2] <= 32 // slots) & (some[:, 4] <= config.block_kv // 2 // slots)
                assert 2 * slots not in kinds or not fuller.any()


def test_every_part_of_a_cut_tile_is_an_item():
    """Gives long rows, few CTAs, a window that both ends of a part lie in, and more parts than there is room for."""
    for window, lengths, ctas, cuts in (
        (None, (900, 700, 70, 64), 16, 2),
        (None, (900, 700, 0, 64), 2, 0),
        (100, (900, 700, 70, 64), 16, 3),
        (None, (40000, 39000, 500, 64), 132, 1),
    ):
        config = Config(ctas=ctas, stack=2, part=64, block_kv=64, **ALONE)
        case = dataclasses.replace(SMALL, q_lens=(1,) * 4, kv_lens=lengths, heads=(4, 2), unused=0)
        q, pages, *_ = shapes(case)
        keys = jnp.asarray(lengths, jnp.int32)
        bounds = jnp.cumsum(jnp.concatenate([jnp.zeros(1, jnp.int32), (keys > 0).astype(jnp.int32)]), dtype=jnp.int32)
        work = make_work(q, pages, bounds, keys, window=window, config=config)
        tiles, (cut, *begins) = np.asarray(work.tiles), np.asarray(work.parts)
        assert cut == cuts
        whole, parts = np.split(np.asarray(work.items), [len(tiles) * 2])
        alone = int(work.count[0]) - cut
        expected = sorted((*tile, head) for tile in tiles[cut : cut + alone].tolist() for head in (0, 2))
        assert sorted(map(tuple, whole[: alone * 2, :PART].tolist())) == expected
        expected = [
            [*tile, head, part]
            for tile in tiles[:cut].tolist()
            for part in range(0 if window is None else max(tile[3] - window + 1, 0) // 64, tile[3] // 64 + 1)
            for head in (0, 2)
        ]
        assert parts[: 2 * begins[-1]].tolist() == expected
        assert len(parts) <= AREAS


def test_heads_are_computed_together_whose_keys_the_cache_holds():
    def together(lengths, heads, formats=("bf16", "bf16"), before=0):
        """Returns how many KV heads the first tile has before the next one has its first."""
        longer = tuple(length + before for length in lengths)
        case = Case(lengths, longer, 0, heads, 128, 16, *formats, "bfloat16")
        q, pages, *_ = shapes(case)
        bounds = jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]), jnp.int32)
        work = make_work(q, pages, bounds, jnp.asarray(longer, jnp.int32))
        items = np.asarray(work.items)[: int(work.count[0]) * heads[1]]
        assert len(np.unique(items[:, [ROW, HEAD]], axis=0)) == len(items)
        return 1 + int(np.argmax(np.diff(items[:, HEAD]) <= 0))

    assert together((1024,) * 8, (32, 32)) == together((512,) * 16, (32, 32)) == 4
    assert together((1024,), (32, 32)) == 32
    assert together((1024,) * 8, (32, 32), ("fp8", "fp8")) == 8
    assert together((1024,) * 16, (32, 8)) == 2
    assert together((2048,), (32, 32), before=6144) == 16  # fewer would not keep all CTAs busy


def shapes(case: Case) -> tuple:
    """Returns the types of case.inputs(), without the inputs."""
    formats = (parse_format(name, case.head_dim) for name in (case.k_format, case.v_format))
    chunks, pages = len(case.q_lens), sum(-(-length // case.page_size) for length in case.kv_lens) + 1
    pool = jax.eval_shape(lambda: allocate(pages, case.heads[1], case.page_size, case.head_dim, *formats))
    q = jax.ShapeDtypeStruct((sum(case.q_lens) + case.unused, case.heads[0], case.head_dim), case.dtype)
    sizes = (chunks, -(-max(case.kv_lens) // case.page_size)), (chunks + 1,), (chunks,)
    return q, pool, *(jax.ShapeDtypeStruct(size, jnp.int32) for size in sizes)


SUPPORTED = [
    case for case in (*CASES, *MOSAIC_CASES) if case.dtype != "float32" and "f32" not in (case.k_format, case.v_format)
]


VARIANTS = [  # with zero points, and rotated
    dataclasses.replace(case, k_format=k, v_format=v)
    for case, k, v in (
        (MOSAIC_CASES[5], "int4-g128-zp", "int8-g8-zp"),
        (MOSAIC_CASES[0], "bf16-h", "int4-g32-h"),
        (MOSAIC_CASES[13], "int8-g16-h", "int4-g32-zp-h"),
    )
]


@pytest.mark.parametrize("which", thinned(range(3), (0,)))
def test_every_kind_of_case_lowers_for_cuda(which):
    """Leaves lengths out, which change nothing; heads change a number."""
    cases = (*SUPPORTED[: -len(MOSAIC_CASES) : 8][which::3], *MOSAIC_CASES[which::3], *VARIANTS)
    cases = dict.fromkeys(dataclasses.replace(case, q_lens=(70,), kv_lens=(100,), unused=0) for case in cases)
    for number, case in enumerate(cases):
        logits = logits_of(number, case.heads[0], case.dtype)
        attend = partial(prefill_attention, scale=case.scale, window=case.window, backend="mosaic", **logits)
        text = jax.jit(attend).trace(*shapes(case)).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("stablehlo.custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize("number", thinned(range(5), (0, 2, 4)))
def test_parts_lower_for_cuda(number):
    """Lowers each kind of K and V for one row, which has a configuration of its own, or for many: in turn."""
    case = (MOSAIC_CASES[1], MOSAIC_CASES[3], MOSAIC_CASES[14], *VARIANTS[1:])[number]
    case = dataclasses.replace(case, q_lens=((1, 200, 200, 1, 200)[number],), kv_lens=(300,), unused=0)
    logits = logits_of(number, case.heads[0], case.dtype)
    attend = partial(mosaic_sm90.prefill_attention, scale=case.scale, window=case.window, **logits)
    for part, kernels in ((128, 2), *([(1024, 1)] if number < 2 else [])):  # no page table holds a second of 1024
        run = jax.jit(partial(attend, part=part))
        text = run.trace(*shapes(case)).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("stablehlo.custom_call @mosaic_gpu") == kernels


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_supported_call_fits_shared_memory(head_dim):
    groups = [f"{kind}-g{group}" for kind in ("int8", "int4") for group in (8, 32, head_dim)]
    formats = ("bf16", "f16", "fp8", *groups)
    for dtype, page_size, k_format in product(("bfloat16", "float16"), (8, 128), formats):
        for heads, v_format in product(((1, 1), (2, 1)), (k_format, "bf16", "int8-g8")):
            case = dataclasses.replace(SMALL, heads=heads, head_dim=head_dim, page_size=page_size, dtype=dtype,
                                       k_format=k_format, v_format=v_format)  # fmt: skip
            q, pages, *_ = shapes(case)
            formats_of = pages.k.format, pages.v.format
            for config, part in product((choose_config(q, pages), choose_config(q, pages, len(q))), (None, 1024)):
                sizes = *heads, head_dim, page_size, 4, q.dtype, *formats_of, case.scale, None, None
                plan = Plan(*sizes, dataclasses.replace(config, part=part))
                plan.check()
                assert shared_bytes(plan.scratch(), reductions=1024) <= SHARED_MEMORY


def test_registers_that_are_asked_for_are_there():
    for (computing, warpgroups), registers in mosaic_sm90.REGISTERS.items():
        launched = (1 << 16) // (128 * warpgroups) // 8 * 8
        if registers is not None:
            more, converting, fetching = registers
            assert max(converting, fetching) <= launched <= more
            assert computing * more + (warpgroups - computing - 1) * converting + fetching <= warpgroups * launched


def test_one_work_list_and_one_lowering_serve_32_layers():
    case = SUPPORTED[-1]

    def layers(q, pages, table, cu_q_lens, kv_lens):
        work = make_work(q, pages, cu_q_lens, kv_lens, window=case.window)
        options = {"scale": case.scale, "window": case.window, "work": work, "backend": "mosaic"}
        for _ in range(32):
            q = prefill_attention(q, pages, table, cu_q_lens, kv_lens, **options)
        return q

    text = jax.jit(layers).trace(*shapes(case)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1


def test_what_is_not_supported_says_what_is():
    case = MOSAIC_CASES[0]
    q, pages, *rest = case.inputs()
    for arguments, options, message in (
        ((q.astype(jnp.float32), pages), {}, "dtype float32 is not supported .* bfloat16, float16"),
        ((q, pages), {"scale": -1.0}, "scale is -1.0: the mosaic kernel takes positive ones"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            prefill_attention(*arguments, *rest, **{"scale": 1.0, "backend": "mosaic"} | options)
    work = make_work(q, pages, *rest[1:])
    with pytest.raises(ValueError, match="work was made for window None, not 7"):
        prefill_attention(q, pages, *rest, scale=1.0, window=7, work=work, backend="mosaic")
    with pytest.raises(ValueError, match="work was made for parts of None keys, not 128"):
        mosaic_sm90.prefill_attention(q, pages, *rest, 1.0, None, work=work, part=128)
    for options, message in (
        ({"block_kv": 96}, "block_kv is 96, expected a multiple of 64"),
        ({"heads": 3}, "2 warpgroups cannot share 3 heads"),
        ({"warpgroups": 3}, "alternate needs 2 warpgroups, got 3"),
        ({"stack": 3}, "stack=3 and converters=1, expected"),
        ({"stages": 0}, "stages=0 and ctas=132 must be positive"),
        ({"part": 192}, "part is 192, expected a multiple of block_kv=128"),
    ):
        with pytest.raises(ValueError, match=message):
            Config(**options)
    for config, message in (
        (Config(warpgroups=4, alternate=False), "takes 5 warpgroups in all, which is not supported"),
        (Config(heads=2), "tiles of 2 query heads do not divide 1 of a KV head"),
        (Config(block_kv=192), "blocks of 192 keys are not made of pages of 128"),
    ):
        attend = partial(mosaic_sm90.prefill_attention, scale=1.0, window=None, config=config)
        with pytest.raises(NotImplementedError, match=message):
            jax.eval_shape(attend, *shapes(dataclasses.replace(case, page_size=128)))
    for heads, rows in (((4, 1), 64), ((4, 4), 128), ((6, 2), 128)):
        assert choose_config(*shapes(dataclasses.replace(SMALL, heads=heads))[:2]).tile_rows == rows


FAMILIES = [  # heads of gpt-oss, whose every other layer has this window, and of Gemma 2
    dataclasses.replace(MOSAIC_CASES[0], k_format=kv, v_format=kv, heads=heads, head_dim=head_dim, window=window)
    for kv in ("bf16", "fp8")
    for heads, head_dim, window in (((64, 8), 64, 128), ((64, 8), 64, None), ((8, 4), 256, None))
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "number"),
    [*product([*VARIANTS, *SUPPORTED], [1]), *product([*VARIANTS, *FAMILIES, *MOSAIC_CASES[-4:]], [0, 2])],
    ids=str,
)
def test_gpu_matches_the_formula_and_repeats_itself(case, number):
    arguments, logits = poisoned(case), logits_of(number, case.heads[0], case.dtype)
    options = {"scale": case.scale, "window": case.window, "backend": "mosaic"}
    attend = jax.jit(partial(prefill_attention, **options, **logits))
    out = attend(*arguments)
    expected = reference.prefill_attention(*arguments, case.scale, case.window, **logits)
    assert error(out, expected) < (1.3 if logits else 1) * tolerance(case)  # fewer heads count beside sinks
    assert same_bits(out, attend(*arguments))


@pytest.mark.gpu
def test_gpu_company_and_an_outer_jit_change_no_bit():
    case = dataclasses.replace(MOSAIC_CASES[0], k_format="int8-g8", v_format="bf16")
    q, pages, table, cu_q_lens, kv_lens = case.inputs()
    attend = partial(prefill_attention, scale=case.scale, backend="mosaic")
    out = attend(q, pages, table, cu_q_lens, kv_lens)
    assert same_bits(out, jax.jit(attend)(q, pages, table, cu_q_lens, kv_lens))
    alone = q[130:194], pages, table[2:3], jnp.asarray([0, 64], jnp.int32), kv_lens[2:3]
    assert same_bits(out[130:194], attend(*alone))


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "name", "window"), [
    ((32, 8), "bf16", None), ((32, 8), "int8-g8", None), ((8, 8), "fp8", None), ((32, 8), "bf16", 1500),
    ((32, 8), "int8-g8-h", None),
])  # fmt: skip
def test_gpu_long_rows_have_the_same_bits_however_they_come(heads, name, window):
    """Attends a text of five parts, and rows of it: one alone, which is cut, and many at once, which are not."""
    case = dataclasses.replace(
        MOSAIC_CASES[0], q_lens=(4500,), kv_lens=(4500,), unused=0, heads=heads, k_format=name, v_format=name,
        window=window,
    )  # fmt: skip
    q, pages, table, cu_q_lens, kv_lens = case.inputs()
    logits = logits_of(1, heads[0], case.dtype)
    options = {"scale": case.scale, "window": window, "backend": "deterministic"}
    attend = jax.jit(partial(prefill_attention, **options, **logits))
    whole = attend(q, pages, table, cu_q_lens, kv_lens)
    for rows in ([4499], [4096], [4095], [2047, 1023, 4499, 100], [*range(500, 4500, 16)]):
        at = jnp.asarray(rows, jnp.int32)
        chunks = jnp.tile(table, (len(rows), 1)), jnp.arange(len(rows) + 1, dtype=jnp.int32), at + 1
        assert same_bits(attend(q[at], pages, *chunks), whole[at])
    seven = q[4092:4099], pages, table, jnp.asarray([0, 7], jnp.int32), jnp.asarray([4099], jnp.int32)
    assert same_bits(attend(*seven), whole[4092:4099])
    row = q[-1:], pages, table, jnp.asarray([0, 1], jnp.int32), kv_lens
    expected = reference.prefill_attention(*row, case.scale, window, **logits)
    assert error(whole[-1:], expected) < 1.3 * tolerance(case)
