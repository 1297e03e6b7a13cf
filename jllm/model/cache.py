"""Makes the paged KV cache of a whole model: formats by name, allocation, copies of pages, and bytes.

A step quantizes K and V and writes them in pallas_kernels.cache_update. The engine allots the pages (engine/pages.py).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jllm.config import LlamaConfig
from jllm.errors import ConfigError
from jllm.model.shapes import Array, Int32, shaped
from jllm.parallel.mesh import stored_kv_heads
from jllm.parallel.ranks import HEADS
from pallas_kernels.formats import kv_formats, kv_pages
from pallas_kernels.formats.kv_formats import Kivi, KVFormat
from pallas_kernels.formats.kv_pages import KVPages, Pages, Tail
from pallas_kernels.formats.kv_tail import allocate_tail

Cache = KVPages  # of all layers
Tails = Tail  # of all layers

DTYPE_NAMES = {dtype: name for name, dtype in kv_formats.FLOATS.items()}


KVCache = str | KVFormat | tuple[KVFormat, KVFormat]  # a name, one format for both, or the formats of K and V


def parse_kv_cache(name: KVCache | None, config: LlamaConfig, dtype) -> tuple[KVFormat, KVFormat]:
    """Returns the formats of K and V from one name: "int8-g8" for both, or "k=int8-g8,v=int4-g32". None is the model's
    dtype. Format objects are returned as they are. A per-channel format of K gets a per-token format for V. Raises
    ConfigError for an unknown format, and for one that does not fit the head dim."""
    if isinstance(name, KVFormat | tuple):
        formats = (name, name) if isinstance(name, KVFormat) else name
        if isinstance(name, Kivi):
            formats = name, name.of_values()
        for fmt in formats:
            if not fmt.fits(config.head_dim):
                raise ConfigError(f"KV format {fmt.name} does not fit the head dim {config.head_dim}: {fmt}")
        return _check_values(*formats)
    if name is None:
        name = DTYPE_NAMES[jnp.dtype(dtype).name]
    names = {"k": name, "v": name}
    if "=" in name or "," in name:
        parts = [part.strip().partition("=") for part in name.split(",")]
        if sorted(key for key, _, _ in parts) != ["k", "v"] or not all(value for _, _, value in parts):
            raise ConfigError(f"KV cache format {name!r}: give k=FORMAT,v=FORMAT, each once, or one FORMAT for both")
        names = {key: value for key, _, value in parts}
    try:
        k, v = (kv_formats.parse_format(names[key].strip(), config.head_dim) for key in ("k", "v"))
    except ValueError as e:
        raise ConfigError(f"KV cache format {name!r}: {e}") from None
    if isinstance(k, Kivi) and names["k"] == names["v"] == name:
        v = k.of_values()
        if not v.fits(config.head_dim):
            raise ConfigError(
                f"KV cache format {name!r}: V has groups of {k.group} along the head dim {config.head_dim}, which they "
                f"do not divide; give k={name},v=FORMAT"
            )
    _check_values(k, v)
    if "float64" in (k.dtype, v.dtype) and not jax.config.jax_enable_x64:
        raise ConfigError(f"KV cache format {name!r}: f64 needs JAX's 64-bit mode (jax.enable_x64)")
    return k, v


def _check_values(k: KVFormat, v: KVFormat) -> tuple[KVFormat, KVFormat]:
    if isinstance(v, Kivi):
        raise ConfigError(
            f"KV format {v.name} is per channel, for K alone: give V a format per token, such as {v.of_values().name}"
        )
    return k, v


def shared_block(kv_cache: KVCache | None, config: LlamaConfig) -> int:
    """Returns the number of tokens that a shared prefix's length must be a multiple of (Kivi.residual). It is 1 where
    the pages hold all tokens."""
    k, _ = parse_kv_cache("bf16" if kv_cache is None else kv_cache, config, "bfloat16")
    return k.residual if isinstance(k, Kivi) else 1


def least_page(kv_cache: KVCache | None, config: LlamaConfig) -> int:
    """Returns the number of tokens that a page size must be a multiple of (Kivi.group). It is 1 where any page size
    will do."""
    k, _ = parse_kv_cache("bf16" if kv_cache is None else kv_cache, config, "bfloat16")
    return k.group or 1 if isinstance(k, Kivi) else 1


def make_tails(
    config: LlamaConfig,
    formats: tuple[KVFormat, KVFormat],
    dtype: Any,
    slots: int,
    page_size: int,
    width: int = 1,
) -> Tails | None:
    """Returns empty tails of S slots in a float dtype if K is stored as Kivi, else None. On a mesh each device has the
    tails of its KV heads. `width` is the most rows of a short segment. Raises ConfigError for pages that do not hold
    whole groups."""
    k, _ = formats
    if not isinstance(k, Kivi):
        return None
    if page_size % (k.group or 1):
        raise ConfigError(
            f"KV format {k.name} has groups of {k.group} tokens, each in one page: page_size must be a multiple of "
            f"{k.group}, not {page_size}"
        )
    fmt = KVFormat(jnp.dtype(dtype).name)
    sizes = slots, stored_kv_heads(config), config.head_dim, k.residual + width - 1
    return _on_devices(lambda: allocate_tail(*sizes, fmt, config.num_layers), config)


def with_tails(cache: Cache, tails: Tails | None) -> Cache:
    """Returns the cache with its tails, as layers take it."""
    return replace(cache, tail=tails)


def without_tails(cache: Cache) -> tuple[Cache, Tails | None]:
    """Returns the cache and its tails apart: the inverse of with_tails."""
    return replace(cache, tail=None), cache.tail


def make_cache(config: LlamaConfig, num_pages: int, page_size: int, formats: tuple[KVFormat, KVFormat]) -> Cache:
    """Returns an empty cache: N pages of P tokens for each layer. On a mesh each device has the pages of its KV
    heads."""
    sizes = (num_pages, stored_kv_heads(config), page_size, config.head_dim)
    return _on_devices(lambda: kv_pages.allocate(*sizes, *formats, layers=config.num_layers), config)


def _on_devices[T](allocate: Callable[[], T], config: LlamaConfig) -> T:
    """Returns the result of allocate(). On a mesh each device allocates the part of its KV heads."""
    if config.mesh is None:
        return allocate()
    return jax.jit(allocate, out_shardings=NamedSharding(config.mesh, HEADS))()


def cache_bytes(cache: Cache) -> int:
    """Returns the bytes that a cache holds, scales included."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))


