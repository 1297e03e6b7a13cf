"""Times steps of a given size, for every experiment on whole steps.

A step decodes one token of each slot, or computes chunks of prompts. Slots have their own pages in one pool. Steps
compile before the first is timed, as compiling measures too (XLA's autotuning). Then they are dispatched one after the
other: each takes the state that the previous one left. They are timed together by the host's clock.
"""

import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jllm.config import LlamaConfig
from jllm.errors import ConfigError
from jllm.files.hf_config import load_config
from jllm.model.cache import cache_bytes, make_cache, make_tails, parse_kv_cache
from jllm.model.layers import stack_layers
from jllm.model.param_specs import init_params, param_specs
from jllm.model.params import EMBED, HEAD, Params, layer_prefix
from jllm.model.sampling import Draws
from jllm.model.shards import random_share
from jllm.parallel.memory import is_host
from jllm.parallel.ranks import REPLICATED, place, placed_shapes
from jllm.programs.compiler import Compiled, Compiler, Recipe
from jllm.programs.packed_step import Layout, jitted, pack_chunks
from jllm.programs.tracing import usual_processes
from jllm.quant.quantize import check_shapes, formats_by_weight, quantize
from jllm.quant.schemes import PLAIN, Formats, Scheme
from jllm.step.batch import PromptChunk
from jllm.step.buckets import Bucket
from jllm.step.state import SPREAD, Slots, State, Variant, make_slots, place_state

KINDS = ("decode", "prefill")
UNLIMITED = 1 << 30  # tokens of a sequence


def model_config(path: str, layers: int | None) -> LlamaConfig:
    """Returns the shapes of a config.json, with only its first `layers` layers if given. Raises ConfigError if it has
    fewer."""
    config = load_config(Path(path))
    if layers is not None and layers > config.num_layers:
        raise ConfigError(f"--layers {layers}: {path} has {config.num_layers}")
    return config if layers is None else replace(config, num_layers=layers, windows=config.windows[:layers])


def random_params(config: LlamaConfig, dtype: str, scheme: str = "bf16") -> Params:
    """Returns weights on one device, or on the config's mesh, where every device makes its own shard. A layer is
    quantized before the next one is made. So sources only leave gaps of a layer's size between the kept arrays. Raises
    QuantizationError, before any is made, for a scheme that does not fit the whole model."""
    key, stored, shapes = jax.random.key(0), jnp.dtype(dtype), param_specs(config)
    formats = formats_by_weight(shapes, scheme)
    check_shapes(shapes, formats)

    def made(i: int, params: Params) -> Params:
        return params if scheme == "bf16" else quantize(params, scheme_of_layer(formats, i), donate=True)

    if config.mesh is not None:
        return random_share(config, key, stored, made)
    if scheme == "bf16":
        return init_params(config, key, stored)

    def layer(i: int) -> Params:
        small = replace(config.one_layer(i), vocab_size=1 if i else config.vocab_size)
        return made(i, init_params(small, jax.random.fold_in(key, i), stored))

    first, *others = map(layer, range(config.num_layers))
    return replace(first, layers=(*first.layers, *(each.layers[0] for each in others)))


def scheme_of_layer(formats: Mapping[str, Formats], layer: int) -> Scheme:
    """Returns the scheme of one layer that is made as layer 0 of its own model. It has the whole model's formats of
    that layer, of the embedding and of the head."""
    own, first = layer_prefix(layer), layer_prefix(0)
    return Scheme(
        f"layer {layer}",
        tuple(
            (name.replace(own, first), "|".join(fmt.name for fmt in found) or PLAIN)
            for name, found in formats.items()
            if name.startswith(own) or name in (EMBED, HEAD)
        ),
    )


# The inputs of a step


def layout_of(decodes: int = 0, tokens: int = 0, prompts: int = 0) -> Layout:
    """Returns a step that decodes that many slots, and computes that many tokens of prompts."""
    return Layout(Bucket(decodes, tokens, prompts), deltas=8)


def chunk_of(slot: int, start: int, tokens: int, length: int, adapter: int = -1) -> PromptChunk:
    """Returns a chunk of a prompt of `length` tokens. It samples after its last token, and never ends."""
    ids = [i % 97 for i in range(start, start + tokens)]
    limit = {"max_length": UNLIMITED, "adapter": adapter}
    return PromptChunk(slot, ids, start, start + tokens == length, prompt_len=length, sampling=limit)


