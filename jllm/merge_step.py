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
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from jllm.batch import Chunks, Paged, RaggedBatch, chunk_of_row
from jllm.cache import with_tails, without_tails
from jllm.config import LlamaConfig
from jllm.errors import EvaluationError
from jllm.hooks import Edits, HookRows, Hooks, make_edits
from jllm.model import Cache, Taps, head, head_taps, tapped_backbone
from jllm.parallel.draws import draw_apart, leaves_parts
from jllm.parallel.ranks import WHOLE, per_rank
from jllm.params import Params
from jllm.rows import Rows, lay_out
from jllm.sampling import (
    Purpose,
    Sampling,
    TokenCounts,
    constrain,
    count_tokens,
    penalize,
    token_logprobs,
    token_ranks,
    top_logprobs,
)
from jllm.sampling import sample as draw_tokens
from jllm.speculative.drafter import Advance, Drafter
from jllm.speculative.forced import with_forced
from jllm.speculative.rejection import accept_or_draw, certain
from jllm.state import NOT_FINITE, SPREAD, TOP_LOGPROBS, Guidance, Outputs, Slots, State, Variant, spread_drafter
from pallas_kernels.backends import or_xla
from pallas_kernels.move_tokens import move_tokens

PROMPT_LOGPROB_ROWS = 128  # logits rows alive at once when prompt logprobs are asked for

Scores = tuple[jax.Array | None, jax.Array | None, jax.Array | None, jax.Array | None]  # as Logits has them of prompts
Draw = Callable[..., tuple[jax.Array, jax.Array]]  # as sampling.sample


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Logits:
    """What the forward half of a step yields and its sampling half takes."""

    values: jax.Array  # f[R Q + B, V], float32 at least, before penalties; in parts see jllm.parallel.draws
    rows: Rows
    prompt_logprobs: jax.Array | None  # f[C] of each prompt token's target
    prompt_ranks: jax.Array | None  # i32[C] of the same, 1 for the most likely token
    prompt_best: jax.Array | None  # i32[C] the most likely token in each target's place
    prompt_best_logprobs: jax.Array | None  # f[C] of these
    taps: Taps  # [T, ...] by names of the variant's; of the head's rows [R Q + B, ...]
    hidden: jax.Array  # [R Q + B, E], before the final norm
    chunk_hidden: jax.Array  # [C, E]
    hook_rows: HookRows | None = None  # of the values


def forward(
    params: Params,
    state: State,
    batch: RaggedBatch,
    *,
    config: LlamaConfig,
    variant: Variant = Variant(),
    backend: str | None = None,
    hooks: Hooks | None = None,
    parts: bool = False,
) -> tuple[State, Logits]:
    """Admits what begins, writes the K and V of the step's T tokens to their pages, and computes the logits of every
    row of a short segment and of the last row of every chunk. parts: a device of a mesh may leave them in parts, as
    parallel.draws says."""
    if config.mesh is not None:
        own = partial(_forward_own, variant=variant, backend=backend)
        return _per_rank(own, config, WHOLE, WHOLE)(params, state, batch, hooks)
    slots = _admit(_change_pages(state.slots, batch.deltas), batch)
    if variant.guided:
        state = replace(state, guidance=_unguided(state.guidance, batch.chunk_slot))
    sizes = state.cache[0].k.num_pages, state.cache[0].k.page_size
    paged, rows = lay_out(slots, state.drafts, batch, *sizes, tails=state.tails is not None)
    short, C = paged.short_rows, batch.tokens.shape[0]
    last = short + jnp.clip(paged.chunk_cu[1:] - 1, 0, max(C - 1, 0))

    def pick(values: jax.Array) -> jax.Array:  # of all rows, the head's
        return jnp.concatenate([values[:short], jnp.take(values, last, axis=0, mode="clip")])

    edits = of_head = of_prompt = hook_rows = None
    if hooks is not None:
        every = _hook_rows(state, batch, paged, rows)
        prompt: HookRows = jax.tree.map(lambda x: x[short:], every)
        user = hooks.see(state.user, prompt.slot, prompt.index, prompt.token)
        state = replace(state, user=user)
        every, hook_rows, prompt = (replace(x, user=user) for x in (every, jax.tree.map(pick, every), prompt))
        edits = make_edits(hooks.edit, config.num_layers, every)
        if edits is not None:
            of_head, of_prompt = replace(edits, rows=hook_rows), replace(edits, rows=prompt)
    options: dict[str, Any] = {"backend": backend}
    given = with_tails(state.cache, state.tails)
    found = tapped_backbone(params, config, paged, given, variant.taps, **options, edits=edits)
    hidden, cache, taps = _without_gradient(found[0]), *found[1:]
    assert cache is not None
    cache, tails = without_tails(cache)
    picked = pick(hidden)
    whole = not (parts and leaves_parts(config, picked.shape[0], variant.draws))
    values = head(params, config, picked, **options, edits=of_head, whole=whole)
    scores: Scores = (None, None, None, None)
    if variant.prompt_logprobs and C:
        scores = _score_prompt(params, config, hidden[short:], batch.targets, of_prompt, **options)
    taps = taps | head_taps(params, config, picked, values, variant.taps, **options, edits=of_head)
    counts = state.counts
    if variant.penalties:
        assert counts is not None, "the penalties variant needs State.counts"
        counts = _count_prompt(counts, batch, paged.positions[short:])
    logits = Logits(values, rows, *scores, taps, picked, hidden[short:], hook_rows)
    return replace(state, cache=cache, tails=tails, slots=slots, counts=counts), logits


