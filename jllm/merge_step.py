"""The merged step: step(params, state, batch) -> state, outputs. One compiled function for every mix of requests.

A step is `forward` (K and V are written, logits of the rows whose next token is due) and then `sample`. Short segments
come first, then prompt chunks. A decoding sequence's input is its slot's last sampled token, which never leaves the
device; a slot that the device has marked done writes nothing, so the host may dispatch step t + 1 before it has read
the tokens of step t.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jllm.batch import Chunks, Paged, RaggedBatch, ShortSegments, chunk_of_row, paged_batch
from jllm.cache import make_cache, parse_kv_cache
from jllm.config import LlamaConfig
from jllm.model import Cache, Taps, head, head_taps, tapped_backbone
from jllm.params import Params
from jllm.sampling import (
    Sampling,
    TokenCounts,
    count_tokens,
    neutral_sampling,
    penalize,
    token_logprobs,
    token_ranks,
    top_logprobs,
)
from jllm.sampling import sample as draw_tokens

PROMPT_LOGPROB_ROWS = 128  # logits rows alive at once when prompt logprobs are asked for
TOP_LOGPROBS = 20
WANTS = ("penalties", "logprobs", "prompt_logprobs")  # of a variant: what single requests ask for
NOT_FINITE = -2  # in place of a token: the row's logits hold NaN or infinity, and the slot is done

Draw = Callable[..., tuple[jax.Array, jax.Array]]  # as sampling.sample


@dataclass(frozen=True)
class Variant:
    """Optional outputs of a step, compiled in only where a request asks for them; each combination is compiled once."""

    penalties: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    taps: tuple[str, ...] = ()  # values inside the forward pass, by names of jllm.taps

    def __or__(self, other: "Variant") -> "Variant":
        """What serves both. Their taps are the same."""
        return replace(self, **{name: getattr(self, name) or getattr(other, name) for name in WANTS})

    def covers(self, other: "Variant") -> bool:
        """Whether a step of this variant does all that one of the other does."""
        return self == self | other and other | self == self

    @property
    def breadth(self) -> int:
        """How many things it does that requests ask for."""
        return sum(getattr(self, name) for name in WANTS)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """What the device knows of each batch slot."""

    token: jax.Array  # i32[S] last sampled token: the next input
    length: jax.Array  # i32[S] tokens whose K and V are in the pages
    done: jax.Array  # bool[S] ended: writes nothing and samples nothing
    pages: jax.Array  # i32[S, M] page table
    sampling: Sampling  # [S]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """Everything that the model remembers between steps. `user` is a pytree of the caller's own, which steps leave
    alone."""

    cache: Cache
    slots: Slots
    counts: TokenCounts | None = None  # [S, V], only while penalties are asked for
    user: Any = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """The rows that the head runs on: R short segments of Q rows, then the last row of each of B chunks."""

    slot: jax.Array  # i32[R Q + B], clipped into range
    target_slot: jax.Array  # i32[R Q + B], out of range where the row is not valid
    length: jax.Array  # i32[R Q + B], tokens in the pages after this step: the new token's index in its sequence
    valid: jax.Array  # bool[R Q + B], whether a token is sampled
    written: jax.Array  # bool[R Q + B], whether the slot's length changes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Logits:
    """What the forward half of a step yields and its sampling half takes."""

    values: jax.Array  # f[R Q + B, V], float32 at least, before penalties
    rows: Rows
    prompt_logprobs: jax.Array | None  # f[C] of each prompt token's target
    prompt_ranks: jax.Array | None  # i32[C] of the same, 1 for the most likely token
    taps: Taps  # [T, ...] by names of the variant's; of the head's rows [R Q + B, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Outputs:
    """What a step yields, in rows: R decode rows, then B chunks."""

    tokens: jax.Array  # i32[R + B] the sampled token, -1 for a row that samples nothing, or NOT_FINITE
    logprobs: jax.Array | None  # f[R + B] of the sampled token
    top_ids: jax.Array | None  # i32[R + B, TOP_LOGPROBS], best first
    top_logprobs: jax.Array | None  # f[R + B, TOP_LOGPROBS]
    prompt_logprobs: jax.Array | None  # as Logits has them
    prompt_ranks: jax.Array | None = None
    taps: Taps = field(default_factory=dict)


def make_slots(slots: int, max_pages: int, bias: int = 0) -> Slots:
    """S empty slots of M page table entries each. bias: X, logit bias entries of a slot; 0 leaves out penalties."""

    def ints(*shape: int) -> jax.Array:  # each field its own buffer, since all are donated
        return jnp.zeros((slots, *shape), jnp.int32)

    sampling = jax.tree.map(jnp.array, neutral_sampling(slots, bias))
    return Slots(token=ints(), length=ints(), done=jnp.ones(slots, bool), pages=ints(max_pages), sampling=sampling)


def init_state(
    config: LlamaConfig,
    *,
    slots: int,
    num_pages: int,
    page_size: int = 16,
    max_pages: int | None = None,
    kv_cache: str | None = None,
    dtype: Any = None,
) -> State:
    """A state of S empty slots and N empty KV pages of P tokens. A slot may hold max_pages pages, by default its share
    of the pool. kv_cache names the format of K and V, by default that of dtype, which defaults to the config's. Raises
    ConfigError for an unknown format."""
    formats = parse_kv_cache(kv_cache, config, config.dtype if dtype is None else dtype)
    table = max(1, num_pages // slots) if max_pages is None else max_pages
    return State(make_cache(config, num_pages, page_size, formats), make_slots(slots, table))


def forward(
    params: Params,
    state: State,
    batch: RaggedBatch,
    *,
    config: LlamaConfig,
    variant: Variant = Variant(),
    backend: str | None = None,
) -> tuple[State, Logits]:
    """Admits what begins, writes the K and V of the step's T tokens to their pages, and computes the logits of every
    row of a short segment and of the last row of every chunk."""
    slots = _admit(_change_pages(state.slots, batch.deltas), batch)
    paged, rows = lay_out(slots, batch, state.cache[0].k.num_pages, state.cache[0].k.page_size)
    hidden, cache, taps = tapped_backbone(params, config, paged, state.cache, variant.taps, backend=backend)
    assert cache is not None
    short, C = paged.short_rows, batch.tokens.shape[0]
    last = short + jnp.clip(paged.chunk_cu[1:] - 1, 0, max(C - 1, 0))
    picked = jnp.concatenate([hidden[:short], jnp.take(hidden, last, axis=0, mode="clip")])
    values = head(params, config, picked, backend=backend)
    scores: tuple[jax.Array | None, jax.Array | None] = (None, None)
    if variant.prompt_logprobs and C:
        scores = _score_prompt(params, config, hidden[short:], batch.targets, backend)
    taps = taps | head_taps(params, config, picked, values, variant.taps, backend=backend)
    counts = state.counts
    if variant.penalties:
        assert counts is not None, "the penalties variant needs State.counts"
        counts = _count_prompt(counts, batch, paged.positions[short:])
    return replace(state, cache=cache, slots=slots, counts=counts), Logits(values, rows, *scores, taps)


def sample(
    state: State,
    logits: Logits,
    *,
    variant: Variant = Variant(),
    backend: str | None = None,
    draw: Draw = draw_tokens,
) -> tuple[State, Outputs]:
    """Draws a token for each row that is due, and moves its sequence on. `draw` takes logits [rows, V], Sampling and
    token indices [rows] as sampling.sample does, and returns tokens and which rows are finite."""
    raw, rows = logits.values, logits.rows
    sampling: Sampling = jax.tree.map(lambda x: x[rows.slot], state.slots.sampling)
    counts = state.counts
    if variant.penalties:
        assert counts is not None, "the penalties variant needs State.counts"
        penalized = penalize(raw, sampling.penalties, jax.tree.map(lambda x: x[rows.slot], counts))
        tokens, _ = draw(penalized, sampling, rows.length, backend=backend)
        finite = jnp.isfinite(raw).all(axis=1)  # a ban makes -inf of a logit
        counts = count_tokens(counts, rows.target_slot, tokens, rows.valid)
    else:
        tokens, finite = draw(raw, sampling, rows.length, backend=backend)
    outputs = Outputs(
        tokens=jnp.where(rows.valid, jnp.where(finite, tokens, NOT_FINITE), -1),
        logprobs=token_logprobs(raw, tokens) if variant.logprobs else None,
        **_top(raw, variant),
        prompt_logprobs=logits.prompt_logprobs,
        prompt_ranks=logits.prompt_ranks,
        taps=logits.taps,
    )
    return replace(state, slots=_advance(state.slots, sampling, rows, tokens, ~finite), counts=counts), outputs


STATIC = ("config", "variant", "backend", "draw")


def eager_step(
    params: Params,
    state: State,
    batch: RaggedBatch,
    *,
    config: LlamaConfig,
    variant: Variant = Variant(),
    backend: str | None = None,
    draw: Draw = draw_tokens,
) -> tuple[State, Outputs]:
    """One merged step: forward, then sample. `step` is this under jit, where config, variant, backend and draw are
    static; the old state stays usable."""
    state, logits = forward(params, state, batch, config=config, variant=variant, backend=backend)
    return sample(state, logits, variant=variant, backend=backend, draw=draw)


step = partial(jax.jit, static_argnames=STATIC)(eager_step)

COPIES = 16  # pages that one call of jit_copy_pages copies at most


def copy_pages(cache: Cache, pages: jax.Array) -> Cache:
    """Copies pages within every layer's pool: pages i32[COPIES, 2] (from, to), all read before any is written.

    Entries whose target is out of range are dropped. jit_copy_pages donates the cache; the host calls it before a step
    whose plan has copies, so that steps without any are what they were.
    """
    source, target = pages[:, 0], pages[:, 1]

    def copy(pool: jax.Array) -> jax.Array:
        rows = pool.at[source].get(mode="clip")
        return pool.at[target].set(rows, mode="drop", unique_indices=True, wrap_negative_indices=False)

    return jax.tree.map(copy, cache)


jit_copy_pages = partial(jax.jit, donate_argnames="cache")(copy_pages)


def _change_pages(slots: Slots, deltas: jax.Array) -> Slots:
    slot, index, page = deltas[:, 0], deltas[:, 1], deltas[:, 2]
    return replace(slots, pages=slots.pages.at[slot, index].set(page, mode="drop"))


def _admit(slots: Slots, batch: RaggedBatch) -> Slots:
    """A chunk (re)writes its slot's sampling parameters and length; that is all there is to admission."""

    def put(old, new):
        return old.at[batch.chunk_slot].set(new, mode="drop")

    sampling = jax.tree.map(put, slots.sampling, batch.sampling)
    return replace(slots, sampling=sampling, done=put(slots.done, False), length=put(slots.length, batch.chunk_start))


