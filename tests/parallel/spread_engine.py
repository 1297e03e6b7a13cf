"""The engine's oracle on meshes: each request's tokens are those that one device gives, in float64."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jllm.cli.main import main
from jllm.engine.engine import Engine
from jllm.engine.request import SamplingParams
from jllm.errors import DrafterError, SnapshotError
from jllm.files import fingerprint
from jllm.guides.guide import Guide
from jllm.model.adapters import init_adapter
from jllm.model.shards import share_params
from jllm.parallel.mesh import spread
from jllm.quant.quantize import quantize
from jllm.speculative.draft_model import DraftModel
from jllm.speculative.eagle import init_eagle
from jllm.speculative.medusa import init_medusa
from jllm.speculative.ngram import NGram
from jllm.speculative.quantized_copy import QuantizedCopy
from jllm.speculative.tree import Tree, chain
from jllm.step import draws
from jllm.step.batch import PromptChunk, ragged_batch
from jllm.step.buckets import Bucket
from jllm.step.forward import forward
from jllm.step.merge import step
from jllm.step.sample import sample
from jllm.step.state import init_state
from tests.ascii import TOKENIZER
from tests.parallel import meshes
from tests.parallel.meshes import on_mesh
from tests.tiny import serve

jax.config.update("jax_enable_x64", True)
SIZES = {"max_slots": 3, "page_size": 8, "max_step_tokens": 8, "buckets": (Bucket(3, 5, 3),)}
KIVI = "kivi2-g8-r8"
model_of = partial(meshes.model_of, num_layers=1)
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [3, 1, 4, 1, 5], [5, 6, 7, 8, 9, 10, 11, 12, 20, 21], [40]]
ASKED = [
    SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.0, max_new_tokens=12, seed=3, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.02, max_new_tokens=12, seed=4, ignore_eos=True),
    SamplingParams(temperature=1.2, max_new_tokens=12, seed=5, ignore_eos=True),
]


def tokens(model, sampling=ASKED, **options) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in serve(model, PROMPTS, sampling, **(SIZES | options))]


@pytest.mark.parametrize(
    ("devices", "scheme", "kv_cache", "changes"),
    [
        (8, None, "k=int8-g16,v=int4-g8", {"num_layers": 2, "tie_embeddings": True, "windows": (8, None)}),
        (2, "w4a16-g32", "fp8", {"num_kv_heads": 1, "vocab_size": 101}),
        (4, "uint8-zp", None, {"num_kv_heads": 8}),
    ],
)
def test_tokens_are_those_of_one_device(devices, scheme, kv_cache, changes):
    model = model_of(**changes)
    if scheme is not None:
        model = replace(model, params=quantize(model.params, scheme))
    wanted = tokens(model, kv_cache=kv_cache)
    assert len({t for ids in wanted for t in ids}) > 8
    assert tokens(on_mesh(model, devices), kv_cache=kv_cache) == wanted


def test_quantized_activations_are_those_of_as_many_parts():
    model = model_of()
    model = replace(model, params=quantize(model.params, "w8a8"))
    one = replace(model, config=replace(model.config, activation_parts=2))
    assert tokens(on_mesh(model, 2)) == tokens(one)


def test_deterministic_activations_have_a_scale_a_row_on_any_mesh():
    model = model_of()
    model = replace(model, params=quantize(model.params, "w8a8-all"))
    two = on_mesh(model, 2)
    assert tokens(two, deterministic=True) == tokens(model) != tokens(two)


def test_preemption_prefixes_and_speculation():
    model, two = model_of(), on_mesh(model_of(), 2)
    greedy = [replace(ASKED[0], max_new_tokens=20)] * len(PROMPTS)
    drafted = {"speculate": NGram(drafts=2, shortest=1), "buckets": (Bucket(3, 5, 3), Bucket(2, 0, 0, 3))}
    wanted = tokens(model, greedy, kv_cache=KIVI)
    engine = Engine(two, **(SIZES | drafted), num_pages=6, kv_cache=KIVI)
    ids = [engine.submit(prompt, params) for prompt, params in zip(PROMPTS, greedy)]
    done = {event.id: event.completion.token_ids for event in engine.run() if event.completion}
    assert [done[i] for i in ids] == wanted
    again = engine.submit(PROMPTS[0], greedy[0])
    (last,) = [event.completion for event in engine.run() if event.completion]
    assert (last.token_ids, again) == (wanted[0], 4)
    metrics = engine.metrics()
    assert metrics["preemptions"] > 0 < metrics["prefix_hit_tokens"]
    assert metrics["draft_tokens_mean"] > 0


def test_adapters():
    """Ranks share KV heads here, so that several have the same rows of b. Places are fewer than adapters."""
    model = meshes.model_of(num_layers=1)
    rng, found = np.random.default_rng(0), {}
    for i, targets in enumerate((None, ["k_proj", "down_proj"], ["o_proj", "up_proj"])):
        start = init_adapter(model.config, jax.random.key(i), 2, targets=targets)
        found[f"a{i}"] = {
            name: replace(each, b=jnp.asarray(rng.normal(size=each.b.shape))) for name, each in start.items()
        }
    options = SIZES | {"max_adapters": 2, "adapter_rank": 3, "adapters": found, "executables": None}
    sampling = [SamplingParams(max_new_tokens=5, ignore_eos=True, seed=1, adapter=name) for name in (*found, None)]

    def tokens(engine):
        engine.adapters.update("a0", found["a0"])
        for each in sampling:
            engine.submit([5, 6, 7, 8, 9], each)
        done = {event.id: event.completion for event in engine.run() if event.completion}
        return [done[id].token_ids for id in sorted(done)]

    want = tokens(Engine(model, **options))
    assert len(set(want)) == 4
    assert tokens(Engine(on_mesh(model, 4), **options)) == want


def test_guides():
    """Masks are put into a state that every device has, and each draws by them."""
    pytest.importorskip("llguidance")
    model = replace(model_of(), tokenizer=TOKENIZER)
    guides = [Guide.regex("([a-e]{2}-){2,4}"), Guide.choice(["yes", "no"]), None, Guide.regex("[a-f]{9}")]
    asked = [replace(p, guide=guide, ignore_eos=False) for p, guide in zip(ASKED, guides)]
    options = SIZES | {"speculate": NGram(drafts=2, shortest=1)}
    one, two = (serve(m, PROMPTS, asked, **options) for m in (model, on_mesh(model, 2)))
    assert [(c.token_ids, c.finish_reason) for c in two] == [(c.token_ids, c.finish_reason) for c in one]
    assert two[1].text in ("yes", "no")


def test_penalties_and_logprobs():
    asked = [replace(p, repetition_penalty=1.3, logprobs=2, logit_bias={7: 2.0}) for p in ASKED]
    model = model_of()
    one, two = (serve(m, PROMPTS, asked, **SIZES) for m in (model, on_mesh(model, 2)))
    assert [c.token_ids for c in one] == [c.token_ids for c in two]
    for a, b in zip(one, two):
        found = [[t.logprob for t in completion.logprobs] for completion in (a, b)]
        np.testing.assert_allclose(*found, atol=1e-9)


def test_each_device_draws_rows_of_its_own_where_there_are_many(monkeypatch):
    """Three slots and three chunks on two devices, and 97 tokens, of which no mesh has equal parts."""
    monkeypatch.setattr(draws, "LEAST", 0)
    model, two = model_of(), on_mesh(model_of(), 2)
    assert tokens(two) == tokens(model)
    greedy = [ASKED[0]] * len(PROMPTS)
    drafted = {"speculate": NGram(drafts=2, shortest=1), "buckets": (Bucket(3, 5, 3), Bucket(2, 0, 0, 3))}
    assert tokens(two, greedy, **drafted) == tokens(model, greedy)
    asked = [replace(p, logprobs=1) for p in ASKED]
    assert [c.token_ids for c in serve(two, PROMPTS, asked, **SIZES)] == tokens(model)
    state = init_state(two.config, slots=3, num_pages=6, page_size=8)
    batch = ragged_batch([PromptChunk(0, [5, 6, 7], pages=[2, 0])], decodes=[1, 2])
    said = str(jax.make_jaxpr(partial(step, config=two.config))(two.params, state, batch))
    assert said.count("all_to_all") == 1


def test_a_snapshot_goes_from_a_mesh_to_one_device_and_back():
    model, greedy, options = model_of(), ASKED[0], SIZES | {"kv_cache": KIVI}
    model = replace(model, params=quantize(model.params, "w4a16-g32"))
    (wanted,) = (c.token_ids for c in serve(model, PROMPTS[:1], [greedy], **options))
    spread_out = on_mesh(model, 4)
    for first, second in ((model, spread_out), (spread_out, model)):
        engine = Engine(first, **options)
        request = engine.submit(PROMPTS[0], greedy)
        while not (found := engine.step()) or len(found[-1].token_ids) == 0:
            pass
        snapshot = engine.snapshot(request)
        assert snapshot.cache[0].k.values.shape[1] == model.config.num_kv_heads
        assert snapshot.weights == fingerprint.of_function(model.params, model.config)
        engine.close()
        other = Engine(second, **options)
        known = len(snapshot.tokens) - len(PROMPTS[0])
        other.resume(snapshot, replace(greedy, max_new_tokens=len(wanted) - known))
        (last,) = [event.completion for event in other.run() if event.completion]
        assert last.token_ids == wanted[known:]
    heads = on_mesh(model_of(num_kv_heads=4), 2)
    with pytest.raises(SnapshotError, match="the snapshot has 2 heads of 16, .* the cache 4 heads"):
        Engine(heads, **options).resume(snapshot, greedy)


def test_steps_are_compiled_once():
    engine = Engine(on_mesh(model_of("float32"), 2), **SIZES)
    assert engine.compile_ahead() == 1
    from jllm.programs.packed_step import packed_step

    before = packed_step._cache_size()
    for prompt in PROMPTS:
        engine.submit(prompt, ASKED[0])
    list(engine.run())
    assert packed_step._cache_size() <= before + 1
    assert engine.metrics()["compile_first_use"] == 0


def test_steps_on_a_mesh_are_kept_in_files_of_that_mesh(tmp_path):
    model = model_of("float32")
    engines = [Engine(on_mesh(model, n), **SIZES, executables=tmp_path) for n in (2, 4, 2)]
    found = []
    for engine, files in zip(engines, (1, 2, 2)):
        engine.compile_ahead()
        for prompt, params in zip(PROMPTS, ASKED):
            engine.submit(prompt, params)
        found.append({event.id: event.completion.token_ids for event in engine.run() if event.completion})
        assert len(list(tmp_path.iterdir())) == files
    assert [engine.metrics()["compile_loaded"] for engine in engines] == [0, 0, 1]
    assert found[0] == found[2]
    moved = Mesh(np.asarray(jax.devices()[1::-1]), ("model",))
    other = replace(model, config=spread(model.config, moved))
    other = replace(other, params=share_params(model.params, other.config))
    engine = Engine(other, **SIZES, executables=tmp_path)
    engine.compile_ahead()
    assert engine.metrics()["compile_loaded"] == 0


def test_the_pure_functions():
    model = model_of()
    batch = ragged_batch([PromptChunk(0, [5, 6, 7], pages=[2, 0]), PromptChunk(1, [9], pages=[1])])
    sizes = {"slots": 2, "num_pages": 4, "page_size": 8}
    found = []
    for m in (model, on_mesh(model, 4)):
        state, outputs = step(m.params, init_state(m.config, **sizes), batch, config=m.config)
        state, logits = forward(m.params, state, ragged_batch(decodes=[0, 1]), config=m.config)
        _, more = sample(state, logits, config=m.config)
        found.append((outputs.tokens, more.tokens))
    np.testing.assert_array_equal(*found)


KINDS = {"draft": 8, "medusa-own": 2, "eagle": 2}  # spread_engines_on_meshes.py has a copy


@pytest.mark.parametrize(("kind", "devices"), KINDS.items())
def test_drafters(kind, devices):
    """Draft what they draft on one device: as many tokens are accepted."""
    model = model_of()
    c, key, dtype = model.config, jax.random.key(3), jnp.float64
    drafters = {
        "draft": lambda: DraftModel(model.params, c, chain(2)),
        "medusa-own": lambda: init_medusa(c, key, Tree((0, 0, 1)), dtype, own=True),
        "eagle": lambda: init_eagle(c, key, chain(2), dtype),
    }
    asked, found = [replace(p, max_new_tokens=8) for p in ASKED], []
    for m in (model, on_mesh(model, devices)):
        drafter = drafters[kind]()
        rows = drafter.tree.size
        drafted = {"speculate": drafter, "buckets": (Bucket(3, 5, 3), Bucket(2, 0, 0, rows))}
        engine = Engine(m, **(SIZES | drafted))
        for prompt, params in zip(PROMPTS, asked):
            engine.submit(prompt, params)
        done = {event.id: event.completion.token_ids for event in engine.run() if event.completion}
        found.append(([done[i] for i in sorted(done)], engine.metrics()["draft_tokens_mean"]))
    assert found[0] == found[1]
    assert found[0][0] == tokens(model, asked)


def test_a_copy_on_other_devices_than_its_target():
    copy = QuantizedCopy(model_of().params, chain(1))
    with pytest.raises(DrafterError, match="on each of 1 devices in float64, its target has .* on each of 2 devices"):
        init_state(on_mesh(model_of(), 2).config, slots=1, num_pages=2, drafter=copy, dtype="float64")


def test_the_command(tmp_path, capsys):
    jax.config.update("jax_enable_x64", False)
    ask = ["Once upon a time", "--max-new-tokens", "8", "--temperature", "0", "--max-slots", "1"]
    try:
        texts, kept = [], ["--devices", "2", "--compile-cache", str(tmp_path)]
        for _ in range(2):
            assert main([*ask, *kept]) == 0
            texts.append(capsys.readouterr().out)
        assert texts[0] == texts[1]
        assert len(texts[0]) > 8
        assert list(tmp_path.iterdir())
        assert main([*ask, "--devices", "9"]) == 2
        assert "9 devices asked for, and there are 8" in capsys.readouterr().err
    finally:
        jax.config.update("jax_enable_x64", True)
