import dataclasses
import json
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats.kv_formats import KVFormat, parse_format
from pallas_kernels.formats.kv_pages import KVPages, allocate
from pallas_kernels.formats.reference_pages import read_sequence
from pallas_kernels.move_tokens import bench, move_tokens, reference
from pallas_kernels.move_tokens.cases import BENCH_CASES, CASES, Case
from tests.kernels.helpers import poison, same_bits

SMALL = Case(rows=3, moves=3, layers=2, num_kv_heads=2, head_dim=64, page_size=8, k_format="int8-g8", v_format="fp8")


def visible_sources(case: Case, table, source, target) -> np.ndarray:
    """Returns bool [N, P]: the slots that may be read."""
    visible = np.zeros((case.num_pages, case.page_size), bool)
    for (page, offset), _ in reference.slots(case.num_pages, case.page_size, table, source, target):
        visible[page, offset] = True
    return visible


def poisoned(case: Case, seed: int = 0) -> tuple:
    """Returns the case's inputs with NaN, wherever the pages can hold one, in each slot that may not be read."""
    pools, *indices = case.inputs(seed)
    visible = visible_sources(case, *case.indices(seed))
    return tuple(poison(pages, visible) for pages in pools), *indices


def shapes(case: Case) -> tuple:
    """Returns the types of case.inputs(), without the inputs."""
    formats = (parse_format(name, case.head_dim) for name in (case.k_format, case.v_format))
    sizes = case.num_pages, case.num_kv_heads, case.page_size, case.head_dim
    pages = jax.eval_shape(lambda: allocate(*sizes, *formats, layers=case.layers))
    table, moves = (jax.ShapeDtypeStruct((case.rows, n), jnp.int32) for n in (8, case.moves))
    return (pages,), table, moves, moves


@pytest.mark.parametrize("case", CASES[::5] + CASES[2::5], ids=str)
def test_moves_what_the_definition_moves_and_touches_nothing_else(case):
    arguments = poisoned(case)
    expected = reference.move_tokens(*arguments)
    assert not same_bits(expected, arguments[0])
    assert same_bits(move_tokens(*arguments), expected)


@pytest.mark.parametrize(("moves", "page_size", "k_format"), [(1, 8, "bf16"), (6, 8, "int4-g32"), (5, 32, "fp8")])
def test_accepted_nodes_become_the_next_tokens(moves, page_size, k_format):
    """Reads back through the page tables: what was there stays, the accepted path follows in its order."""
    case = dataclasses.replace(SMALL, rows=2, moves=moves, page_size=page_size, k_format=k_format)
    for seed in range(5):
        pools, *indices = case.inputs(seed)
        moved, (table, source, target) = move_tokens(pools, *indices), case.indices(seed)
        paths = np.where(source < 0, target, source)
        for pages, path, begin, end in zip(table, paths, target[:, 0], target[:, -1] + 1):
            for before, after in zip(pools[0], moved[0]):
                for pair in ((before.k, after.k), (before.v, after.v)):
                    old, new = (read_sequence(x, pages, 0, begin - 1 + case.nodes) for x in pair)
                    np.testing.assert_array_equal(new, np.concatenate([old[:begin], old[path], old[end:]]))


def overlapping() -> tuple:
    """Returns one sequence whose moves cross pages, and write what earlier ones read: 9, 10, 14, 17 to 8, 9, 10, 11."""
    pools, *_ = dataclasses.replace(SMALL, rows=1).inputs()
    source, target = (jnp.asarray([x], jnp.int32) for x in ([9, 10, 14, 17, -1], [8, 9, 10, 11, 12]))
    return pools, jnp.asarray([[3, 5, 1]], jnp.int32), source, target


def test_by_hand():
    pools, *indices = overlapping()
    moved = move_tokens(pools, *indices)
    for before, after in zip(jax.tree.leaves([*pools[0]]), jax.tree.leaves([*moved[0]])):
        before, after = (np.asarray(x).reshape(*x.shape[:2], 8, -1).copy() for x in (before, after))
        sources = [before[page, :, offset].copy() for page, offset in ((5, 1), (5, 2), (5, 6), (1, 1))]
        for offset, row in enumerate(sources):
            before[5, :, offset] = row
        assert same_bits(before, after)


