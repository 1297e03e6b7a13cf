"""Packs the scheduler's plan into the buffer that the device reads."""

from dataclasses import fields

import numpy as np

from jllm.engine.plan import Chunk, StepPlan
from jllm.engine.request import SamplingParams
from jllm.model.sampling import STOP_IDS, Penalties, Sampling
from jllm.programs.packed_step import Layout
from jllm.step.batch import PromptChunk, fill_batch

# Fields of SamplingParams that the device uses; the host uses the others.
NAMES = {f.name for f in (*fields(Sampling), *fields(Penalties))} & {f.name for f in fields(SamplingParams)}


def pack_plan(layout: Layout, plan: StepPlan, page_size: int, vocab_size: int) -> np.ndarray:
    """Returns the buffer of a planned step."""
    buffer, batch = layout.pack()
    chunks = [_chunk(chunk, page_size, vocab_size) for chunk in plan.chunks]
    R = len(plan.decodes)
    batch.decode_rows[:R] = plan.rows
    batch.decode_room[:R] = [seq.mapped * page_size for seq in plan.decodes]
    fill_batch(batch, chunks, [seq.slot for seq in plan.decodes if seq.slot is not None], plan.deltas)
    return buffer


def _chunk(chunk: Chunk, page_size: int, vocab_size: int) -> PromptChunk:
    seq, p, stop = chunk.seq, chunk.seq.params, chunk.start + len(chunk.tokens)
    assert seq.slot is not None
    bias = p.logit_bias or {}
    sampling = {name: getattr(p, name) for name in NAMES} | {
        "top_k": min(p.top_k, vocab_size),
        "seed": seq.seed,
        "sample": seq.sample,
        "max_length": seq.max_length,
        "stop_ids": sorted(seq.stop_ids)[:STOP_IDS],
        "bias_ids": list(bias),
        "bias_values": list(bias.values()),
    }
    targets = seq.prompt[chunk.start + 1 : stop + 1] if p.prompt_logprobs else ()
    return PromptChunk(
        seq.slot,
        chunk.tokens,
        chunk.start,
        chunk.final,
        prompt_len=len(seq.prompt),
        targets=targets,
        room=seq.mapped * page_size,
        sampling=sampling,
    )
