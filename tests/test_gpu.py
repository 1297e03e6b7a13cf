"""On a device (`pytest -m gpu`): numbers are right there too, the cache is updated in place, and what runs unasked
agrees with plain jnp. The oracle of the engine is in test_gpu_oracle.py."""

import re
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jllm
from jllm.engine.request import SamplingParams
from jllm.files.hf_config import load_config
from jllm.model.cache import make_cache, parse_kv_cache
from jllm.model.model import Model
from jllm.model.param_specs import init_params
from jllm.programs.packed_step import Layout, pack_chunks, packed_step
from jllm.step.buckets import Bucket
from jllm.step.state import State, make_slots
from tests.gpu_models import LAYERS, Job, kernel_model, kernels_of_steps, play
from tests.kernels_of import kernels_of, of_step
from tests.parity import OPTIONS, PARITY, expected
from tests.tiny import serve

pytestmark = pytest.mark.gpu
BUCKETS = (Bucket(4, 0, 0), Bucket(4, 128, 4))
CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.mark.parametrize("family", ["llama2", "llama3.1", "qwen2-window", "qwen3"])
def test_parity_in_float32(family):
    """By XLA: no kernel takes float32."""
    model = jllm.load(PARITY / family, dtype="float32")
    cases = expected(family)
    params = SamplingParams(temperature=0.0, max_new_tokens=len(cases[0][2]), ignore_eos=True)
    done = serve(model, [p.tolist() for p, _, _ in cases], [params] * len(cases), **OPTIONS)
    for (_, _, greedy), completion in zip(cases, done, strict=True):
        assert list(completion.token_ids) == greedy.tolist()


@pytest.mark.parametrize(
    ("shape", "kv_cache"), [("D=128", "bf16"), ("D=64", "int8-g8"), ("D=128", "fp8"), ("D=64", "int4-g16")]
)
def test_no_copy_of_a_pool(shape, kv_cache):
    """Donated pools are written and read where they are, by kernels: no instruction of the compiled step copies
    anything of their size."""
    model = kernel_model(shape)
    num_pages = 16411  # a number that stands for the pool wherever it occurs
    layout = Layout(Bucket(4, 16, 4), deltas=8)
    formats = parse_kv_cache(kv_cache, model.config, jnp.bfloat16)
    state = jax.eval_shape(lambda: State(make_cache(model.config, num_pages, 16, formats), make_slots(4, 64)))
    buffer = np.asarray(pack_chunks(layout))
    traced = packed_step.trace(model.params, state, buffer, config=model.config, layout=layout)
    kernels = kernels_of(traced.jaxpr.jaxpr)
    assert kernels == of_step(LAYERS, chunks=True)
    compiled = traced.lower().compile()
    text = compiled.as_text()
    assert text.count('custom_call_target="mosaic_gpu') == kernels.total()
    assert not re.findall(rf"= \S*\[{LAYERS * num_pages},[^=]* (copy|copy-start)\(", text)
    pool = state.cache.k.values
    assert compiled.memory_analysis().temp_size_in_bytes < pool.size * pool.dtype.itemsize // LAYERS


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
        (cold, none, needs, kernels), (warm, loaded, still, _) = (
            pool.submit(start, tmp_path).result() for _ in range(2)
        )
    assert warm == cold
    assert kernels > 0
    assert (none, loaded) == (0, 2)
    assert still == needs > 0


def test_steps_that_other_processes_traced_have_the_same_kernels(tmp_path):
    """Kept in files or not: an engine that keeps none has no other reason to look for the library of kernels."""
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        (own, *theirs) = (
            pool.submit(start, *asked).result() for asked in ((tmp_path,), (tmp_path / "2", 2), (None, 2))
        )
    for each in theirs:
        assert each[0] == own[0]
        assert each[3] == own[3] > 0


