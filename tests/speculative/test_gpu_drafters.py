"""On a device (`pytest -m gpu`): drafters that have weights, through the kernels that it runs."""

import pytest

from jllm.engine.engine import Engine
from jllm.engine.request import SamplingParams
from jllm.speculative.draft_model import DraftModel
from jllm.speculative.quantized_copy import QuantizedCopy
from tests.gpu_models import Job, kernel_model, play
from tests.speculative.simulation import TREES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["own K and V", "the target's"])
@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("model", ["D=64", "D=128"])
def test_a_target_that_drafts_for_itself(model, shape, kind):
    """In bfloat16 its passes have other numbers of rows than the target's steps, so that sums differ by rounding, and a
    draft where two tokens nearly tie."""
    model = kernel_model(model)
    drafter = DraftModel(model.params, model.config, TREES[shape])
    if kind == "the target's":
        drafter = QuantizedCopy(model.params, TREES[shape])
    engine = Engine(model, max_slots=4, num_pages=64, speculate=drafter, drafts=drafter.tree.size - 1)
    params = [SamplingParams(temperature=t, seed=5, max_new_tokens=40, ignore_eos=True) for t in (0.0, 0.7, 1.0)]
    jobs = [Job(range(3 + 20 * i, 20 + 30 * i), p, i) for i, p in enumerate(params)]
    for completion in play(engine, jobs):
        assert len(completion.token_ids) == 40
    metrics = engine.metrics()
    assert metrics["draft_acceptance"][1] > 0.8
    assert metrics["draft_tokens_mean"] > 2
