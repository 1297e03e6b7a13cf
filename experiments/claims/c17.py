"""Tests C17: admission needs a length predictor.

Rows have requests per second by the predictor of admission, with pages on demand and with extents. LLaMA-2-7B in bf16
with 512 slots is simulated. There are two workloads, with 1,024 requests drawn from each. The QPS workload has only
lengths, so its prompts carry no hint. `stories` has held-out prompts of the bundled model with its real output lengths
(train_length_predictor.py): half run to the end token, half stop at the first line break.

`none` predicts nothing (pages on demand only). `longest` predicts the longest output of the workload. `quantile` uses
the lengths so far, `learned` the prompt too, and `oracle` the true length. quantile and learned run at several
quantiles. The best one that rarely preempts counts.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.claims.claim import Answer, Claim, Row, in_most, percents
from experiments.claims.simulated import Todo, cell, simulated
from experiments.simulate import Case
from experiments.simulation.requests import Workload, read_workload
from experiments.training.learned_length import load_learned
from jllm.files.load import load

PREDICTOR = Path(__file__).parents[1] / "workloads" / "stories_length.safetensors"
QUANTILES = (0.5, 0.7, 0.9)
PREEMPTED = 0.05
POOLS = (16.0, 32.0)
POLICIES = ("paged", "extent")
NEAR = 0.90  # share of the oracle's QPS
NEEDED = 0.05  # loss without a predictor that proves the need
STORIES = "stories"


def measure(toy: bool) -> Iterator[Row]:
    stories, talks = read_workload(STORIES), read_workload("ppl_samples_1024")
    learned = load_learned(PREDICTOR, load())
    todo: list[Todo] = []
    for workload in (stories,) if toy else (stories, talks):
        for gib in (1.0,) if toy else POOLS:
            for policy in POLICIES:
                todo += cases(policy, gib, workload, learned, 64 if toy else 512, 60 if toy else 1024)
    yield from simulated(todo)


def cases(policy: str, gib: float, workload: Workload, learned: Any, slots: int, requests: int) -> Iterator[Todo]:
    names = ["longest", "oracle", "quantile", *(["learned"] if workload.texts else [])]
    if policy == "paged":
        names = ["none", *names]
    for name in names:
        for quantile in QUANTILES if name in ("quantile", "learned") else (None,):
            case = Case("llama-2-7b", None, None, policy, None if name == "none" else name, slots, gib, quantile)
            yield case, workload, {"requests": requests, "learned": learned if name == "learned" else None}


def chosen(rows: list[Row]) -> dict[tuple[Any, ...], dict[str, Row]]:
    """Returns each predictor's row, by workload, policy and pool. Of several quantiles, the best that rarely preempts
    counts, else the one that preempts least."""
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        of_cell = found.setdefault(cell(row, "workload", "kv_policy", "pool_gib"), {})
        old = of_cell.get(row["predictor"])
        if old is None or _rank(row) > _rank(old):
            of_cell[row["predictor"]] = row
    return found


def _rank(row: Row) -> tuple[bool, float]:
    allowed = row["preemption_rate"] <= PREEMPTED
    return allowed, row["qps"] if allowed else -row["preemption_rate"]


def shares(rows: list[Row], policy: str, name: str) -> list[float]:
    """Returns the share of the oracle's requests per second that a policy reaches with a predictor, case by case."""
    some = [cells for (_, of, _), cells in chosen(rows).items() if of == policy and name in cells]
    return [cells[name]["qps"] / cells["oracle"]["qps"] for cells in some]


def holds(rows: list[Row]) -> Answer:
    """Decides by pages on demand without a predictor. A loss above NEEDED proves the need."""
    return in_most(share < 1 - NEEDED for share in shares(rows, "paged", "none")), ""


def words(rows: list[Row]) -> tuple[str, str]:
    share = percents(shares(rows, "paged", "none"))
    line = f"Simulated: pages on demand serve {share} of an oracle's requests with no predictor."
    return f"{share} of an oracle's requests without one, simulated", line


CLAIM = Claim(
    id="C17",
    stated="admission needs a trained predictor of output length",
    measure=measure,
    holds=holds,
    words=words,
    computed=True,
)
