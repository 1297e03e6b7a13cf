"""The paged KV cache of a whole model: formats by name, allocation, copies of pages, and its size in bytes.

A step writes it, and quantizes K and V as it does, in pallas_kernels.cache_update (kv_formats.encode); who has which
page is the engine's matter (engine/pages.py).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jllm.config import LlamaConfig
from jllm.errors import ConfigError
from jllm.model.shapes import Array, Int32, shaped
from jllm.parallel.mesh import stored_kv_heads
from jllm.parallel.ranks import HEADS
from pallas_kernels.formats import kv_formats, kv_pages
from pallas_kernels.formats.kv_formats import Kivi, KVFormat
from pallas_kernels.formats.kv_pages import KVPages, Tail
from pallas_kernels.formats.kv_tail import allocate_tail

Cache = tuple[KVPages, ...]  # one a layer
Tails = tuple[Tail, ...]  # likewise

DTYPE_NAMES = {dtype: name for name, dtype in kv_formats.FLOATS.items()}


KVCache = str | KVFormat | tuple[KVFormat, KVFormat]  # a name, or formats as objects: of both, or of K and V


def parse_kv_cache(name: KVCache | None, config: LlamaConfig, dtype) -> tuple[KVFormat, KVFormat]:
    """Returns formats of K and V from one name: "int8-g8" for both, "k=int8-g8,v=int4-g32", None for the model's dtype.
    Formats themselves are taken as they are. One of K per channel has V per token beside it."""
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
        raise ConfigError(f"KV format {v.name} is one of K, per channel: V is per token, as {v.of_values().name} is")
    return k, v


def shared_block(kv_cache: KVCache | None, config: LlamaConfig) -> int:
    """Returns the tokens of which what sequences share is a whole multiple (Kivi.residual); 1 where the pages hold
    all."""
    k, _ = parse_kv_cache("bf16" if kv_cache is None else kv_cache, config, "bfloat16")
    return k.residual if isinstance(k, Kivi) else 1


def least_page(kv_cache: KVCache | None, config: LlamaConfig) -> int:
    """Returns the tokens of which a page has a whole multiple (Kivi.group); 1 where any page will do."""
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
    """Returns empty tails of S slots, in a float dtype, where K is stored as Kivi; else None. On a mesh each device has
    those of its KV heads. `width` is the most rows of a short segment. Raises ConfigError for pages that do not hold
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
    return _on_devices(lambda: tuple(allocate_tail(*sizes, fmt) for _ in range(config.num_layers)), config)


def with_tails(cache: Cache, tails: Tails | None) -> Cache:
    """Returns the cache as layers take it."""
    if tails is None:
        return cache
    return tuple(replace(pages, tail=tail) for pages, tail in zip(cache, tails, strict=True))


def without_tails(cache: Cache) -> tuple[Cache, Tails | None]:
    """Returns the reverse."""
    tails = tuple(pages.tail for pages in cache if pages.tail is not None)
    return tuple(replace(pages, tail=None) for pages in cache), tails or None


def make_cache(config: LlamaConfig, num_pages: int, page_size: int, formats: tuple[KVFormat, KVFormat]) -> Cache:
    """Returns an empty cache: for each layer, N pages of P tokens; on a mesh each device has those of its KV heads."""
    sizes = (num_pages, stored_kv_heads(config), page_size, config.head_dim)
    return _on_devices(lambda: tuple(kv_pages.allocate(*sizes, *formats) for _ in range(config.num_layers)), config)


def _on_devices[T](allocate: Callable[[], T], config: LlamaConfig) -> T:
    """Returns what allocate() gives; on a mesh each device makes that of its KV heads."""
    if config.mesh is None:
        return allocate()
    return jax.jit(allocate, out_shardings=NamedSharding(config.mesh, HEADS))()


def cache_bytes(cache: Cache) -> int:
    """Returns bytes that a cache holds, scales included."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))


COPIES = 16  # pages that one call of jit_copy_pages copies at most


@shaped
def copy_pages(cache: Cache, pages: Int32[Array, "n 2"]) -> Cache:
    """Copies pages within every layer's pool, each from one to another; all are read before any is written.

    Entries whose target is out of range are dropped. jit_copy_pages donates the cache; the host calls it before a step
    whose plan has copies, so that steps without any are what they were.
    """
    source, target = pages[:, 0], pages[:, 1]

    def copy(pool: jax.Array) -> jax.Array:
        rows = pool.at[source].get(mode="clip")
        return pool.at[target].set(rows, mode="drop", unique_indices=True, wrap_negative_indices=False)

    return jax.tree.map(copy, cache)


jit_copy_pages = partial(jax.jit, donate_argnames="cache")(copy_pages)
