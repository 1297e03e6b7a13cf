"""What the kernel with a resident x does, for the interpreter, which runs no inline PTX: by the format's definition."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.quantized_weights import unpack4
from pallas_kernels.weight_only_matmul.operand_sm90 import ROWS, plain_values
from pallas_kernels.weight_only_matmul.plan_sm90 import Plan
from pallas_kernels.weight_only_matmul.resident_sizes import ROW_ORDER, TILE, Sizes
from pallas_kernels.weight_only_matmul.stream_sm90 import CHUNK


def by_product(plan: Plan, x: jax.Array) -> jax.Array:
    """x [m, chunks * 128] -> [chunks, 4, m, 32]: as prepare_x has it, NF4's without the order in a thread's columns."""
    m = x.shape[0]
    if plan.format.packed:
        return x.reshape(m, -1, 4, 4, 8).transpose(1, 3, 0, 2, 4).reshape(-1, 4, m, 32)
    return x.reshape(m, -1, 2, 4, 2, 8).transpose(1, 2, 4, 0, 3, 5).reshape(-1, 4, m, 32)


def in_order(plan: Plan, x: jax.Array) -> jax.Array:
    """by_product's x -> [m, chunks, 128]."""
    m = x.shape[2]
    if plan.format.packed:
        return x.reshape(-1, 4, m, 4, 8).transpose(2, 0, 3, 1, 4).reshape(m, -1, CHUNK)
    return x.reshape(-1, 2, 2, m, 4, 8).transpose(3, 0, 1, 4, 2, 5).reshape(m, -1, CHUNK)


def prepare(plan: Plan, x: Any, target: Any, part: jax.Array) -> None:
    sizes = Sizes(plan)
    wide = jnp.pad(x[...], ((0, 0), (0, sizes.of_part * plan.config.split * CHUNK - plan.k)))
    wide = lax.dynamic_slice_in_dim(wide, part * sizes.of_part * CHUNK, sizes.of_part * CHUNK, axis=1)
    target[...] = by_product(plan, wide)


def stage(
    plan: Plan, read: dict[str, Any], sums: jax.Array, tile: jax.Array, first: jax.Array, chunks: jax.Array,
    warpgroup: jax.Array,
) -> jax.Array:  # fmt: skip
    """What resident_sm90._stage gives, by the format's definition and with the same roundings."""
    sizes, fmt = Sizes(plan), plan.format
    codes = read["w"][...]
    if fmt.packed:
        codes = unpack4(codes, signed=fmt.codes == "int4")
    values = plain_values(codes, fmt, plan.dtype)

    def spread(name: str) -> jax.Array:  # [16, columns]
        if not plan.by_group:
            return read[name].at[pl.ds(tile * TILE, TILE)][...].astype(plan.dtype)[:, None]
        return jnp.repeat(read[name][...].astype(plan.dtype).T, fmt.group or 1, axis=1)

    if "zeros" in read:
        values = values - spread("zeros")
    if plan.by_group and fmt.group != CHUNK:
        values = values * spread("scales")
    x = in_order(plan, read["x"][...])
    x = jnp.pad(x, ((0, 0), (0, sizes.steps * sizes.warps - sizes.of_part), (0, 0)))
    x = lax.dynamic_slice_in_dim(x, first, sizes.warps, axis=1).astype(jnp.float32)
    w = values.astype(jnp.float32).reshape(TILE, sizes.warps, CHUNK)
    products = jnp.einsum("rwk,twk->wrt", w, x, precision="highest")
    if fmt.group == CHUNK:
        products = products * read["scales"][...].astype(jnp.float32)[:, :, None]
    products = jnp.where((first + jnp.arange(sizes.warps) < chunks)[:, None, None], products, 0)
    products = jnp.concatenate([products[:, i : i + 1] for i in ROW_ORDER], axis=1)
    products = jnp.pad(products, ((0, 0), (0, 0), (0, plan.config.tokens - plan.m)))
    return sums + lax.dynamic_slice_in_dim(products.reshape(-1, plan.config.tokens), warpgroup * ROWS, ROWS)


def finish(plan: Plan, tile: jax.Array, part: jax.Array, parts: Any, out: Any, vectors: dict[str, Any]) -> None:
    rows = pl.ds(tile * TILE, TILE)
    total = parts[...].reshape(-1, TILE, plan.config.tokens).sum(0)
    total = jnp.concatenate([total[i : i + 1] for i in np.argsort(ROW_ORDER)])
    if vectors:
        total = total * vectors["scales"][rows][:, None]
    out.at[part, :, rows][...] = total.T[: plan.m].astype(plan.out_dtype)
