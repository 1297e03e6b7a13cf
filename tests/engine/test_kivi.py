"""K per channel with the newest block in a tail of its slot (KIVI), through the engine: what leaves a slot is whole
blocks, and no company, draft, fork or snapshot changes a token."""

import jax
import numpy as np
import pytest

from jllm.analysis.activations import tap
from jllm.analysis.evaluate import evaluate
from jllm.analysis.protocols import Protocol
from jllm.engine.engine import Engine
from jllm.engine.options import EngineOptions
from jllm.engine.request import SamplingParams
from jllm.engine.room import sizes_for
from jllm.errors import ConfigError, EvaluationError, SnapshotError
from jllm.files import snapshot as snapshots
from jllm.quant.quantize import quantize
from jllm.speculative.medusa import init_medusa
from jllm.speculative.ngram import NGram
from jllm.speculative.quantized_copy import QuantizedCopy
from jllm.speculative.tree import Tree, chain
from jllm.step.buckets import Bucket
from jllm.step.state import init_state
from tests.engine.test_oracle import COMPANY, TINY, Job, alone, assert_same, play
from tests.speculative.scripted import scripted
from tests.tiny import CONFIG, greedy, one_size, tiny_model

KIVI, BLOCK = "kivi2-g8-r16", 16
COMMON = tuple(range(3, 40))  # two blocks and a part


@pytest.fixture(scope="module")
def model64():
    with jax.enable_x64(True):
        yield tiny_model("float64", num_layers=1)


def jobs(prompts, new: int) -> list[Job]:
    return [
        Job(p, SamplingParams(temperature=t, max_new_tokens=new, seed=i, ignore_eos=True), 2 * i, None)
        for i, (p, t) in enumerate(zip(prompts, (0.0, 1.0, 0.7, 0.0), strict=True))
    ]


@pytest.fixture(scope="module")
def asked(model64):
    """Requests, two of which begin alike, and what each gets alone."""
    with jax.enable_x64(True):
        these = jobs([COMMON, (50, 3, 3), (*COMMON[:34], 9, 9), (7,)], 30)
        options = {"max_slots": 1, "page_size": 64, "buckets": (Bucket(1, 64, 1),), "max_step_tokens": 64}
        found = list(alone(model64, these, **options, kv_cache=KIVI))
        plain = list(alone(model64, these, **options))
        assert [c.token_ids for c in found] != [c.token_ids for c in plain], "nothing was rounded"
        return these, found


@pytest.mark.parametrize("more", [TINY, "pool that forces preemption", "drafts"])
def test_any_company_same_tokens(model64, asked, more):
    these, want = asked
    drafter = scripted(chain(3), these, want, right=0.0)  # each segment writes three keys that do not stay
    options = one_size(2) | {"speculate": drafter, "drafts": 3} if more == "drafts" else COMPANY[more]
    seen: dict = {}
    with jax.enable_x64(True):
        for got, expected in zip(play(model64, these, {**options, "kv_cache": KIVI}, seen), want, strict=True):
            assert_same(got, expected, False)
    assert seen["preemptions"] or more != "pool that forces preemption"


def tokens_of(engine: Engine) -> dict[tuple[int, int], tuple[int, ...]]:
    return {(e.id, e.sample): e.completion.token_ids for e in engine.run() if e.completion}


def test_a_prefix_is_found_as_far_as_its_blocks_are_whole(model64):
    """The two blocks of the prompt; its other tokens are computed again, though a page of 8 of them is full."""
    with jax.enable_x64(True):
        engine = Engine(model64, **one_size(1), kv_cache=KIVI)
        first, again = (engine.submit(COMMON + (44,) * 5, greedy(6)) for _ in range(2))
        done = tokens_of(engine)
    assert done[first, 0] == done[again, 0]
    assert engine.metrics()["prefix_hit_tokens"] == 2 * BLOCK


def test_a_block_within_a_page_is_copied(model64):
    with jax.enable_x64(True):
        engine = Engine(model64, **one_size(2, 64, 62), kv_cache=KIVI)
        samples = engine.submit(COMMON, SamplingParams(n=2, temperature=1.0, seed=3, max_new_tokens=40))
        done = tokens_of(engine)
        assert engine.metrics()["copied_pages"] == 1
        alone = Engine(model64, **one_size(2, 64, 62), kv_cache=KIVI, prefix_cache=False)
        apart = [alone.submit(COMMON, SamplingParams(temperature=1.0, seed=3, max_new_tokens=40))]
        assert tokens_of(alone)[apart[0], 0] == done[samples, 0]


