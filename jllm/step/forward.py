"""Runs the first half of a merged step: admits sequences, writes K and V, and computes logits."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from jllm.config import LlamaConfig
from jllm.errors import EvaluationError
from jllm.model.backbone import Taps, head, head_taps, tapped_backbone
from jllm.model.cache import with_tails, without_tails
from jllm.model.hooks import Edits, HookRows, Hooks, make_edits
from jllm.model.paged import Paged, chunk_of_row
from jllm.model.params import Params
from jllm.model.sampling import TokenCounts, count_tokens, token_logprobs, token_ranks
from jllm.model.taps import ROWS_OF_HEAD
from jllm.parallel.ranks import REPLICATED, STACKED, on_mesh
from jllm.step.batch import RaggedBatch
from jllm.step.draws import leaves_parts
from jllm.step.rows import HeadRows, lay_out
from jllm.step.state import SPREAD, Guidance, Slots, State, Variant
from pallas_kernels.one_order import fenced

PROMPT_LOGPROB_ROWS = 128  # rows of logits in memory at once for prompt logprobs

Scores = tuple[jax.Array | None, jax.Array | None, jax.Array | None, jax.Array | None]  # Logits' prompt fields


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Logits:
    """Holds the results of a step's forward half, the inputs of its sampling half."""

    values: jax.Array  # f[R Q + B, V], float32 at least, before penalties; or parts, see jllm.step.draws
    rows: HeadRows
    prompt_logprobs: jax.Array | None  # f[C] of each prompt token's target
    prompt_ranks: jax.Array | None  # i32[C] of the same, 1 for the most likely token
    prompt_best: jax.Array | None  # i32[C] the most likely token at each target's place
    prompt_best_logprobs: jax.Array | None  # f[C] of prompt_best
    taps: Taps  # [T, ...] by the variant's names; the head's values [R Q + B, ...]; or [N, ...] of the tapped rows
    hidden: jax.Array  # [R Q + B, E], before the final norm
    chunk_hidden: jax.Array  # [C, E]
    hook_rows: HookRows | None = None  # of the values, without `inputs`, which the state has


@on_mesh({"params": STACKED, "state": SPREAD, "batch": REPLICATED, "hooks": REPLICATED}, (SPREAD, REPLICATED))
def forward(
    params: Params,
    state: State,
    batch: RaggedBatch,
    hooks: Hooks | None = None,
    *,
    config: LlamaConfig,
    variant: Variant = Variant(),
    backend: str | None = None,
    parts: bool = False,
) -> tuple[State, Logits]:
    """Admits new sequences, writes the K and V of the step's T tokens to their pages, and computes logits. Logits are
    those of every row of a short segment and of the last row of every chunk. With `parts`, a device of a mesh may leave
    them in parts (jllm.step.draws)."""
    slots = _admit(_change_pages(state.slots, batch.deltas), batch)
    if variant.guided:
        state = replace(state, guidance=_unguided(state.guidance, batch.chunk_slot))
    sizes = state.cache.k.num_pages, state.cache.k.page_size
    paged, rows = lay_out(slots, state.drafts, batch, *sizes, tails=state.tails is not None)
    short, C = paged.short_rows, batch.tokens.shape[0]
    last = short + jnp.clip(paged.chunk_cu[1:] - 1, 0, max(C - 1, 0))

    def pick(values: jax.Array) -> jax.Array:  # the head's rows from all rows
        return jnp.concatenate([values[:short], jnp.take(values, last, axis=0, mode="clip")])

    edits = of_head = of_prompt = hook_rows = None
    if hooks is not None:
        every = _hook_rows(state, batch, paged, rows)
        prompt: HookRows = jax.tree.map(lambda x: x[short:], every)
        user = hooks.see(state.user, prompt.slot, prompt.index, prompt.token, state.inputs)
        state, shared = replace(state, user=user), {"user": user, "inputs": state.inputs}
        every, hook_rows, prompt = (replace(x, **shared) for x in (every, jax.tree.map(pick, every), prompt))
        edits = make_edits(hooks.edit, config.num_layers, every, hooks.add)
        if edits is not None:
            of_head, of_prompt = replace(edits, rows=hook_rows), replace(edits, rows=prompt)
    tailed = with_tails(state.cache, state.tails)
    hidden, cache, taps = tapped_backbone(params, config, paged, tailed, variant.taps, backend=backend, edits=edits)
    assert cache is not None
    cache, tails = without_tails(cache)
    hidden = _without_gradient(hidden)
    picked = pick(hidden)
    whole = not (parts and leaves_parts(config, picked.shape[0], variant.draws))
    values = head(params, config, picked, backend=backend, edits=of_head, whole=whole)
    scores: Scores = (None, None, None, None)
    if variant.prompt_logprobs and C:
        scores = _score_prompt(params, config, hidden[short:], batch.targets, of_prompt, backend=backend)
    taps = taps | head_taps(params, config, picked, values, variant.taps, backend=backend, edits=of_head)
    if batch.tapped.shape[0]:
        taps = _tapped_rows(taps, batch.tapped, short, paged.chunk_cu[1:])
    counts = state.counts
    if variant.penalties:
        assert counts is not None, "the penalties variant needs State.counts"
        counts = _count_prompt(counts, batch, paged.positions[short:])
    hook_rows = None if hook_rows is None else replace(hook_rows, inputs=None)
    logits = Logits(values, rows, *scores, taps, picked, hidden[short:], hook_rows)
    return replace(state, cache=cache, tails=tails, slots=slots, counts=counts), logits


