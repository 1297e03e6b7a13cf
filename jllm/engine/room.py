"""Estimates the device memory that an engine takes before it allocates: how many pages fit, and which options would
fit."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jllm.config import LlamaConfig
from jllm.engine.options import EngineOptions, drafter_of, resolve
from jllm.errors import ConfigError, NoRoomError, QuantizationError
from jllm.files.fit import SCHEMES, page_bytes, step_bytes, trial_bytes, would_fit
from jllm.model.adapters import choose_targets, empty_slots
from jllm.model.cache import make_tails, parse_kv_cache
from jllm.model.params import Params, tree_bytes
from jllm.model.sampling import words
from jllm.model.taps import resolve_taps, tap_numbers
from jllm.parallel.memory import gib, is_host
from jllm.programs.sizes import EngineSizes
from jllm.programs.step_room import largest
from jllm.quant.quantize import quantize, weight_formats
from jllm.speculative.forced import coming_tokens
from jllm.speculative.tree import chain
from jllm.step.buckets import Bucket
from jllm.step.state import make_slots

CPU_CACHE_BYTES = 1 << 30  # default bytes of pages if other programs share the memory, or its size is unknown
SHARE = 0.05  # the most of free memory that is left beside pages, slots and a step
SLACK = 1 << 30  # bytes for uses not counted here, where less than the share is enough
TRIALS = 2  # programs that XLA tries products of at once; more wait (compiler.py)
KV_FORMATS = ("int8-g8", "int4-g32")  # proposed formats, the more accurate one first


@dataclass(frozen=True)
class Need:
    """Holds the bytes that an engine takes beside the weights."""

    pool: int
    slots: int
    step: int  # an estimate of the largest step

    @property
    def total(self) -> int:
        return self.pool + self.slots + self.step


def sizes_for(options: EngineOptions, config: LlamaConfig, params: Params, free: int | None) -> EngineSizes:
    """Returns the engine's sizes for a device with `free` bytes beside the weights. The default is as many pages as
    fit, but at least one a slot."""
    return _reckon(options, config, params.dtype, free)[0]


def check_room(options: EngineOptions, config: LlamaConfig, params: Params, free: int | None) -> None:
    """Raises NoRoomError if the pages and the largest step take more than is free. Its message names options that would
    fit."""
    if free is None:
        return
    sizes, need = _reckon(options, config, params.dtype, free)
    if need.total <= free:
        return
    limits, bucket = sizes.limits, largest(sizes.buckets)
    pool = f"{limits.num_pages} KV pages of {limits.page_size} tokens take {gib(need.pool)}"
    step = f"a step of {bucket.decodes} decodes and {bucket.tokens} prompt tokens about {gib(need.step + need.slots)}"
    found = list(_options_that_fit(options, config, params, free, sizes))
    otherwise = "no option alone would make it fit: it takes a smaller model or a larger device"
    raise NoRoomError(
        f"{pool}, {step}: {gib(need.total)} in all, and the device has {gib(free)} free beside the weights; "
        f"{would_fit(found, otherwise)}"
    )


def _reckon(options: EngineOptions, config: LlamaConfig, dtype: Any, free: int | None) -> tuple[EngineSizes, Need]:
    """Returns the sizes and the bytes that they take. The default is as many pages as fit."""
    page = page_bytes(config, dtype, options.kv_cache, options.page_size) + _draft_bytes(options, config, dtype)
    buckets = resolve(options, config, 0).buckets
    step = max(step_bytes(config, dtype, bucket) for bucket in (largest(buckets), *buckets))
    pages = CPU_CACHE_BYTES // page
    if free is not None:
        spare = min(int(SHARE * free), SLACK + TRIALS * trial_bytes(config, dtype, largest(buckets)))
        fits = _affordable(options, config, dtype, page, free - spare - step)
        pages = min(pages, fits) if is_host() else fits
    sizes = resolve(options, config, pages)
    slots = _slot_bytes(options, config, dtype, sizes.max_pages)
    return sizes, Need(sizes.limits.num_pages * page, slots, step)


def _draft_bytes(options: EngineOptions, config: LlamaConfig, dtype: Any) -> int:
    """Returns the bytes of one page in a drafter's pools."""
    drafter = drafter_of(options)
    if drafter is None:
        return 0
    sizes = {"slots": 1, "num_pages": 1, "page_size": options.page_size, "max_tokens": options.page_size}
    return tree_bytes(jax.eval_shape(lambda: drafter.init(config, dtype, **sizes)[0]))


