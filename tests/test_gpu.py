"""On a device (`pytest -m gpu -n 0`): the numbers are right there too, and the cache is updated in place."""

import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jllm
from jllm.batch import Layout, Rung, pack_decode
from jllm.cache import make_cache, parse_kv_cache
from jllm.checkpoint import init_params
from jllm.config import load_config
from jllm.engine.request import SamplingParams
from jllm.pretrained import Model
from jllm.step import State, jit_step, make_slots
from tests.parity import FAMILIES, OPTIONS, PARITY, expected
from tests.tiny import CONFIG, serve, tiny_model

pytestmark = pytest.mark.gpu
LADDER = (Rung(4, 0, 0), Rung(4, 128, 4))
CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.mark.parametrize("family", FAMILIES)
def test_parity_in_float32(family):
    model = jllm.load(PARITY / family, dtype="float32")
    cases = expected(family)
    params = SamplingParams(temperature=0.0, max_new_tokens=len(cases[0][2]), ignore_eos=True)
    done = serve(model, [p.tolist() for p, _, _ in cases], [params] * len(cases), **OPTIONS)
    for (_, _, greedy), completion in zip(cases, done, strict=True):
        assert list(completion.token_ids) == greedy.tolist()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kv_cache", [None, "int8-g8", "fp8", "int4-g16"])
def test_company_up_to_the_first_near_tie(dtype, kv_cache):
    model = tiny_model(dtype)
    params = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True, logprobs=2)
    prompts = [list(range(3, 40)), [5], list(range(50, 60)), [9, 9, 9]]
    options = {"page_size": 8, "max_step_tokens": 16, "kv_cache": kv_cache}
    together = serve(model, prompts, [params] * 4, max_slots=4, ladder=(Rung(4, 16, 4),), **options)
    compared = 0
    for prompt, got in zip(prompts, together, strict=True):
        want = serve(model, [prompt], [params], max_slots=1, ladder=(Rung(1, 16, 1),), **options)[0]
        for a, b, info in zip(got.token_ids, want.token_ids, want.logprobs, strict=True):
            if info.top[0][1] - info.top[1][1] < 0.1:
                break
            assert a == b
            compared += 1
    assert compared > 10


@pytest.mark.parametrize("kv_cache", ["bf16", "int8-g8"])
def test_no_copy_of_a_pool(kv_cache):
    """Donated pools are written in place: no instruction of the compiled step copies anything of their size."""
    model = tiny_model("bfloat16")
    num_pages = 4099  # a number that stands for the pool wherever it occurs
    cache = make_cache(CONFIG, num_pages, 16, parse_kv_cache(kv_cache, CONFIG, jnp.bfloat16))
    layout = Layout(Rung(4, 16, 4), deltas=8)
    state = State(cache, make_slots(4, 8))
    buffer = np.asarray(pack_decode(layout, []))
    compiled = jit_step.lower(model.params, state, buffer, config=CONFIG, layout=layout).compile()
    pattern = rf"= \S*\[{num_pages},[^=]* (copy|copy-start)\("
    assert not re.findall(pattern, compiled.as_text())
    assert compiled.memory_analysis().temp_size_in_bytes < cache[0].k.values.nbytes


def test_the_bundled_model_tells_a_story():
    """In bfloat16, as stored; what it says must be likely in float32 too."""
    model = jllm.load()
    assert model.params.embed.dtype == jnp.bfloat16
    prompt = model.tokenizer.encode("Once upon a time")
    story = jllm.generate(model, prompt, SamplingParams(temperature=0.0, max_new_tokens=40))[0]
    judge = SamplingParams(temperature=0.0, max_new_tokens=1, prompt_logprobs=True)
    verdict = jllm.generate(jllm.load(dtype="float32"), [prompt + list(story.token_ids)], judge)[0]
    assert np.mean(verdict.prompt_logprobs[len(prompt) - 1 :]) > -2.0


def test_a_second_process_loads_what_the_first_compiled(tmp_path):
    """Kernels included; and what a step needs beside its arguments is still known."""
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        (cold, none, needs), (warm, loaded, still) = (pool.submit(start, tmp_path).result() for _ in range(2))
    assert warm == cold
    assert (none, loaded) == (0, 2)
    assert still == needs > 0


def start(folder):
    """In a process of its own: tokens, programs that were loaded, and bytes that the largest step needs."""
    jax.config.update("jax_enable_compilation_cache", False)  # what that has had cannot be serialized
    engine = jllm.Engine(jllm.load(), max_slots=4, max_step_tokens=132, ladder=LADDER, executables=folder)
    engine.compile_ahead()
    loaded = engine.metrics()["compile_loaded"]
    ids = [engine.submit(prompt, SamplingParams(temperature=0.0, max_new_tokens=20)) for prompt in ([5] * 150, [6, 7])]
    done = {event.id: event.completion.token_ids for event in engine.run() if event.completion}
    (largest,) = [program for (rung, _), program in engine._device._programs.items() if rung.tokens]
    return [done[i] for i in ids], loaded, largest.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(("kv_cache", "mean"), [(None, 0.02), ("int8-g8", 0.02), ("fp8", 0.03)])
def test_kernels_agree_with_xla(kv_cache, mean):
    """Prompts in chunks beside decodes, through the kernels that the device chooses and through plain jnp. fp8's coarse
    steps widen whatever two ways of rounding differ by."""
    model = jllm.load()
    assert model.config.head_dim == 64  # a size that the kernels take
    text = (PARITY.parent.parent.parent / "jllm" / "assets" / "fairytale" / "README.md").read_text()
    prompts = [
        model.tokenizer.encode(text)[start : start + n] for start, n in [(0, 400), (100, 3), (200, 150), (9, 70)]
    ]
    check_agreement(model, prompts, kv_cache, mean=mean, most=0.5, gap=0.2)


def test_kernels_agree_with_xla_at_7b():
    """In bfloat16, at the shapes that speed is measured at; logits of random weights have a deviation of 1.3."""
    config = load_config(CONFIGS / "llama-2-7b.json")
    model = Model(config, init_params(config, jax.random.key(0), jnp.bfloat16), None)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, config.vocab_size, n).tolist() for n in (700, 3, 150, 70)]
    check_agreement(model, prompts, None, mean=0.05, most=0.5, gap=0.2)


def check_agreement(model, prompts, kv_cache, *, mean, most, gap):
    """Kernels and plain jnp: log-probabilities of prompts differ by `mean` on average and by `most` at the most, and
    tokens not before the two likeliest are closer than `gap`."""
    params = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True, logprobs=2, prompt_logprobs=True)
    options = {"max_slots": 4, "max_step_tokens": 132, "ladder": (Rung(4, 128, 4),), "kv_cache": kv_cache}
    ours, plain = (
        serve(model, prompts, [params] * 4, **options, num_pages=400, backend=backend) for backend in (None, "xla")
    )
    errors = [np.abs(np.subtract(a.prompt_logprobs, b.prompt_logprobs)) for a, b in zip(ours, plain, strict=True)]
    assert np.concatenate(errors).mean() < mean
    assert max(error.max() for error in errors) < most
    for a, b in zip(ours, plain, strict=True):
        for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=True)):
            if x != y:
                assert b.logprobs[i].top[0][1] - b.logprobs[i].top[1][1] < gap
                break
