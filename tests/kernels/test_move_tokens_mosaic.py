"""Checks the Mosaic GPU kernel: interpreted on the CPU with race detection, lowered for CUDA, and run on a GPU."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.move_tokens import mosaic_sm90, move_tokens, reference
from pallas_kernels.move_tokens.cases import BENCH_CASES, CASES, Case
from tests.kernels.helpers import same_bits
from tests.kernels.interpreter import FIND_RACES, INTERPRET
from tests.kernels.layers import caught
from tests.kernels.test_move_tokens import OUT_OF_RANGE, SMALL, mixed, overlapping, poisoned, shapes


def interpreted(*arguments, interpret=FIND_RACES):
    """Runs the kernel under the GPU interpreter; a race raises."""
    return jax.block_until_ready(mosaic_sm90.move_tokens.__wrapped__(*arguments, interpret=interpret))


def small(case: Case, **changes) -> Case:
    """Returns a handful of blocks for the interpreter."""
    return dataclasses.replace(case, **{"rows": 2, "moves": 2, "layers": 1} | changes)


SOME = CASES[::5] + CASES[2::5]  # each pair of formats twice, on pages of several sizes
INTERPRETED = (
    *(small(case) for case in SOME),
    small(CASES[5], rows=5, layers=2, head_dim=256, k_format="int8-g256", v_format="int4-g16"),
    small(CASES[8], num_kv_heads=17, head_dim=256, k_format="f32", v_format="int4-g128"),  # many pieces and a rest
)


@pytest.mark.parametrize("case", INTERPRETED, ids=str)
def test_moves_what_the_definition_moves_and_touches_nothing_else(case):
    arguments = poisoned(case)
    assert same_bits(interpreted(*arguments), reference.move_tokens(*arguments))


def test_takes_moves_in_their_order():
    pools, table, source, target = overlapping()
    expected = reference.move_tokens(pools, table, source, target)
    assert same_bits(interpreted(pools, table, source, target), expected)
    assert not same_bits(interpreted(pools, table, source[:, ::-1], target[:, ::-1]), expected)


@pytest.mark.parametrize("blocks", [1, 9, 10**6])
def test_takes_pools_of_several_models_however_work_is_cut(monkeypatch, blocks):
    monkeypatch.setattr(mosaic_sm90, "BLOCKS", blocks)
    assert same_bits(interpreted(*mixed()), reference.move_tokens(*mixed()))


def test_leaves_alone_what_does_not_move():
    pools, table, source, target = SMALL.inputs()
    for idle in (target, jnp.full_like(target, -(2**31))):
        assert same_bits(interpreted(pools, table, idle, target), pools)
    for change in OUT_OF_RANGE.values():
        arguments = pools, *change(table, source, target)
        assert same_bits(interpreted(*arguments), reference.move_tokens(*arguments))
    assert same_bits(interpreted(pools, table[:0], source[:0], target[:0]), pools)
    assert same_bits(interpreted(pools, table, source[:, :0], target[:, :0]), pools)
    assert interpreted((), table, source, target) == ()


def test_races_where_sequences_share_a_page_that_they_write():
    pools, table, source, target = overlapping()
    shared, source = jnp.concatenate([table, table]), jnp.concatenate([source, source + 1])
    with pytest.raises(Exception, match="a race in"):
        interpreted(pools, shared, source, jnp.concatenate([target, target]))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("_chosen", lambda real: lambda number, begins, pointers: (pointers[0], real(number, begins, pointers)[1])),
        ("_chosen", lambda real: lambda *given: (real(*given)[0], mosaic_sm90._i32(0))),  # the layer is ignored
        ("_bytes_before", lambda real: lambda kind, page, offset: real(kind, offset, page)),
        ("_copy", lambda real: lambda kind, *rest: real(kind._replace(heads=1), *rest)),
        ("_copy", lambda real: lambda *given: real(*given[:5], given[6], given[5])),
        ("_body", lambda real: lambda *refs, num_pages, **given: real(*refs, num_pages=2 * num_pages, **given)),
    ],
)
def test_faults_are_caught(monkeypatch, name, change):
    pools, *indices = poisoned(SMALL)
    if name == "_body":  # its bound is that of all layers' pages
        indices = OUT_OF_RANGE["pages that are none"](*indices)
    arguments = pools, *indices
    monkeypatch.setattr(mosaic_sm90, name, change(getattr(mosaic_sm90, name)))

    def check() -> None:
        assert same_bits(interpreted(*arguments, interpret=INTERPRET), reference.move_tokens(*arguments))

    assert caught(check)


def lower(function, *arguments) -> str:
    return function.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def custom_calls(text: str) -> list[str]:
    return [line for line in text.splitlines() if "stablehlo.custom_call @mosaic_gpu" in line]


def test_every_kind_of_case_lowers_to_one_launch_whose_arrays_alias():
    """Expects each array to be an output of the call that aliases its operand, and of the step."""
    assert len({case.k_format for case in BENCH_CASES[::3]}) == 4
    for case in (*SOME, *INTERPRETED[-2:], *BENCH_CASES[::3]):
        text = lower(jax.jit(mosaic_sm90.move_tokens, donate_argnums=0), *shapes(case))
        (call,) = custom_calls(text)
        arrays = len(jax.tree.leaves(shapes(case)[0]))
        assert len(re.findall(r"output_operand_alias<", call)) == arrays
        assert len(re.findall(r"tf.aliasing_output|jax.buffer_donor", text)) == arrays


def test_what_the_kernel_does_not_do_is_refused_where_it_is_named():
    pools, *indices = SMALL.inputs()
    narrow, *_ = dataclasses.replace(SMALL, head_dim=32, k_format="bf16").inputs()
    wide = [jnp.full((SMALL.rows, 65), -1, jnp.int32)] * 2
    for message, arguments in (
        ("head dim 32 is not supported by backend mosaic, which does 64, 128, 256", (narrow, *indices)),
        ("Q=65 is not supported by backend mosaic, which does at most 64 moves", (pools, indices[0], *wide)),
    ):
        with pytest.raises(NotImplementedError, match=message):
            move_tokens(*arguments, backend="mosaic")
        assert same_bits(move_tokens(*arguments, backend="hopper"), move_tokens(*arguments, backend="xla"))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gpu_moves_what_the_definition_moves(case):
    arguments = poisoned(case)
    out = move_tokens(*arguments, backend="mosaic")
    assert same_bits(out, reference.move_tokens(*arguments))
    assert same_bits(move_tokens(*arguments, backend="mosaic"), out)
    assert same_bits(move_tokens(*overlapping(), backend="mosaic"), reference.move_tokens(*overlapping()))
    assert same_bits(move_tokens(*mixed(), backend="mosaic"), reference.move_tokens(*mixed()))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["mosaic", "xla"])
def test_gpu_step_holds_no_copy_of_a_pool(backend):
    """Donates 32 layers of three arrays into the result: no instruction makes another."""
    case = dataclasses.replace(BENCH_CASES[0], rows=8, k_format="int8-g8", v_format="fp8", spare=3000)
    compiled = jax.jit(partial(move_tokens, backend=backend), donate_argnums=0).lower(*shapes(case)).compile()
    smallest = case.num_pages * case.num_kv_heads * case.page_size * case.head_dim // 4
    assert compiled.memory_analysis().temp_size_in_bytes < smallest
    assert not re.findall(rf"= \w+\[{case.layers * case.num_pages},\S+ copy(-start)?\(", compiled.as_text())
