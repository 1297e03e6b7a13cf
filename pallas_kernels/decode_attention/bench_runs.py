"""Makes what benchmarks of decode_attention time: the layers of a case, over pages or contiguous keys and values. Each
run is of several layers in one jit. Each has pages of its own, so that no cache holds them. Each layer's queries are
the results of the one before."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench.cases import random_tables
from pallas_kernels.bench.measure import device_us
from pallas_kernels.decode_attention import decode_attention, make_work
from pallas_kernels.decode_attention.cases import Case
from pallas_kernels.decode_attention.config import choose_config, triton_config
from pallas_kernels.formats.kv_formats import bytes_per_token, parse_format
from pallas_kernels.formats.kv_pages import KVPages, allocate


def moved_bytes(case: Case) -> int:
    """Returns the bytes of K and V that a layer reads, scales included."""
    formats = [parse_format(name, case.head_dim) for name in (case.k_format, case.v_format)]
    return sum(case.lengths) * bytes_per_token(case.head_dim, case.heads[1], *formats)


def layers_for(case: Case) -> int:
    """Returns how many layers read more than caches hold, within reason."""
    return max(2, min(32, -(-(256 << 20) // moved_bytes(case))))


@partial(jax.jit, static_argnums=(1, 2))
def random_pages(key: jax.Array, num_pages: int, case: Case) -> KVPages:
    """Returns pages of random bits: any integers, and floats of both signs below 2."""
    formats = (parse_format(name, case.head_dim) for name in (case.k_format, case.v_format))
    types = jax.eval_shape(lambda: allocate(num_pages, case.heads[1], case.page_size, case.head_dim, *formats))
    leaves, tree = jax.tree.flatten(types)

    def fill(key: jax.Array, leaf: Any) -> jax.Array:
        if leaf.dtype == jnp.uint8:
            return jax.random.bits(key, leaf.shape, jnp.uint8) & jnp.uint8(0xBF)  # e4m3 below 2: no NaN
        if leaf.dtype == jnp.int8:
            return jax.random.randint(key, leaf.shape, -127, 128, jnp.int8)
        return jax.random.uniform(key, leaf.shape, leaf.dtype, -2, 2)

    return jax.tree.unflatten(tree, [fill(k, leaf) for k, leaf in zip(jax.random.split(key, len(leaves)), leaves)])


@partial(jax.jit, static_argnums=(1, 2))
def random_normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.normal(key, shape, dtype)


def random_key() -> jax.Array:
    """Returns a key of a generator that compiles in no time."""
    return jax.random.key(0, impl="rbg")


@dataclass(frozen=True)
class Run:
    """Holds what is timed, attend(*make(key)): the layers of a case. A call of its own makes each layer's arrays.
    Compiled together they would take as long as all kernels."""

    make: Callable[[jax.Array], tuple[Any, ...]]
    attend: Callable[..., jax.Array]
    layers: int

    def compiled(self) -> "Run":
        attend = jax.jit(self.attend).lower(*jax.eval_shape(self.make, random_key())).compile()
        return Run(self.make, attend, self.layers)

    def microseconds(self) -> float:
        """Returns the microseconds of one layer."""
        return device_us(partial(self.attend, *self.make(random_key()))) / self.layers


def consecutive_tables(lengths: tuple[int, ...], page_size: int) -> np.ndarray:
    """Returns page tables i32[len(lengths), M] in which each sequence's pages, and the sequences, follow one
    another."""
    needed = [-(-length // page_size) for length in lengths]
    ends = np.cumsum(needed)
    numbers = (ends - needed)[:, None] + np.arange(max(needed))
    return np.where(numbers < ends[:, None], numbers, -7).astype(np.int32)


def paged(
    case: Case, backend: str, consecutive: bool = False, tuned: dict[str, int] | None = None, **changes: Any
) -> Run:
    """Returns decode_attention over shuffled pages, or consecutive ones. `changes` go to its configuration, `tuned` to
    that of backend triton. A work list is made once, as in a step."""
    layers, rows = layers_for(case), len(case.lengths)
    num_pages = sum(-(-length // case.page_size) for length in case.lengths)
    generators = [np.random.default_rng(i) for i in range(layers)]
    tables = [random_tables(rng, num_pages, case.lengths, case.page_size) for rng in generators]
    if consecutive:
        tables = [consecutive_tables(case.lengths, case.page_size)] * layers

    def make(key: jax.Array) -> tuple[Any, ...]:
        keys = jax.random.split(key, layers + 1)
        q = random_normal(keys[0], (rows * case.width, case.heads[0], case.head_dim), jnp.dtype(case.dtype))
        lengths = jnp.asarray(case.lengths, jnp.int32)
        narrow = jax.eval_shape(partial(random_pages, random_key(), num_pages, case)).narrow
        queries = case.heads[0] // case.heads[1] * case.width
        config = replace(choose_config(case.head_dim, queries, case.heads[1], narrow), **changes)
        listed = jax.jit(make_work, static_argnums=(1, 2, 3), static_argnames=("config", "width"))
        options: dict[str, Any] = {"width": case.width, "config": config}
        work = listed(lengths, *case.heads, case.head_dim, **options) if backend == "mosaic" else None
        cache = [random_pages(key, num_pages, case) for key in keys[1:]]
        return q, cache, [jnp.asarray(table) for table in tables], lengths, work

    def attend(q: jax.Array, cache: list[KVPages], tables: list[jax.Array], lengths: jax.Array, work: Any) -> jax.Array:
        run = partial(decode_attention, scale=case.scale, work=work, backend=backend)
        if tuned is not None:
            from pallas_kernels.decode_attention import triton

            config = triton_config(case.head_dim, case.heads[0] // case.heads[1] * case.width, cache[0])
            run = partial(triton.decode_attention, scale=case.scale, window=None, config=replace(config, **tuned))
        for pages, table in zip(cache, tables):
            q = run(q, pages, table, lengths)
        return q

    return Run(make, attend, layers)


def cudnn(case: Case) -> Run:
    """Returns cuDNN's attention over contiguous K and V of equal lengths."""
    layers, dtype = layers_for(case), jnp.dtype(case.dtype)
    shape = (len(case.lengths), case.lengths[0], case.heads[1], case.head_dim)

    def make(key: jax.Array) -> tuple[Any, ...]:
        keys = jax.random.split(key, 2 * layers + 1)
        q = random_normal(keys[0], (shape[0], 1, case.heads[0], case.head_dim), dtype)
        arrays = [random_normal(each, shape, dtype) for each in keys[1:]]
        return q, list(zip(arrays[::2], arrays[1::2]))

    def attend(q: jax.Array, cache: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
        for k, v in cache:
            q = jax.nn.dot_product_attention(q, k, v, scale=case.scale, implementation="cudnn")
        return q

    return Run(make, attend, layers)
