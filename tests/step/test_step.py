"""The step as a function: it is traced at full size for every bucket, and it is pure when asked to be."""

import re
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jllm.files.hf_config import load_config
from jllm.model.backbone import head
from jllm.model.cache import cache_bytes, make_cache, parse_kv_cache
from jllm.model.param_specs import abstract_params
from jllm.model.sampling import make_counts
from jllm.programs.packed_step import Layout, pack_chunks, packed_step
from jllm.quant.quantize import quantize
from jllm.quant.schemes import PRESETS
from jllm.step import forward as step_forward
from jllm.step.batch import PromptChunk, ragged_batch
from jllm.step.buckets import Bucket, choose_bucket, make_buckets
from jllm.step.forward import forward
from jllm.step.merge import step
from jllm.step.sample import sample
from jllm.step.state import State, Variant, init_state, make_slots
from tests.kernels_of import kernels_of, of_step
from tests.tiny import CONFIG, log_softmax, tiny_model

CONFIGS = Path(__file__).parents[2] / "configs"
BUCKETS = make_buckets(512, 2048)
MIXED, PLAIN = Bucket(64, 512, 64), Variant()


@pytest.mark.parametrize("bucket", BUCKETS[::4], ids=str)
def test_a_7b_step_is_traced_for_buckets_of_all_sizes(bucket):
    """Takes shapes alone. Lowers the first and the last bucket too."""
    config = load_config(CONFIGS / "llama-2-7b.json")
    formats = parse_kv_cache("int8-g8", config, jnp.bfloat16)

    def state():
        return State(make_cache(config, 4096, 16, formats), make_slots(512, config.context // 16))

    layout = Layout(bucket, deltas=1152)
    buffer = jax.ShapeDtypeStruct((layout.size,), np.int32)
    params = abstract_params(config, jnp.bfloat16)
    traced = packed_step.trace(params, jax.eval_shape(state), buffer, config=config, layout=layout, variant=Variant())
    if bucket in (BUCKETS[0], BUCKETS[-1]):
        text = traced.lower().as_text()
        assert text.count("call @_layer(") == config.num_layers
        assert text.count("func private @_layer(") == 1  # one body for all layers


def traced_for_cuda(shape: str, scheme: str, bucket=MIXED, variant=PLAIN, backend="hopper", **changes):
    """A step as a Hopper GPU runs it, from shapes alone and without one."""
    config = replace(load_config(CONFIGS / f"{shape}.json"), **changes)
    formats = parse_kv_cache(None, config, jnp.bfloat16)
    bias = 8 if variant.penalties else 0

    def state():
        counts = make_counts(64, config.vocab_size) if bias else None
        return State(make_cache(config, 4096, 16, formats), make_slots(64, 256, bias), counts)

    layout = Layout(bucket, deltas=160, bias=bias)
    return packed_step.trace(
        quantize(abstract_params(config, jnp.bfloat16), scheme),
        jax.eval_shape(state),
        jax.ShapeDtypeStruct((layout.size,), np.int32),
        config=config,
        layout=layout,
        variant=variant,
        backend=backend,
    )


def lowered_for_cuda(shape: str, scheme: str, *rest, **changes) -> str:
    return traced_for_cuda(shape, scheme, *rest, **changes).lower(lowering_platforms=("cuda",)).as_text()


# In one body for all layers: decode attention and its merge, prefill attention, cache update. Norms of all rows and of
# the head's. Then the two of sample.
KERNELS = 4 + 2 + 2
SHAPES = ["llama-2-7b", "llama-3-8b", "mistral-7b-v0.1", "qwen3-8b"]
SCHEMES = list(PRESETS)
# Each shape, and a scheme of each kernel and kind of table. The rest are of the same kernels in other sizes.
LOWERED = list(zip(SHAPES * 2, ["w8a8", "w4a16-g64-zp", "fp8", "nf4-dq", "w8a16"]))
REST = [pair for pair in product(SHAPES, SCHEMES) if pair not in LOWERED]


def products(scheme: str) -> int:
    """The kernels that a layer of 7B and some hundred rows has beside those of every layer, and a head of int8."""
    if scheme in ("bf16", "fp4", "fp4-dq"):  # plain products are XLA's for that many rows, and FP4 has no kernel
        return 0
    if scheme == "llm-int8":  # two of each weight
        return 8
    if scheme == "w8a8-groups":  # QKV, gate and up: what reads a scale for each group is plain jnp
        return 2
    silu = scheme in ("w8a8", "w8a8-all", "w8a8-head", "fp8")  # else it is of 16 bits, and XLA's
    codes = silu and scheme != "w8a8"  # of attention's output
    return (3 if scheme in ("w8a8", "w8a8-tensor") else 4) + silu + codes + (scheme == "w8a8-head")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_as_many_products_by_kernels_as_the_scheme_quantizes(scheme):
    kernels = kernels_of(traced_for_cuda("llama-2-7b", scheme, num_layers=1).jaxpr.jaxpr)
    assert (kernels - of_step(1, chunks=True)).total() == products(scheme)


@pytest.mark.parametrize(
    ("shape", "scheme"), LOWERED + [pytest.param(*pair, marks=pytest.mark.exhaustive) for pair in REST]
)
def test_a_step_on_the_kernels_lowers_for_cuda(shape, scheme):
    text = lowered_for_cuda(shape, scheme)
    assert text.count("call @_layer(") == load_config(CONFIGS / f"{shape}.json").num_layers
    assert text.count("custom_call @mosaic_gpu_v2") == KERNELS + products(scheme)


def branches(text: str) -> int:
    """Loops, and conditionals of which the text does not already say how they go (as it does of those by platform)."""
    known: set[str] = set()
    unknown = text.count("stablehlo.while") + text.count("stablehlo.if")
    for line in text.splitlines():
        if "func.func" in line:
            known.clear()
        name = re.match(r" *(%\w+) = ", line)
        case = re.search(r"\"stablehlo\.case\"\((%\w+)\)", line)
        if case and case[1] not in known:
            unknown += 1
        elif name and (case or "stablehlo.constant" in line):
            known.add(name[1])
    return unknown


ASKING = Variant(penalties=True, logprobs=True)
WAITING = [(Bucket(64, 0, 0), PLAIN), (MIXED, ASKING)]
OTHERS = [(MIXED, PLAIN), (Bucket(64, 0, 0), ASKING), (MIXED, Variant(penalties=True)), (MIXED, Variant(logprobs=True))]


@pytest.mark.parametrize(
    ("bucket", "variant"), WAITING + [pytest.param(*pair, marks=pytest.mark.exhaustive) for pair in OTHERS], ids=str
)
def test_a_step_on_the_kernels_waits_for_nothing_that_the_host_must_read(bucket, variant):
    text = lowered_for_cuda("llama-2-7b", "bf16", bucket, variant, num_layers=2)
    assert text.count("stablehlo.case") > 0
    assert branches(text) == 0
    if bucket.tokens == 0 and variant == PLAIN:
        plain = lowered_for_cuda("llama-2-7b", "bf16", bucket, variant, "xla", num_layers=2)
        assert branches(plain) > 3  # what plain sampling skips


@pytest.mark.parametrize("vocabulary", [pytest.param(300, marks=pytest.mark.exhaustive), 32001])
def test_a_vocabulary_of_any_size_is_sampled_from_on_the_kernels(vocabulary):
    """Without a word to the host, where rows end within a vector, too."""
    step = traced_for_cuda("llama-2-7b", "bf16", num_layers=1, vocab_size=vocabulary)
    kernels = kernels_of(step.jaxpr.jaxpr)
    assert (kernels["sample_part"], kernels["sample_row"]) == (1, 1)
    assert branches(step.lower(lowering_platforms=("cuda",)).as_text()) == 0


def test_prompts_are_scored_in_blocks(monkeypatch):
    """Of which the last is not full."""
    monkeypatch.setattr(step_forward, "PROMPT_LOGPROB_ROWS", 5)
    model, rng = tiny_model(), np.random.default_rng(0)
    hidden, targets = jnp.asarray(rng.normal(size=(13, 32)), jnp.float32), rng.integers(0, 97, 13).astype(np.int32)
    targets[-1] = -1  # not asked for
    scores = step_forward._score_prompt(model.params, CONFIG, hidden, jnp.asarray(targets), None, backend=None)
    logprobs, ranks, best, best_logprobs = scores
    logits = np.asarray(head(model.params, CONFIG, hidden))
    rows = np.arange(12)
    assert {x.shape for x in scores} == {(13,)}
    np.testing.assert_allclose(logprobs[:-1], log_softmax(logits)[rows, targets[:-1]], atol=1e-5)
    better = logits[:-1] > logits[rows, targets[:-1]][:, None]
    np.testing.assert_array_equal(ranks[:-1], 1 + better.sum(axis=1))
    np.testing.assert_array_equal(best, logits.argmax(axis=1))
    np.testing.assert_allclose(best_logprobs, log_softmax(logits).max(axis=1), atol=1e-5)


@pytest.mark.parametrize(
    ("slots", "tokens"), [(512, 2048), (512, 16384), (256, 1024), (104, 256), (64, 256), (16, 256), (4, 256), (1, 8)]
)
def test_sizes_of_more_than_eight_rows_are_multiples_of_eight(slots, tokens):
    sizes = make_buckets(slots, tokens)
    assert [bucket for bucket in sizes if bucket.size > 8 and bucket.size % 8] == []
    assert sizes[-1] == Bucket(slots, tokens - slots, min(slots, tokens - slots))
    assert all(bucket.decodes <= slots and bucket.size <= tokens for bucket in sizes)


def test_the_buckets_holds_every_step():
    assert len(BUCKETS) <= 17
    for decodes, tokens, chunks in [(1, 0, 0), (512, 1536, 512), (0, 1, 1), (33, 129, 17), (512, 0, 0)]:
        bucket = choose_bucket(BUCKETS, decodes, tokens, chunks)
        assert bucket.decodes >= decodes
        assert bucket.tokens >= tokens
        assert bucket.chunks >= chunks
    assert choose_bucket(BUCKETS, 512, 1536, 512).size == 2048  # a full step has no slack
    assert choose_bucket(make_buckets(16, 256), 1, 0, 0) == Bucket(1, 0, 0)
    assert choose_bucket(BUCKETS, 1, 0, 0) == Bucket(8, 0, 0)
    assert choose_bucket(BUCKETS, 330, 1, 1) == Bucket(512, 384, 384)
    assert choose_bucket(BUCKETS, 9, 1, 1) == Bucket(64, 64, 64)
    assert choose_bucket(BUCKETS, 65, 65, 1) == Bucket(128, 128, 128)
    assert choose_bucket(BUCKETS, 129, 1, 1) == Bucket(256, 128, 128)
    assert choose_bucket(BUCKETS, 460, 0, 0) == Bucket(512, 0, 0)
    assert choose_bucket(BUCKETS, 300, 0, 0) == Bucket(312, 0, 0)
    assert choose_bucket((Bucket(4, 8, 1), Bucket(4, 16, 4)), 1, 2, 2) == Bucket(4, 16, 4)  # for its chunks


def small_state(**options) -> State:
    return init_state(CONFIG, slots=2, num_pages=8, page_size=8, max_pages=4, **options)


def prompt_batch(tokens, pages, **sampling):
    return ragged_batch([PromptChunk(0, tokens, pages=pages, sampling=sampling)])


def test_a_step_leaves_its_state_usable_and_the_packed_one_takes_it():
    model, state = tiny_model(), small_state()
    tokens = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    first, a = step(model.params, state, prompt_batch(tokens, [0, 1]), config=CONFIG)
    again, b = step(model.params, state, prompt_batch(tokens, [0, 1]), config=CONFIG)
    np.testing.assert_array_equal(a.tokens, b.tokens)
    assert float(jnp.abs(state.cache[0].k.values).max()) == 0
    assert float(jnp.abs(first.cache[0].k.values[:2]).max()) > 0
    assert first.slots.length.tolist() == [9, 0]
    layout = Layout(Bucket(1, 16, 1), deltas=4)
    chunk = PromptChunk(0, tokens, pages=[0, 1], sampling={"max_length": 99})
    packed, c = packed_step(model.params, again, pack_chunks(layout, [chunk]), config=CONFIG, layout=layout)
    np.testing.assert_array_equal([-1, *a.tokens], c.tokens)
    assert again.cache.k.values.is_deleted()
    assert packed.slots.token.tolist()[0] == int(c.tokens[1])


def test_a_step_is_forward_and_then_sample():
    """And what the caller keeps in the state goes through both."""
    model, state = tiny_model(), replace(small_state(), user={"steps": jnp.zeros(2)})
    batch = prompt_batch([5, 6, 7], [3], temperature=0.9, seed=3)
    whole, outputs = step(model.params, state, batch, config=CONFIG)
    middle, logits = forward(model.params, state, batch, config=CONFIG)
    assert middle.slots.length.tolist() == [0, 0]
    banned = replace(logits, values=logits.values.at[:, int(outputs.tokens[0])].set(-jnp.inf))
    after, again = sample(middle, logits)
    _, other = sample(middle, banned)
    assert int(other.tokens[0]) != int(outputs.tokens[0])
    np.testing.assert_array_equal(outputs.tokens, again.tokens)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(after), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert whole.user["steps"].shape == (2,)


def test_only_the_last_chunk_samples_and_only_the_output_is_counted():
    """A prompt in two chunks, its first output token (recomputed after a preemption, say) in a third, and a decode."""
    model, prompt, recomputed = tiny_model(num_layers=1), [5, 6, 5, 7, 8, 5], 8
    cache = make_cache(model.config, 8, 8, parse_kv_cache(None, model.config, jnp.float32))
    state = State(cache, make_slots(2, 4, bias=1), make_counts(2, 97))
    layout, static = Layout(Bucket(1, 4, 2), deltas=4, bias=1), {"variant": Variant(penalties=True)}

    def run(state, start, tokens, final):
        asked = {"max_length": 100, "stop_ids": range(8)}
        chunk = PromptChunk(1, tokens, start, final, pages=(3, 5), prompt_len=len(prompt), sampling=asked)
        buffer = pack_chunks(layout, [chunk])
        return packed_step(model.params, state, buffer, config=model.config, layout=layout, **static)

    def counted(state) -> tuple[list[int], dict[int, int]]:
        seen, counts = np.asarray(state.counts.seen), np.asarray(state.counts.counts)
        assert not seen[0].any()
        assert not counts[0].any()
        return np.flatnonzero(seen[1]).tolist(), {int(t): int(counts[1, t]) for t in np.flatnonzero(counts[1])}

    state, outputs = run(state, 0, prompt[:4], False)
    assert outputs.tokens.tolist() == [-1, -1, -1]
    assert state.slots.done.tolist() == [True, False]
    assert counted(state) == ([5, 6, 7], {})
    state, outputs = run(state, 4, [8, 5, recomputed], True)
    token = outputs.tokens.tolist()[1]
    assert outputs.tokens.tolist() == [-1, token, -1]
    assert token > 8, "another test than it was"
    assert counted(state) == ([5, 6, 7, 8, token], {recomputed: 1, token: 1})
    buffer = pack_chunks(layout, decodes=[1])
    state, outputs = packed_step(model.params, state, buffer, config=model.config, layout=layout, **static)
    after = outputs.tokens.tolist()[0]
    assert counted(state)[1] == Counter([recomputed, token, after])
    state, _ = run(state, 0, [9], False)
    assert counted(state) == ([9], {}), "a first chunk begins anew"


@pytest.mark.parametrize("ended_by", ["stop id", "length"])
def test_the_device_itself_ends_a_slot(ended_by):
    """So that a decode dispatched before the host has read the end does nothing."""
    model, state = tiny_model(), small_state()
    _, free = step(model.params, state, prompt_batch([5, 6, 7], [3]), config=CONFIG)
    end = {"stop_ids": [2, 3, 4, int(free.tokens[0])]} if ended_by == "stop id" else {"max_length": 4}
    state, first = step(model.params, state, prompt_batch([5, 6, 7], [3], **end), config=CONFIG)
    assert first.tokens.tolist() == free.tokens.tolist()
    assert state.slots.done.tolist() == [True, True]
    _, second = step(model.params, state, ragged_batch(decodes=[0]), config=CONFIG)
    assert second.tokens.tolist() == [-1]


def test_a_done_slot_writes_nothing():
    """The host dispatches a decode before it has read that the slot ended: pages and lengths must not change."""
    model = tiny_model()
    state, _ = step(model.params, small_state(), prompt_batch([5, 6, 7], [3]), config=CONFIG)
    assert state.slots.done.tolist() == [False, True]
    state = replace(state, slots=replace(state.slots, done=jnp.ones(2, bool)))
    after, outputs = step(model.params, state, ragged_batch(decodes=[0]), config=CONFIG)
    assert outputs.tokens.tolist() == [-1]
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("shape", ["llama-2-7b", "llama-3-8b"])
@pytest.mark.parametrize(
    "name", ["bf16", "f32", "fp8", "int8-g8", "int8-g32", "int8-g128", "int4-g8", "int4-g64", "k=int8-g8,v=int4-g16"]
)
def test_cache_bytes_are_the_formula(name, shape):
    """A token of a layer: for K and for V, K heads x D values of some bits, and K heads x D / group float16 scales."""
    config = load_config(CONFIGS / f"{shape}.json")
    bits = {"bf16": 16, "f32": 32, "fp8": 8, "int8": 8, "int4": 4}

    def one(part: str) -> float:
        kind, _, group = part.partition("-g")
        scales = config.head_dim // int(group) * 2 if group else 0
        return config.num_kv_heads * (config.head_dim * bits[kind] / 8 + scales)

    parts = [p.partition("=")[2] for p in name.split(",")] if "=" in name else [name, name]
    formats = parse_kv_cache(name, config, jnp.bfloat16)
    cache = jax.eval_shape(lambda: make_cache(config, 600, 16, formats))
    assert cache_bytes(cache) == 600 * 16 * config.num_layers * sum(map(one, parts))
    made = make_cache(CONFIG, 3, 8, parse_kv_cache("int8-g8", CONFIG, jnp.float32))
    assert cache_bytes(made) == sum(leaf.nbytes for leaf in jax.tree.leaves(made))