def sample(
    state: State,
    logits: Logits,
    *,
    variant: Variant = Variant(),
    backend: str | None = None,
    draw: Draw = draw_tokens,
    config: LlamaConfig | None = None,
    hooks: Hooks | None = None,
) -> tuple[State, Outputs]:
    """Draws a token for each row that is due, accepts the drafts that equal what was drawn in their place, and moves
    the sequences on. `draw` takes logits [rows, V], Sampling and token indices [rows] as sampling.sample does, and
    returns tokens and which rows are finite. The config is for models on a mesh alone. Raises ValueError for another
    `draw` under rejection sampling."""
    if config is not None and config.mesh is not None:
        own = partial(_sample_own, variant=variant, backend=backend, draw=draw)
        return _per_rank(own, config, WHOLE, WHOLE)((), state, logits, hooks)
    raw, rows = logits.values, logits.rows
    sampling: Sampling = jax.tree.map(lambda x: x[rows.slot], state.slots.sampling)
    each: Sampling = rows.spread(sampling)
    counts = state.counts
    if state.drafts is not None and state.drafts.logits is not None:
        if draw is not draw_tokens:
            raise ValueError("acceptance='rejection' draws tokens as sampling.sample does: leave draw out")
        draw = _or_accept(rows, state.drafts.logits)
    given = raw
    if hooks is not None:
        assert logits.hook_rows is not None, "forward and sample take the same hooks"
        given = hooks.process(raw, logits.hook_rows, drafts=rows.tree.size > 1)
    if variant.penalties:
        assert counts is not None, "the penalties variant needs State.counts"
        own = rows.spread(jax.tree.map(lambda x: x[rows.slot], counts))
        given = penalize(given, each.penalties, own, rows.drafts_before())
    possible = None
    if variant.guided:
        assert state.guidance is not None
        allowed = rows.of_nodes(state.guidance.allowed[rows.slot])
        given, possible = constrain(given, allowed), jnp.any(allowed != 0, axis=1)
    tokens, finite = draw(given, each, rows.index, backend=backend)
    if given is not raw:
        finite = jnp.isfinite(raw).all(axis=1)  # a ban makes -inf of a logit
    nodes, count = rows.accept(tokens, possible)
    drawn, sound = rows.by_sequence(tokens, nodes), rows.by_sequence(finite, nodes)
    count, done = _end(sampling, rows.start, drawn, sound, count)
    valid = jnp.arange(rows.most, dtype=jnp.int32)[None, :] < count[:, None]
    if variant.penalties:
        assert counts is not None
        slot = jnp.where(valid, rows.target_slot[:, None], state.slots.token.shape[0])
        counts = count_tokens(counts, slot.reshape(-1), drawn.reshape(-1), valid.reshape(-1))
    outputs = Outputs(
        tokens=rows.flat(jnp.where(valid, jnp.where(sound, drawn, NOT_FINITE), -1)),
        **_logprobs(rows, raw, tokens, nodes, variant),
        prompt_logprobs=logits.prompt_logprobs,
        prompt_ranks=logits.prompt_ranks,
        prompt_best=logits.prompt_best,
        prompt_best_logprobs=logits.prompt_best_logprobs,
        nodes=None if rows.tree.is_chain else jnp.where(valid[: nodes.shape[0]], nodes, -1),
        drafted=None if rows.tree.size == 1 else jnp.maximum(rows.used - 1, 0),
        taps=logits.taps,
    )
    slots, user = _advance(state.slots, rows, drawn, count, done), state.user
    if hooks is not None:
        index = rows.start[:, None] + jnp.arange(rows.most, dtype=jnp.int32)[None, :]
        slot = jnp.where(valid & sound, rows.target_slot[:, None], state.slots.token.shape[0])
        user = hooks.see(user, slot.reshape(-1), index.reshape(-1), drawn.reshape(-1))
    cache = _compact(state, rows, nodes, count, backend)
    return replace(state, cache=cache, slots=slots, counts=counts, user=user), outputs


