"""C2: the VM allocator and paging over reserving the longest length.

The QPS workload, all at once, with pools of 16, 32 and 64 GiB, 512 slots; simulated with the engine's own scheduler and
policies, no device. `reserve` takes pages for the longest output at admission, or for a whole context of 2,048 tokens;
`paged` takes them as tokens come; `extent` takes a run of pages of the length that the lengths so far say (quantile
0.9) or of the true one (oracle).
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

from experiments.claims.claim import Claim, Part, Row, Verdict, verdict_of
from experiments.claims.simulated import CONTEXT, MODELS, Bench, Todo, cell, gain
from experiments.simulate import Case
from experiments.simulation.requests import Workload, read_workload

WHOLE = f"context of {CONTEXT}"
STATED = 2.0  # more: three times as many
HELPS = 0.05
SLOTS = 512
POOLS = (16.0, 32.0, 64.0)
KV = (None, "int8-g8")
CANDIDATES = (("paged", None), ("extent", "quantile"), ("extent", "oracle"))


def measure(toy: bool) -> Iterator[Row]:
    workload = read_workload("ppl_samples_1024")
    if toy:
        workload = Workload(workload.name, workload.samples[:40], texts=False)
    models, formats, pools = (MODELS[:1], KV[:1], (2.0,)) if toy else (MODELS, KV, POOLS)
    slots = 16 if toy else SLOTS
    todo: list[Todo] = []
    for model, kv, gib in product(models, formats, pools):
        for more in ({"context": CONTEXT}, {}):
            todo.append((Case(model, None, kv, "reserve", None, slots, gib), workload, more))
        for policy, predictor in CANDIDATES:
            todo.append((Case(model, None, kv, policy, predictor, slots, gib), workload, {}))
    yield from Bench().rows(todo)


def gains(rows: list[Row]) -> dict[tuple[str, str, bool], list[float]]:
    """What each candidate gains over reserving (True: a whole context), by model, format and pool."""
    found: dict[tuple[str, str, bool], list[float]] = {}
    cells: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        cells.setdefault(cell(row, "model", "kv", "pool_gib"), []).append(row)
    for of_cell in cells.values():
        bases = [row for row in of_cell if row["kv_policy"] == "reserve"]
        for row, base in product(of_cell, bases):
            if row["kv_policy"] != "reserve":
                key = (row["kv_policy"], row["predictor"], base["allowed"] == WHOLE)
                found.setdefault(key, []).append(gain(row, base))
    return found


def judge(rows: list[Row]) -> Verdict:
    found = gains(rows)
    texts = {
        key: f"{label((policy, predictor, None))} {min(some):+.0%} to {max(some):+.0%} over "
        + label(("reserve", "none", WHOLE if context else None))
        for key, some in found.items()
        for policy, predictor, context in [key]
    }
    every = [value for key, some in found.items() if key[0] == "paged" for value in some]
    parts = [
        Part(f"{said} in {len(some)} of {len(every)} cases of paged, {min(some):+.0%} to {max(some):+.0%}", holds)
        for said, least in (("more requests a second", HELPS), (f"{STATED:+.0%}", STATED))
        for holds in (True, False)
        if (some := [value for value in every if (value >= least) is holds])
    ]
    return verdict_of(parts, ", ".join(texts.values()), how="Simulated")


def draw(figure: Any, rows: list[Row]) -> None:
    kinds = list(dict.fromkeys(cell(row, "kv_policy", "predictor", "allowed") for row in rows))
    groups = list(dict.fromkeys(cell(row, "model", "kv") for row in rows))
    for axes, group in zip(figure.subplots(1, len(groups), sharey=True, squeeze=False)[0], groups):
        of_group = [row for row in rows if cell(row, "model", "kv") == group]
        pools = sorted({row["pool_gib"] for row in of_group})
        for i, kind in enumerate(kinds):
            qps = {r["pool_gib"]: r["qps"] for r in of_group if cell(r, "kv_policy", "predictor", "allowed") == kind}
            at = [j + (i - (len(kinds) - 1) / 2) * 0.16 for j in range(len(pools))]
            axes.bar(at, [qps.get(pool, 0) for pool in pools], 0.15, label=label(kind))
        axes.set_xticks(range(len(pools)), [f"{pool:g}" for pool in pools])
        axes.set_title(f"{group[0]}, KV {group[1]}", fontsize=7)
        axes.set_xlabel("pool, GiB", fontsize=7)
    figure.axes[0].set_ylabel("requests a second, simulated", fontsize=8)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=6)


def label(kind: tuple[Any, ...]) -> str:
    policy, predictor, allowed = kind
    if policy == "reserve":
        return "reserve, a whole context" if allowed == WHOLE else "reserve, the longest output"
    return policy if predictor == "none" else f"{policy}, {predictor}"


CLAIM = Claim(
    id="C2",
    rule=(
        "Paged over reserving, in each case (model, format of K and V, pool, and what is reserved): more is "
        f"{HELPS:.0%} or more."
    ),
    stated="QPS +200 %",
    measure=measure,
    judge=judge,
    draw=draw,
    computed=True,
)
