"""Checks decode_attention with segments of several rows: chains and trees of drafts."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_attention import Segments, decode_attention, plan, reference
from pallas_kernels.decode_attention.cases import Case
from pallas_kernels.prefill_attention import prefill_attention
from tests.kernels.helpers import TOLERANCE, error, missed, poison, same_bits, visible_slots

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies


def case_of(lengths, **changes) -> Case:
    options = {"heads": (4, 2), "head_dim": 64, "page_size": 8, "k_format": "bf16", "v_format": "int8-g8"}
    return Case(lengths=tuple(lengths), dtype="float32", **(options | changes))


def queries(case: Case, width: int) -> jax.Array:
    shape = (len(case.lengths) * width, case.heads[0], case.head_dim)
    return jnp.asarray(np.random.default_rng(3).normal(size=shape), case.dtype)


def random_trees(rng, rows, width: int) -> np.ndarray:
    """Returns ancestors of trees, each node's parent any node before it, or none."""
    masks = [[0] * width for _ in rows]
    for of_segment, used in zip(masks, rows):
        for i in range(used):
            parent = int(rng.integers(-1, i))
            of_segment[i] = (1 << i) | (of_segment[parent] if parent >= 0 else 0)
    return words(masks)


def words(masks) -> np.ndarray:
    """Masks of rows of Q bits as Segments has them: u32[R, Q, ceil(Q / 32)]."""
    shifts = range(0, len(masks[0]), 32)
    return np.asarray([[[mask >> i & 0xFFFFFFFF for i in shifts] for mask in each] for each in masks], np.uint32)


def run(case, q, pages, table, lengths, segments, **options):
    out = decode_attention(q, pages, table, lengths, scale=case.scale, window=case.window, segments=segments, **options)
    parts = (None, None) if segments is None else (segments.rows, segments.ancestors)
    return out, reference.decode_attention(q, pages, table, lengths, case.scale, case.window, *parts)


@hypothesis.settings(max_examples=10)
@hypothesis.given(st.data())
def test_trees_match_the_formula_and_read_nothing_else(data):
    width = data.draw(st.integers(1, 6) | st.sampled_from([31, 32, 33, 64]))
    rows = data.draw(st.lists(st.integers(0, width), min_size=1, max_size=4))
    committed = [data.draw(st.integers(0, 140)) for _ in rows]
    lengths = [c + used if used else 0 for c, used in zip(committed, rows)]
    case = case_of(lengths, window=data.draw(st.sampled_from([None, 1, 3, 40])))
    ancestors = random_trees(np.random.default_rng(data.draw(st.integers(0, 99))), rows, width)
    ancestors = jnp.asarray(ancestors) if data.draw(st.booleans()) else None
    _, pages, table, lengths = case.inputs()
    starts = [0 if case.window is None else max(0, c - case.window + 1) for c in committed]
    pages = poison(pages, visible_slots(table, starts, lengths.tolist(), pages.k.num_pages, case.page_size))
    segments = Segments(jnp.asarray(rows, jnp.int32), ancestors)
    out, expected = run(case, queries(case, width), pages, table, lengths, segments, debug=True)
    assert error(out, expected) < TOLERANCE["float32"]
    unused = np.arange(width) >= np.asarray(rows)[:, None]
    assert not np.asarray(out).reshape(len(rows), width, -1)[unused].any()


def test_a_chain_is_one_row_after_the_other_and_a_chunk_of_a_prompt():
    case, width = case_of((130, 5, 41, 0), window=50), 4
    q = queries(case, width)
    _, pages, table, lengths = case.inputs()
    rows = jnp.asarray([4, 4, 3, 0], jnp.int32)
    out, _ = run(case, q, pages, table, lengths, Segments(rows))
    chain = jnp.asarray(words([[1, 3, 7, 15]] * 4))
    assert same_bits(out, run(case, q, pages, table, lengths, Segments(rows, chain))[0])
    apart = jnp.stack(
        [
            decode_attention(
                q[i::width], pages, table, jnp.where(i < rows, lengths - rows + i + 1, 0), scale=case.scale, window=50
            )
            for i in range(width)
        ],
        axis=1,
    )
    np.testing.assert_allclose(out.reshape(apart.shape), apart, rtol=2e-6, atol=2e-6)
    cu = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(rows)])
    flat = q.reshape(4, width, *q.shape[1:])[np.arange(width) < np.asarray(rows)[:, None]]
    chunks = prefill_attention(flat, pages, table, cu, lengths, scale=case.scale, window=50)
    np.testing.assert_allclose(
        out.reshape(4, width, *q.shape[1:])[np.arange(width) < np.asarray(rows)[:, None]], chunks, rtol=2e-6, atol=2e-6
    )


def test_segments_of_all_rows_need_not_be_said():
    case = case_of((19, 0, 64))
    _, pages, table, lengths = case.inputs()
    said = Segments(jnp.asarray([3, 0, 3], jnp.int32))
    both = [run(case, queries(case, 3), pages, table, lengths, segments)[0] for segments in (None, said)]
    assert same_bits(*both)


def test_one_row_is_traced_as_before():
    case = case_of((19, 64))
    q, pages, table, lengths = case.inputs()
    attend = jax.jit(partial(decode_attention, scale=case.scale))
    plain = attend.lower(q, pages, table, lengths).as_text()
    one = attend.lower(q, pages, table, lengths, segments=Segments(jnp.ones(2, jnp.int32))).as_text()
    assert plain.count("stablehlo.") == one.count("stablehlo.")


