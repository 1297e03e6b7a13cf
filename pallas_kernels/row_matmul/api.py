"""Multiplies each row by a matrix of its own, or by the two of a low-rank adapter of its own."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.backends import DETERMINISTIC, Backend, choose
from pallas_kernels.checks import check_floats, check_int32, check_out_dtype
from pallas_kernels.formats.numerics import compute_dtype
from pallas_kernels.row_matmul import xla
from pallas_kernels.row_matmul.config import MOST_ROWS, check_supported, check_unasked, fits_low_rank, spreads


def row_matmul(
    x: jax.Array,
    w: jax.Array,
    layer: jax.Array,
    group: jax.Array,
    *,
    parts: tuple[int, ...] | None = None,
    scale: jax.Array | None = None,
    residual: jax.Array | None = None,
    runs: int | None = None,
    out_dtype: DTypeLike | None = None,
    backend: str | None = None,
) -> jax.Array:
    """Returns [M, N]: each row of x times its own matrix of w [L, X, N, K], transposed: w[layer, group[row]].

    group is i32[M], and rows whose group is not in [0, X) give zeros. layer is i32[]. Rows come in any order. x is
    [M, K], or with `parts` [M, P, K]: the numbers of w's rows that multiply each of the P parts, in order. scale
    [L, X, P] multiplies each part of a product, and residual [M, N] is added. Sums are in promote_types(x.dtype,
    float32), rounded once to out_dtype (default: x's). x may have more bits than w, such as sums that are not rounded
    yet. Of many rows x is rounded to w's dtype, and backend xla rounds products to it as well. If the backend is
    deterministic, each row adds in the order of K, whatever its company. `runs` bounds the runs of neighbouring rows of
    one group, where it is known that they are few. Raises ValueError where shapes or dtypes disagree.
    """
    check_int32(layer=layer, group=group)
    optional = {"scale": scale, "residual": residual}
    for name, array in {"x": x, "w": w, **optional}.items():
        if array is not None:
            check_floats(**{name: array})
    each = x[:, None] if parts is None and x.ndim == 2 else x
    parts = w.shape[2:3] if parts is None else parts
    fits = w.ndim == 4 and each.ndim == 3 and each.shape[1:] == (len(parts), w.shape[3]) and sum(parts) == w.shape[2]
    if not fits or layer.ndim or group.shape != x.shape[:1]:
        shapes = f"x {x.shape}, w {w.shape}, layer {layer.shape} and group {group.shape}"
        raise ValueError(f"{shapes} with parts {parts}, expected [M, P, K], [L, X, N, K], [] and [M]")
    wanted = {"scale": (*w.shape[:2], len(parts)), "residual": (x.shape[0], w.shape[2])}
    for name, array in optional.items():
        if array is not None and array.shape != wanted[name]:
            raise ValueError(f"{name} has shape {array.shape}, expected {wanted[name]}")
    out_dtype = check_out_dtype(x.dtype if out_dtype is None else out_dtype)
    chosen = choose(BACKENDS, backend, each, w, scale, residual, parts, out_dtype)
    return chosen.run(each, w, scale, layer, group, residual, parts, out_dtype, runs)


def low_rank(
    x: jax.Array,
    a: jax.Array,
    b: jax.Array,
    layer: jax.Array,
    group: jax.Array,
    *,
    parts: tuple[int, ...],
    scale: jax.Array | None = None,
    residual: jax.Array | None = None,
    runs: int | None = None,
    out_dtype: DTypeLike | None = None,
    backend: str | None = None,
    gated: bool = False,
) -> jax.Array:
    """Returns [M, N]: row_matmul with b [L, X, N, r] of row_matmul of x [M, K] with a [L, X, P r, K], plus residual.

    Each of the P parts of b's rows multiplies the products with its own part of a. Other arguments are as in
    row_matmul. What lies between a and b is not rounded, but of many rows to b's dtype. Few rows on Hopper take one
    kernel. gated: SiLU of the first of two parts times the second, [M, N / 2], where low_rank_gates says so.
    """
    out_dtype = check_out_dtype(x.dtype if out_dtype is None else out_dtype)
    wide, M = compute_dtype(x.dtype), x.shape[0]
    mosaic = _chosen(M, b, scale, residual, parts, out_dtype, backend) is BACKENDS["mosaic"]
    if mosaic and fits_low_rank(x, a, b, residual, parts, runs, out_dtype, gated):
        from pallas_kernels.row_matmul import low_rank_sm90  # imports all of Pallas

        return low_rank_sm90.low_rank(x, a, b, scale, layer, group, residual, parts, out_dtype, gated=gated)
    kind = b.dtype if mosaic and M > MOST_ROWS else wide  # as that kernel would round it
    between = row_matmul(x, a, layer, group, runs=runs, out_dtype=kind, backend=backend)
    between = between.reshape(M, len(parts), b.shape[3])
    if gated:
        return _mosaic(between, b, scale, layer, group, residual, parts, out_dtype, runs, gated=True)
    more: dict[str, Any] = {"parts": parts, "scale": scale, "residual": residual, "runs": runs}
    return row_matmul(between, b, layer, group, **more, out_dtype=out_dtype, backend=backend)


def low_rank_gates(
    x: jax.Array,
    a: jax.Array,
    b: jax.Array,
    *,
    parts: tuple[int, ...],
    scale: jax.Array | None = None,
    runs: int | None = None,
    backend: str | None = None,
) -> bool:
    """Returns whether low_rank can apply SiLU to its sum with a residual [M, N], all in x's dtype."""
    residual: Any = jax.ShapeDtypeStruct((x.shape[0], b.shape[2]), x.dtype)
    mosaic = _chosen(x.shape[0], b, scale, residual, parts, x.dtype, backend) is BACKENDS["mosaic"]
    one = fits_low_rank(x, a, b, residual, parts, runs, x.dtype, gated=True)
    return mosaic and (one or spreads(x.shape[0], parts, b.shape[3], residual, x.dtype, gated=True))


def _chosen(m: int, b: Any, scale: Any, residual: Any, parts: tuple[int, ...], out_dtype: Any, backend: Any) -> Backend:
    """Returns the backend of the product with b."""
    low = jax.ShapeDtypeStruct((m, len(parts), b.shape[3]), compute_dtype(b.dtype))
    return choose(BACKENDS, backend, low, b, scale, residual, parts, jnp.dtype(out_dtype))


def _mosaic(*arguments: Any, **more: Any) -> jax.Array:
    from pallas_kernels.row_matmul import mosaic_sm90  # imports all of Pallas

    return mosaic_sm90.row_matmul(*arguments, **more)


BACKENDS = {
    "mosaic": Backend(_mosaic, check_supported, check_unasked),
    "xla": Backend(xla.row_matmul),
    DETERMINISTIC: Backend(xla.in_one_order),
}
