"""Takes the KV cache of one sequence out of its pages as a value. It can be cut, edited, saved, or put into pages
again.

The pages may be of this cache or another. A snapshot holds K and V bit for bit as stored, scales included. It is a
cache of one page that is as long as the sequence. So all code that reads pages reads a snapshot, and its next cache may
have another page size. All functions except save_snapshot and load_snapshot are pure, and take numpy arrays as well as
jax ones.

    snapshot = take(state.cache, pages, tokens)             # while the tokens' K and V are in these pages
    state = replace(state, cache=put(state.cache, other_pages, snapshot))
    batch = ragged_batch([PromptChunk(1, more, snapshot.length, pages=other_pages)])

Several sequences can start from one snapshot: each is a fork of it, and the snapshot stays as it was.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Integral
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from jllm.errors import CheckpointError, SnapshotError, counted
from jllm.files.safetensors_io import NAMES, read_as_stored, read_header, read_metadata, write_file
from jllm.model.backbone import Cache
from pallas_kernels.formats.kv_formats import Kivi, KVFormat, dim_of, parse_format
from pallas_kernels.formats.kv_pages import KVPages, Pages

KIND = "jllm-kv-snapshot"
SEVERAL = "several"  # Snapshot.weights of K and V that are partly of older weights
INPUT = "inputs."  # before the names of a request's own arrays in a file
OWN = frozenset({"kind", "k_format", "v_format", "weights", "guided"})  # reserved metadata of a file


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Snapshot:
    """Holds K and V of a sequence's first T tokens, and its L >= T tokens. The newest one has no K and V yet."""

    tokens: Any  # i32[L]
    cache: Cache  # one page of T tokens for each layer: values [L, K, T, D], scales [L, K, T * G]
    # Fingerprint of the model that made it (fingerprint.of_function). None: unknown, and any model may resume it.
    weights: str | None = field(default=None, metadata={"static": True})
    # The token at which the guided text begins; the guide continues when it is resumed with one. None: it had none.
    guided: int | None = field(default=None, metadata={"static": True})
    inputs: Mapping[str, Any] | None = None  # the request's own arrays by name, which decided about K and V

    @property
    def length(self) -> int:
        """Returns T: the number of tokens whose K and V are in it."""
        return self.cache.k.page_size

    @property
    def ready(self) -> bool:
        """Returns True: K and V are here. (Pages of another device may still be on their way.)"""
        return True


def take(cache: Cache, pages: Sequence[int], tokens: Sequence[int], length: int | None = None) -> Snapshot:
    """Returns a snapshot of the first `length` tokens (default: all of `tokens`) of the sequence in `pages`, in this
    order.

    Raises SnapshotError if the pages hold fewer tokens, or one of them is not in the cache.
    """
    length = len(tokens) if length is None else length
    _check_pages(cache, pages, length)
    if not 0 <= length <= len(tokens):
        raise SnapshotError(f"length must be in [0, {len(tokens)}], the number of tokens, not {length}")
    _check_blocks(cache, length)
    return join(gather_pages(cache, jnp.asarray(pages, jnp.int32)), tokens, length)