def test_each_path_of_a_tree_is_that_path_alone():
    """Puts a node's ancestors' keys behind the committed ones, alone: it gets what the tree gives it."""
    masks, committed, width = [0b1, 0b11, 0b101, 0b1011, 0b10101], 21, 5
    with jax.enable_x64(True):
        formats = {"k_format": "f64", "v_format": "f64", "page_size": 32, "window": 9}
        case = replace(case_of((committed + width,), **formats), dtype="float64")
        _, pages, table, lengths = case.inputs()
        q = queries(case, width)
        segments = Segments(jnp.asarray([width], jnp.int32), jnp.asarray(words([masks])))
        out, _ = run(case, q, pages, table, lengths, segments)
        for i, mask in enumerate(masks):
            path = [committed + n for n in range(width) if mask >> n & 1]
            stop = committed + len(path)

            def alone(pool, path=path, stop=stop):
                return replace(pool, values=pool.values.at[:, :, committed:stop].set(pool.values[:, :, np.array(path)]))

            own = replace(pages, k=alone(pages.k), v=alone(pages.v))
            single, _ = run(case, q[i : i + 1], own, table, jnp.asarray([stop], jnp.int32), None)
            assert error(out[i : i + 1], single) < 1e-14


def test_debug_asks_nothing_of_unused_segments_and_all_rows_of_others():
    case = case_of((9, 20))
    _, pages, table, lengths = case.inputs()
    q, rows = queries(case, 4), jnp.asarray([0, 4], jnp.int32)
    out, _ = run(case, q, pages, table.at[0].set(-1), lengths, Segments(rows), debug=True)
    assert not np.asarray(out)[:4].any()
    with pytest.raises(ValueError, match="row 0 uses 4 rows of 4, with 3 keys"):
        decode_attention(q, pages, table, lengths.at[0].set(3), scale=1.0, debug=True)


def test_seeded_faults_are_caught():
    case, width = case_of((90, 30), window=12), 4
    q = queries(case, width)
    _, pages, table, lengths = case.inputs()
    rows = jnp.asarray([4, 3], jnp.int32)
    masks = jnp.asarray(words([[0b1, 0b11, 0b101, 0b1011], [0b1, 0b10, 0b110, 0]]))
    out, expected = run(case, q, pages, table, lengths, Segments(rows, masks))
    assert error(out, expected) < TOLERANCE["float32"]

    def wrong(rows=rows, masks=masks):
        return error(run(case, q, pages, table, lengths, Segments(rows, masks))[0], expected)

    faults = {
        "an ancestor too many": wrong(masks=masks.at[0, 3].set(0b1111)),
        "an ancestor too few": wrong(masks=masks.at[0, 3].set(0b1001)),
        "a chain": wrong(masks=jnp.asarray(words([[1, 3, 7, 15]] * 2))),
        "a sibling's position": wrong(masks=masks.at[1, 1].set(0b11)),
        "a row too few": wrong(rows=rows - 1),
    }
    assert not missed(faults, TOLERANCE["float32"])


def test_faults_in_either_word_of_a_mask_are_caught():
    case, width = case_of((90,), window=60), 40
    q = queries(case, width)
    _, pages, table, lengths = case.inputs()
    rows, masks = jnp.asarray([width], jnp.int32), jnp.asarray(random_trees(np.random.default_rng(1), [width], width))
    out, expected = run(case, q, pages, table, lengths, Segments(rows, masks), debug=True)
    assert error(out, expected) < TOLERANCE["float32"]

    def wrong(masks):
        return error(run(case, q, pages, table, lengths, Segments(rows, masks))[0], expected)

    faults = {
        "words exchanged": wrong(masks[..., ::-1]),
        "an ancestor too few among the first": wrong(masks.at[0, 39, 0].set(0)),
        "one too many among the last": wrong(masks.at[0, 39, 1].set(0xFF)),
    }
    assert not missed(faults, TOLERANCE["float32"])


def test_what_does_not_fit_is_refused():
    case = case_of((19, 64))
    q, pages, table, lengths = case.inputs()
    attend = partial(decode_attention, pages=pages, page_table=table, lengths=lengths, scale=1.0)
    with pytest.raises(ValueError, match="5 queries for 2 lengths: expected 1 to 64 for each"):
        attend(queries(case_of((1,) * 5), 1))
    with pytest.raises(ValueError, match=r"segments.rows has shape \(3,\), expected \[2\]"):
        attend(q, segments=Segments(jnp.ones(3, jnp.int32)))
    with pytest.raises(ValueError, match=r"segments.ancestors is uint32\[2, 1\], expected uint32\[2, 1, 1\]"):
        attend(q, segments=Segments(jnp.ones(2, jnp.int32), jnp.ones((2, 1), jnp.uint32)))
    wide = case_of((19, 64), head_dim=256)
    with pytest.raises(NotImplementedError, match="segments of 17 rows of head dim 256 are not supported by backend"):
        attend(queries(wide, 17).astype(jnp.bfloat16), pages=wide.inputs()[1], backend="mosaic")
    shapes = jax.ShapeDtypeStruct((34, *wide.heads[:1], 256), jnp.bfloat16)
    assert plan(shapes, wide.inputs()[1], lengths, backend="hopper") is None  # which is xla's then
    masks = jnp.asarray(words([[1, 1], [1, 3]]))
    with pytest.raises(ValueError, match="row 0: ancestors of its row 1 are 1, expected bit 1 as the highest"):
        attend(queries(case, 2), segments=Segments(jnp.full(2, 2, jnp.int32), masks), debug=True)
    with pytest.raises(ValueError, match="row 1 uses 3 rows of 2, with 64 keys"):
        attend(queries(case, 2), segments=Segments(jnp.asarray([2, 3], jnp.int32)), debug=True)