def step_of(
    kind: str, batch: int, prompt: int = 0, adapters: tuple[int, ...] | None = None
) -> tuple[Layout, np.ndarray]:
    """Returns layout and buffer of a step that decodes all slots, or computes a whole prompt of each. `adapters` are
    those of the slots, if the params have some."""
    if kind == "decode":
        layout = replace(layout_of(batch), adapters=adapters is not None)
        return layout, pack_chunks(layout, decodes=range(batch))
    layout = replace(layout_of(tokens=batch * prompt, prompts=batch), adapters=adapters is not None)
    own = adapters or (-1,) * batch
    return layout, pack_chunks(layout, [chunk_of(slot, 0, prompt, prompt, own[slot]) for slot in range(batch)])


def filled_slots(slots: int, pages_each: int, context: int, adapters: tuple[int, ...] | None = None) -> Slots:
    """Returns slots that all run, with `context` tokens in their own pages, and their adapters if there are any."""
    empty = make_slots(slots, pages_each, adapters=adapters is not None)
    sampling = empty.sampling if adapters is None else replace(empty.sampling, adapter=jnp.asarray(adapters, jnp.int32))
    return Slots(
        token=jnp.arange(slots, dtype=jnp.int32),
        length=jnp.full(slots, context, jnp.int32),
        done=jnp.zeros(slots, bool),
        pages=jnp.arange(slots * pages_each, dtype=jnp.int32).reshape(slots, pages_each),
        sampling=replace(sampling, max_length=jnp.full(slots, UNLIMITED, jnp.int32)),
    )


@dataclass(frozen=True)
class Pool:
    """Slots and the pages that they share."""

    slots: int
    pages_each: int  # most pages of a slot
    page_size: int
    kv_cache: str | None  # KV format; None: the weights' dtype
    pages: int | None = None  # None: as many as all slots may have
    adapters: tuple[int, ...] | None = None  # of the slots, if the params have some

    def state(self, config: LlamaConfig, dtype: Any, context: int = 0) -> State:
        """Returns a state with all slots at `context` tokens."""
        pages = self.slots * self.pages_each if self.pages is None else self.pages
        formats = parse_kv_cache(self.kv_cache, config, dtype)
        cache = make_cache(config, pages, self.page_size, formats)
        tails = make_tails(config, formats, dtype, self.slots, self.page_size)
        return place_state(State(cache, self.filled(context), tails=tails), config)

    def filled(self, context: int) -> Slots:
        """Returns its slots at `context` tokens."""
        return filled_slots(self.slots, self.pages_each, context, self.adapters)


