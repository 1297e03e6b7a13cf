"""On a device (`pytest -m gpu -n 0`): quantized models through the kernels say what they say through plain jnp."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import jllm
from jllm.batch import Rung
from jllm.engine.request import SamplingParams
from jllm.quant.quantize import quantize
from jllm.quant.schemes import PRESETS
from tests.quant.test_accuracy import TEXT
from tests.tiny import serve, tiny_model

pytestmark = pytest.mark.gpu
OPTIONS = {"max_slots": 4, "max_step_tokens": 132, "ladder": (Rung(4, 128, 4),)}
SCORE = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True, prompt_logprobs=True)


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in ("bf16", "w8a8")])
def test_kernels_agree_with_xla(name):
    """Sizes that every kernel takes; a prompt in chunks beside decodes. The mosaic kernels are named, so that those
    run that are not chosen by themselves."""
    sizes = {"hidden_size": 512, "intermediate_size": 768, "num_heads": 4, "num_kv_heads": 2, "head_dim": 128}
    model = tiny_model("bfloat16", **sizes, vocab_size=512)
    model = replace(model, params=quantize(model.params, name))
    prompts = [np.random.default_rng(i).integers(3, 320, n).tolist() for i, n in enumerate((100, 3, 60, 90))]
    ours, plain = (serve(model, prompts, [SCORE] * 4, **OPTIONS, backend=backend) for backend in ("mosaic", "xla"))
    errors = np.concatenate([np.subtract(a.prompt_logprobs, b.prompt_logprobs) for a, b in zip(ours, plain)])
    spread = np.std(np.concatenate([b.prompt_logprobs for b in plain]))
    assert spread > 0.5
    assert np.sqrt(np.mean(errors**2)) < 0.1 * spread


@pytest.mark.parametrize("name", ["w8a8-talk", "w8a8-all", "fp8", "nf4", "w4a16-g64"])
def test_the_bundled_model_loses_as_little_as_on_a_cpu(name):
    model = jllm.load(dtype="float32")
    tokens = model.tokenizer.encode(TEXT)
    plain, ours = (
        jllm.generate(jllm.load(dtype=dtype, quantize=scheme), [tokens], SCORE)[0]
        for dtype, scheme in (("float32", None), (jnp.bfloat16, name))
    )
    assert abs(np.mean(ours.prompt_logprobs) - np.mean(plain.prompt_logprobs)) < 0.05
