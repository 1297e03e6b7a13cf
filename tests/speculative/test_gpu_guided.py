"""On a device (`pytest -m gpu`): guided samples that verify drafts, through the kernels that it runs."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from jllm.engine.engine import Engine
from jllm.engine.request import SamplingParams
from jllm.speculative.ngram import NGram
from jllm.step.buckets import Bucket
from tests.ascii import EOS, TOKENIZER
from tests.gpu_models import Job, kernel_model, play
from tests.tiny import full_logits

pytest.importorskip("llguidance")
pytest.importorskip("hypothesis")

from jllm.guides.matcher import Guides  # noqa: E402
from tests.guides.test_guided import GUIDES  # noqa: E402
from tests.speculative.scripted import scripted  # noqa: E402
from tests.speculative.test_guided import KEYS, SHAPES  # noqa: E402

pytestmark = pytest.mark.gpu

SIZES = {"max_slots": 6, "num_pages": 64, "max_step_tokens": 38, "buckets": (Bucket(6, 32, 6),)}
OPTIONS = SIZES | {"prefix_cache": False}
CLOSE = 0.25  # of a logit: the deviation of logits is 3, and rounding to bfloat16 may choose either


@pytest.fixture(scope="module")
def model():
    return replace(kernel_model("D=128"), tokenizer=TOKENIZER)  # of whose 512 tokens 95 can be written


def jobs() -> list[Job]:
    """Guided ones, and one that is not, which come one after the other."""
    guides = [*GUIDES, KEYS, None]
    greedy = SamplingParams(temperature=0.0, max_new_tokens=40, seed=1)
    params = [replace(greedy, guide=guide, seed=i) for i, guide in enumerate(guides)]
    return [Job(range(5 + i, 15 + 3 * i), each, 2 * i) for i, each in enumerate(params)]


def drafter_of(shape: str):
    """N-grams, or noise in a chain or a tree, among which a guide's forced tokens are right."""
    if shape == "ngram":
        return NGram(3, shortest=1)
    unknown = [SimpleNamespace(token_ids=(), seed=job.params.seed) for job in jobs()]
    return scripted(SHAPES[shape], jobs(), unknown, right=0.0, ragged=True)


def below_the_best(model, prompt, token_ids, guide) -> np.ndarray:
    """How far each token's logit is below the best of those that a matcher of its own allows, by the forward pass
    without a cache."""
    matcher = Guides(model.tokenizer, model.config.vocab_size, model.config.eos_ids).matcher(guide).state
    logits = full_logits(model, [*prompt, *token_ids])[len(prompt) - 1 :].astype(np.float32)
    found = []
    for row, token in zip(logits, token_ids):
        allowed = [i for i in range(3, len(row)) if matcher.validate_tokens([i])]
        allowed += [EOS] if matcher.is_accepting() else []
        assert token in allowed
        assert matcher.consume_token(token)
        found.append(row[allowed].max() - row[token])
    return np.array(found)


@pytest.mark.parametrize("shape", ["ngram", *SHAPES])
def test_guided_tokens_are_the_likeliest_that_are_allowed(model, shape):
    """Verified as drafts or not; and a second run has the same tokens."""
    drafter = drafter_of(shape)
    engine = Engine(model, **OPTIONS, speculate=drafter, drafts=drafter.tree.size - 1)
    engine.compile_ahead(job.params for job in jobs())  # in threads, which takes a fraction of the time
    got = play(engine, jobs())
    metrics = engine.metrics()
    assert metrics["draft_segments"]
    assert metrics["draft_tokens_mean"] > 1
    assert metrics["pages_free"] == metrics["pages_total"]
    for job, completion in zip(jobs(), got):
        if job.params.guide is not None:
            assert completion.finish_reason in ("stop", "length")
            assert (below_the_best(model, job.prompt, completion.token_ids, job.params.guide) < CLOSE).all()
    assert [c.token_ids for c in play(engine, jobs())] == [c.token_ids for c in got]