def pool_for(batch: int, tokens: int, page_size: int, kv_cache: str | None) -> Pool:
    """Returns a pool with room for that many tokens in each slot."""
    return Pool(batch, -(-tokens // page_size), page_size, kv_cache)


def page_bytes(config: LlamaConfig, dtype: Any, page_size: int, kv_cache: str | None) -> int:
    """Returns the bytes of one page in all layers, scales included."""
    return cache_bytes(jax.eval_shape(lambda: Pool(1, 1, page_size, kv_cache).state(config, dtype).cache))


# Timing


def stopwatch() -> Callable[[str], None]:
    """Returns a function that prints a run's progress, with the seconds so far."""
    start = time.perf_counter()
    return lambda text: print(f"{time.perf_counter() - start:.0f} s: {text}", file=sys.stderr, flush=True)


class StepTimer:
    """Steps of one model over one pool, with weights as an engine's steps take them, that return what `taps` name.
    `renew` makes the state."""

    taps: tuple[str, ...] = ()

    def __init__(self, params: Params, config: LlamaConfig, pool: Pool, backend: str | None = None):
        self.params, self.config, self.pool, self.backend = stack_layers(params, config), config, pool, backend
        self.state: State | None = None

    def renew(self) -> None:
        """Makes a fresh state. The old one, which a failed step may have lost, is dropped first."""
        self.state = None
        self.state = self.pool.state(self.config, self.params.dtype)

    def call(self, layout: Layout) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns packed_step's arguments and static ones. Of state and buffer they are the shapes."""
        state = jax.eval_shape(lambda: self.pool.state(self.config, self.params.dtype))
        state = placed_shapes(state, self.config, SPREAD)
        buffer = jax.ShapeDtypeStruct((layout.size,), np.int32)
        variant = Variant(draws=Draws.GREEDY, adapters=self.params.adapters is not None, taps=self.taps)
        static = {"config": self.config, "layout": layout, "backend": self.backend, "variant": variant}
        return (self.params, state, buffer), static

    def lower(self, layout: Layout) -> jax.stages.Lowered:
        arguments, static = self.call(layout)
        return jitted(layout, self.backend).lower(*arguments, **static)

    def recipe(self, layout: Layout) -> Recipe:
        """Returns how a step is traced here, and unless it is a mesh's, in another process."""
        elsewhere = partial(self.call, layout) if self.config.mesh is None else None
        return Recipe(partial(self.lower, layout), step=elsewhere)

    def place(self, context: int, slots: int | None = None, pages_each: int | None = None) -> None:
        """Gives the first slots `context` tokens in their own pages; the others are empty. The defaults are all slots,
        and all pages that a slot may have."""
        assert self.state is not None
        count, each = slots or self.pool.slots, pages_each or self.pool.pages_each
        slot = jnp.arange(self.pool.slots, dtype=jnp.int32)[:, None]
        page = jnp.arange(self.pool.pages_each, dtype=jnp.int32)[None, :]
        filled = self.pool.filled(context)
        pages = jnp.where((slot < count) & (page < each), slot * each + page, 0)
        slots_now = replace(filled, pages=pages, done=slot[:, 0] >= count)
        self.state = replace(self.state, slots=place(slots_now, self.config, REPLICATED))

    def run(self, step: Callable[..., Any], buffers: Sequence[jax.Array]) -> jax.Array:
        """Dispatches a step on each buffer. Returns the last one's tokens without waiting for them."""
        for buffer in buffers:
            self.state, outputs = step(self.params, self.state, buffer)
        return outputs.tokens

    def repeated(self, step: Callable[..., Any], buffer: np.ndarray, context: int, steps: int = 1) -> Callable[[], Any]:
        """Returns a function that runs `steps` steps on one buffer, and returns the last one's tokens. All slots are at
        `context` tokens at its first call. Later calls continue from the previous one."""
        self.renew()
        self.place(context)
        buffers = [place(jax.device_put(buffer), self.config, REPLICATED)] * steps
        return lambda: self.run(step, buffers)

    def seconds(self, step: Callable[..., Any], buffers: Sequence[jax.Array], tokens: int) -> float:
        """Returns the seconds of a step on each buffer, timed together. The slots are restored. Raises RuntimeError if
        the last step makes another number of tokens."""
        assert self.state is not None
        slots = self.state.slots
        self.state = replace(self.state, slots=jax.tree.map(jnp.copy, slots))  # they are donated
        jax.block_until_ready(self.state)
        start = time.perf_counter()
        made = jax.block_until_ready(self.run(step, buffers))
        seconds = time.perf_counter() - start
        self.state = replace(self.state, slots=slots)
        if (count := int((np.asarray(made) >= 0).sum())) != tokens:
            raise RuntimeError(f"a step made {count} tokens instead of {tokens}")
        return seconds

    def runs(self, step: Callable[..., Any], buffers: Sequence[jax.Array], tokens: int, repeats: int) -> list[float]:
        """Returns the seconds of each of several such runs."""
        return [self.seconds(step, buffers, tokens) for _ in range(repeats)]

    def one(self, step: Callable[..., Any], buffer: np.ndarray, tokens: int, steps: int, repeats: int) -> float:
        """Returns the seconds of one step on the same buffer: the best run after a slower first one."""
        buffers = [place(jax.device_put(buffer), self.config, REPLICATED)] * steps
        self.seconds(step, buffers, tokens)
        return min(self.runs(step, buffers, tokens, repeats)) / steps


def compile_ahead[K: Hashable](recipes: Mapping[K, Recipe], threads: int) -> dict[K, Future[jax.stages.Compiled]]:
    """Compiles programs in threads, and waits for all. For a GPU other processes trace steps, as when an engine starts.
    A program's error raises when its result is read."""
    steps = sum(recipe.step is not None for recipe in recipes.values())
    processes = 0 if is_host() else min(usual_processes(), steps)
    compiler = Compiler(Compiled(), progress=False, processes=processes, tells=False, threads=threads)
    try:
        found = {key: compiler.add(recipe) for key, recipe in recipes.items()}
        wait(found.values())
    finally:
        compiler.close()
    return found


def decode_steps(
    params: Params, config: LlamaConfig, batch: int, context: int, steps: int, kv_cache: str | None = None
) -> Callable[[], jax.Array]:
    """Returns a function that runs `steps` decode steps of slots that begin at `context` tokens. It may be called 16
    times."""
    return decoding_at(params, config, batch, context, steps, kv_cache)(context)


def decoding_at(
    params: Params, config: LlamaConfig, batch: int, longest: int, steps: int, kv_cache: str | None = None
) -> Callable[[int], Callable[[], jax.Array]]:
    """Returns a function that gives such functions by context, up to `longest`, for one compiled step. Only the latest
    one stays valid."""
    timer = StepTimer(params, config, pool_for(batch, longest + 16 * steps, 16, kv_cache))
    layout, buffer = step_of("decode", batch)
    step = timer.lower(layout).compile()
    return lambda context: timer.repeated(step, buffer, context, steps)
