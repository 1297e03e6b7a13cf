"""The same numbers as transformers in float64, for families that differ from LLaMA in their blocks."""

import jax
import numpy as np
import pytest

import jllm
from jllm.engine.request import SamplingParams
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