COPIES = 16  # the most pages that one call of jit_copy_pages copies


@shaped
def copy_pages(pools: tuple[Cache, ...], pages: Int32[Array, "n 2"]) -> tuple[Cache, ...]:
    """Copies pages in every layer of every pool, each from one to another. Reads all pages before it writes any.

    Entries whose target is out of range are dropped. jit_copy_pages donates the pools. The host calls it before a step
    whose plan has copies, so that steps without copies do not change.
    """

    def copy(part: Pages) -> Pages:
        source, target = part.rows_of_all(pages[:, 0]), part.rows_of_all(pages[:, 1])

        def moved(pool: jax.Array) -> jax.Array:
            rows = pool.at[source].get(mode="clip")
            return pool.at[target].set(rows, mode="drop", unique_indices=True, wrap_negative_indices=False)

        return jax.tree.map(moved, part)

    return tuple(replace(cache, k=copy(cache.k), v=copy(cache.v)) for cache in pools)


jit_copy_pages = partial(jax.jit, donate_argnames="pools")(copy_pages)


def distinct(cache: Cache, config: LlamaConfig) -> Cache:
    """Returns the cache of a mesh with each KV head once: [L N, K, ...]."""
    copies = stored_kv_heads(config) // config.num_kv_heads
    return cache if copies == 1 else jax.tree.map(lambda x: x[:, ::copies], cache)


def repeated(cache: Any, config: LlamaConfig) -> Any:
    """Returns a cache on the host with each KV head as often as the mesh has it: the inverse of distinct."""
    copies = stored_kv_heads(config) // config.num_kv_heads
    return cache if copies == 1 else jax.tree.map(lambda x: np.repeat(x, copies, axis=1), cache)