def start(folder, processes=0):
    """In a process of its own, which keeps programs in a folder or not: tokens, programs that were loaded, bytes that
    the largest step needs, and its kernels if it was compiled."""
    jax.config.update("jax_enable_compilation_cache", False)  # what that has had cannot be serialized
    more = {"compile_processes": processes, "executables": folder}
    engine = jllm.Engine(jllm.load(), max_slots=4, max_step_tokens=132, buckets=BUCKETS, **more)
    engine.compile_ahead()
    loaded = engine.metrics()["compile_loaded"]
    assert engine.metrics()["compile_elsewhere"] == (len(BUCKETS) - 1 if processes else 0)
    ids = [engine.submit(prompt, SamplingParams(temperature=0.0, max_new_tokens=20)) for prompt in ([5] * 150, [6, 7])]
    done = {event.id: event.completion.token_ids for event in engine.run() if event.completion}
    (largest,) = [program for (bucket, *_), program in engine._device.programs._kept.items() if bucket.tokens]
    kernels = 0 if loaded else largest.as_text().count('custom_call_target="mosaic_gpu')
    return [done[i] for i in ids], loaded, largest.memory_analysis().temp_size_in_bytes, kernels


@pytest.mark.parametrize(("kv_cache", "mean"), [(None, 0.02), ("int8-g8", 0.02), ("fp8", 0.03)])
def test_kernels_agree_with_xla(kv_cache, mean):
    """Prompts in chunks beside decodes, through the kernels that the device chooses and through plain jnp. fp8's coarse
    steps widen whatever two ways of rounding differ by."""
    model = jllm.load(dtype="bfloat16")
    text = (PARITY.parent.parent.parent / "jllm" / "assets" / "fairytale" / "README.md").read_text()
    prompts = [
        model.tokenizer.encode(text)[start : start + n] for start, n in [(0, 400), (100, 3), (200, 150), (9, 70)]
    ]
    check_agreement(model, prompts, kv_cache, {}, mean=mean, most=0.5, gap=0.2)


def test_kernels_agree_with_xla_at_7b():
    """In bfloat16, at the shapes that speed is measured at; logits of random weights have a deviation of 1.3."""
    config = load_config(CONFIGS / "llama-2-7b.json")
    model = Model(config, init_params(config, jax.random.key(0), jnp.bfloat16), None)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, config.vocab_size, n).tolist() for n in (700, 3, 150, 70)]
    products = {"gemm_skinny": 2, "gemm_skinny_gated": 1}  # of 132 rows: more than the one for q, k and v is for
    check_agreement(model, prompts, None, products, mean=0.05, most=0.5, gap=0.2)


def check_agreement(model, prompts, kv_cache, products, *, mean, most, gap):
    """Kernels, a layer's `products` among them, and plain jnp: log-probabilities of prompts differ by `mean` on average
    and by `most` at the most, and tokens not before the two likeliest are closer than `gap`."""
    params = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True, logprobs=2, prompt_logprobs=True)
    options = {"max_slots": 4, "max_step_tokens": 132, "buckets": (Bucket(4, 128, 4),), "kv_cache": kv_cache}
    engines = [jllm.Engine(model, **options, num_pages=400, backend=backend) for backend in (None, "xla")]
    ours, plain = (play(engine, [Job(prompt, params) for prompt in prompts]) for engine in engines)
    wanted = of_step(model.config.num_layers, chunks=True, **products) + Counter(norm_quant=1)  # of prompts' logits
    assert kernels_of_steps(engines[0]) == [wanted]  # the step with prompts' scores serves those without, too
    assert not any(kernels_of_steps(engines[1]))
    errors = [np.abs(np.subtract(a.prompt_logprobs, b.prompt_logprobs)) for a, b in zip(ours, plain, strict=True)]
    assert np.concatenate(errors).mean() < mean
    assert max(error.max() for error in errors) < most
    for a, b in zip(ours, plain, strict=True):
        for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=True)):
            if x != y:
                assert b.logprobs[i].top[0][1] - b.logprobs[i].top[1][1] < gap
                break
