"""The oracle with drafters that have weights: the tokens of plain decoding, through preemption, too."""

import jax
import pytest

from jllm.engine.loop import Engine
from jllm.engine.request import SamplingParams
from jllm.speculative.draft_model import DraftModel
from tests import gpu_models
from tests.engine.test_oracle import COMPANY, alone, assert_same, play
from tests.speculative.simulation import TREES, make
from tests.speculative.test_oracle import POOL, some_jobs
from tests.tiny import tiny_model

ROOMY = "two slots, pages of 16"


@pytest.mark.parametrize(
    ("kind", "shape", "company"),
    [
        ("itself", "chain", POOL),
        ("itself", "levels", ROOMY),
        ("eagle", "paths", POOL),
        ("medusa", "levels", ROOMY),
    ],
)
def test_drafters_change_no_token(kind, shape, company):
    """A target that drafts for itself is right, too, wherever it drafts."""
    with jax.enable_x64(True):
        model = tiny_model("float64")
        itself = DraftModel(model.params, model.config, TREES[shape])
        drafter = itself if kind == "itself" else make(kind, model, TREES[shape])
        jobs, seen = some_jobs(), {}
        options = COMPANY[company] | {"speculate": drafter, "drafts": drafter.tree.size - 1}
        got = play(model, jobs, options, seen)
        for completion, want in zip(got, alone(model, jobs), strict=True):
            assert_same(completion, want, False)
    assert seen["draft_segments"] > 3
    assert kind != "itself" or set(seen["draft_acceptance"].values()) == {1.0}
    assert (seen["preemptions"] > 0) == (company == POOL)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("model", ["D=64", "D=128"])
def test_a_target_that_drafts_for_itself_on_a_device(model, shape):
    """In bfloat16, through the kernels of a device. Its passes have other numbers of rows than the target's steps, so
    that sums differ by rounding, and a draft where two tokens nearly tie."""
    model = gpu_models.kernel_model(model)
    drafter = DraftModel(model.params, model.config, TREES[shape])
    engine = Engine(model, max_slots=4, num_pages=64, speculate=drafter, drafts=drafter.tree.size - 1)
    params = [SamplingParams(temperature=t, seed=5, max_new_tokens=40, ignore_eos=True) for t in (0.0, 0.7, 1.0)]
    jobs = [gpu_models.Job(range(3 + 20 * i, 20 + 30 * i), p, i) for i, p in enumerate(params)]
    for completion in gpu_models.play(engine, jobs):
        assert len(completion.token_ids) == 40
    metrics = engine.metrics()
    assert metrics["draft_acceptance"][1] > 0.8
    assert metrics["draft_tokens_mean"] > 2
