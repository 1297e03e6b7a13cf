"""On a device (`pytest -m gpu`): quantized models through the kernels say what they say through plain jnp."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jllm
from jllm.engine.request import SamplingParams
from jllm.quant.quantize import quantize
from jllm.step.buckets import Bucket
from tests.gpu_models import Job, kernels_of_steps, play
from tests.quant.test_accuracy import TEXT
from tests.tiny import tiny_model

pytestmark = pytest.mark.gpu
OPTIONS = {"max_slots": 4, "max_step_tokens": 132, "buckets": (Bucket(4, 128, 4),)}
SCORE = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True, prompt_logprobs=True)


# Of each kernel and kind of weight; what the tests of kernels are alone with are other groups of values.
PRODUCTS = {
    "w8a8": 3, "w8a8-all": 4, "w8a8-tensor": 3, "fp8": 4, "w8a16": 4, "uint8-zp": 4, "fp8-weight": 4,
    "w4a16-g128": 4, "w4a16-g32-zp": 4, "nf4-dq": 4, "llm-int8": 8, "w8a8-groups": 2, "fp8-b128": 4,
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_kernels_agree_with_xla(name):
    """Sizes that every kernel takes; a prompt in chunks beside decodes. Rounding moves this small model's logits far:
    activations in bfloat16 and in float32 lie 0.18 (w8a8) to 0.25 (fp8) of their spread apart, and kernels may not lie
    further."""
    sizes = {"hidden_size": 512, "intermediate_size": 768, "num_heads": 4, "num_kv_heads": 2, "head_dim": 128}
    model = tiny_model("bfloat16", **sizes, vocab_size=512)
    model = replace(model, params=quantize(model.params, name))
    exact = replace(
        model, params=jax.tree.map(lambda x: x.astype("float32") if x.dtype == "bfloat16" else x, model.params)
    )
    prompts = [np.random.default_rng(i).integers(3, 320, n).tolist() for i, n in enumerate((100, 3, 60, 90))]

    def scored(model, backend, products):
        engine = jllm.Engine(model, **OPTIONS, backend=backend)
        found = play(engine, [Job(prompt, SCORE) for prompt in prompts])
        for kernels in kernels_of_steps(engine):
            made = sum(kernels[name] for name in ("gemm_skinny", "gemm_tall", "weight_only_matmul"))
            assert made == model.config.num_layers * products
        return np.concatenate([each.prompt_logprobs for each in found])

    ours, plain, wide = scored(model, None, PRODUCTS[name]), scored(model, "xla", 0), scored(exact, "xla", 0)
    assert np.std(plain) > 0.5
    assert np.sqrt(np.mean((ours - plain) ** 2)) < max(np.sqrt(np.mean((plain - wide) ** 2)), 0.1 * np.std(plain))


@pytest.mark.parametrize("name", ["w8a8-all", "fp8", "nf4", "w4a16-g64"])
def test_the_bundled_model_loses_as_little_as_on_a_cpu(name):
    model = jllm.load(dtype="float32")
    tokens = model.tokenizer.encode(TEXT)
    plain, ours = (
        jllm.generate(jllm.load(dtype=dtype, quantize=scheme), [tokens], SCORE)[0]
        for dtype, scheme in (("float32", None), (jnp.bfloat16, name))
    )
    assert abs(np.mean(ours.prompt_logprobs) - np.mean(plain.prompt_logprobs)) < 0.05
