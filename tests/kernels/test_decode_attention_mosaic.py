"""The Mosaic GPU kernel: interpreted on the CPU with race detection, lowered for CUDA, and run where there is a GPU."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks import get_races
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_attention import decode_attention, make_work, mosaic_sm90, reference
from pallas_kernels.decode_attention.cases import BENCH_CASES, CASES, Case
from pallas_kernels.decode_attention.config import Config, check_supported
from pallas_kernels.decode_attention.work import max_slots, row_splits
from pallas_kernels.kv_pages import KVPages, allocate, parse_format
from tests.kernels.helpers import TOLERANCE, error, missed, poison, same_bits, swap_entries, visible_slots
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
TINY = Config(tile=64, split=128, per_sm=1, sms=3, stages=2, merge_per_sm=1)


def poisoned(case: Case):
    """The case's inputs with NaN wherever the pages can hold one, and tables that point nowhere before the window."""
    q, pages, table, lengths = case.inputs()
    starts = first_visible(lengths, case.window)
    pages = poison(pages, visible_slots(table, starts, lengths.tolist(), pages.k.num_pages, case.page_size))
    hidden = np.arange(table.shape[1])[None] < np.array(starts)[:, None] // case.page_size
    return q, pages, jnp.asarray(np.where(hidden, -1, table), jnp.int32), lengths


def interpreted(case: Case, arguments, config: Config = TINY):
    """The kernel under the GPU interpreter; a race fails."""
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    out = mosaic_sm90.decode_attention(*arguments, case.scale, case.window, config=config, interpret=interpret)
    jax.block_until_ready(out)
    assert not get_races().races_found
    return out


def small(**changes) -> Case:
    return dataclasses.replace(SMALL, **changes)


INTERPRETED = [
    (small(window=100), TINY),
    (small(lengths=(300,), heads=(2, 2), page_size=128, head_dim=128, k_format="int8-g8", v_format="int4-g32"), TINY),
    (
        small(lengths=(9, 140), heads=(9, 1), page_size=8, k_format="f16", v_format="f16", dtype="float16"),
        dataclasses.replace(TINY, tile=128, split=256),
    ),
    (small(lengths=(200,), heads=(1, 1), page_size=32, head_dim=256, k_format="fp8", v_format="int8-g256"), TINY),
    (small(lengths=(70,), heads=(71, 1), page_size=64, window=1, k_format="f16"), TINY),
    (small(lengths=(70, 0, 20), heads=(2, 1), page_size=8, k_format="int4-g8", v_format="int8-g16"), TINY),
    (small(lengths=(100,), heads=(3, 1), k_format="int8-g64", v_format="fp8", dtype="float16", window=50), TINY),
    (small(lengths=(100,), heads=(2, 1), v_format="int4-g8", k_format="int4-g64", head_dim=128), TINY),
]


@pytest.mark.parametrize(("case", "config"), INTERPRETED, ids=str)
def test_matches_the_formula_and_reads_nothing_else(case, config):
    arguments = poisoned(case)
    out = interpreted(case, arguments, config)
    assert out.dtype == case.dtype
    assert error(out, reference.decode_attention(*arguments, case.scale, case.window)) < TOLERANCE[case.dtype]


def test_bits_depend_neither_on_the_run_nor_on_company():
    case = small(lengths=(300, 40), heads=(2, 1))
    q, pages, table, lengths = case.inputs()
    out = interpreted(case, (q, pages, table, lengths))
    assert same_bits(out, interpreted(case, (q, pages, table, lengths)))
    alone = interpreted(case, (q[:1], pages, table[:1], lengths[:1]), dataclasses.replace(TINY, sms=5))
    assert same_bits(out[:1], alone)


def test_seeded_faults_are_caught():
    case = small(lengths=(130,), heads=(2, 1), window=100)
    q, pages, table, lengths = case.inputs()
    expected = reference.decode_attention(q, pages, table, lengths, case.scale, case.window)
    other = dataclasses.replace(case, window=case.window + 1)
    faults = {
        "swapped table entries": error(interpreted(case, (q, pages, swap_entries(table, 0, 5, 8), lengths)), expected),
        "one key too few": error(interpreted(case, (q, pages, table, lengths - 1)), expected),
        "a longer window": error(interpreted(other, (q, pages, table, lengths)), expected),
        "K for V": error(interpreted(case, (q, KVPages(pages.v, pages.k), table, lengths)), expected),
    }
    assert not missed(faults, TOLERANCE[case.dtype])


