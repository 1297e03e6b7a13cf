"""The merged step: step(params, state, batch) -> state, outputs. One compiled function for every mix of requests.

Decode rows come first, then prompt chunks. A decode row's input is its slot's last sampled token, which never leaves
the device; a slot that the device has marked done writes nothing, so the host may dispatch step t + 1 before it has
read the tokens of step t.
"""

from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp

from jllm.batch import STOP_IDS, Layout, RaggedBatch
from jllm.config import LlamaConfig
from jllm.model import Cache, Paged, Taps, head, head_taps, tapped_backbone
from jllm.params import Params
from jllm.sampling import (
    Penalties,
    RowParams,
    count_tokens,
    penalize,
    sample_checked,
    sample_reference,
    token_logprobs,
    token_ranks,
    top_logprobs,
)

PROMPT_LOGPROB_ROWS = 128  # logits rows alive at once when prompt logprobs are asked for
TOP_LOGPROBS = 20
WANTS = ("penalties", "logprobs", "prompt_logprobs")  # of a variant: what single requests ask for
NOT_FINITE = -2  # in place of a token: the row's logits hold NaN or infinity, and the slot is done


@dataclass(frozen=True)
class Variant:
    """What costs memory or time when nobody asked; each combination is compiled once."""

    penalties: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    sort: bool = False  # sample by sorting, as a baseline
    taps: tuple[str, ...] = ()  # values inside the forward pass, by names of jllm.taps

    def __or__(self, other: "Variant") -> "Variant":
        """What serves both. They sample alike."""
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
    """Per batch slot, on the device."""

    token: jax.Array  # i32[S] last sampled token: the next input
    length: jax.Array  # i32[S] tokens whose K and V are in the pages
    done: jax.Array  # bool[S] ended: writes nothing and samples nothing
    pages: jax.Array  # i32[S, M] page table
    max_length: jax.Array  # i32[S]
    stop_ids: jax.Array  # i32[S, STOP_IDS], -1 padded
    temperature: jax.Array  # f32[S]
    top_k: jax.Array  # i32[S]
    top_p: jax.Array  # f32[S]
    min_p: jax.Array  # f32[S]
    seed: jax.Array  # i32[S], u32 bits
    sample: jax.Array  # i32[S]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotPenalties:
    """Per batch slot, and only while a request asks for penalties or a bias."""

    repetition: jax.Array  # f32[S]
    presence: jax.Array  # f32[S]
    frequency: jax.Array  # f32[S]
    seen: jax.Array  # bool[S, V] token occurs in prompt or output
    counts: jax.Array  # i32[S, V] occurrences in the output
    bias_ids: jax.Array  # i32[S, X]
    bias_values: jax.Array  # f32[S, X]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """Everything that the model remembers between steps."""

    cache: Cache
    slots: Slots
    penalties: SlotPenalties | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Outputs:
    """What a step yields, in rows: R decode rows, then B chunks."""

    tokens: jax.Array  # i32[R + B] the sampled token, -1 for a row that samples nothing, or NOT_FINITE
    logprobs: jax.Array | None  # f[R + B] of the sampled token
    top_ids: jax.Array | None  # i32[R + B, TOP_LOGPROBS], best first
    top_logprobs: jax.Array | None  # f[R + B, TOP_LOGPROBS]
    prompt_logprobs: jax.Array | None  # f[C] of each prompt token's target
    prompt_ranks: jax.Array | None = None  # i32[C] of the same, 1 for the most likely token
    taps: Taps = field(default_factory=dict)  # [R + C, ...] by names of the variant's; of the head's rows [R + B, ...]


