"""On a device (`pytest -m gpu`): guided samples that verify drafts, through the kernels that it runs."""

from dataclasses import replace

import numpy as np
import pytest

from jllm.batch import Bucket
from jllm.engine.loop import Engine
from jllm.engine.request import SamplingParams
from jllm.speculative.ngram import NGram
from tests.ascii import EOS, TOKENIZER
from tests.gpu_models import Job, kernel_model, play
from tests.tiny import full_logits

pytest.importorskip("llguidance")
pytest.importorskip("hypothesis")

from jllm.engine.guides import Guides  # noqa: E402
from tests.engine.test_guided import GUIDES  # noqa: E402
from tests.speculative.scripted import scripted  # noqa: E402
from tests.speculative.test_guided import KEYS, SHAPES  # noqa: E402

pytestmark = pytest.mark.gpu

SIZES = {"max_slots": 6, "num_pages": 64, "max_step_tokens": 38, "buckets": (Bucket(6, 32, 6),)}
OPTIONS = SIZES | {"prefix_cache": False}
CLOSE = 0.25  # of a logit: the deviation of logits is 3, and rounding to bfloat16 may choose either
DRAFTERS = {"ngram": lambda jobs, wants: NGram(3, shortest=1)} | {
    shape: (lambda jobs, wants, tree=tree: scripted(tree, jobs, wants, right=0.7, ragged=True))
    for shape, tree in SHAPES.items()
}


@pytest.fixture(scope="module")
def model():
    return replace(kernel_model("D=128"), tokenizer=TOKENIZER)  # of whose 512 tokens 95 can be written


def jobs() -> list[Job]:
    """Guided ones, and one that is not, which come one after the other."""
    guides = [*GUIDES, KEYS, None]
    greedy = SamplingParams(temperature=0.0, max_new_tokens=40, seed=1)
    params = [replace(greedy, guide=guide, seed=i) for i, guide in enumerate(guides)]
    return [Job(range(5 + i, 15 + 3 * i), each, 2 * i) for i, each in enumerate(params)]


@pytest.fixture(scope="module")
def plain(model):
    engine = Engine(model, **OPTIONS)
    engine.compile_ahead(job.params for job in jobs())  # in threads, which takes a fraction of the time
    return play(engine, jobs()), engine.metrics()["steps"]


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


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_guided_tokens_are_the_likeliest_that_are_allowed(model, plain, drafter):
    """Verified as drafts or not; and a second run has the same bits."""
    wants, steps = plain
    made = DRAFTERS[drafter](jobs(), wants)
    engine = Engine(model, **OPTIONS, speculate=made, drafts=3 if drafter == "ngram" else made.tree.size - 1)
    engine.compile_ahead(job.params for job in jobs())
    got = play(engine, jobs())
    metrics = engine.metrics()
    assert metrics["draft_segments"]
    for job, completion in zip(jobs(), got):
        if job.params.guide is not None:
            assert completion.finish_reason in ("stop", "length")
            assert (below_the_best(model, job.prompt, completion.token_ids, job.params.guide) < CLOSE).all()
    assert metrics["steps"] < steps
    assert metrics["pages_free"] == metrics["pages_total"]
    assert [c.token_ids for c in play(engine, jobs())] == [c.token_ids for c in got]
