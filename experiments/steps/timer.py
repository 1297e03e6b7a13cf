"""How long a step of some size takes: every experiment on whole steps times them here.

A step decodes one token of each slot, or computes chunks of prompts. Slots have pages of their own in one pool. Steps
are compiled before the first is timed, since compiling measures too (XLA's autotuning); then they are dispatched one
after the other, each fed by the state that the one before left, and timed together on the host's clock.
"""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jllm.batch import Rung
from jllm.cache import cache_bytes, make_cache, parse_kv_cache
from jllm.checkpoint import init_params
from jllm.config import LlamaConfig, load_config
from jllm.engine.layout import Layout, pack_chunks, packed_step
from jllm.merge_step import Slots, State, make_slots
from jllm.params import Params
from jllm.quant.quantize import quantize

Chunk = tuple[int, int, int]  # slot, position of the first token, tokens
KINDS = ("decode", "prefill")
UNLIMITED = 1 << 30  # tokens of a sequence


def model_config(path: str, layers: int | None) -> LlamaConfig:
    """The shapes of a config.json, cut to its first layers where a number of them is given."""
    config = load_config(Path(path))
    return config if layers is None else replace(config, num_layers=layers, windows=config.windows[:layers])


def random_params(config: LlamaConfig, dtype: str, scheme: str = "bf16") -> Params:
    params = init_params(config, jax.random.key(0), jnp.dtype(dtype))
    return params if scheme == "bf16" else quantize(params, scheme)


# What a step is given


def decode_layout(batch: int) -> Layout:
    return Layout(Rung(batch, 0, 0), deltas=8)


def prefill_layout(prompts: int, tokens: int) -> Layout:
    """One chunk of `tokens` tokens for each prompt."""
    return Layout(Rung(0, prompts * tokens, prompts), deltas=8)


def step_layout(kind: str, batch: int, prompt: int) -> Layout:
    """A step that decodes `batch` slots, or computes as many whole prompts of `prompt` tokens."""
    return decode_layout(batch) if kind == "decode" else prefill_layout(batch, prompt)


def pack(layout: Layout, chunks: Sequence[Chunk] = (), length: int = 0) -> np.ndarray:
    """The buffer of a step in which the first slots decode, or which computes chunks of prompts of `length` tokens,
    each of which samples after its last token."""
    if not chunks:
        return pack_chunks(layout, decodes=range(layout.rung.decodes))
    buffer, batch = layout.pack()
    n = len(chunks)
    batch.tokens[:] = np.arange(layout.rung.tokens) % 97
    batch.chunk_slot[:n], batch.chunk_start[:n], batch.chunk_len[:n] = zip(*chunks)
    batch.chunk_final[:n] = [start + tokens == length for _, start, tokens in chunks]
    batch.prompt_len[:n], batch.sampling.max_length[:n] = length, UNLIMITED
    return buffer


def step_buffer(kind: str, batch: int, prompt: int) -> np.ndarray:
    """The buffer of `step_layout`'s step."""
    chunks = [] if kind == "decode" else [(slot, 0, prompt) for slot in range(batch)]
    return pack(step_layout(kind, batch, prompt), chunks, prompt)


def filled_slots(slots: int, pages_each: int, context: int) -> Slots:
    """Every slot runs, with `context` tokens in pages of its own."""
    empty = make_slots(slots, pages_each)
    return Slots(
        token=jnp.arange(slots, dtype=jnp.int32),
        length=jnp.full(slots, context, jnp.int32),
        done=jnp.zeros(slots, bool),
        pages=jnp.arange(slots * pages_each, dtype=jnp.int32).reshape(slots, pages_each),
        sampling=replace(empty.sampling, max_length=jnp.full(slots, UNLIMITED, jnp.int32)),
    )


@dataclass(frozen=True)
class Pool:
    """Slots and the pages that they share."""

    slots: int
    pages_each: int  # most pages of a slot
    page_size: int
    kv_cache: str | None  # KV format; None: the weights' dtype
    pages: int | None = None  # None: as many as all slots may have

    def state(self, config: LlamaConfig, dtype: Any, context: int = 0) -> State:
        """All slots at `context` tokens."""
        pages = self.slots * self.pages_each if self.pages is None else self.pages
        cache = make_cache(config, pages, self.page_size, parse_kv_cache(self.kv_cache, config, dtype))
        return State(cache, filled_slots(self.slots, self.pages_each, context))