def make_slots(slots: int, max_pages: int) -> Slots:
    """S empty slots of M page table entries each."""

    def ints(*shape: int, fill: int = 0) -> jax.Array:  # each field its own buffer, since all are donated
        return jnp.full((slots, *shape), fill, jnp.int32)

    return Slots(
        token=ints(),
        length=ints(),
        done=jnp.ones(slots, bool),
        pages=ints(max_pages),
        max_length=ints(),
        stop_ids=ints(STOP_IDS, fill=-1),
        temperature=jnp.zeros(slots, jnp.float32),
        top_k=ints(),
        top_p=jnp.ones(slots, jnp.float32),
        min_p=jnp.zeros(slots, jnp.float32),
        seed=ints(),
        sample=ints(),
    )


def make_penalties(slots: int, vocab: int, bias: int) -> SlotPenalties:
    """Neutral penalties for S slots and V tokens, with room for X bias entries."""
    return SlotPenalties(
        repetition=jnp.ones(slots, jnp.float32),
        presence=jnp.zeros(slots, jnp.float32),
        frequency=jnp.zeros(slots, jnp.float32),
        seen=jnp.zeros((slots, vocab), bool),
        counts=jnp.zeros((slots, vocab), jnp.int32),
        bias_ids=jnp.full((slots, bias), -1, jnp.int32),
        bias_values=jnp.zeros((slots, bias), jnp.float32),
    )


def step(
    params: Params,
    state: State,
    buffer: jax.Array,
    *,
    config: LlamaConfig,
    layout: Layout,
    variant: Variant = Variant(),
    backend: str | None = None,
) -> tuple[State, Outputs]:
    """Runs one merged step and samples one token for each row that is due.

    buffer i32[layout.size] is a packed batch (see batch.Layout). jit_step donates `state`, undonated_step does not;
    config, layout, variant and backend are static.
    """
    batch = layout.unpack(buffer)
    rung = layout.rung
    slots = _apply_chunks(_apply_deltas(state.slots, batch.deltas), batch)
    paged, rows = _lay_out(slots, batch, state.cache[0].k.num_pages, state.cache[0].k.page_size)
    hidden, cache, taps = tapped_backbone(params, config, paged, state.cache, variant.taps, backend=backend)
    assert cache is not None
    last = rung.decodes + jnp.clip(paged.chunk_cu[1:] - 1, 0, max(rung.tokens - 1, 0))
    picked = jnp.concatenate([hidden[: rung.decodes], jnp.take(hidden, last, axis=0, mode="clip")])
    raw = head(params, config, picked, backend=backend)
    row_params = _row_params(slots, rows.slot, raw.dtype)
    penalties = state.penalties
    if variant.penalties:
        assert penalties is not None, "the penalties variant needs State.penalties"
        penalties = _count_prompt(
            _apply_penalties(penalties, batch), batch, rows.chunk, paged.positions[rung.decodes :]
        )
        logits = penalize(raw, _gather_penalties(penalties, rows.slot, raw.dtype))
        tokens, _ = _draw(logits, row_params, rows.length, variant, backend)
        finite = jnp.isfinite(raw).all(axis=1)  # a ban makes -inf of a logit
        seen, counts = count_tokens(penalties.seen, penalties.counts, rows.target_slot, tokens, rows.valid)
        penalties = replace(penalties, seen=seen, counts=counts)
    else:
        tokens, finite = _draw(raw, row_params, rows.length, variant, backend)
    scores: tuple[jax.Array | None, jax.Array | None] = (None, None)
    if variant.prompt_logprobs and rung.tokens:
        scores = _score_prompt(params, config, hidden[rung.decodes :], batch.targets, backend)
    outputs = Outputs(
        tokens=jnp.where(rows.valid, jnp.where(finite, tokens, NOT_FINITE), -1),
        logprobs=token_logprobs(raw, tokens) if variant.logprobs else None,
        **_top(raw, variant),
        prompt_logprobs=scores[0],
        prompt_ranks=scores[1],
        taps=taps | head_taps(params, config, picked, raw, variant.taps, backend=backend),
    )
    return State(cache, _advance(slots, rows, tokens, ~finite), penalties), outputs


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

