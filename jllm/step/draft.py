"""Runs a drafter after the second half of a merged step. It proposes the tokens that the next step verifies."""

from dataclasses import replace

import jax.numpy as jnp

from jllm.config import LlamaConfig
from jllm.model.paged import Chunks
from jllm.model.params import Params
from jllm.speculative.drafter import Advance, Drafter
from jllm.speculative.forced import with_forced
from jllm.step.batch import RaggedBatch
from jllm.step.forward import Logits
from jllm.step.state import Outputs, State


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
    """Gives the drafter the step's results, and keeps its proposals for the step's slots if `wanted`. Returns the new
    state."""
    rows, slots, drafts = logits.rows, state.slots, state.drafts
    assert drafts is not None, "a drafter needs State.drafts: init_state(..., drafter=drafter)"
    S, R = slots.token.shape[0], rows.tokens.shape[0]
    tokens = rows.unflat(outputs.tokens, -1)
    nodes = jnp.broadcast_to(jnp.arange(rows.most, dtype=jnp.int32), (R, rows.most))
    if outputs.nodes is not None:
        nodes = jnp.maximum(outputs.nodes, 0)
    slot = jnp.where(rows.written, rows.slot, S)
    advance = Advance(
        slot=slot,
        start=rows.start,
        tokens=tokens,
        count=jnp.where(slots.done[rows.slot], 0, jnp.sum(tokens >= 0, axis=1, dtype=jnp.int32)),
        hidden=rows.by_sequence(logits.hidden, nodes),
        pages=slots.pages[rows.slot],
        room=jnp.concatenate([batch.decode_room, batch.chunk_room]),
        sampling=rows.of_slots(slots.sampling),
        chunk_slot=batch.chunk_slot,
        chunks=Chunks(batch.tokens, batch.chunk_start, batch.chunk_len, slots.pages[rows.slot[R:]]),
        chunk_hidden=logits.chunk_hidden,
        cache=state.cache,
    )
    found = drafter.propose(drafts, advance, params, config=config, backend=backend, wanted=wanted)
    if state.guidance is not None and wanted:
        found = with_forced(found, advance, state.guidance.coming[rows.slot], drafter.tree)
    count = drafts.count.at[slot].set(jnp.where(wanted & (advance.count > 0), found.count, 0), mode="drop")
    drafts = replace(drafts, count=count, cache=found.cache, memory=found.memory)
    if wanted:
        drafts = replace(drafts, tokens=drafts.tokens.at[slot].set(found.tokens, mode="drop"))
    cache = state.cache if found.target_cache is None else found.target_cache
    return replace(state, drafts=drafts, cache=cache)
