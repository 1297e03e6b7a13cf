"""Simulates serving for claims: the rows of experiments.simulate for the cases of a claim.

Weights are in bf16, and steps cost what the calibrated model gives (experiments/steps/cost_model.py). Every row is
marked as simulated. A request allows the longest output of the workload, the least that a server could promise to
everyone. Or it allows a whole context, as static caches do.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from tqdm import tqdm

from experiments.claims.claim import Row
from experiments.simulate import Case, make_costs, simulate
from experiments.simulation.requests import Workload

MODELS = ("llama-2-7b", "llama-3-8b")  # 32 KV heads for 32 query heads, and 8
CONTEXT = 2048
GAIN = 0.02  # a smaller simulated gain counts as none
Todo = tuple[Case, Workload, dict[str, Any]]  # the dict has more arguments of simulate.simulate
KEPT = (
    "source", "model", "kv", "kv_policy", "predictor", "quantile", "slots", "pool_gib", "workload", "allowed",
    "requests", "seconds", "qps", "output_tokens_s", "goodput", "ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50",
    "itl_ms_p99", "held_mean", "held_peak", "preemption_rate", "recomputed_share", "fragmentation", "wasted_pages",
    "pages_used", "slack",
)  # fmt: skip


def simulated(todo: Iterable[Todo]) -> Iterator[Row]:
    """Yields a row per case. If the arguments have a context, requests allow all of it."""
    costs = cache(make_costs)
    for case, workload, more in tqdm(list(todo), delay=2):
        allowed = more.get("context", workload.longest_output)
        of_case = costs(case.config, case.scheme, case.kv_cache)
        row = simulate(case, of_case, workload, max_new_tokens=allowed, **more)
        row["allowed"] = f"context of {allowed}" if "context" in more else allowed
        yield {name: row[name] for name in KEPT}


def gain(row: Row, over: Row) -> float:
    """Returns the relative gain in requests per second: 1.0 is twice as many."""
    return row["qps"] / over["qps"] - 1


def cell(row: Row, *names: str) -> tuple[Any, ...]:
    return tuple(row[name] for name in names)
