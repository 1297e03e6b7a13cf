"""Engines with deterministic=True: log-probabilities are to the bit those of a request alone, in float32 and bfloat16.

tests/training/test_logprobs.py has pools that force preemption, and a prefix cache.
"""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jllm
from jllm.engine.engine import Engine
from jllm.engine.options import EngineOptions
from jllm.engine.request import SamplingParams
from jllm.errors import ConfigError
from jllm.quant.quantize import quantize
from jllm.speculative.drafter import Proposal
from jllm.speculative.tree import Tree, chain
from jllm.step.batch import PromptChunk, empty_batch, fill_batch
from jllm.step.buckets import Bucket
from jllm.step.merge import step
from jllm.step.state import Variant, init_state
from pallas_kernels import one_order
from pallas_kernels.decode_attention import api as decode_attention_api
from pallas_kernels.matmul import config as matmul_config
from tests.engine.test_oracle import COMPANY, QUANTIZED, TINY, alone, jobs, play
from tests.tiny import one_size, tiny_model

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

EXACT = {"deterministic": True, "prefix_cache": False}
SIZES = {
    TINY: COMPANY[TINY],
    "decodes apart": {
        "max_slots": 6, "page_size": 16, "max_step_tokens": 16, "buckets": (Bucket(6, 0, 0), Bucket(6, 16, 3)),
    },
}  # fmt: skip
MORE = pytest.mark.exhaustive
CASES = [
    ("float32", "w8a8", "fp8", "decodes apart"),
    ("bfloat16", "fp8", None, TINY),
    pytest.param("float32", None, None, TINY, marks=MORE),
    pytest.param("float32", "w8a8-all", None, TINY, marks=MORE),
    pytest.param("bfloat16", "fp8", None, "decodes apart", marks=MORE),
]  # of an engine; more schemes and formats are in STEPS


ROWS = (2, 4, 8, 16, 64)  # decodes of a compiled size, beside those of one
SLOTS, PAGES, PAGE = 64, 4, 16
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 1, "vocab_size": 259}
LOGPROBS = Variant(logprobs=True, prompt_logprobs=True)


def likeliest(logits, sampling, position, *, backend):
    """Draws without the filters, which take most of a step's time to compile."""
    return jnp.argmax(logits, axis=1).astype(jnp.int32), jnp.isfinite(logits).all(axis=1)


class Steps:
    """Steps of one model from one state, each of whose slots has a prompt of its own."""

    def __init__(self, model, kv_cache=None, drafter=None):
        self.model, self.drafter = model, drafter
        rng = np.random.default_rng(0)
        self.prompts = [rng.integers(0, WIDE["vocab_size"], n).tolist() for n in rng.integers(1, 40, SLOTS)]
        sizes = {"slots": SLOTS, "num_pages": PAGES * SLOTS, "page_size": PAGE, "dtype": model.params.dtype}
        state = init_state(model.config, **sizes, kv_cache=kv_cache, drafter=drafter)
        for first in range(0, SLOTS, 4):
            state, _ = self.run(state, [self.chunk(slot) for slot in range(first, first + 4)], tokens=160)
        self.state = state

    def chunk(self, slot, start=0, stop=None):
        tokens = self.prompts[slot][start:stop]
        pages = range(PAGES * slot, PAGES * (slot + 1))
        targets = [*self.prompts[slot], 0][start + 1 : start + 1 + len(tokens)]
        return PromptChunk(slot, tokens, start, pages=pages, targets=targets, sampling={"max_length": 1000})

    def run(self, state, chunks=(), decodes=(), tokens=0, rows=1):
        """With room for that many prompt tokens."""
        batch = empty_batch(len(decodes), tokens, len(chunks), deltas=PAGES * len(chunks), width=rows)
        batch.decode_rows[:] = rows
        fill_batch(batch, chunks, decodes)
        options = {"config": self.model.config, "variant": LOGPROBS, "backend": "deterministic", "draw": likeliest}
        return step(self.model.params, state, batch, self.drafter, **options)

    def decode(self, slots, **how):
        """What each slot gets in a step of these."""
        _, outputs = self.run(self.state, decodes=slots, **how)
        return [bits(outputs, i) for i in range(len(slots))]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Planted:
    """Drafts nothing itself: tests write the drafts."""

    tree: Tree = field(metadata={"static": True})

    def init(self, config, dtype, **sizes):
        return (), ()

    def propose(self, drafts, advance, params, *, config, backend, wanted=True):
        none = jnp.zeros((advance.slot.shape[0], self.tree.size - 1), jnp.int32)
        return Proposal(none, none[:, 0], (), ())


