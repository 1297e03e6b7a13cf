"""The merged step: step(params, state, batch) -> state, outputs. One compiled function for every mix of requests.

A step is `forward` (K and V are written, logits of the rows whose next token is due) and then `sample`. Short segments
come first, then prompt chunks. A decoding sequence's input is its slot's last sampled token, which never leaves the
device; a slot that the device has marked done writes nothing, so the host may dispatch step t + 1 before it has read
the tokens of step t.

With a drafter a third part follows: `draft` proposes what comes next, and the next step's segments have these drafts in
rows of their own. `sample` accepts those that equal what it draws, so that a step may advance a sequence by several
tokens. Between steps the state is that of plain decoding.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
from jllm.speculative.accept import accept, drafts_before
from jllm.speculative.drafter import Advance, Drafter, Drafts
from jllm.speculative.tree import Tree, chain
from pallas_kernels.move_tokens import move_tokens

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
    drafts: Drafts | None = None  # only with a drafter
    user: Any = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """The rows that the head runs on: R short segments of Q rows, then the last row of each of B chunks; and the R + B
    sequences that they are of."""

    slot: jax.Array  # i32[R + B], clipped into range
    target_slot: jax.Array  # i32[R + B], out of range where no token is drawn
    valid: jax.Array  # bool[R + B], whether tokens are drawn
    written: jax.Array  # bool[R + B], whether the slot's length changes
    start: jax.Array  # i32[R + B], the token index of the first token drawn, which is its sequence's length before it
    tokens: jax.Array  # i32[R, Q], the inputs of the short segments
    used: jax.Array  # i32[R], how many of these count
    tree: Tree = field(metadata={"static": True})  # of the Q rows

    @property
    def most(self) -> int:
        """W: the most tokens that a short segment may draw."""
        return self.tree.depth + 1

    def spread(self, values: Any) -> Any:
        """A row of values for each sequence [R + B, ...] as a row for each of the head's rows [R Q + B, ...]."""
        if self.tree.size == 1:
            return values
        R, B = self.used.shape[0], self.slot.shape[0] - self.used.shape[0]
        of = np.concatenate([np.repeat(np.arange(R), self.tree.size), R + np.arange(B)])
        return jax.tree.map(lambda x: x[of], values)

    @property
    def index(self) -> jax.Array:
        """i32[R Q + B], the token index of what each row draws."""
        if self.tree.size == 1:
            return self.start
        R, B = self.used.shape[0], self.slot.shape[0] - self.used.shape[0]
        depths = np.concatenate([np.tile(np.asarray(self.tree.depths, np.int32), R), np.zeros(B, np.int32)])
        return self.spread(self.start) + depths


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Logits:
    """What the forward half of a step yields and its sampling half takes."""

    values: jax.Array  # f[R Q + B, V], float32 at least, before penalties
    rows: Rows
    prompt_logprobs: jax.Array | None  # f[C] of each prompt token's target
    prompt_ranks: jax.Array | None  # i32[C] of the same, 1 for the most likely token
    taps: Taps  # [T, ...] by names of the variant's; of the head's rows [R Q + B, ...]
    hidden: jax.Array  # [R Q + B, E], before the final norm
    chunk_hidden: jax.Array  # [C, E]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Outputs:
    """What a step yields, in rows: up to W tokens of each of R short segments, in order, then one of each of B chunks.
    Without drafts W is 1."""

    tokens: jax.Array  # i32[R W + B] the tokens drawn, -1 where there is none, or NOT_FINITE
    logprobs: jax.Array | None  # f[R W + B] of these
    top_ids: jax.Array | None  # i32[R W + B, TOP_LOGPROBS], best first
    top_logprobs: jax.Array | None  # f[R W + B, TOP_LOGPROBS]
    prompt_logprobs: jax.Array | None  # as Logits has them
    prompt_ranks: jax.Array | None = None
    nodes: jax.Array | None = None  # i32[R, W] of a tree, which node each token was drawn at
    drafted: jax.Array | None = None  # i32[R] drafts that were verified, where segments have rows for them
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
    drafter: Drafter | None = None,
) -> State:
    """A state of S empty slots and N empty KV pages of P tokens. A slot may hold max_pages pages, by default its share
    of the pool. kv_cache names the format of K and V, by default that of dtype, which defaults to the config's. Raises
    ConfigError for an unknown format, and for a drafter that does not fit the config."""
    dtype = config.dtype if dtype is None else dtype
    formats = parse_kv_cache(kv_cache, config, dtype)
    table = max(1, num_pages // slots) if max_pages is None else max_pages
    state = State(make_cache(config, num_pages, page_size, formats), make_slots(slots, table))
    return replace(state, drafts=None if drafter is None else init_drafts(drafter, state, config, dtype))


def init_drafts(drafter: Drafter, state: State, config: LlamaConfig, dtype: Any) -> Drafts:
    """No drafts yet, for the slots and pages of a state."""
    (S, M), pool = state.slots.pages.shape, state.cache[0].k
    sizes = {"slots": S, "num_pages": pool.num_pages, "page_size": pool.page_size, "max_tokens": M * pool.page_size}
    cache, memory = drafter.init(config, dtype, **sizes)
    tree = drafter.tree
    return Drafts(jnp.zeros((S, tree.size - 1), jnp.int32), jnp.zeros(S, jnp.int32), cache, memory, tree)


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
    paged, rows = lay_out(slots, state.drafts, batch, state.cache[0].k.num_pages, state.cache[0].k.page_size)
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
    logits = Logits(values, rows, *scores, taps, picked, hidden[short:])
    return replace(state, cache=cache, slots=slots, counts=counts), logits


def sample(
    state: State,
    logits: Logits,
    *,
    variant: Variant = Variant(),
    backend: str | None = None,
    draw: Draw = draw_tokens,
) -> tuple[State, Outputs]:
    """Draws a token for each row that is due, accepts the drafts that equal what was drawn in their place, and moves
    the sequences on. `draw` takes logits [rows, V], Sampling and token indices [rows] as sampling.sample does, and
    returns tokens and which rows are finite."""
    raw, rows = logits.values, logits.rows
    sampling: Sampling = jax.tree.map(lambda x: x[rows.slot], state.slots.sampling)
    each: Sampling = rows.spread(sampling)
    counts = state.counts
    if variant.penalties:
        assert counts is not None, "the penalties variant needs State.counts"
        own = rows.spread(jax.tree.map(lambda x: x[rows.slot], counts))
        tokens, _ = draw(penalize(raw, each.penalties, own, _drafts_before(rows)), each, rows.index, backend=backend)
        finite = jnp.isfinite(raw).all(axis=1)  # a ban makes -inf of a logit
    else:
        tokens, finite = draw(raw, each, rows.index, backend=backend)
    nodes, count = _accept(rows, tokens)
    drawn, sound = _by_sequence(rows, tokens, nodes), _by_sequence(rows, finite, nodes)
    count, done = _end(sampling, rows.start, drawn, sound, count)
    valid = jnp.arange(rows.most, dtype=jnp.int32)[None, :] < count[:, None]
    if variant.penalties:
        assert counts is not None
        slot = jnp.where(valid, rows.target_slot[:, None], state.slots.token.shape[0])
        counts = count_tokens(counts, slot.reshape(-1), drawn.reshape(-1), valid.reshape(-1))
    outputs = Outputs(
        tokens=_flat(rows, jnp.where(valid, jnp.where(sound, drawn, NOT_FINITE), -1)),
        **_logprobs(rows, raw, tokens, nodes, variant),
        prompt_logprobs=logits.prompt_logprobs,
        prompt_ranks=logits.prompt_ranks,
        nodes=None if rows.tree.is_chain else jnp.where(valid[: nodes.shape[0]], nodes, -1),
        drafted=None if rows.tree.size == 1 else jnp.maximum(rows.used - 1, 0),
        taps=logits.taps,
    )
    slots = _advance(state.slots, rows, drawn, count, done)
    return replace(state, cache=_compact(state, rows, nodes, count, backend), slots=slots, counts=counts), outputs


def draft(
    params: Params,
    state: State,
    batch: RaggedBatch,
    logits: Logits,
    outputs: Outputs,
    drafter: Drafter,
    *,
    config: LlamaConfig,
    backend: str | None = None,
) -> State:
    """Has the drafter see what a step did, and keeps what it proposes for the slots of the step."""
    rows, slots, drafts = logits.rows, state.slots, state.drafts
    assert drafts is not None, "a drafter needs State.drafts: init_state(..., drafter=drafter)"
    S, R = slots.token.shape[0], rows.tokens.shape[0]
    tokens = outputs.tokens[: R * rows.most].reshape(R, rows.most)
    last = jnp.pad(outputs.tokens[R * rows.most :, None], ((0, 0), (0, rows.most - 1)), constant_values=-1)
    tokens = jnp.concatenate([tokens, last])
    nodes = jnp.broadcast_to(jnp.arange(rows.most, dtype=jnp.int32), (R, rows.most))
    if outputs.nodes is not None:
        nodes = jnp.maximum(outputs.nodes, 0)
    slot = jnp.where(rows.written, rows.slot, S)
    advance = Advance(
        slot=slot,
        start=rows.start,
        tokens=tokens,
        count=jnp.where(slots.done[rows.slot], 0, jnp.sum(tokens >= 0, axis=1, dtype=jnp.int32)),
        hidden=_by_sequence(rows, logits.hidden, nodes),
        pages=slots.pages[rows.slot],
        room=jnp.concatenate([batch.decode_room, batch.chunk_room]),
        sampling=jax.tree.map(lambda x: x[rows.slot], slots.sampling),
        chunk_slot=batch.chunk_slot,
        chunks=Chunks(batch.tokens, batch.chunk_start, batch.chunk_len, slots.pages[rows.slot[R:]]),
        chunk_hidden=logits.chunk_hidden,
    )
    found, count, cache, memory = drafter.propose(drafts, advance, params, config=config, backend=backend)
    drafts = replace(
        drafts,
        tokens=drafts.tokens.at[slot].set(found, mode="drop"),
        count=drafts.count.at[slot].set(jnp.where(advance.count > 0, count, 0), mode="drop"),
        cache=cache,
        memory=memory,
    )
    return replace(state, drafts=drafts)


STATIC = ("config", "variant", "backend", "draw")


def eager_step(
    params: Params,
    state: State,
    batch: RaggedBatch,
    drafter: Drafter | None = None,
    *,
    config: LlamaConfig,
    variant: Variant = Variant(),
    backend: str | None = None,
    draw: Draw = draw_tokens,
) -> tuple[State, Outputs]:
    """One merged step: forward, sample and, with a drafter, draft. `step` is this under jit, where config, variant,
    backend and draw are static; the old state stays usable."""
    state, logits = forward(params, state, batch, config=config, variant=variant, backend=backend)
    state, outputs = sample(state, logits, variant=variant, backend=backend, draw=draw)
    if drafter is not None:
        state = draft(params, state, batch, logits, outputs, drafter, config=config, backend=backend)
    return state, outputs


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


def lay_out(
    slots: Slots, drafts: Drafts | None, batch: RaggedBatch, num_pages: int, page_size: int
) -> tuple[Paged, Rows]:
    """A step's rows: what each token is, where it stands and where its K and V go, and the rows that the head runs
    on."""
    S, Q = slots.token.shape[0], batch.width
    in_use = batch.decode_slot < S
    decode_slot = jnp.where(in_use, batch.decode_slot, 0)
    live = in_use & ~slots.done[decode_slot]
    start = jnp.where(live, slots.length[decode_slot], 0)
    tree, ancestors = chain(0), None
    tokens, used = slots.token[decode_slot][:, None], live.astype(jnp.int32)
    if Q > 1:
        assert drafts is not None, "segments of several rows need State.drafts"
        tree = drafts.tree
        if tree.size != Q:
            raise ValueError(f"the batch has segments of {Q} rows, and the drafter's tree has {tree.size} nodes")
        tokens = jnp.concatenate([tokens, drafts.tokens[decode_slot]], axis=1)
        last = slots.sampling.max_length[decode_slot] - 1  # the last token of all never gets K and V
        most = jnp.minimum(batch.decode_rows, last - start)
        used = jnp.where(live, jnp.minimum(most, 1 + drafts.count[decode_slot]), 0)
        if not tree.is_chain:
            masks = tree.ancestors()
            ancestors = jnp.broadcast_to(masks[None], (tokens.shape[0], *masks.shape))
    chunk_slot = jnp.where(batch.chunk_slot < S, batch.chunk_slot, 0)
    paged = paged_batch(
        ShortSegments(tokens, start, used, slots.pages[decode_slot], ancestors),
        Chunks(batch.tokens, batch.chunk_start, batch.chunk_len, slots.pages[chunk_slot]),
        num_pages=num_pages,
        page_size=page_size,
    )
    valid = jnp.concatenate([live, batch.chunk_final == 1])
    slot = jnp.concatenate([decode_slot, chunk_slot])
    rows = Rows(
        slot=slot,
        target_slot=jnp.where(valid, slot, S),
        valid=valid,
        written=jnp.concatenate([live, batch.chunk_len > 0]),
        start=jnp.concatenate([start + 1, batch.chunk_start + batch.chunk_len]),
        tokens=tokens,
        used=used,
        tree=tree,
    )
    return paged, rows


def _accept(rows: Rows, drawn: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The nodes that each segment reaches i32[R, W], and how many tokens each sequence draws i32[R + B]."""
    R, Q = rows.tokens.shape
    nodes, count = accept(rows.tree, rows.tokens, drawn[: R * Q].reshape(R, Q), rows.used)
    return nodes, jnp.concatenate([count, rows.valid[R:].astype(jnp.int32)])


def _drafts_before(rows: Rows) -> jax.Array | None:
    """The drafts that each of the head's rows comes after, i32[R Q + B, D], padded with -1."""
    if rows.tree.size == 1:
        return None
    drafts = drafts_before(rows.tree, rows.tokens)
    drafts = drafts.reshape(-1, drafts.shape[2])
    return jnp.pad(drafts, ((0, rows.slot.shape[0] - rows.used.shape[0]), (0, 0)), constant_values=-1)


def _by_sequence(rows: Rows, values: jax.Array, nodes: jax.Array) -> jax.Array:
    """Of values of the head's rows [R Q + B, ...] those at nodes i32[R, W], and those of the chunks in their first
    column: [R + B, W, ...]."""
    if rows.tree.size == 1:
        return values[:, None]
    R, Q = rows.tokens.shape
    B = rows.slot.shape[0] - R
    short = Q * jnp.arange(R, dtype=jnp.int32)[:, None] + nodes
    chunks = R * Q + jnp.arange(B, dtype=jnp.int32)[:, None]
    return values[jnp.concatenate([short, jnp.broadcast_to(chunks, (B, rows.most))])]


def _flat(rows: Rows, values: jax.Array) -> jax.Array:
    """Values by sequence [R + B, W, ...] as Outputs has them: [R W + B, ...]."""
    R = rows.used.shape[0]
    return jnp.concatenate([values[:R].reshape(-1, *values.shape[2:]), values[R:, 0]])


def _end(
    sampling: Sampling, start: jax.Array, drawn: jax.Array, sound: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """How many of `count` tokens drawn [R + B, W] there are up to the first that ends its sequence, and whether one
    does."""
    stop = jnp.any(sampling.stop_ids[:, None, :] == drawn[:, :, None], axis=2)
    total, done = jnp.zeros_like(count), jnp.zeros_like(count, bool)
    for e in range(drawn.shape[1]):
        here = (e < count) & ~done
        total += here.astype(jnp.int32)
        done |= here & (stop[:, e] | ~sound[:, e] | (start + e + 1 >= sampling.max_length))
    return total, done


def _advance(slots: Slots, rows: Rows, drawn: jax.Array, count: jax.Array, done: jax.Array) -> Slots:
    """Lengths grow by what was written and stays; the last token drawn becomes the next input, and may have ended its
    sequence."""
    last = drawn[:, 0]
    for e in range(1, drawn.shape[1]):
        last = jnp.where(e < count, drawn[:, e], last)
    written = jnp.where(rows.written, rows.slot, slots.token.shape[0])
    return replace(
        slots,
        length=slots.length.at[written].set(rows.start + jnp.maximum(count, 1) - 1, mode="drop"),
        token=slots.token.at[rows.target_slot].set(last, mode="drop"),
        done=slots.done.at[rows.target_slot].set(done, mode="drop"),
    )


def _compact(state: State, rows: Rows, nodes: jax.Array, count: jax.Array, backend: str | None) -> Cache:
    """The K and V of accepted nodes of a tree, moved to their places; those of a chain are there."""
    if rows.tree.is_chain:
        return state.cache
    R, W = nodes.shape
    first = rows.start[:R, None] - 1
    e = jnp.arange(W, dtype=jnp.int32)[None, :]
    source, target = jnp.where(e < count[:R, None], first + nodes, -1), first + e
    return move_tokens(state.cache, state.slots.pages[rows.slot[:R]], source, target, backend=backend)


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


def _logprobs(
    rows: Rows, raw: jax.Array, tokens: jax.Array, nodes: jax.Array, variant: Variant
) -> dict[str, jax.Array | None]:
    if not variant.logprobs:
        return {"logprobs": None, "top_ids": None, "top_logprobs": None}
    ids, values = top_logprobs(raw, min(TOP_LOGPROBS, raw.shape[-1]))
    found = {"logprobs": token_logprobs(raw, tokens), "top_ids": ids, "top_logprobs": values}
    return {name: _flat(rows, _by_sequence(rows, value, nodes)) for name, value in found.items()}


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