@pytest.mark.parametrize("steps", [2, 12, 13])
def test_forks_and_snapshots_go_on_as_if_nothing_had_been(model64, steps, tmp_path):
    """Before, at and past the end of a block."""
    with jax.enable_x64(True):
        engine = Engine(model64, **one_size(3, tokens=61), kv_cache=KIVI)
        request = engine.submit(COMMON, greedy(40))
        for _ in range(steps):
            engine.step()
        value = engine.snapshot(request)
        assert value.length % BLOCK == 0
        assert len(value.tokens) - 1 - BLOCK < value.length < len(value.tokens)
        snapshots.save_snapshot(tmp_path / "one", value)
        back = snapshots.load_snapshot(tmp_path / "one")
        for one, other in zip(jax.tree.leaves(back), jax.tree.leaves(value), strict=True):
            np.testing.assert_array_equal(one, other)
        twin = engine.fork(request)
        again = engine.resume(back, greedy(len(COMMON) + 40 - len(value.tokens)))
        done = tokens_of(engine)
    want = (*COMMON, *done[request, 0])
    assert done[request, twin] == done[request, 0]
    assert (*value.tokens.tolist(), *done[again, 0]) == want


def test_a_snapshot_that_was_cut_within_a_block_is_used_to_its_beginning(model64):
    with jax.enable_x64(True):
        engine = Engine(model64, **one_size(2), kv_cache=KIVI)
        request = engine.submit(COMMON, greedy(40))
        for _ in range(20):
            engine.step()
        value = snapshots.cut(engine.snapshot(request), BLOCK + 5)
        again = engine.resume(value, greedy(10))
        done = tokens_of(engine)
        fresh = Engine(model64, **one_size(1), kv_cache=KIVI)
        other = fresh.submit(COMMON[: BLOCK + 5], greedy(10))
        assert tokens_of(fresh)[other, 0] == done[again, 0]


def test_what_it_does_not_do_is_named():
    model = tiny_model(num_layers=1)
    copy = QuantizedCopy(quantize(model.params, "w8a16"))
    tree = init_medusa(model.config, jax.random.key(0), Tree((0, 0, 1)), "float32")
    for options, said in [
        ({"page_size": 8, "kv_cache": "kivi2-g16"}, "page_size must be a multiple of 16, not 8"),
        (
            {"kv_cache": f"v={KIVI},k=f32"},
            f"KV format {KIVI} is per channel, for K alone: give V a format per token, such as int2-g8-zp",
        ),
        ({"kv_cache": "kivi2-g32"}, "V has groups of 32 along the head dim 16"),
        (
            {"kv_cache": KIVI, "speculate": copy},
            f"drafts in the model's own pages, which KV format {KIVI} does not support",
        ),
        ({"kv_cache": KIVI, "speculate": tree}, f"Medusa drafts trees, which KV format {KIVI} does not support"),
    ]:
        with pytest.raises(ConfigError, match=said) as refusal:
            Engine(model, max_slots=1, **options)
        assert "\n" not in str(refusal.value)
    with pytest.raises(EvaluationError, match=f"attention weights cannot be tapped where K is stored as {KIVI}"):
        tap(model, [3, 4, 5], ["layers.0.weights"], kv_cache=KIVI)


def test_tails_are_counted_as_memory():
    model, sizes = tiny_model(num_layers=2), {}
    for kv in (KIVI, "int2-g8-zp"):
        state = init_state(model.config, slots=3, num_pages=6, page_size=16, kv_cache=kv, drafter=NGram(drafts=3))
        sizes[kv] = sum(leaf.nbytes for leaf in jax.tree.leaves(state.tails))
    ring = BLOCK + 3  # and the drafts
    assert sizes == {KIVI: 2 * 2 * 3 * ring * CONFIG.num_kv_heads * CONFIG.head_dim * 4, "int2-g8-zp": 0}
    pages = []
    for kv in (KIVI, "kivi2-g8-r64"):
        options = EngineOptions(max_slots=8, kv_cache=kv, buckets=(Bucket(8, 8, 8),), max_step_tokens=16)
        pages.append(sizes_for(options, model.config, model.params, 350_000).limits.num_pages)
    assert pages[0] > 2 * pages[1] > 16, "longer tails leave less for pages"


def test_taps_and_evaluations_read_it_as_serving_does():
    """However a prompt is cut."""
    model, ids = tiny_model(num_layers=1), list(range(3, 60))
    parts = [
        tap(model, ids, ["logits"], prompt=prompt, segment=segment, kv_cache=KIVI, page_size=8)["logits"]
        for prompt, segment in ((None, 1), (9, 5))
    ]
    np.testing.assert_allclose(parts[1], parts[0], atol=2e-4)
    plain = tap(model, ids, ["logits"], page_size=8)["logits"]
    assert np.abs(plain - parts[0])[:BLOCK].max() < 2e-4, "the first block is read as it was computed"
    assert np.abs(plain - parts[0])[BLOCK:].max() > 1e-2
    protocol = Protocol("tiny", context=48)
    found = [evaluate(model, ids, protocol, kv_cache=KIVI, max_step_tokens=n).perplexity for n in (64, 7)]
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert found[0] != pytest.approx(evaluate(model, ids, protocol).perplexity, rel=1e-4)


def test_pages_leave_a_slot_in_whole_blocks(model64):
    state = init_state(CONFIG, slots=1, num_pages=8, page_size=8, kv_cache=KIVI)
    with pytest.raises(SnapshotError, match="leaves its slot in whole blocks: 16 tokens, not 21"):
        snapshots.take(state.cache, [0, 1, 2], range(21))
