"""The same numbers as transformers, for every family, on tiny checkpoints (tests/data/make_parity.py wrote them)."""

import numpy as np
import pytest

import jllm
from jllm.engine.request import SamplingParams
from tests.parity import FAMILIES, OPTIONS, PARITY, WIDE, expected
from tests.tiny import full_logits, log_softmax, serve

NARROW = [name for name in FAMILIES if name not in WIDE]  # test_families.py has the others
# What attention without a cache has of its own: windows, heads that share K and V. The engine's test has all families.
APART = ["llama-mqa", "llama3.1", "qwen2-window", "qwen3-moe"]


@pytest.mark.parametrize("family", APART)
def test_logits_without_a_cache(family):
    model = jllm.load(PARITY / family)
    for prompt, logits, _ in expected(family):
        got = full_logits(model, prompt.tolist(), pad=64)
        error = np.linalg.norm(got - logits) / np.linalg.norm(logits)
        assert error < 1e-4
        np.testing.assert_allclose(log_softmax(got), log_softmax(logits), atol=1e-3, rtol=0)


@pytest.mark.parametrize("family", NARROW)
def test_greedy_and_logprobs_through_the_engine(family):
    """Chunked, merged and paged, all prompts together."""
    model = jllm.load(PARITY / family)
    cases = expected(family)
    n = len(cases[0][2])
    params = SamplingParams(temperature=0.0, max_new_tokens=n, ignore_eos=True, prompt_logprobs=True)
    done = serve(model, [p.tolist() for p, _, _ in cases], [params] * len(cases), **OPTIONS)
    for (prompt, logits, greedy), completion in zip(cases, done, strict=True):
        assert list(completion.token_ids) == greedy.tolist()
        want = log_softmax(logits)[np.arange(len(prompt) - 1), prompt[1:]]
        np.testing.assert_allclose(completion.prompt_logprobs, want, atol=1e-3, rtol=0)


def test_every_family_is_there():
    llama = {"llama1", "llama2", "llama3", "llama3.1", "llama3.2", "llama-longrope", "llama-mqa", "llama-bias"}
    assert set(FAMILIES) >= llama | {"mistral", "qwen2", "qwen2-window", "qwen3", "qwen3-yarn", "mixtral", "qwen3-moe"}