def bits(outputs, row):
    return tuple(np.asarray(x[row]).tobytes() for x in (outputs.tokens, outputs.logprobs, outputs.top_logprobs))


def differing(steps, sizes):
    """How many of the slots get other bits in steps of each size than alone."""
    alone = [steps.decode([slot])[0] for slot in range(SLOTS)]
    found = {}
    for size in sizes:
        together = [each for first in range(0, SLOTS, size) for each in steps.decode(range(first, first + size))]
        found[size] = sum(got != want for got, want in zip(together, alone, strict=True))
    _, beside = steps.run(steps.state, [steps.chunk(60), steps.chunk(61, stop=1)], range(8), tokens=50)
    found["beside prompts"] = sum(bits(beside, row) != alone[row] for row in range(8))
    return found


FEW = (64,)
STEPS = [
    ("float32", None, None, {}, (8, 64)),
    pytest.param("float32", None, None, {}, ROWS, marks=MORE),
    pytest.param("bfloat16", None, None, {}, (4, 64), marks=MORE),
    ("float32", "w8a8-groups", "int8-g8", {"tie_embeddings": True}, FEW),
    ("bfloat16", "w4a16-g32", "k=int4-g8-h,v=int4-g16-zp", {"windows": (11,)}, FEW),
    ("float32", "nvfp4", "kivi2-g16-r32", {"hidden_size": 96}, FEW),
]


def of_scheme(dtype, scheme=None, **changes):
    model = tiny_model(dtype, **WIDE | changes)
    return model if scheme is None else replace(model, params=quantize(model.params, scheme))


@pytest.mark.parametrize(("dtype", "scheme", "kv_cache", "changes", "sizes"), STEPS, ids=str)
def test_steps_of_any_size_give_the_bits_of_a_step_alone(dtype, scheme, kv_cache, changes, sizes):
    found = differing(Steps(of_scheme(dtype, scheme, **changes), kv_cache), sizes)
    assert not any(found.values()), found


def test_an_operation_without_a_fence_is_noticed(monkeypatch):
    monkeypatch.delitem(decode_attention_api.BACKENDS, "deterministic")
    model = of_scheme("float32", context=120)  # of no other test: a layer of this config is not traced yet
    found = differing(Steps(model), (8,))
    assert all(found.values()), found


@pytest.mark.parametrize(("dtype", "kv_cache"), [pytest.param("float32", None, marks=MORE), ("bfloat16", "int8-g8")])
def test_prompts_have_the_bits_that_they_have_alone(dtype, kv_cache):
    """In one chunk or in two, beside other chunks and decodes."""
    steps = Steps(of_scheme(dtype), kv_cache)
    slot = max(range(SLOTS), key=lambda slot: len(steps.prompts[slot]))

    def scored(*runs):
        """Runs of chunks and decodes, of whose chunks the first is the slot's."""
        state, found, last = steps.state, [], None
        for chunks, decodes, tokens in runs:
            state, outputs = steps.run(state, chunks, decodes, tokens)
            count = len(chunks[0].tokens)
            found += np.asarray(outputs.prompt_logprobs[:count]).tolist()
            last = bits(outputs, len(decodes))
        return found, last

    whole, other = steps.chunk(slot), steps.chunk(20)
    begin, rest = steps.chunk(slot, 0, 7), steps.chunk(slot, 7)
    alone = scored(([whole], (), len(whole.tokens)))
    assert scored(([whole, other, steps.chunk(21)], range(9), 160)) == alone
    assert scored(([begin, other], (), 50), ([rest, other], range(8), 96)) == alone


CHAIN, BUSHY = chain(3), Tree((0, 0, 2, 2, 4))
HALF = ("bfloat16", "int4-g8-zp-h")
DRAFTS = [(BUSHY, *HALF)]  # of which a chain is a part
DRAFTS += [
    pytest.param(*each, marks=MORE) for each in ((CHAIN, "float32", None), (BUSHY, "float32", None), (CHAIN, *HALF))
]