def _tapped_rows(taps: Taps, rows: jax.Array, short: int, ends: jax.Array) -> Taps:
    """Returns the values of these rows i32[N] alone. The head has the short rows, and one row of each chunk."""
    chunk = jnp.sum(rows[:, None] - short >= ends[None], axis=1, dtype=jnp.int32)
    of_head = jnp.where(rows < short, rows, short + chunk)
    at = {name: of_head if name in ROWS_OF_HEAD else rows for name in taps}
    return {name: jnp.take(value, at[name], axis=0, mode="clip") for name, value in taps.items()}


def _change_pages(slots: Slots, deltas: jax.Array) -> Slots:
    slot, index, page = deltas[:, 0], deltas[:, 1], deltas[:, 2]
    return replace(slots, pages=slots.pages.at[slot, index].set(page, mode="drop"))


def _admit(slots: Slots, batch: RaggedBatch) -> Slots:
    """Returns slots with the sampling parameters and lengths of the step's chunks. Admission is nothing else."""

    def put(old, new):
        return old.at[batch.chunk_slot].set(new, mode="drop")

    sampling = jax.tree.map(put, slots.sampling, batch.sampling)
    return replace(slots, sampling=sampling, done=put(slots.done, False), length=put(slots.length, batch.chunk_start))


def _unguided(guidance: Guidance | None, slots: jax.Array) -> Guidance:
    """Returns guidance in which all tokens may be drawn in these slots, whose sequences begin."""
    assert guidance is not None, "the guided variant needs State.guidance"

    def put(old: jax.Array) -> jax.Array:
        return old.at[slots].set(~jnp.zeros((), old.dtype), mode="drop")

    return jax.tree.map(put, guidance)


def _hook_rows(state: State, batch: RaggedBatch, paged: Paged, rows: HeadRows) -> HookRows:
    """Returns the slot, index and token of all T rows of a step."""
    S, (R, Q), C = state.slots.token.shape[0], rows.tokens.shape, batch.tokens.shape[0]
    used = jnp.arange(Q, dtype=jnp.int32)[None, :] < rows.used[:, None]
    short = jnp.where(used, rows.slot[:R, None], S).reshape(-1)
    chunk = chunk_of_row(paged.chunk_cu[1:], C)
    slot = jnp.take(batch.chunk_slot, chunk, mode="fill", fill_value=S)
    return HookRows(jnp.concatenate([short, jnp.minimum(slot, S)]), paged.positions, paged.tokens)


@jax.custom_jvp
def _without_gradient(x: jax.Array) -> jax.Array:
    """Returns x, and raises EvaluationError under differentiation: attention over pages has no gradient."""
    return x


@_without_gradient.defjvp
def _refuse_gradient(primals: Any, tangents: Any) -> NoReturn:
    raise EvaluationError("a step has no gradients: take jllm.model.backbone.packed_logits, which runs without a cache")


def _count_prompt(counts: TokenCounts, batch: RaggedBatch, position: jax.Array) -> TokenCounts:
    """Returns counts with the chunks' tokens: all as seen, and recomputed output as output. A sequence's first chunk
    resets its slot's counts."""
    S = counts.seen.shape[0]
    first = jnp.where(batch.chunk_start == 0, batch.chunk_slot, S)
    counts = jax.tree.map(lambda x: x.at[first].set(jnp.zeros((), x.dtype), mode="drop"), counts)
    chunk = chunk_of_row(jnp.cumsum(batch.chunk_len, dtype=jnp.int32), batch.tokens.shape[0])
    slot = jnp.where(chunk < batch.chunk_slot.shape[0], jnp.take(batch.chunk_slot, chunk, mode="clip"), S)
    is_output = position >= jnp.take(batch.prompt_len, chunk, mode="clip")
    return count_tokens(counts, slot, batch.tokens, is_output)


def _score_prompt(
    params: Params,
    config: LlamaConfig,
    hidden: jax.Array,
    targets: jax.Array,
    edits: Edits | None,
    *,
    backend: str | None,
) -> Scores:
    """Returns log p(target) of each prompt row [C], its rank, the most likely token and that token's log p. Works in
    row blocks, so that no [C, V] array exists."""
    C = hidden.shape[0]
    block = min(PROMPT_LOGPROB_ROWS, C)
    pad = -C % block

    def blocks(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, pad), *((0, 0),) * (x.ndim - 1))).reshape(-1, block, *x.shape[1:])

    def one(x):
        own = None if edits is None else replace(edits, rows=replace(edits.rows, **x[2]))
        logits = head(params, config, x[0], backend=backend, edits=own)
        best = jnp.argmax(logits, axis=1).astype(jnp.int32)
        of = partial(token_logprobs, backend=backend)
        logprobs, of_best = (fenced(backend, of, logits, tokens) for tokens in (x[1], best))
        return logprobs, token_ranks(logits, x[1]), best, of_best

    rows = None if edits is None else {name: blocks(getattr(edits.rows, name)) for name in ("slot", "index", "token")}
    found = jax.lax.map(one, (blocks(hidden), blocks(jnp.maximum(targets, 0)), rows))
    logprobs, ranks, best, best_logprobs = (x.reshape(-1)[:C] for x in found)
    return logprobs, ranks, best, best_logprobs
