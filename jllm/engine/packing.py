"""A plan of the scheduler as the packed buffer that the device reads."""

from collections.abc import Callable, Collection

import numpy as np

from jllm.batch import STOP_IDS, Layout, RaggedBatch
from jllm.engine.scheduler import Chunk, Plan
from jllm.engine.sequence import Sequence


def pack_plan(
    layout: Layout, plan: Plan, vocab_size: int, stop_ids: Callable[[Sequence], Collection[int]]
) -> np.ndarray:
    """A fresh i32 buffer; stop_ids gives the tokens that end a sequence."""
    buffer, batch = layout.pack()
    batch.decode_slot[: len(plan.decodes)] = [s.slot for s in plan.decodes]
    if plan.deltas:
        batch.deltas[: len(plan.deltas)] = plan.deltas
    at = 0
    for b, chunk in enumerate(plan.chunks):
        n = len(chunk.tokens)
        batch.tokens[at : at + n] = chunk.tokens
        if chunk.seq.params.prompt_logprobs:
            following = chunk.seq.prompt[chunk.start + 1 : chunk.start + n + 1]
            batch.targets[at : at + len(following)] = following
        at += n
        _write_chunk(batch, b, chunk, vocab_size)
        ids = sorted(stop_ids(chunk.seq))[:STOP_IDS]
        batch.stop_ids[b, : len(ids)] = ids
        if layout.bias:
            _write_penalties(batch, b, chunk.seq)
    return buffer


def _write_chunk(batch: RaggedBatch, b: int, chunk: Chunk, vocab_size: int) -> None:
    seq, p = chunk.seq, chunk.seq.params
    batch.chunk_slot[b], batch.chunk_start[b] = seq.slot, chunk.start
    batch.chunk_len[b], batch.chunk_final[b] = len(chunk.tokens), chunk.final
    batch.prompt_len[b], batch.max_length[b] = len(seq.prompt), seq.max_length
    batch.seed[b : b + 1].view(np.uint32)[0] = seq.seed
    batch.sample[b] = seq.sample
    batch.temperature[b], batch.top_k[b] = p.temperature, min(p.top_k, vocab_size)
    batch.top_p[b], batch.min_p[b] = p.top_p, p.min_p


def _write_penalties(batch: RaggedBatch, b: int, seq: Sequence) -> None:
    p = seq.params
    batch.repetition[b], batch.presence[b] = p.repetition_penalty, p.presence_penalty
    batch.frequency[b] = p.frequency_penalty
    if p.logit_bias:
        batch.bias_ids[b, : len(p.logit_bias)] = list(p.logit_bias)
        batch.bias_values[b, : len(p.logit_bias)] = list(p.logit_bias.values())