def lay_out(slots: Slots, batch: RaggedBatch, num_pages: int, page_size: int) -> tuple[Paged, Rows]:
    """A step's rows: what each token is, where it stands and where its K and V go, and the rows that the head runs
    on."""
    S = slots.token.shape[0]
    in_use = batch.decode_slot < S
    decode_slot = jnp.where(in_use, batch.decode_slot, 0)
    live = in_use & ~slots.done[decode_slot]
    start = jnp.where(live, slots.length[decode_slot], 0)
    chunk_slot = jnp.where(batch.chunk_slot < S, batch.chunk_slot, 0)
    paged = paged_batch(
        ShortSegments(slots.token[decode_slot][:, None], start, live.astype(jnp.int32), slots.pages[decode_slot]),
        Chunks(batch.tokens, batch.chunk_start, batch.chunk_len, slots.pages[chunk_slot]),
        num_pages=num_pages,
        page_size=page_size,
    )
    valid = jnp.concatenate([live, batch.chunk_final == 1])
    slot = jnp.concatenate([decode_slot, chunk_slot])
    rows = Rows(
        slot=slot,
        target_slot=jnp.where(valid, slot, S),
        length=jnp.concatenate([start + 1, batch.chunk_start + batch.chunk_len]),
        valid=valid,
        written=jnp.concatenate([live, batch.chunk_len > 0]),
    )
    return paged, rows


