"""C12: paging does not help past batch 512, nor with grouped-query attention.

Requests a second with pages on demand over those with the longest output reserved, by slots (the largest batch, each
policy at its best up to there), head grouping (LLaMA-2-7B's 32 KV heads, LLaMA-3-8B's 8) and pool; 2,048 requests drawn
from the QPS workload, all at once; simulated. What paging costs in a kernel is not part of it: decode attention over
shuffled pages takes as long as cuDNN's over contiguous arrays.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any

from experiments.claims.claim import Claim, Part, Row, Verdict, verdict_of
from experiments.claims.simulated import MODELS, Bench, Todo, cell, gain
from experiments.simulate import Case
from experiments.simulation.requests import read_workload

SLOTS = (64, 128, 256, 512, 1024)
POOLS = (16.0, 64.0)
MUCH = 512  # slots, past which it is said not to help
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
    yield from Bench().rows(todo)


def gains(rows: list[Row], policy: str = "paged") -> dict[tuple[str, float, int], float]:
    """What a policy gains over reserving, by model, pool and slots; each at its best with as many slots or fewer, since
    slots that find no pages only coarsen the compiled sizes."""
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


def judge(rows: list[Row]) -> Verdict:
    found = gains(rows)
    halves = (
        (f"past batch {MUCH}", {key: gain for key, gain in found.items() if key[2] > MUCH}),
        ("with 8 KV heads", {key: gain for key, gain in found.items() if key[0] == GROUPED}),
    )
    parts = []
    for half, some in halves:
        for side in (True, False):
            of_side = {key: gain for key, gain in some.items() if (gain <= HELPS) is side}
            if of_side:
                count = "all" if len(of_side) == len(some) else f"{len(of_side)} of"
                where = f"{half} in {count} {len(some)} cases"
                said = f"at most {HELPS:+.0%} {where}, {spread(of_side.values())}{pools(of_side, some)}"
                parts.append(Part(said, side))
    rest = [gain for key, gain in found.items() if not any(key in some for _, some in halves)]
    others = f"with 32 KV heads up to {MUCH} slots {spread(rest)}" if rest else ""
    return verdict_of(parts, others, how="Simulated, paged over reserve, requests a second")


def spread(gains: Iterable[float]) -> str:
    gains = list(gains)
    return f"{min(gains):+.0%} to {max(gains):+.0%}"


def pools(some: Mapping[tuple[str, float, int], float], every: Mapping[tuple[str, float, int], float]) -> str:
    """Which slots of which pools they are, where they are not all that there are."""
    if len(some) == len(every):
        return ""
    by: dict[float, list[int]] = {}
    for _, gib, slots in some:
        by.setdefault(gib, []).append(slots)
    return f" ({', '.join(f'{gib:g} GiB with {to(slots)} slots' for gib, slots in by.items())})"


def to(slots: list[int]) -> str:
    return str(slots[0]) if len(slots) == 1 else f"{min(slots)} to {max(slots)}"


def draw(figure: Any, rows: list[Row]) -> None:
    axes = figure.subplots()
    for policy, style in (("paged", "o-"), ("extent", "x:")):
        found = gains(rows, policy)
        for i, (model, gib) in enumerate(dict.fromkeys(key[:2] for key in found)):
            line = {key[2]: value for key, value in found.items() if key[:2] == (model, gib)}
            label = f"{policy}, {model}, {gib:g} GiB"
            axes.plot(list(line), [100 * value for value in line.values()], style, color=f"C{i}", label=label)
    axes.axhline(0, color="gray", linewidth=1)
    axes.axvline(MUCH, color="black", linestyle="--", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("slots")
    axes.set_ylabel("QPS over reserve, %, simulated")
    axes.legend(fontsize=6, ncols=2)


CLAIM = Claim(
    id="C12",
    rule=f"In each case no gain is at most {HELPS:.0%} more requests a second.",
    stated="no gain past batch 512 or with GQA",
    measure=measure,
    judge=judge,
    draw=draw,
    computed=True,
)