def _forward_own(
    params: Params, state: State, batch: RaggedBatch, hooks: Hooks | None, **options: Any
) -> tuple[State, Logits]:
    """forward, as per_rank calls functions."""
    return forward(params, state, batch, hooks=hooks, **options)


def _sample_own(
    params: tuple, state: State, logits: Logits, hooks: Hooks | None, **options: Any
) -> tuple[State, Outputs]:
    """sample, likewise."""
    return sample(state, logits, hooks=hooks, **options)


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
    wanted: bool = True,
) -> State:
    """Has the drafter see what a step did, and keeps what it proposes for the slots of the step, if drafts are wanted
    of it."""
    rows, slots, drafts = logits.rows, state.slots, state.drafts
    assert drafts is not None, "a drafter needs State.drafts: init_state(..., drafter=drafter)"
    S, R = slots.token.shape[0], rows.tokens.shape[0]
    tokens = rows.unflat(outputs.tokens, -1)
    nodes = jnp.broadcast_to(jnp.arange(rows.most, dtype=jnp.int32), (R, rows.most))
    if outputs.nodes is not None:
        nodes = jnp.maximum(outputs.nodes, 0)
    slot = jnp.where(rows.written, rows.slot, S)
    sampling: Sampling = jax.tree.map(lambda x: x[rows.slot], slots.sampling)
    if drafts.logits is not None:
        sampling = replace(sampling, purpose=Purpose.DRAFTING)
    advance = Advance(
        slot=slot,
        start=rows.start,
        tokens=tokens,
        count=jnp.where(slots.done[rows.slot], 0, jnp.sum(tokens >= 0, axis=1, dtype=jnp.int32)),
        hidden=rows.by_sequence(logits.hidden, nodes),
        pages=slots.pages[rows.slot],
        room=jnp.concatenate([batch.decode_room, batch.chunk_room]),
        sampling=sampling,
        chunk_slot=batch.chunk_slot,
        chunks=Chunks(batch.tokens, batch.chunk_start, batch.chunk_len, slots.pages[rows.slot[R:]]),
        chunk_hidden=logits.chunk_hidden,
        cache=state.cache,
    )
    options: dict[str, Any] = {"config": config, "backend": backend, "wanted": wanted}
    found = drafter.propose(drafts, advance, params, **options)
    if state.guidance is not None and wanted:
        found = with_forced(found, advance, state.guidance.coming[rows.slot], drafter.tree)
    count = drafts.count.at[slot].set(jnp.where(wanted & (advance.count > 0), found.count, 0), mode="drop")
    drafts = replace(drafts, count=count, cache=found.cache, memory=found.memory)
    if wanted:
        drafts = replace(drafts, tokens=drafts.tokens.at[slot].set(found.tokens, mode="drop"))
    if wanted and drafts.logits is not None:
        kept, drawn_from = drafts.logits, found.logits
        if drawn_from is None:
            drawn_from = certain(found.tokens, kept.shape[2], kept.dtype)
        drafts = replace(drafts, logits=kept.at[slot].set(drawn_from.astype(kept.dtype), mode="drop"))
    cache = state.cache if found.target_cache is None else found.target_cache
    return replace(state, drafts=drafts, cache=cache)


