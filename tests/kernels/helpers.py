"""Computes errors, poison and seeded faults for the kernels' tests."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats.kv_pages import KVPages, Pages

# Of a row's norm: what rounding the result costs, with little to spare. float64 only leaves the order of sums.
TOLERANCE = {"float64": 1e-12, "float32": 1e-6, "float16": 5e-4, "bfloat16": 3e-3}


def thinned(cases: Sequence[Any], kept: Collection[int]) -> list[Any]:
    """Returns the cases as parameters. All but those at these places are exhaustive."""
    assert set(kept) <= set(range(len(cases)))
    marks = [() if i in kept else pytest.mark.exhaustive for i in range(len(cases))]
    return [pytest.param(*(x if type(x) is tuple else (x,)), marks=mark) for x, mark in zip(cases, marks, strict=True)]


def error(out, expected) -> float:
    """Returns the largest error of a row [..., H, D] relative to its norm in `expected`. It is infinite for NaN, and
    where a row that must be zero isn't."""
    out, expected = np.asarray(out).astype(np.float64), np.asarray(expected).astype(np.float64)
    assert out.shape == expected.shape
    out, expected = (x.reshape(x.shape[0], -1) for x in (out, expected))
    norms = np.linalg.norm(expected, axis=-1)
    distances = np.linalg.norm(out - expected, axis=-1)
    relative = distances / np.where(norms > 0, norms, 1)
    relative[(norms == 0) & (distances > 0)] = np.inf
    return float(np.max(np.nan_to_num(relative, nan=np.inf)))


def logits_of(number: int, num_heads: int, dtype: str) -> dict[str, Any]:
    """Returns what the number-th case of attention has besides: nothing, sinks, or sinks and a softcap. Most sinks take
    about as much as all keys. One is none, one takes nothing, and one takes all."""
    if number % 3 == 1:
        return {}
    sinks = np.resize([4.0, -np.inf, 2.0, 60.0, -60.0, 6.0], num_heads)
    return {"sinks": jnp.asarray(sinks, dtype), "softcap": None if number % 3 else 1.5}


def same_bits(a, b) -> bool:
    """Returns whether two pytrees of arrays are equal bit for bit."""
    a, b = jax.tree.leaves(a), jax.tree.leaves(b)
    return all(
        np.asarray(x).tobytes() == np.asarray(y).tobytes() and x.dtype == y.dtype for x, y in zip(a, b, strict=True)
    )


def visible_slots(table, starts, stops, num_pages: int, page_size: int) -> np.ndarray:
    """Returns bool [N, P]: the slots of tokens starts[b] .. stops[b] of the sequences whose page tables are given."""
    visible = np.zeros((num_pages, page_size), bool)
    for row, start, stop in zip(np.asarray(table), starts, stops):
        for token in range(start, stop):
            visible[row[token // page_size], token % page_size] = True
    return visible


def poison(pages: KVPages, visible: np.ndarray) -> KVPages:
    """Puts NaN in every slot of all layers that is not visible; in its scales where values have no NaN."""

    def poisoned(pool: Pages) -> Pages:
        values, hidden = np.array(pool.values), np.tile(~visible, (pool.layers, 1))
        hidden = np.broadcast_to(hidden[:, None, :], values.shape[:3])
        if pool.scales is None:
            values[hidden] = 0x7F if values.dtype == np.uint8 else np.nan  # 0x7f: e4m3's NaN
            return replace(pool, values=jnp.asarray(values))
        scales = np.array(pool.scales).reshape(*values.shape[:3], -1)
        scales[hidden] = np.nan
        return replace(pool, scales=jnp.asarray(scales.reshape(pool.scales.shape)))

    return KVPages(poisoned(pages.k), poisoned(pages.v))


def swap_entries(table: jax.Array, row: int, i: int, j: int) -> jax.Array:
    """Exchanges two entries of one page table."""
    return table.at[row, i].set(table[row, j]).at[row, j].set(table[row, i])


def swap_scales(pool: Pages, page: int, head: int) -> Pages:
    """Exchanges the scales of the first two groups, in one page of one head."""
    scales = np.array(pool.scales)
    groups = scales[page, head].reshape(pool.page_size, -1)  # a view
    groups[:, [0, 1]] = groups[:, [1, 0]]
    return replace(pool, scales=jnp.asarray(scales))


def missed(faults: dict[str, float], tolerance: float) -> dict[str, float]:
    """Returns the seeded faults whose error is no clear failure."""
    return {name: found for name, found in faults.items() if found < 2 * tolerance}