def test_no_moves_no_rows_no_layers():
    pools, table, source, target = SMALL.inputs()
    for idle in (target, jnp.full_like(target, -1), jnp.full_like(target, -(2**31))):
        assert same_bits(move_tokens(pools, table, idle, target), pools)
    assert same_bits(move_tokens(pools, table[:0], source[:0], target[:0]), pools)
    assert same_bits(move_tokens(pools, table, source[:, :0], target[:, :0]), pools)
    assert move_tokens((), table, source, target) == ()


OUT_OF_RANGE = {
    "a source beyond the table": lambda table, source, target: (table, source.at[0, -1].set(10**9), target),
    "a target before it": lambda table, source, target: (table, source, target.at[0, 0].set(-1)),
    "pages that are none": lambda table, source, target: (table.at[0].set(SMALL.num_pages), source, target),
    "pages below 0": lambda table, source, target: (table.at[0].set(-1), source, target),
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_drops_moves_from_and_to_no_page(name):
    pools, *indices = SMALL.inputs()
    arguments = pools, *OUT_OF_RANGE[name](*indices)
    assert same_bits(move_tokens(*arguments), reference.move_tokens(*arguments))


def mixed() -> tuple:
    """Returns a target's and a smaller draft's pools. Heads, head dims and formats differ, numbers of pages and tokens
    not."""
    large, *indices = SMALL.inputs()
    small, *_ = dataclasses.replace(SMALL, num_kv_heads=1, head_dim=128, k_format="bf16", v_format="int4-g64").inputs()
    return (*large, *small), *indices


def test_pools_of_several_models_move_together():
    assert same_bits(move_tokens(*mixed()), reference.move_tokens(*mixed()))


def test_seeded_faults_are_caught():
    pools, table, source, target = arguments = poisoned(dataclasses.replace(SMALL, k_format="int4-g32"))
    expected = reference.move_tokens(*arguments)

    def other_scales(moved):
        return tuple(KVPages(dataclasses.replace(new.k, scales=old.k.scales), new.v) for old, new in zip(pools, moved))

    assert same_bits(move_tokens(*arguments), expected)
    faults = {
        "a source too far": move_tokens(pools, table, source + 1, target),
        "a target too far": move_tokens(pools, table, source, jnp.where(source < 0, target, target + 1)),
        "a move left out": move_tokens(pools, table, source.at[0, 0].set(-1), target),
        "tables exchanged": move_tokens(pools, table[::-1], source, target),
        "a table's entries exchanged": move_tokens(pools, jnp.roll(table, 1, axis=1), source, target),
        "scales left behind": other_scales(move_tokens(*arguments)),
        "a layer left out": jax.tree.map(
            lambda old, new: jnp.concatenate([new[: len(new) // 2], old[len(old) // 2 :]]), pools, expected
        ),
        "V left out": tuple(KVPages(new.k, old.v) for old, new in zip(pools, move_tokens(*arguments))),
    }
    assert not [name for name, found in faults.items() if same_bits(found, expected)]


@pytest.mark.parametrize("fmt", ["f32", "bf16", "f16", "fp8", "int8-g8", "int4-g32"])
def test_donated_pools_are_changed_in_place(fmt):
    """Moves what follows from what attention read, as in a step: no copy and no temporary of a pool."""
    case = dataclasses.replace(SMALL, rows=4, k_format=fmt, v_format=fmt, spare=4096)

    @partial(jax.jit, donate_argnums=0)
    def step(pools, table, source, target):
        seen = pools[0].k.values[table[:, 0], 0, 0, 0].astype(jnp.float32)
        return move_tokens(pools, table, jnp.where(seen[:, None] > 0, source, -1), target)

    compiled = step.lower(*shapes(case)).compile()
    pools = jax.tree.leaves(shapes(case)[0])
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == sum(x.size * x.dtype.itemsize for x in pools)
    assert memory.temp_size_in_bytes < case.num_pages * case.num_kv_heads * case.page_size  # far below the smallest
    assert not re.findall(rf"= \w+\[{case.layers * case.num_pages},\S+ copy\(", compiled.as_text())


@pytest.mark.parametrize("k_format", ["bf16", "int8-g8", "int4-g32-zp"])
def test_no_array_of_pages_is_reshaped_on_the_way(k_format):
    """Expects no reshape, which XLA copies on a GPU, once before it is written and once after."""
    case = dataclasses.replace(SMALL, k_format=k_format)
    text = jax.jit(partial(move_tokens, backend="xla")).lower(*shapes(case)).as_text()
    pages = rf"tensor<{case.layers * case.num_pages}x{case.num_kv_heads}x\S*>"
    assert re.search(rf"-> {pages}", text), "as the scatters have it"
    assert not re.findall(rf"stablehlo.reshape.*-> {pages}", text)


def test_undonated_pools_stay():
    pools, *indices = SMALL.inputs()
    before = jax.tree.map(np.array, pools)
    move_tokens(pools, *indices)
    assert same_bits(pools, jax.tree.map(jnp.asarray, before))


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ([9], [10], "row 0 moves cache index 9 to 10, expected one before it"),
        ([9, 10], [8, 8], "row 0 writes cache index 8, where an earlier move has written"),
        ([10, 9], [9, 8], "row 0 reads cache index 9, where an earlier move has written"),
    ],
)
def test_reference_catches_moves_that_are_none_of_a_path(source, target, message):
    pools, table, *_ = overlapping()
    with pytest.raises(ValueError, match=message):
        reference.move_tokens(pools, table, [source], [target])


def test_bad_arguments_say_what_is_wrong():
    pools, table, source, target = SMALL.inputs()
    wider, *_ = dataclasses.replace(SMALL, page_size=16).inputs()
    fewer, *_ = dataclasses.replace(SMALL, spare=1).inputs()

    def call(pools=pools, table=table, source=source, target=target, backend=None):
        move_tokens(pools, table, source, target, backend=backend)

    n = SMALL.num_pages
    for error_type, message, arguments in (
        (ValueError, r"target has shape \(3, 2\), expected \[R, Q\] with R=3, Q=3", {"target": target[:, 1:]}),
        (ValueError, r"source has shape \(2, 3\), expected \[R, Q\] with R=3", {"source": source[1:]}),
        (ValueError, "source has dtype float32, expected int32", {"source": source.astype(jnp.float32)}),
        (
            ValueError,
            rf"pools\[1\] has \d+ pages of 16 tokens, expected {n} of 8 as pools\[0\] has",
            {"pools": (*pools, *wider)},
        ),
        (ValueError, rf"pools\[1\] has {n - 1} pages of 8 tokens, expected {n} of 8", {"pools": (*pools, *fewer)}),
        (ValueError, "pages.v.values has shape", {"pools": (KVPages(pools[0].k, wider[0].v),)}),
        (ValueError, "unknown backend", {"backend": "cpu"}),
    ):
        with pytest.raises(error_type, match=message):
            call(**arguments)


def test_pages_in_unknown_formats():
    pools, *indices = SMALL.inputs()
    unknown = dataclasses.replace(pools[0].k, scales=None, format=KVFormat("int8"))
    for backend in ("xla", None):
        with pytest.raises(NotImplementedError, match=r"k is stored as .*, which no backend reads; formats: bfloat16"):
            move_tokens((KVPages(unknown, pools[0].v),), *indices, backend=backend)


def test_bench_cases_trace():
    for case in BENCH_CASES[::5]:
        arguments = shapes(case)
        moved = jax.eval_shape(move_tokens, *arguments)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), moved) == jax.tree.map(
            lambda x: (x.shape, x.dtype), arguments[0]
        )


def test_one_row_a_case_backend_and_kind_of_step_and_bars_of_the_kernel(monkeypatch, tmp_path):
    case = dataclasses.replace(SMALL, rows=64)
    monkeypatch.setattr(bench, "BENCH_CASES", (case,))
    monkeypatch.setattr(bench, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(bench, "device_us", lambda run: jax.block_until_ready(run()) and 4.0)
    monkeypatch.setattr(bench, "move_tokens", lambda *arguments, backend: move_tokens(*arguments))
    assert bench.main(["--results", str(tmp_path)]) == 0
    document = json.loads(next(tmp_path.glob("move_tokens-*.json")).read_text())
    assert [(row["peer"], row["step"], row["us"]) for row in document["rows"][1:]] == [
        (peer, step, 4.0) for peer in ("mosaic", "xla") for step in ("moves", "idle")
    ]
    assert [(row["name"], row["met"]) for row in document["bars"]] == [
        ("R=64 K=2 int8-g8 moves", False),
        ("R=64 K=2 int8-g8 idle", True),
    ]
    assert bench.moved_bytes(case, 3) == 2 * 3 * case.layers * case.num_kv_heads * (64 + 2 * 8 + 64)
