"""The oracle with drafters that have weights: the tokens of plain decoding, through preemption, too."""

import jax
import pytest

from jllm.speculative.draft_model import DraftModel
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