def items_of(work, lengths):
    """Every item of a work list, as (worker, row, head, split), by walking it as the kernel does."""
    _, first, splits = (np.asarray(x) for x in row_splits(jnp.asarray(lengths), work.window, work.config.split))
    for worker, count in enumerate(np.asarray(work.items)):
        used, head, split = (int(x) for x in np.asarray(work.first)[:, worker])
        for _ in range(count):
            row = int(work.rows[used])
            yield worker, row, head, first[row] + split
            split += 1
            if split == splits[row]:
                head, split = head + 1, 0
            if head == work.heads:
                used, head = used + 1, 0


@pytest.mark.parametrize("window", [None, 1, 100, 300])
@pytest.mark.parametrize("seed", range(4))
def test_the_work_list_has_every_item_once_and_is_balanced(window, seed):
    rng = np.random.default_rng(seed)
    lengths = np.where(rng.random(9) < 0.3, 0, rng.integers(1, (60, 600, 5000, 300)[seed], 9)).astype(np.int32)
    config = dataclasses.replace(TINY, sms=(1, 5, 16, 40)[seed])
    work = make_work(jnp.asarray(lengths), 6, 3, 64, window=window, config=config)
    items = list(items_of(work, lengths))
    expected, slots = [], 0
    for row, length in enumerate(lengths.tolist()):
        start = 0 if window is None else max(length - window, 0)
        splits = range(start // config.split, -(-length // config.split))
        expected += [(row, head, split) for head in range(3) for split in splits]
        if len(splits) > 1:
            assert work.slots[row] == slots
            slots += len(splits)
    assert sorted(item[1:] for item in items) == sorted(expected)
    assert slots <= max_slots(len(lengths), int(lengths.max()), window, config.split)
    loads = np.zeros(config.workers)
    for worker, row, _, split in items:
        start = 0 if window is None else max(int(lengths[row]) - window, 0)
        low, high = max(start, split * config.split), min(int(lengths[row]), (split + 1) * config.split)
        loads[worker] += -(-high // config.tile) - low // config.tile
    assert loads.max() - loads.mean() <= config.split // config.tile


def test_a_work_list_of_another_batch_is_refused():
    q, pages, table, lengths = SMALL.inputs()
    work = make_work(lengths, *SMALL.heads, SMALL.head_dim, window=5, config=TINY)
    with pytest.raises(ValueError, match="window 5"):
        mosaic_sm90.decode_attention(q, pages, table, lengths, SMALL.scale, None, work)


def shapes(case: Case):
    """The types of case.inputs(), without the inputs."""
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


def lower(case: Case, function=decode_attention) -> str:
    f = jax.jit(partial(function, scale=case.scale, window=case.window, backend="mosaic"))
    return f.trace(*shapes(case)).lower(lowering_platforms=("cuda",)).as_text()


DISTINCT = {dataclasses.replace(case, lengths=(100, 100)): None for case in BENCH_CASES}


@pytest.mark.parametrize("case", [*filter(supported, CASES), *filter(supported, DISTINCT)], ids=str)
def test_lowers_for_cuda(case):
    assert "mosaic_gpu" in lower(case)


def test_unsupported_arguments_name_what_is_supported():
    for change, message in (
        ({"dtype": "float32"}, "bfloat16, float16"),
        ({"head_dim": 32}, "64, 128, 256"),
        ({"page_size": 4}, "8, 16, 32, 64, 128"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            lower(small(**change))


def test_32_layers_share_one_kernel():
    def layers(q, *arguments, **options):
        for _ in range(32):
            q = decode_attention(q, *arguments, **options)
        return q

    text = lower(small(lengths=(100,)), layers)
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*filter(supported, CASES)], ids=str)
def test_on_the_device(case):
    arguments = poisoned(case)
    run = jax.jit(partial(decode_attention, scale=case.scale, window=case.window, backend="mosaic"))
    out = run(*arguments)
    assert error(out, reference.decode_attention(*arguments, case.scale, case.window)) < TOLERANCE[case.dtype]
    assert same_bits(out, run(*arguments))
