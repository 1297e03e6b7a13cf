"""What a plan says is what the device reads, field by field; what is not written is padding."""

from dataclasses import fields, is_dataclass, replace

import numpy as np

from jllm.engine.plan import StepPlan, next_chunk, pack_plan
from jllm.engine.request import SamplingParams
from jllm.engine.sequence import Sequence
from jllm.model.sampling import STOP_IDS
from jllm.programs.packed_step import Layout
from jllm.step.batch import PromptChunk, ragged_batch
from jllm.step.buckets import Bucket

NOWHERE = np.iinfo(np.int32).max
LAYOUT = Layout(Bucket(3, 10, 3), deltas=3, bias=2)


def test_a_plan_as_the_device_reads_it():
    asked = {"repetition_penalty": 1.5, "presence_penalty": 0.25, "frequency_penalty": 0.5, "logit_bias": {7: -1.0}}
    rare = SamplingParams(temperature=0.5, top_k=2**40, top_p=0.75, min_p=0.125, prompt_logprobs=True, **asked)
    first = Sequence(0, 0, (10, 11, 12, 13, 14), rare, 2**32 - 1, 50, [20, 21], slot=2, mapped=2)
    second = Sequence(0, 1, (30, 31), SamplingParams(temperature=0.0), 5, 9, slot=0, mapped=1)
    decodes = tuple(Sequence(2, 0, (1,), SamplingParams(), 0, 9, slot=slot, mapped=slot) for slot in (3, 1))
    first.computed, first.prefill_end, second.prefill_end = 3, 7, 2
    first.stop_ids, second.stop_ids = frozenset(range(40, 40 + STOP_IDS + 3)), frozenset({9, 2})
    chunks = next_chunk(first, 3, 8), next_chunk(second, 2, 8)
    plan = StepPlan(0, decodes, (2, 1), chunks, ((2, 1, 6), (0, 0, 4)))
    buffer = pack_plan(LAYOUT, plan, 8)
    batch = LAYOUT.unpack(buffer)
    assert buffer.dtype == np.int32
    want = {
        "decode_slot": [3, 1, NOWHERE],
        "decode_rows": [2, 1, 1],
        "decode_room": [24, 8, NOWHERE],
        "chunk_room": [16, 8, NOWHERE],
        "width": 1,
        "tokens": [13, 14, 20, 30, 31, 0, 0, 0, 0, 0],
        "targets": [14, -1, -1, -1, -1, -1, -1, -1, -1, -1],  # what follows in a prompt whose scores are asked for
        "deltas": [[2, 1, 6], [0, 0, 4], [NOWHERE] * 3],
        "chunk_slot": [2, 0, NOWHERE],
        "chunk_start": [3, 0, 0],
        "chunk_len": [3, 2, 0],
        "chunk_final": [0, 1, 0],
        "prompt_len": [5, 2, 0],
        "tapped": [],
        "max_length": [50, 9, 0],
        "top_k": [NOWHERE, 0, 0],
        "seed": [2**32 - 1, 5, 0],
        "adapter": None,
        "sample": [0, 1, 0],
        "stop_ids": [list(range(40, 40 + STOP_IDS)), [2, 9] + [-1] * (STOP_IDS - 2), [-1] * STOP_IDS],
        "temperature": [0.5, 0, 0],
        "top_p": [0.75, 1, 1],
        "min_p": [0.125, 0, 0],
        "repetition_penalty": [1.5, 1, 1],
        "presence_penalty": [0.25, 0, 0],
        "frequency_penalty": [0.5, 0, 0],
        "bias_ids": [[7, -1], [-1, -1], [-1, -1]],
        "bias_values": [[-1, 0], [0, 0], [0, 0]],
    }
    found = flat(batch)
    assert {name: np.asarray(found[name]).tolist() for name in want} == want
    assert found.keys() == want.keys()
    plain = replace(LAYOUT, bias=0)
    assert plain.unpack(plain.pack()[0]).sampling.penalties is None


def flat(batch) -> dict:
    """Fields by name, those of nested structs among them."""
    found = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        found |= flat(value) if is_dataclass(value) else {field.name: value}
    return found


def test_a_prompt_by_hand_goes_on_where_others_ended():
    batch = ragged_batch([PromptChunk(1, [7, 8], 3, pages=[4, 6], sampling={"top_k": 3})], [0], [(0, 2, 5)])
    names = ("chunk_slot", "chunk_start", "chunk_len", "chunk_final", "prompt_len")
    assert [int(getattr(batch, name)[0]) for name in names] == [1, 3, 2, 1, 5]
    assert batch.deltas.tolist() == [[0, 2, 5], [1, 0, 4], [1, 1, 6]]
    assert batch.tokens.tolist() == [7, 8]
    assert batch.decode_slot.tolist() == [0]
    assert batch.sampling.top_k.tolist() == [3]
    assert batch.sampling.max_length.tolist() == [NOWHERE]
    assert batch.sampling.penalties is None
    penalized = ragged_batch([PromptChunk(0, [7], sampling={"presence_penalty": 0.5})]).sampling.penalties
    assert penalized.presence_penalty.tolist() == [0.5]
