"""Runs the second half of a merged step: draws tokens from logits, accepts drafts, and advances the sequences."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jllm.config import LlamaConfig
from jllm.model.backbone import Cache
from jllm.model.hooks import Hooks
from jllm.model.sampling import (
    Sampling,
    constrain,
    count_tokens,
    penalize,
    tempered_logprobs,
    token_logprobs,
    top_logprobs,
)
from jllm.model.sampling import sample as draw_tokens
from jllm.parallel.ranks import REPLICATED, on_mesh
from jllm.step.forward import Logits
from jllm.step.rows import HeadRows
from jllm.step.state import NOT_FINITE, SPREAD, TOP_LOGPROBS, Outputs, Slots, State, Variant
from pallas_kernels.backends import or_xla
from pallas_kernels.move_tokens import move_tokens
from pallas_kernels.one_order import fenced

Draw = Callable[..., tuple[jax.Array, jax.Array]]  # like sampling.sample


@on_mesh({"state": SPREAD, "logits": REPLICATED, "hooks": REPLICATED}, (SPREAD, REPLICATED))
def sample(
    state: State,
    logits: Logits,
    hooks: Hooks | None = None,
    *,
    variant: Variant = Variant(),
    backend: str | None = None,
    draw: Draw = draw_tokens,
    config: LlamaConfig | None = None,
) -> tuple[State, Outputs]:
    """Draws a token for each row that is due, accepts the drafts that equal drawn tokens, and advances the sequences.
    `draw` takes logits [rows, V], Sampling and token indices [rows], as sampling.sample does. It returns tokens and
    whether rows are finite. Only models on a mesh need `config`."""
    raw, rows = logits.values, logits.rows
    S, counts = state.slots.token.shape[0], state.counts
    sampling: Sampling = rows.of_slots(state.slots.sampling)
    each: Sampling = rows.spread(sampling)
    given = raw
    if hooks is not None:
        assert logits.hook_rows is not None, "forward and sample take the same hooks"
        hook_rows = replace(logits.hook_rows, inputs=state.inputs)
        given = hooks.process(raw, hook_rows, drafts=rows.tree.size > 1, backend=backend)
    if variant.penalties:
        assert counts is not None, "the penalties variant needs State.counts"
        of_rows = each.penalties, rows.spread(rows.of_slots(counts)), rows.drafts_before()
        given = fenced(backend, penalize, given, *of_rows)
    possible = None
    if variant.guided:
        assert state.guidance is not None
        allowed = rows.of_nodes(state.guidance.allowed[rows.slot])
        given, possible = constrain(given, allowed), jnp.any(allowed != 0, axis=1)
    tokens, finite = draw(given, each, rows.index, backend=backend)
    if given is not raw:
        finite = jnp.isfinite(raw).all(axis=1)  # a ban turns a logit into -inf
    nodes, count = rows.accept(tokens, possible)
    drawn, sound = rows.by_sequence(tokens, nodes), rows.by_sequence(finite, nodes)
    count, done = _end(sampling, rows.start, drawn, sound, count)
    valid = jnp.arange(rows.most, dtype=jnp.int32)[None, :] < count[:, None]
    if variant.penalties:
        assert counts is not None
        slot = jnp.where(valid, rows.target_slot[:, None], S)
        counts = count_tokens(counts, slot.reshape(-1), drawn.reshape(-1), valid.reshape(-1))
    outputs = Outputs(
        tokens=rows.flat(jnp.where(valid, jnp.where(sound, drawn, NOT_FINITE), -1)),
        **_logprobs(rows, raw, tokens, nodes, each, variant, backend),
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
        slot = jnp.where(valid & sound, rows.target_slot[:, None], S)
        user = hooks.see(user, slot.reshape(-1), index.reshape(-1), drawn.reshape(-1), state.inputs)
    cache = _compact(state, rows, nodes, count, backend)
    return replace(state, cache=cache, slots=slots, counts=counts, user=user), outputs


def _end(
    sampling: Sampling, start: jax.Array, drawn: jax.Array, sound: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the number of drawn tokens up to the one that ends the sequence, and whether one does. `drawn` is [R + B,
    W], and the number is at most `count`."""
    stop = jnp.any(sampling.stop_ids[:, None, :] == drawn[:, :, None], axis=2)
    total, done = jnp.zeros_like(count), jnp.zeros_like(count, bool)
    for e in range(drawn.shape[1]):
        here = (e < count) & ~done
        total += here.astype(jnp.int32)
        done |= here & (stop[:, e] | ~sound[:, e] | (start + e + 1 >= sampling.max_length))
    return total, done


def _logprobs(
    rows: HeadRows,
    raw: jax.Array,
    tokens: jax.Array,
    nodes: jax.Array,
    each: Sampling,
    variant: Variant,
    backend: str | None,
) -> dict[str, Any]:
    if not variant.logprobs:
        return {"logprobs": None, "top_ids": None, "top_logprobs": None}
    top = partial(top_logprobs, n=min(TOP_LOGPROBS, raw.shape[-1]), backend=backend)
    ids, values = fenced(backend, top, raw)
    found: dict[str, Any] = {
        "logprobs": fenced(backend, partial(token_logprobs, backend=backend), raw, tokens),
        "top_ids": ids,
        "top_logprobs": values,
    }
    if variant.tempered:
        tempered = partial(tempered_logprobs, backend=backend)
        found["tempered"] = fenced(backend, tempered, raw, tokens, ids, each.temperature)
    return jax.tree.map(lambda value: rows.flat(rows.by_sequence(value, nodes)), found)


def _advance(slots: Slots, rows: HeadRows, drawn: jax.Array, count: jax.Array, done: jax.Array) -> Slots:
    """Returns slots after the step. Lengths grow by the tokens that stay in the pages. The last drawn token becomes the
    next input, and may have ended its sequence."""
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


def _compact(state: State, rows: HeadRows, nodes: jax.Array, count: jax.Array, backend: str | None) -> Cache:
    """Returns the cache with the K and V of a tree's accepted nodes moved to their places. A chain's are there
    already."""
    if rows.tree.is_chain:
        return state.cache
    R, W = nodes.shape
    first = rows.start[:R, None] - 1
    e = jnp.arange(W, dtype=jnp.int32)[None, :]
    source, target = jnp.where(e < count[:R, None], first + nodes, -1), first + e
    (cache,) = move_tokens((state.cache,), state.slots.pages[rows.slot[:R]], source, target, backend=or_xla(backend))
    return cache
