"""Tests C12: paging does not help past batch 512, nor with grouped-query attention.

Rows compare requests per second with paged policies and with reserving the longest output. They vary the slots (each
policy at its best up to there), head grouping (LLaMA-2-7B's 32 KV heads, LLaMA-3-8B's 8) and pool. 2,048 requests,
drawn from the QPS workload, start at once in a simulation. The cost of paging in a kernel is not included: decode
attention over shuffled pages takes as long as cuDNN's over contiguous arrays.
"""

from collections.abc import Iterator
from itertools import product

from experiments.claims.claim import Answer, Claim, Row, in_most, percents
from experiments.claims.simulated import MODELS, Todo, cell, gain, simulated
from experiments.simulate import Case
from experiments.simulation.requests import read_workload

SLOTS = (64, 128, 256, 512, 1024)
POOLS = (16.0, 64.0)
MUCH = 512  # slots past which it should not help
HELPS = 0.05
GROUPED = "llama-3-8b"
PAGED = ("paged", None), ("extent", "quantile")


def measure(toy: bool) -> Iterator[Row]:
    workload = read_workload("ppl_samples_1024")
    slots, pools, requests = ((8, 16), (1.0,), 40) if toy else (SLOTS, POOLS, 2048)
    todo: list[Todo] = [
        (
            Case(model, None, None, policy, predictor, n, gib, step_tokens=max(2048, 2 * n)),
            workload,
            {"requests": requests},
        )
        for model, gib, n in product(MODELS, pools, slots)
        for policy, predictor in (("reserve", None), *PAGED)
    ]
    yield from simulated(todo)


def gains(rows: list[Row], policy: str = "paged") -> dict[tuple[str, float, int], float]:
    """Returns a policy's gain over reserving, by model, pool and slots. Each counts at its best with as many slots or
    fewer: slots without pages only make the compiled sizes coarser."""
    best: dict[tuple[str, str, float, int], Row] = {}
    for row in sorted(rows, key=lambda row: row["slots"]):
        about = cell(row, "kv_policy", "model", "pool_gib")
        fewer = [best[key] for key in best if key[:3] == about]
        best[*about, row["slots"]] = max([row, *fewer], key=lambda row: row["qps"])
    return {
        key[1:]: gain(row, best["reserve", *key[1:]])
        for key, row in best.items()
        if key[0] == policy and ("reserve", *key[1:]) in best
    }


def holds(rows: list[Row]) -> Answer:
    """Decides by each case past the claim's slots or with grouped queries. A gain must exceed HELPS."""
    return in_most(gain <= HELPS for gain in cases(rows)), ""


def words(rows: list[Row]) -> tuple[str, str]:
    found = cases(rows)
    helped = f"over {percents([HELPS])} in {sum(gain > HELPS for gain in found)} of {len(found)} cases"
    line = f"Simulated: past batch {MUCH} or with grouped queries, paging gains {helped}."
    return f"{percents(found)} more requests a second, simulated", line


def cases(rows: list[Row]) -> list[float]:
    return [gain for (model, _, slots), gain in gains(rows).items() if slots > MUCH or model == GROUPED]


CLAIM = Claim(
    id="C12",
    stated="no gain past batch 512 or with GQA",
    measure=measure,
    holds=holds,
    words=words,
    computed=True,
)