STATIC = ("config", "layout", "variant", "backend")
jit_step = partial(jax.jit, static_argnames=STATIC, donate_argnames="state")(step)
undonated_step = partial(jax.jit, static_argnames=STATIC)(step)  # for notebooks: the old state stays usable


@dataclass(frozen=True)
class _Rows:
    """The rows that the head runs on: R decode rows, then the last row of each of B chunks; and whose the C prompt
    tokens are."""

    slot: jax.Array  # i32[R + B], clipped into range
    target_slot: jax.Array  # i32[R + B], out of range where the row is not valid
    length: jax.Array  # i32[R + B], tokens in the pages after this step = position of the new token
    valid: jax.Array  # bool[R + B], whether a token is sampled
    written: jax.Array  # bool[R + B], whether the slot's length changes
    chunk: jax.Array  # i32[C], which chunk each prompt token is in; B for the unused tail


def _apply_deltas(slots: Slots, deltas: jax.Array) -> Slots:
    slot, index, page = deltas[:, 0], deltas[:, 1], deltas[:, 2]
    return replace(slots, pages=slots.pages.at[slot, index].set(page, mode="drop"))


def _apply_chunks(slots: Slots, batch: RaggedBatch) -> Slots:
    """A chunk row (re)writes its slot's parameters; that is all there is to admission."""
    names = ("max_length", "stop_ids", "temperature", "top_k", "top_p", "min_p", "seed", "sample")

    def put(old, new):
        return old.at[batch.chunk_slot].set(new, mode="drop")

    new = {name: put(getattr(slots, name), getattr(batch, name)) for name in names}
    return replace(slots, **new, done=put(slots.done, False), length=put(slots.length, batch.chunk_start))