def _per_rank(function: Callable, config: LlamaConfig, *inputs: Any) -> Callable:
    """function(params, state, ...) of a model on a mesh, which gives a state and what else is whole; inputs: what holds
    of the arguments after the state."""
    return per_rank(function, config, (SPREAD, *inputs), (SPREAD, WHOLE))


def sample_step(
    params: Params,
    state: State,
    batch: RaggedBatch,
    logits: Logits,
    drafter: Drafter | None = None,
    hooks: Hooks | None = None,
    *,
    config: LlamaConfig,
    variant: Variant = Variant(),
    backend: str | None = None,
    draw: Draw = draw_tokens,
    wanted: bool = True,
) -> tuple[State, Outputs]:
    """The second half of a merged step, of which forward is the first: sample and, with a drafter, draft."""
    if config.mesh is not None:
        own = partial(sample_step, variant=variant, backend=backend, draw=draw, wanted=wanted)
        spread = _per_rank(own, config, WHOLE, WHOLE, spread_drafter(drafter), WHOLE)
        return spread(params, state, batch, logits, drafter, hooks)
    state, outputs = sample(state, logits, variant=variant, backend=backend, draw=draw, hooks=hooks)
    if drafter is not None:
        state = draft(params, state, batch, logits, outputs, drafter, config=config, backend=backend, wanted=wanted)
    elif state.drafts is not None:  # what was drafted is behind the sequences now
        state = replace(state, drafts=replace(state.drafts, count=jnp.zeros_like(state.drafts.count)))
    if variant.guided and state.drafts is not None:
        outputs = replace(outputs, drafts=(state.drafts.tokens, state.drafts.count))
    return state, outputs


STATIC = ("config", "variant", "backend", "draw", "wanted")


def eager_step(
    params: Params,
    state: State,
    batch: RaggedBatch,
    drafter: Drafter | None = None,
    hooks: Hooks | None = None,
    *,
    config: LlamaConfig,
    variant: Variant = Variant(),
    backend: str | None = None,
    draw: Draw = draw_tokens,
    wanted: bool = True,
) -> tuple[State, Outputs]:
    """One merged step: forward, sample and, with a drafter, draft; wanted: whether the next step may verify drafts.
    `step` is this under jit, where config, variant, backend, draw and wanted are static; the old state stays usable."""
    if config.mesh is not None:
        own = partial(eager_step, variant=variant, backend=backend, draw=draw, wanted=wanted)
        spread = _per_rank(own, config, WHOLE, spread_drafter(drafter), WHOLE)
        return spread(params, state, batch, drafter, hooks)
    options: dict[str, Any] = {"config": config, "variant": variant, "backend": backend}
    rejects = state.drafts is not None and state.drafts.logits is not None
    takes_rows = variant.takes_rows or variant.taps or hooks is not None or rejects
    parts = draw is draw_tokens and not takes_rows
    state, logits = forward(params, state, batch, **options, hooks=hooks, parts=parts)
    if logits.values.shape[1] != config.vocab_size:
        draw = draw_apart(config, variant.draws)
    return sample_step(params, state, batch, logits, drafter, hooks, **options, draw=draw, wanted=wanted)


step = partial(jax.jit, static_argnames=STATIC)(eager_step)


def _change_pages(slots: Slots, deltas: jax.Array) -> Slots:
    slot, index, page = deltas[:, 0], deltas[:, 1], deltas[:, 2]
    return replace(slots, pages=slots.pages.at[slot, index].set(page, mode="drop"))


def _admit(slots: Slots, batch: RaggedBatch) -> Slots:
    """A chunk (re)writes its slot's sampling parameters and length; that is all there is to admission."""

    def put(old, new):
        return old.at[batch.chunk_slot].set(new, mode="drop")

    sampling = jax.tree.map(put, slots.sampling, batch.sampling)
    return replace(slots, sampling=sampling, done=put(slots.done, False), length=put(slots.length, batch.chunk_start))


def _unguided(guidance: Guidance | None, slots: jax.Array) -> Guidance:
    """Guidance where all tokens may be drawn in these slots, which begin."""
    assert guidance is not None, "the guided variant needs State.guidance"

    def put(old: jax.Array) -> jax.Array:
        return old.at[slots].set(~jnp.zeros((), old.dtype), mode="drop")

    return jax.tree.map(put, guidance)


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