def put(cache: Cache, pages: Sequence[int], snapshot: Snapshot) -> Cache:
    """Returns the cache with the snapshot's K and V in `pages`, in this order. The rest of the last page becomes zero.

    Raises SnapshotError for a snapshot of other shapes or formats. Raises it for pages that are too few, duplicate, or
    not in the cache. The caller must make sure that the snapshot was made with the same weights.
    """
    check_fits(snapshot, cache)
    _check_pages(cache, pages, snapshot.length)
    _check_blocks(cache, snapshot.length)
    size = cache.k.page_size
    count = -(-snapshot.length // size)
    return scatter_pages(cache, jnp.asarray(pages[:count], jnp.int32), split(snapshot, size, count))


def cut(snapshot: Snapshot, length: int) -> Snapshot:
    """Returns the snapshot of the first `length` tokens alone: a fork from an earlier point. Raises SnapshotError
    beyond its end."""
    if not 0 <= length <= snapshot.length:
        raise SnapshotError(f"a snapshot of {snapshot.length} tokens has no first {length}")
    guided = None if snapshot.guided is None else min(snapshot.guided, length)
    kept: dict[str, Any] = {"weights": snapshot.weights, "guided": guided, "inputs": snapshot.inputs}
    return replace(join(snapshot.cache, snapshot.tokens[:length], length), **kept)


def check_fits(snapshot: Snapshot, cache: Cache) -> None:
    """Raises SnapshotError unless the snapshot has the cache's layers, heads, head dim and formats."""
    if len(snapshot.cache) != len(cache):
        raise SnapshotError(f"the snapshot has {len(snapshot.cache)} layers, the cache {len(cache)}")
    ours, theirs = _shape(snapshot.cache), _shape(cache)
    if ours != theirs:
        raise SnapshotError(f"the snapshot has {ours}, the cache {theirs}")


def check_guided(snapshot: Snapshot) -> None:
    """Raises SnapshotError unless its guide, if it has one, begins within its tokens or at their end."""
    at, count = snapshot.guided, len(snapshot.tokens)
    if at is not None and not (isinstance(at, Integral) and not isinstance(at, bool) and 0 <= at <= count):
        raise SnapshotError(f"a snapshot's guide begins at a token in [0, {count}], or is None, not {at!r}")


# Conversion between many pages and one


@jax.jit
def gather_pages(cache: Cache, page: jax.Array) -> Cache:
    """Returns a cache of these pages alone, i32[n], in this order."""

    def found(part: Pages) -> Pages:
        rows = part.rows_of_all(page).reshape(-1)
        return jax.tree.map(lambda pool: pool.at[rows].get(mode="clip"), part)

    return replace(cache, k=found(cache.k), v=found(cache.v))


def _scatter_pages(cache: Cache, page: jax.Array, rows: Cache) -> Cache:
    """Returns the cache with page i of `rows` at page[i] (i32[n]). A page outside of the cache is dropped."""

    def put(part: Pages, new: Pages) -> Pages:
        at = part.rows_of_all(page).reshape(-1)
        return jax.tree.map(lambda pool, some: pool.at[at].set(some, mode="drop"), part, new)

    return replace(cache, k=put(cache.k, rows.k), v=put(cache.v, rows.v))


scatter_pages = jax.jit(_scatter_pages)
scatter_pages_donated = partial(jax.jit, donate_argnums=0)(_scatter_pages)


def join(rows: Cache, tokens: ArrayLike, length: int) -> Snapshot:
    """Returns a snapshot of the first `length` tokens of all pages of `rows`, one after another."""

    def one(pages: Pages) -> Pages:
        values, scales = pages.values, pages.scales
        (_, heads, size, row), leading = values.shape, (pages.layers, pages.num_pages)
        values = values.reshape(*leading, *values.shape[1:]).swapaxes(1, 2)
        values = values.reshape(leading[0], heads, leading[1] * size, row)[:, :, :length]
        if scales is not None:
            numbers = pages.format.numbers(pages.head_dim)
            scales = scales.reshape(*leading, *scales.shape[1:]).swapaxes(1, 2)
            scales = scales.reshape(leading[0], heads, leading[1] * size * numbers)[:, :, : length * numbers]
        return replace(pages, values=values, scales=scales)

    return Snapshot(np.asarray(tokens, np.int32), KVPages(one(rows.k), one(rows.v)))


def split(snapshot: Snapshot, page_size: int, count: int) -> Cache:
    """Returns a cache of `count` pages of `page_size` tokens that hold the snapshot one after another, then zeros."""

    def many(pages: Pages) -> Pages:
        values, scales = pages.values, pages.scales
        layers, heads, _, row = values.shape
        values = _padded(values, count * page_size).reshape(layers, heads, count, page_size, row)
        values = values.swapaxes(1, 2).reshape(layers * count, heads, page_size, row)
        if scales is not None:
            flat = page_size * pages.format.numbers(pages.head_dim)
            scales = _padded(scales, count * flat).reshape(layers, heads, count, flat)
            scales = scales.swapaxes(1, 2).reshape(layers * count, heads, flat)
        return replace(pages, values=values, scales=scales)

    return KVPages(many(snapshot.cache.k), many(snapshot.cache.v))


def _padded(x: Any, length: int) -> Any:
    """Returns x with zeros up to `length` along axis 2."""
    xp = x.__array_namespace__()
    return xp.concat([x, xp.zeros((*x.shape[:2], length - x.shape[2], *x.shape[3:]), dtype=x.dtype)], axis=2)


def _shape(cache: Cache) -> str:
    heads, dim = cache.k.values.shape[1], cache.k.head_dim
    return f"{heads} heads of {dim}, k={cache.k.format.name}, v={cache.v.format.name}"


def _check_blocks(cache: Cache, length: int) -> None:
    fmt = cache.k.format
    if isinstance(fmt, Kivi) and length % fmt.residual:
        whole = length - length % fmt.residual
        raise SnapshotError(f"K stored as {fmt.name} leaves its slot in whole blocks: {whole} tokens, not {length}")


def _check_pages(cache: Cache, pages: Sequence[int], length: int) -> None:
    size, count = cache.k.page_size, cache.k.num_pages
    if len(pages) * size < length:
        need = counted(-(-length // size), "page")
        raise SnapshotError(f"{counted(length, 'token')} need {need} of {size}, not {len(pages)}")
    if len(set(pages)) != len(pages) or not all(0 <= page < count for page in pages):
        raise SnapshotError(f"pages must be different ones in [0, {count}), not {list(pages)}")


# Files


def save_snapshot(path: str | Path, snapshot: Snapshot, about: Mapping[str, str] = MappingProxyType({})) -> None:
    """Writes one safetensors file, which load_snapshot reads back bit for bit.

    `about` goes into its metadata beside the snapshot's own, whose names are reserved. The file gets its name once it
    is complete. Raises OutputError if it cannot be written, and SnapshotError for a reserved name.
    """
    check_guided(snapshot)
    if taken := OWN.intersection(about):
        raise SnapshotError(f"{min(taken)!r} is the name of a snapshot's own metadata: give `about` another name")
    arrays, metadata = as_arrays(snapshot)
    write_file(Path(path), arrays, {**about, **metadata})


def load_snapshot(path: str | Path, formats: Iterable[KVFormat] = ()) -> Snapshot:
    """Returns a snapshot as it was saved, in numpy arrays. `formats` are the caller's own formats that it may have.
    Raises SnapshotError for a damaged file, or one with another content."""
    path = Path(path)
    try:
        metadata, stored = read_metadata(path), read_header(path)
        if metadata.get("kind") != KIND:
            raise SnapshotError(f"{path}: not a snapshot of a KV cache: its metadata are {json.dumps(metadata)}")
        arrays = {name: read_as_stored(tensor) for name, tensor in stored.items() if tensor.dtype in NAMES.values()}
    except CheckpointError as error:
        raise SnapshotError(str(error)) from None
    try:
        return from_arrays(arrays, metadata, formats)
    except SnapshotError as error:
        raise SnapshotError(f"{path}: {error}") from None


def as_arrays(snapshot: Snapshot) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Returns a snapshot as a file or a message holds it: arrays of dtypes that safetensors have, by name, and
    metadata."""
    cache = snapshot.cache
    metadata = {"kind": KIND, "k_format": cache.k.format.name, "v_format": cache.v.format.name}
    metadata |= {} if snapshot.weights is None else {"weights": snapshot.weights}
    metadata |= {} if snapshot.guided is None else {"guided": str(snapshot.guided)}
    arrays = {"tokens": np.asarray(snapshot.tokens, np.int32)}
    arrays |= {f"{INPUT}{name}": np.asarray(value) for name, value in (snapshot.inputs or {}).items()}
    for side, pages in (("k", cache.k), ("v", cache.v)):
        for i, values in enumerate(np.asarray(pages.values)):
            arrays[f"layers.{i}.{side}.values"] = values
        for i, scales in enumerate(() if pages.scales is None else np.asarray(pages.scales)):
            arrays[f"layers.{i}.{side}.scales"] = scales
    return arrays, metadata


def from_arrays(arrays: dict[str, np.ndarray], metadata: dict[str, str], formats: Iterable[KVFormat] = ()) -> Snapshot:
    """Returns the snapshot that as_arrays was given. Raises SnapshotError unless the arrays and metadata are a
    snapshot's."""
    try:
        return _assemble(arrays, metadata, {fmt.name: fmt for fmt in formats})
    except (KeyError, ValueError) as error:
        raise SnapshotError(f"garbled snapshot: {error}") from None


def _assemble(arrays: dict[str, np.ndarray], metadata: dict[str, str], own: Mapping[str, KVFormat]) -> Snapshot:
    """Returns the snapshot of from_arrays. Raises ValueError or KeyError for wrong names, shapes or dtypes."""
    tokens, count = arrays["tokens"], len({name.split(".")[1] for name in arrays if name.startswith("layers.")})
    first = arrays["layers.0.k.values"]
    heads, length = first.shape[:2]
    inputs = {name.removeprefix(INPUT): value for name, value in arrays.items() if name.startswith(INPUT)}
    used = {"tokens", *(f"{INPUT}{name}" for name in inputs)}

    def one(i: int, which: str) -> Pages:
        name = f"layers.{i}.{which}"
        values: Any = arrays[f"{name}.values"]  # not a jax.Array, whose dtype depends on JAX's 64-bit mode
        stored = metadata[f"{which}_format"]
        try:
            fmt = own.get(stored) or parse_format(stored, dim_of(stored, values.shape[-1]))
        except ValueError as error:
            raise ValueError(f"{error}; a format of your own must be given: load_snapshot(path, [format])") from None
        dim = values.shape[-1] * 8 * fmt.storage_dtype.itemsize // fmt.bits
        scales: Any = arrays[f"{name}.scales"] if fmt.group else None
        used.update({f"{name}.values"} | ({f"{name}.scales"} if fmt.group else set()))
        if values.shape[:2] != (heads, length) or values.ndim != 3 or values.dtype != fmt.storage_dtype:
            raise ValueError(f"{name}.values is {values.dtype} of shape {list(values.shape)}")
        if scales is not None and (scales.shape, scales.dtype) != ((heads, length * fmt.numbers(dim)), np.float16):
            raise ValueError(f"{name}.scales is {scales.dtype} of shape {list(scales.shape)}")
        return Pages(values, scales, fmt)

    def side(which: str) -> Pages:
        every = [one(i, which) for i in range(count)]
        values: Any = np.stack([each.values for each in every])
        found: list[Any] = [each.scales for each in every]
        scales: Any = None if found[0] is None else np.stack(found)
        return Pages(values, scales, every[0].format, count)

    cache = KVPages(side("k"), side("v"))
    if tokens.dtype != np.int32 or tokens.ndim != 1 or len(tokens) < length:
        raise ValueError(f"tokens is {tokens.dtype} of shape {list(tokens.shape)}, and K and V are of {length}")
    if odd := sorted(arrays.keys() - used):
        raise ValueError(f"{odd[0]} has no place in it")
    guided = int(metadata["guided"]) if "guided" in metadata else None
    if guided is not None and not 0 <= guided <= len(tokens):
        raise ValueError(f"its guide begins at token {guided} of {len(tokens)}")
    return Snapshot(tokens, cache, metadata.get("weights"), guided, inputs or None)
