"""Decode attention timed for claims: several layers in one jit, whose pages no cache holds, all compiled ahead."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from experiments.claims.claim import microseconds
from pallas_kernels.decode_attention import decode_attention, make_work
from pallas_kernels.decode_attention.bench import layers_for, moved_bytes, random_pages
from pallas_kernels.decode_attention.cases import Case

__all__ = ["Run", "compiled", "contiguous", "moved_bytes", "paged", "size"]


@dataclass(frozen=True)
class Run:
    """attend(*make(key)) is what is timed: the given layers, each one's queries the results of the one before."""

    make: Callable[[jax.Array], tuple[Any, ...]]
    attend: Callable[..., jax.Array]
    layers: int


@dataclass(frozen=True)
class Compiled:
    make: Callable[[jax.Array], tuple[Any, ...]]
    attend: Callable[..., jax.Array]
    layers: int

    def timed(self) -> tuple[float, jax.Array]:
        """Microseconds of one layer, and the result of the last."""
        arguments = self.make(jax.random.key(0))
        return microseconds(partial(self.attend, *arguments)) / self.layers, self.attend(*arguments)


def size(case: Case) -> dict[str, Any]:
    """What a row says of a case."""
    lengths, heads = case.lengths, case.heads
    return {"R": len(lengths), "length": lengths[0], "H": heads[0], "K": heads[1], "D": case.head_dim}


def paged(case: Case, dequantize: int = 1) -> Run:
    """The Mosaic kernel over shuffled pages, the work list made once."""
    rows, dim = len(case.lengths), case.head_dim
    pages_each = -(-max(case.lengths) // case.page_size)

    def make(key: jax.Array) -> tuple[Any, ...]:
        keys = jax.random.split(key, layers_for(case) + 2)
        q = jax.random.normal(keys[0], (rows, case.heads[0], dim), jnp.dtype(case.dtype))
        table = jax.random.permutation(keys[1], rows * pages_each).reshape(rows, pages_each).astype(jnp.int32)
        cache = [random_pages(each, rows * pages_each, case) for each in keys[2:]]
        lengths = jnp.asarray(case.lengths, jnp.int32)
        work = make_work(lengths, case.heads[0], case.heads[1], dim)
        work = replace(work, config=replace(work.config, dequantize=dequantize))
        return q, cache, table, lengths, work

    def attend(q: jax.Array, cache: list[Any], table: jax.Array, lengths: jax.Array, work: Any) -> jax.Array:
        for pages in cache:
            q = decode_attention(q, pages, table, lengths, scale=case.scale, work=work, backend="mosaic")
        return q

    return Run(make, attend, layers_for(case))


def contiguous(case: Case) -> Run:
    """cuDNN, through JAX, over contiguous K and V."""
    shape = (len(case.lengths), case.lengths[0], case.heads[1], case.head_dim)

    def make(key: jax.Array) -> tuple[Any, ...]:
        keys = jax.random.split(key, 2 * layers_for(case) + 1)
        q = jax.random.normal(keys[0], (shape[0], 1, case.heads[0], case.head_dim), jnp.dtype(case.dtype))
        arrays = [jax.random.normal(each, shape, q.dtype) for each in keys[1:]]
        return q, list(zip(arrays[::2], arrays[1::2]))

    def attend(q: jax.Array, cache: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
        for k, v in cache:
            q = jax.nn.dot_product_attention(q, k, v, scale=case.scale, implementation="cudnn")
        return q

    return Run(make, attend, layers_for(case))


def compiled(runs: Sequence[Run]) -> list[Compiled]:
    """All of them, before anything is timed: compiling takes most of the time."""

    def build(run: Run) -> Compiled:
        key = jax.random.key(0)
        attend = jax.jit(run.attend).lower(*jax.eval_shape(run.make, key)).compile()
        return Compiled(jax.jit(run.make).lower(key).compile(), attend, run.layers)

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(build, runs))