def _advance(slots: Slots, sampling: Sampling, rows: Rows, tokens: jax.Array, broken: jax.Array) -> Slots:
    """Lengths grow by what was written; a sampled token becomes the next input and may end its sequence."""
    S = slots.token.shape[0]
    stop = jnp.any(sampling.stop_ids == tokens[:, None], axis=1)
    done = stop | broken | (rows.length + 1 >= sampling.max_length)
    written = jnp.where(rows.written, rows.slot, S)
    return replace(
        slots,
        length=slots.length.at[written].set(rows.length, mode="drop"),
        token=slots.token.at[rows.target_slot].set(tokens, mode="drop"),
        done=slots.done.at[rows.target_slot].set(done, mode="drop"),
    )


def _count_prompt(counts: TokenCounts, batch: RaggedBatch, position: jax.Array) -> TokenCounts:
    """Counts the chunks' tokens: all as seen, those past the original prompt (recomputed output) as output. A first
    chunk begins its slot's counts anew."""
    S = counts.seen.shape[0]
    first = jnp.where(batch.chunk_start == 0, batch.chunk_slot, S)
    counts = jax.tree.map(lambda x: x.at[first].set(jnp.zeros((), x.dtype), mode="drop"), counts)
    chunk = chunk_of_row(jnp.cumsum(batch.chunk_len, dtype=jnp.int32), batch.tokens.shape[0])
    slot = jnp.where(chunk < batch.chunk_slot.shape[0], jnp.take(batch.chunk_slot, chunk, mode="clip"), S)
    is_output = position >= jnp.take(batch.prompt_len, chunk, mode="clip")
    return count_tokens(counts, slot, batch.tokens, is_output)


def _top(logits: jax.Array, variant: Variant) -> dict[str, jax.Array | None]:
    if not variant.logprobs:
        return {"top_ids": None, "top_logprobs": None}
    ids, values = top_logprobs(logits, min(TOP_LOGPROBS, logits.shape[-1]))
    return {"top_ids": ids, "top_logprobs": values}


def _score_prompt(
    params: Params, config: LlamaConfig, hidden: jax.Array, targets: jax.Array, backend: str | None
) -> tuple[jax.Array, jax.Array]:
    """log p(target) of each prompt row [C], and its rank, in row blocks: never a [C, V] array."""
    C, E = hidden.shape
    block = min(PROMPT_LOGPROB_ROWS, C)
    pad = -C % block
    rows = jnp.pad(hidden, ((0, pad), (0, 0))).reshape(-1, block, E)
    ids = jnp.pad(jnp.maximum(targets, 0), (0, pad)).reshape(-1, block)

    def one(x):
        logits = head(params, config, x[0], backend=backend)
        return token_logprobs(logits, x[1]), token_ranks(logits, x[1])

    logprobs, ranks = jax.lax.map(one, (rows, ids))
    return logprobs.reshape(-1)[:C], ranks.reshape(-1)[:C]