def pool_for(batch: int, tokens: int, page_size: int, kv_cache: str | None) -> Pool:
    """Room for as many tokens in each slot."""
    return Pool(batch, -(-tokens // page_size), page_size, kv_cache)


def page_bytes(config: LlamaConfig, dtype: Any, page_size: int, kv_cache: str | None) -> int:
    """Bytes of one page in all layers, scales included."""
    return cache_bytes(jax.eval_shape(lambda: Pool(1, 1, page_size, kv_cache).state(config, dtype).cache))


# How long it takes


class StepTimer:
    """Steps of one model over one pool. The state is there from `renew` on."""

    def __init__(self, params: Params, config: LlamaConfig, pool: Pool, backend: str | None = None):
        self.params, self.config, self.pool, self.backend = params, config, pool, backend
        self.state: State | None = None

    def renew(self) -> None:
        """A fresh state; the old one, which a failed step may have lost, goes first."""
        self.state = None
        self.state = self.pool.state(self.config, self.params.dtype)

    def lower(self, layout: Layout) -> jax.stages.Lowered:
        state = jax.eval_shape(lambda: self.pool.state(self.config, self.params.dtype))
        buffer = jax.ShapeDtypeStruct((layout.size,), np.int32)
        static = {"config": self.config, "layout": layout, "backend": self.backend}
        return packed_step.lower(self.params, state, buffer, **static)

    def place(self, context: int, slots: int | None = None, pages_each: int | None = None) -> None:
        """Gives the first slots `context` tokens in pages of their own; the others are empty. Without numbers: all
        slots, and all pages that a slot may have."""
        assert self.state is not None
        count, each = slots or self.pool.slots, pages_each or self.pool.pages_each
        slot = jnp.arange(self.pool.slots, dtype=jnp.int32)[:, None]
        page = jnp.arange(self.pool.pages_each, dtype=jnp.int32)[None, :]
        filled = filled_slots(self.pool.slots, self.pool.pages_each, context)
        pages = jnp.where((slot < count) & (page < each), slot * each + page, 0)
        self.state = replace(self.state, slots=replace(filled, pages=pages, done=slot[:, 0] >= count))

    def run(self, step: Callable[..., Any], buffers: Sequence[jax.Array]) -> jax.Array:
        """Dispatches a step on each buffer; returns the tokens of the last, before they are there."""
        for buffer in buffers:
            self.state, outputs = step(self.params, self.state, buffer)
        return outputs.tokens

    def seconds(self, step: Callable[..., Any], buffers: Sequence[jax.Array], tokens: int) -> float:
        """Times a step on each buffer, together; the slots are as before then. Raises RuntimeError where the last makes
        another number of tokens."""
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

    def best(self, step: Callable[..., Any], buffers: Sequence[jax.Array], tokens: int, repeats: int) -> float:
        """Seconds of the fastest of several such runs."""
        return min(self.seconds(step, buffers, tokens) for _ in range(repeats))

    def one(self, step: Callable[..., Any], buffer: np.ndarray, tokens: int, steps: int, repeats: int) -> float:
        """Seconds of one step: of as many on the same buffer, the best run after a first, which takes longer."""
        buffers = [jax.device_put(buffer)] * steps
        self.seconds(step, buffers, tokens)
        return self.best(step, buffers, tokens, repeats) / steps


def compile_ahead[K: Hashable](
    lower: Mapping[K, Callable[[], jax.stages.Lowered]], threads: int
) -> dict[K, Future[jax.stages.Compiled]]:
    """Compiles each in threads. It is traced here, since JAX's settings belong to the thread that traces; what raises
    there raises again where its result is asked for."""
    found: dict[K, Future[jax.stages.Compiled]] = {}
    with ThreadPoolExecutor(threads) as executor:
        for key, make in lower.items():
            try:
                found[key] = executor.submit(make().compile)
            except Exception as error:
                found[key] = Future()
                found[key].set_exception(error)
    return found


def repeated(timer: StepTimer, kind: str, prompt: int, context: int, steps: int) -> Callable[[], jax.Array]:
    """A function that runs as many steps and returns the tokens of the last: each slot goes on from where the last call
    left it, or computes the same prompt anew."""
    batch = timer.pool.slots
    step = timer.lower(step_layout(kind, batch, prompt)).compile()
    buffers = [jax.device_put(step_buffer(kind, batch, prompt))] * steps
    timer.renew()
    timer.place(context if kind == "decode" else 0)
    return lambda: timer.run(step, buffers)


def decode_steps(
    params: Params, config: LlamaConfig, batch: int, context: int, steps: int, kv_cache: str | None = None
) -> Callable[[], jax.Array]:
    """A function that runs as many decode steps of slots that begin at `context` tokens; it may be called 16 times."""
    pool = pool_for(batch, context + 16 * steps, 16, kv_cache)
    return repeated(StepTimer(params, config, pool), "decode", 0, context, steps)
