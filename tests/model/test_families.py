"""The same numbers as transformers in float64, for families that differ from LLaMA in their blocks."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jllm
from jllm.engine.request import SamplingParams
from jllm.errors import QuantizationError
from jllm.model.norms import add_linear, norm_rows
from jllm.quant.calibration.migration import scale_keys
from jllm.quant.rotation import rotate
from tests.parity import OPTIONS, PARITY, WIDE, expected
from tests.tiny import full_logits, log_softmax, serve


@pytest.mark.parametrize("family", WIDE)
def test_parity(family):
    """Without a cache, then chunked, merged and paged, all prompts together."""
    cases = expected(family)
    with jax.enable_x64(True):
        model = jllm.load(PARITY / family, dtype="float64")
        prompt, logits, greedy = cases[-1]
        got = full_logits(model, prompt.tolist(), pad=len(prompt))
        np.testing.assert_allclose(got, logits, rtol=0, atol=1e-9)
        params = SamplingParams(temperature=0.0, max_new_tokens=len(greedy), ignore_eos=True, prompt_logprobs=True)
        done = serve(model, [p.tolist() for p, _, _ in cases], [params] * len(cases), **OPTIONS)
    for (prompt, logits, greedy), completion in zip(cases, done, strict=True):
        assert list(completion.token_ids) == greedy.tolist()
        want = log_softmax(logits)[np.arange(len(prompt) - 1), prompt[1:]]
        np.testing.assert_allclose(completion.prompt_logprobs, want, atol=1e-6, rtol=0)


def test_every_family_is_there():
    assert set(WIDE) >= {
        "olmo2",
        "olmo3",
        "smollm3",
        "phi4",
        "granite",
        "gemma2",
        "gemma3",
        "olmoe",
        "qwen2-moe",
        "gpt-oss",
    }


def test_a_residual_multiplier_is_not_rounded_to_the_dtype():
    config = replace(jllm.load(PARITY / "granite").config, residual_multiplier=0.22)  # no number of bfloat16
    rows = jnp.arange(128, 256, dtype=jnp.bfloat16)[:, None]
    x = jnp.zeros_like(rows)
    got = add_linear(x, rows, jnp.ones((1, 1), x.dtype), config=config, backend="xla")
    np.testing.assert_array_equal(got, (rows.astype(jnp.float32) * 0.22).astype(jnp.bfloat16))


def test_a_model_that_names_kernels_has_norms_of_widths_that_these_lack():
    model = jllm.load(PARITY / "gpt-oss")
    x, norm = jnp.ones((4, model.config.hidden_size), jnp.bfloat16), jnp.ones(model.config.hidden_size, jnp.bfloat16)
    assert model.config.hidden_size % 128
    np.testing.assert_array_equal(norm_rows(x, norm, model.config, "mosaic"), x)


def test_what_a_family_cannot_do_is_refused_by_name():
    models = {family: jllm.load(PARITY / family) for family in ("phi4", "gemma2")}
    phi, config = models["phi4"].params.layers[0], models["phi4"].config
    with pytest.raises(QuantizationError, match="where whole heads are rotated"):
        scale_keys(phi, config, jnp.ones((config.num_kv_heads, config.head_dim)))
    with pytest.raises(QuantizationError, match="NormAfterAttentionParams: this kind of layer cannot be rotated"):
        rotate(models["gemma2"], "kv")
