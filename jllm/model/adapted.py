"""Adds low-rank adapters to linear layers (LoRA, arXiv 2106.09685): scale * b (a x) joins a weight's product with x.

The weight stays as it is, in any format. A merged weight has its parts' a's one below the other, and each of its rows
reads its own part's. So no block of zeros is stored or read.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jllm.model.params import Weight
from jllm.model.shapes import Array, Float, shaped
from pallas_kernels.backends import or_xla
from pallas_kernels.formats.numerics import compute_dtype
from pallas_kernels.one_order import fenced
from pallas_kernels.row_matmul import low_rank, low_rank_gates


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """Holds the adapters of one matrix in all layers that have it. P is the number of merged parts, r the rank."""

    a: jax.Array  # [L, A, P r, in]
    b: jax.Array  # [L, A, out, r]
    scale: jax.Array  # [L, A, P], float32 at least


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OneAdapter:
    """Holds the adapter of one matrix of one layer, which all rows take."""

    a: jax.Array  # [P r, in]
    b: jax.Array  # [out, r]
    scale: jax.Array  # [P]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapted:
    """Is a weight with adapters, while a layer is traced. linear and the functions of fused_linear.py take it."""

    base: Weight
    adapters: Slots | OneAdapter
    layer: jax.Array | None  # i32[], the layer's place in Slots
    rows: jax.Array | None  # i32[T], the adapter of each row; another number than 0 .. A - 1: none
    parts: tuple[int, ...] = field(metadata={"static": True})  # rows of each merged part
    runs: int | None = field(default=None, metadata={"static": True})  # most runs of neighbouring rows with one adapter

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape


@shaped
def with_addend(
    x: Float[Array, "T inputs"],
    w: Adapted,
    residual: Float[Array, "T outputs"] | None,
    *,
    out_dtype,
    backend: str | None,
    gated: bool = False,
) -> Float[Array, "T added"]:
    """Returns what the adapters add to the product of x and w, plus the residual, in out_dtype. It takes the residual's
    place in the product. gated: SiLU of the first of two parts of this sum times the second, where `gates` says so."""
    wide = compute_dtype(x.dtype)
    if isinstance(w.adapters, OneAdapter):
        added = _of_one(x, w.adapters, w.parts)
    else:
        assert w.layer is not None, "adapters in slots are those of all layers"
        assert w.rows is not None, "rows choose among adapters in slots"
        slots = w.adapters
        more: dict[str, Any] = {"parts": w.parts, "scale": slots.scale, "residual": residual, "runs": w.runs}
        how: dict[str, Any] = {"out_dtype": out_dtype, "backend": or_xla(backend), "gated": gated}
        return low_rank(x, slots.a, slots.b, w.layer, w.rows, **more, **how)

    def add(added: jax.Array, residual: jax.Array | None) -> jax.Array:
        return (added if residual is None else residual.astype(wide) + added).astype(out_dtype)

    return fenced(backend, add, added, residual)


def gates(x: jax.Array, w: Adapted, *, backend: str | None) -> bool:
    """Returns whether with_addend applies SiLU to its sum with the product of x and w."""
    if not isinstance(w.adapters, Slots):
        return False
    slots = w.adapters
    how: dict[str, Any] = {"runs": w.runs, "backend": or_xla(backend)}
    return low_rank_gates(x, slots.a, slots.b, parts=w.parts, scale=slots.scale, **how)


def _of_one(x: jax.Array, adapter: OneAdapter, parts: tuple[int, ...]) -> jax.Array:
    """Returns the addend of one adapter for all rows by plain products, whose gradients take no memory by row."""
    wide, found, start = compute_dtype(x.dtype), [], 0
    low = jnp.einsum("tk,rk->tr", x.astype(wide), adapter.a.astype(wide), precision="highest")
    low = low.reshape(x.shape[0], len(parts), -1)
    for part, size in enumerate(parts):
        b = adapter.b[start : start + size].astype(wide)
        found.append(jnp.einsum("tr,nr->tn", low[:, part], b, precision="highest") * adapter.scale[part].astype(wide))
        start += size
    return jnp.concatenate(found, axis=1)