def _slot_bytes(options: EngineOptions, config: LlamaConfig, dtype: Any, max_pages: int) -> int:
    """Returns the bytes of slots, and of places for adapters."""
    found = tree_bytes(jax.eval_shape(lambda: make_slots(options.max_slots, max_pages)))
    if options.adapter_places:
        places = choose_targets(config, options.adapter_targets), options.adapter_places, options.rank, dtype
        found += tree_bytes(jax.eval_shape(lambda: empty_slots(*places, config)))
    drafter = drafter_of(options)
    if options.hooks is not None:
        hooks, slots = options.hooks, options.max_slots
        found += tree_bytes(jax.eval_shape(lambda: (hooks.start(slots), hooks.no_inputs(slots))))
    if options.taps:  # the newest step's values, and those that are on their way to the host
        limits = resolve(options, config, options.max_slots).limits
        names = resolve_taps(options.taps, config.num_layers)
        numbers = sum(tap_numbers(name, config) for name in names)
        found += 2 * (limits.tap_rows or 0) * numbers * jnp.dtype(dtype).itemsize
    formats, rows = parse_kv_cache(options.kv_cache, config, dtype), 1 if drafter is None else drafter.tree.size
    tails = dtype, options.max_slots, options.page_size, rows
    found += tree_bytes(jax.eval_shape(lambda: make_tails(config, formats, *tails)))
    if drafter is not None:  # the drafter's memory
        sizes = {"num_pages": 1, "page_size": options.page_size, "max_tokens": max(1, max_pages) * options.page_size}
        found += tree_bytes(jax.eval_shape(lambda: drafter.init(config, dtype, slots=options.max_slots, **sizes)[1]))
    tree = chain(0) if drafter is None else drafter.tree  # each node has a mask while requests use guides
    return found + 4 * options.max_slots * (tree.size * words(config.vocab_size) + coming_tokens(tree))


def _affordable(options: EngineOptions, config: LlamaConfig, dtype: Any, page: int, room: int) -> int:
    """Returns the most pages of `page` bytes that fit into `room` bytes together with the slots.

    A slot's table has an entry for each page, up to the pages of the whole context.
    """
    entries, whole = 4 * options.max_slots, -(-config.context // options.page_size)
    room -= _slot_bytes(options, config, dtype, 0)
    return max(0, room // (page + entries), (room - entries * whole) // page)


def _options_that_fit(
    options: EngineOptions, config: LlamaConfig, params: Params, free: int, sizes: EngineSizes
) -> Iterator[str]:
    """Yields changes of one option that make the engine fit, each with the bytes that it then takes."""
    dtype, limits = params.dtype, sizes.limits

    def total(changes: Mapping[str, Any], free: int = free) -> int | None:
        """Returns the least bytes that the engine takes with the changes; None if it does not fit."""
        try:
            need = _reckon(replace(options, **changes), config, dtype, 0)[1].total
        except ConfigError:
            return None
        return need if need <= free else None

    if options.num_pages is not None:
        need = _reckon(options, config, dtype, free)[1]
        pages = _affordable(options, config, dtype, need.pool // limits.num_pages, free - need.step)
        if pages >= limits.max_slots:
            yield f"num_pages={pages} ({gib(total({'num_pages': pages}) or free)})"
    for name in KV_FORMATS:
        size = total({"kv_cache": name})
        if size is not None:
            yield f"kv_cache={name} ({gib(size)})"
            break
    for name, most in (("max_slots", limits.max_slots), ("max_step_tokens", limits.max_step_tokens)):
        while (most := most // 2) >= 1:
            buckets = options.buckets and _clipped(options.buckets, name, most, limits.max_slots)
            size = total({name: most, "buckets": buckets})
            if size is not None:
                yield f"{name}={most} ({gib(size)})"
                break
    if not weight_formats(params):
        for scheme in SCHEMES:
            less = _saved(params, scheme)
            if less > 0 and total({}, free + less) is not None:
                yield f"a model loaded with quantize={scheme} (its weights take {gib(less)} less)"
                break


def _clipped(buckets: tuple[Bucket, ...], name: str, most: int, slots: int) -> tuple[Bucket, ...]:
    """Returns the caller's buckets, cut to fewer slots or fewer tokens in a step."""
    if name == "max_slots":
        clipped = [Bucket(min(b.decodes, most), b.tokens, min(b.chunks, most)) for b in buckets]
    else:
        clipped = [Bucket(b.decodes, min(b.tokens, max(1, most - slots)), b.chunks) for b in buckets]
    return tuple(dict.fromkeys(clipped))


def _saved(params: Params, scheme: str) -> int:
    """Returns the bytes by which a scheme shrinks the weights; 0 if it does not fit them."""
    plain = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    try:
        return tree_bytes(plain) - tree_bytes(quantize(plain, scheme))
    except QuantizationError:
        return 0
