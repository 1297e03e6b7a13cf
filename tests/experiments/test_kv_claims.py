"""Claims about KV policies and length predictors: their cases at toy size, and what they make of their rows."""

import pytest

from experiments.claims import c2, c12, c16, c17
from experiments.claims.claim import Claim
from experiments.claims.run import run
from experiments.result_file import ResultFile
from experiments.simulate import Case
from experiments.simulation.requests import read_workload
from experiments.training.learned_length import load_learned
from jllm.files.load import load


@pytest.mark.parametrize("claim", [c2.CLAIM, c12.CLAIM, c16.CLAIM, c17.CLAIM], ids=lambda claim: claim.id)
def test_toy_runs_give_rows_and_no_verdict(claim: Claim, tmp_path):
    with ResultFile(tmp_path, claim.id, ["x"]) as result:
        run([(claim, result)], True, lambda line: None)
    rows = result.document["rows"]
    assert result.document["complete"]
    assert "verdict" not in result.document
    assert claim.holds(rows)[0] in ("yes", "no")
    assert {row["source"] for row in rows} <= {"simulated", "data sheet", "measured"}
    assert claim.computed


def served(policy: str, qps: float, **more) -> dict:
    about = {"model": "m", "kv": "bf16", "kv_policy": policy, "predictor": "none", "slots": 512, "pool_gib": 16.0}
    return about | {"workload": "w", "allowed": 1051, "qps": qps, "preemption_rate": 0.0} | more


def test_c12_compares_the_best_of_so_many_slots():
    def rows(*paged):
        found = []
        for model, (few, many) in zip(("llama-2-7b", "llama-3-8b"), paged):
            for slots, reserve, qps in ((256, 10.0, few), (1024, 8.0, many)):
                found += [
                    served(policy, q, model=model, slots=slots) for policy, q in (("reserve", reserve), ("paged", qps))
                ]
        return found

    found = c12.gains(rows((15.0, 12.0), (10.0, 11.0)))
    assert found["llama-2-7b", 16.0, 1024] == pytest.approx(0.5)  # 15 over 10, of 256 slots both
    assert found["llama-3-8b", 16.0, 1024] == pytest.approx(0.1)


def test_c17_takes_the_best_that_preempts_few():
    def rows(none, quantile, learned):
        found = [served("paged", none), served("paged", 10.0, predictor="oracle")]
        for name, some in (("quantile", quantile), ("learned", learned)):
            found += [served("paged", q, predictor=name, preemption_rate=rate) for q, rate in some]
        return found

    preempting = rows(7.0, [(8.0, 0.0), (9.9, 0.2)], [(9.0, 0.05), (8.5, 0.0)])
    ((chosen),) = c17.chosen(preempting).values()
    assert (chosen["quantile"]["qps"], chosen["learned"]["qps"]) == (8.0, 9.0)


def test_the_bundled_predictor_is_the_bundled_models():
    learned, stories = load_learned(c17.PREDICTOR, load()), read_workload(c17.STORIES)
    assert stories.texts
    paragraphs = [s for s in stories.samples if s.stop]
    assert 0.4 < len(paragraphs) / len(stories.samples) < 0.6
    within = sum(s.output <= c17_quantile(learned, s) for s in stories.samples) / len(stories.samples)
    assert abs(within - 0.9) < 0.05
    (case, *_), *_ = c17.cases("extent", 1.0, stories, learned, 8, 5)
    assert isinstance(case, Case)


def c17_quantile(learned, sample) -> int:
    from jllm.engine.request import SamplingParams

    return learned.predict(sample.prompt, SamplingParams(max_new_tokens=2000, stop=sample.stop), 0.9)