def _lay_out(slots: Slots, batch: RaggedBatch, num_pages: int, page_size: int) -> tuple[Paged, _Rows]:
    """Rows of the flat axis: what each token is, where it stands, and where its K and V go."""
    S = slots.token.shape[0]
    in_use = batch.decode_slot < S
    decode_slot = jnp.where(in_use, batch.decode_slot, 0)
    live = in_use & ~slots.done[decode_slot]
    decode_position = jnp.where(live, slots.length[decode_slot], 0)

    chunk_slot = jnp.where(batch.chunk_slot < S, batch.chunk_slot, 0)
    cu = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(batch.chunk_len, dtype=jnp.int32)])
    row = jnp.arange(batch.tokens.shape[0], dtype=jnp.int32)
    # B for the unused tail; not by halves, which would be a loop of small kernels before anything else
    chunk = jnp.searchsorted(cu[1:], row, side="right", method="compare_all").astype(jnp.int32)
    in_chunk = row < cu[-1]
    chunk_position = jnp.where(in_chunk, row - _at(cu, chunk) + _at(batch.chunk_start, chunk), 0)

    position = jnp.concatenate([decode_position, chunk_position])
    table_row = jnp.concatenate([decode_slot, jnp.where(in_chunk, _at(chunk_slot, chunk), 0)])
    page = slots.pages[table_row, jnp.clip(position // page_size, 0, slots.pages.shape[1] - 1)]
    writes = jnp.concatenate([live, in_chunk])
    chunk_end = batch.chunk_start + batch.chunk_len
    paged = Paged(
        tokens=jnp.concatenate([slots.token[decode_slot], batch.tokens]),
        positions=position,
        page=jnp.where(writes, page, num_pages),
        offset=position % page_size,
        decode_pages=slots.pages[decode_slot],
        decode_lengths=jnp.where(live, decode_position + 1, 0),
        chunk_pages=slots.pages[chunk_slot],
        chunk_cu=cu,
        chunk_lengths=jnp.where(batch.chunk_len > 0, chunk_end, 0),
    )
    valid = jnp.concatenate([live, batch.chunk_final == 1])
    slot = jnp.concatenate([decode_slot, chunk_slot])
    rows = _Rows(
        slot=slot,
        target_slot=jnp.where(valid, slot, S),
        length=jnp.concatenate([decode_position + 1, chunk_end]),
        valid=valid,
        written=jnp.concatenate([live, batch.chunk_len > 0]),
        chunk=chunk,
    )
    return paged, rows


def _at(array: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take(array, index, mode="clip")


def _row_params(slots: Slots, slot: jax.Array, dtype) -> RowParams:
    return RowParams(
        temperature=slots.temperature[slot].astype(dtype),
        top_k=slots.top_k[slot],
        top_p=slots.top_p[slot].astype(dtype),
        min_p=slots.min_p[slot].astype(dtype),
        seed=jax.lax.bitcast_convert_type(slots.seed[slot], jnp.uint32),
        sample=slots.sample[slot],
    )


def _advance(slots: Slots, rows: _Rows, tokens: jax.Array, broken: jax.Array) -> Slots:
    """Lengths grow by what was written; a sampled token becomes the next input and may end its sequence."""
    S = slots.token.shape[0]
    stop = jnp.any(slots.stop_ids[rows.slot] == tokens[:, None], axis=1)
    done = stop | broken | (rows.length + 1 >= slots.max_length[rows.slot])
    written = jnp.where(rows.written, rows.slot, S)
    return replace(
        slots,
        length=slots.length.at[written].set(rows.length, mode="drop"),
        token=slots.token.at[rows.target_slot].set(tokens, mode="drop"),
        done=slots.done.at[rows.target_slot].set(done, mode="drop"),
    )


def _apply_penalties(penalties: SlotPenalties, batch: RaggedBatch) -> SlotPenalties:
    """A first chunk resets its slot; every chunk rewrites the parameters."""
    S = penalties.repetition.shape[0]
    first = jnp.where(batch.chunk_start == 0, batch.chunk_slot, S)

    def put(old, new):
        return old.at[batch.chunk_slot].set(new, mode="drop")

    return SlotPenalties(
        repetition=put(penalties.repetition, batch.repetition),
        presence=put(penalties.presence, batch.presence),
        frequency=put(penalties.frequency, batch.frequency),
        seen=penalties.seen.at[first].set(False, mode="drop"),
        counts=penalties.counts.at[first].set(0, mode="drop"),
        bias_ids=put(penalties.bias_ids, batch.bias_ids),
        bias_values=put(penalties.bias_values, batch.bias_values),
    )


def _count_prompt(penalties: SlotPenalties, batch: RaggedBatch, chunk: jax.Array, position: jax.Array) -> SlotPenalties:
    """Counts the chunks' tokens: all as seen, those past the original prompt (recomputed output) as output."""
    in_chunk = chunk < batch.chunk_slot.shape[0]
    slot = jnp.where(in_chunk, _at(batch.chunk_slot, chunk), penalties.repetition.shape[0])
    is_output = position >= _at(batch.prompt_len, chunk)
    seen, counts = count_tokens(penalties.seen, penalties.counts, slot, batch.tokens, is_output)
    return replace(penalties, seen=seen, counts=counts)


def _gather_penalties(penalties: SlotPenalties, slot: jax.Array, dtype) -> Penalties:
    return Penalties(
        repetition=penalties.repetition[slot].astype(dtype),
        presence=penalties.presence[slot].astype(dtype),
        frequency=penalties.frequency[slot].astype(dtype),
        seen=penalties.seen[slot],
        counts=penalties.counts[slot],
        bias_ids=penalties.bias_ids[slot],
        bias_values=penalties.bias_values[slot].astype(dtype),
    )


def _draw(
    logits: jax.Array, params: RowParams, position: jax.Array, variant: Variant, backend: str | None
) -> tuple[jax.Array, jax.Array]:
    """Tokens of logits [R + B, V], and which rows of them are finite."""
    if variant.sort:
        return sample_reference(logits, params, position), jnp.isfinite(logits).all(axis=1)
    return sample_checked(logits, params, position, backend=backend)


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