def _hook_rows(state: State, batch: RaggedBatch, paged: Paged, rows: Rows) -> HookRows:
    """Where all T rows of a step stand."""
    S, (R, Q), C = state.slots.token.shape[0], rows.tokens.shape, batch.tokens.shape[0]
    used = jnp.arange(Q, dtype=jnp.int32)[None, :] < rows.used[:, None]
    short = jnp.where(used, rows.slot[:R, None], S).reshape(-1)
    chunk = chunk_of_row(paged.chunk_cu[1:], C)
    slot = jnp.take(batch.chunk_slot, chunk, mode="fill", fill_value=S)
    return HookRows(jnp.concatenate([short, jnp.minimum(slot, S)]), paged.positions, paged.tokens)


@jax.custom_jvp
def _without_gradient(x: jax.Array) -> jax.Array:
    """x, where a step is not differentiated: attention over pages has no gradient."""
    return x


@_without_gradient.defjvp
def _refuse_gradient(primals: Any, tangents: Any) -> NoReturn:
    raise EvaluationError("a step has no gradients: model.packed_logits is the same function without a cache, and has")


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


def _or_accept(rows: Rows, logits: jax.Array) -> Draw:
    """Draws as rejection sampling does, where rows have drafts after them that were drawn from logits [S, Q - 1, V]."""
    if rows.tree.size == 1:
        return draw_tokens
    R, Q = rows.tokens.shape
    more = jnp.pad(logits[rows.slot[:R]], ((0, 0), (0, 1), (0, 0))).reshape(R * Q, -1)
    proposed = jnp.pad(more, ((0, rows.slot.shape[0] - R), (0, 0)))
    return partial(accept_or_draw, drafts=rows.next_drafts, proposed=proposed)


def _compact(state: State, rows: Rows, nodes: jax.Array, count: jax.Array, backend: str | None) -> Cache:
    """The K and V of accepted nodes of a tree, moved to their places; those of a chain are there."""
    if rows.tree.is_chain:
        return state.cache
    R, W = nodes.shape
    first = rows.start[:R, None] - 1
    e = jnp.arange(W, dtype=jnp.int32)[None, :]
    source, target = jnp.where(e < count[:R, None], first + nodes, -1), first + e
    return move_tokens(state.cache, state.slots.pages[rows.slot[:R]], source, target, backend=or_xla(backend))


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


def _logprobs(rows: Rows, raw: jax.Array, tokens: jax.Array, nodes: jax.Array, variant: Variant) -> dict[str, Any]:
    if not variant.logprobs:
        return {"logprobs": None, "top_ids": None, "top_logprobs": None}
    ids, values = top_logprobs(raw, min(TOP_LOGPROBS, raw.shape[-1]))
    found = {"logprobs": token_logprobs(raw, tokens), "top_ids": ids, "top_logprobs": values}
    return {name: rows.flat(rows.by_sequence(value, nodes)) for name, value in found.items()}


def _score_prompt(
    params: Params,
    config: LlamaConfig,
    hidden: jax.Array,
    targets: jax.Array,
    edits: Edits | None,
    *,
    backend: str | None,
) -> Scores:
    """log p(target) of each prompt row [C], its rank, the most likely token and its log p, in row blocks: never a
    [C, V] array."""
    C = hidden.shape[0]
    block = min(PROMPT_LOGPROB_ROWS, C)
    pad = -C % block

    def blocks(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, pad), *((0, 0),) * (x.ndim - 1))).reshape(-1, block, *x.shape[1:])

    def one(x):
        own = None if edits is None else replace(edits, rows=replace(x[2], user=edits.rows.user))
        logits = head(params, config, x[0], backend=backend, edits=own)
        best = jnp.argmax(logits, axis=1).astype(jnp.int32)
        return token_logprobs(logits, x[1]), token_ranks(logits, x[1]), best, token_logprobs(logits, best)

    rows = None if edits is None else jax.tree.map(blocks, replace(edits.rows, user=None))
    found = jax.lax.map(one, (blocks(hidden), blocks(jnp.maximum(targets, 0)), rows))
    logprobs, ranks, best, best_logprobs = (x.reshape(-1)[:C] for x in found)
    return logprobs, ranks, best, best_logprobs