@pytest.mark.parametrize(("tree", "dtype", "kv_cache"), DRAFTS)
def test_drafts_are_verified_with_the_bits_of_plain_decoding(tree, dtype, kv_cache):
    """Whatever else was drafted, and however many segments a step has."""
    model, slots = of_scheme(dtype), range(8)
    plain, drafting = Steps(model, kv_cache), Steps(model, kv_cache, Planted(tree))
    path = [node for node in range(tree.size) if node in tree.paths[tree.size - 1]]
    state, wanted = plain.state, []
    for _ in path:
        state, outputs = plain.run(state, decodes=slots)
        wanted.append([bits(outputs, row) for row in slots])
    drafts = np.full((SLOTS, tree.size - 1), 7, np.int32)
    for depth, node in enumerate(path[1:]):
        drafts[:8, node - 1] = [np.frombuffer(each[0], np.int32)[0] for each in wanted[depth]]
    made = replace(drafting.state.drafts, tokens=jnp.asarray(drafts), count=jnp.full(SLOTS, tree.size - 1, jnp.int32))
    for own in ([3], slots):
        _, outputs = drafting.run(replace(drafting.state, drafts=made), decodes=own, rows=tree.size)
        for i, slot in enumerate(own):
            got = [bits(outputs, len(path) * i + depth) for depth in range(len(path))]
            assert got == [each[slot] for each in wanted]


@pytest.mark.parametrize(("dtype", "scheme", "kv_cache", "sizes"), CASES, ids=str)
def test_logprobs_are_those_of_a_request_alone(dtype, scheme, kv_cache, sizes):
    model = tiny_model(dtype, **QUANTIZED)
    if scheme is not None:
        model = replace(model, params=quantize(model.params, scheme))
    options = EXACT | {"kv_cache": kv_cache}

    @settings(max_examples=4, suppress_health_check=list(HealthCheck))
    @given(st.lists(jobs, min_size=2, max_size=7))
    def check(found):
        asked = [replace(job, params=replace(job.params, logprobs=3)) for job in found]
        seen: dict = {}
        got = play(model, asked, SIZES[sizes] | options, seen)
        assert not seen["preemptions"]
        for job, completion, want in zip(asked, got, alone(model, asked, **options), strict=True):
            count = len(completion.token_ids)
            assert job.abort_after is not None or completion.finish_reason == want.finish_reason
            assert completion.token_ids == want.token_ids[:count]
            assert completion.logprobs == want.logprobs[:count]

    check()


def test_a_scale_that_all_tokens_share_is_refused():
    model = tiny_model(**QUANTIZED)
    model = replace(model, params=quantize(model.params, "w8a8-tensor"))
    with pytest.raises(ConfigError, match="one scale for all tokens of a step.*w8a8 does"):
        Engine(model, deterministic=True)
    Engine(model)


def test_what_has_no_one_order_here_is_refused_before_anything_runs(monkeypatch):
    for module in (one_order, matmul_config):
        monkeypatch.setattr(module, "on_hopper", lambda: True)
    monkeypatch.setattr(one_order, "capability", lambda: "9.0")
    with pytest.raises(ConfigError, match="has no matmul for model.layers.0.self_attn.qkv_proj: .*no float32 matmul"):
        Engine(tiny_model("float32"), deterministic=True)
    monkeypatch.setattr(one_order, "on_hopper", lambda: False)
    monkeypatch.setattr(one_order, "capability", lambda: "8.0")
    with pytest.raises(ConfigError, match="deterministic is for Hopper GPUs and CPUs"):
        Engine(tiny_model("bfloat16"), deterministic=True)


def test_it_chooses_the_kernels_itself():
    with pytest.raises(ConfigError, match="deterministic chooses the kernels: leave backend='xla' out"):
        EngineOptions(deterministic=True, backend="xla")
    with pytest.raises(ConfigError, match="deterministic must be True or False, not 1"):
        EngineOptions(deterministic=1)  # type: ignore[arg-type]
    model, options = tiny_model(num_layers=1), {"executables": None, **one_size(1, tokens=3)}
    greedy = SamplingParams(temperature=0.0, max_new_tokens=4)
    (found,) = jllm.generate(model, [[5, 6, 7]], greedy, deterministic=True, **options)
    (plain,) = jllm.generate(model, [[5, 6, 7]], greedy, **options)
    assert found.token_ids == plain.token_ids
