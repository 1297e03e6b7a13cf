"""C17: a length predictor is what admission needs.

Requests a second by what admission counts on, with pages on demand and with extents, LLaMA-2-7B in bf16, 512 slots;
simulated. Two workloads: the QPS workload, whose prompts say nothing (it has lengths alone), and `stories`, held-out
prompts for the bundled model with the lengths at which it really stopped (train_length_predictor.py): half go on to
its end token, half stop at the first line break. Of each 1,024 requests are drawn.

`none` counts on nothing (pages on demand alone), `longest` on the workload's longest output, `quantile` on what has
ended so far, `learned` on the prompt as well, `oracle` on the truth. quantile and learned are asked for each of
QUANTILES; of these the best that preempts at most PREEMPTED of the requests is the one that is judged.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.claims.claim import Claim, Part, Row, Verdict, by_case, verdict_of
from experiments.claims.simulated import GAIN, Bench, Todo, cell
from experiments.simulate import Case
from experiments.simulation.requests import Workload, read_workload
from jllm.kv_policies.learned_length import load_learned
from jllm.pretrained import load

PREDICTOR = Path(__file__).parents[1] / "workloads" / "stories_length.safetensors"
QUANTILES = (0.5, 0.7, 0.9)
PREEMPTED = 0.05
POOLS = (16.0, 32.0)
POLICIES = ("paged", "extent")
NEAR = 0.90  # of the oracle's QPS
NEEDED = 0.05  # of it, that is lost without
STORIES = "stories"


def measure(toy: bool) -> Iterator[Row]:
    stories, talks = read_workload(STORIES), read_workload("ppl_samples_1024")
    learned = load_learned(PREDICTOR, load())
    todo: list[Todo] = []
    for workload in (stories,) if toy else (stories, talks):
        for gib in (1.0,) if toy else POOLS:
            for policy in POLICIES:
                todo += cases(policy, gib, workload, learned, 64 if toy else 512, 60 if toy else 1024)
    yield from Bench().rows(todo)


def cases(policy: str, gib: float, workload: Workload, learned: Any, slots: int, requests: int) -> Iterator[Todo]:
    names = ["longest", "oracle", "quantile", *(["learned"] if workload.texts else [])]
    if policy == "paged":
        names = ["none", *names]
    for name in names:
        for quantile in QUANTILES if name in ("quantile", "learned") else (None,):
            case = Case("llama-2-7b", None, None, policy, None if name == "none" else name, slots, gib, quantile)
            yield case, workload, {"requests": requests, "learned": learned if name == "learned" else None}


def chosen(rows: list[Row]) -> dict[tuple[Any, ...], dict[str, Row]]:
    """By workload, policy and pool: each predictor's row, of several quantiles' the best that preempts few enough, or
    the one that preempts least."""
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


def judge(rows: list[Row]) -> Verdict:
    """Whether admission needs a prediction, by policy: without one, and by the longest output, against the oracle; and
    whether a trained predictor is worth more than a quantile."""
    found = chosen(rows)
    parts: list[Part] = []
    bars: list[Row] = []
    wins: dict[str, float] = {}

    def shares(name: str, policy: str) -> list[float]:
        return [
            cells[name]["qps"] / cells["oracle"]["qps"]
            for (_, of, _), cells in found.items()
            if of == policy and name in cells
        ]

    for policy in dict.fromkeys(policy for _, policy, _ in found):
        for name, said in (
            ("none", "without any"), ("longest", "with the longest output as one"),
        ):  # fmt: skip
            if some := shares(name, policy):
                needed = min(some) < 1 - NEEDED
                parts.append(
                    Part(f"needed by {policy}, which {said} serves {between(some)} of the oracle's QPS", needed)
                )
    for (workload, policy, gib), cells in found.items():
        if "learned" not in cells:
            continue
        learned, quantile, oracle = (cells[name]["qps"] for name in ("learned", "quantile", "oracle"))
        where = f"{workload}, {policy}, {gib:g} GiB"
        wins[where] = learned / quantile - 1
        bars += [
            {"name": f"learned over oracle's QPS, {where}", "value": round(learned / oracle, 4), "unit": "1",
             "bar": NEAR, "met": learned >= NEAR * oracle},
            {"name": f"learned over quantile's QPS, {where}", "value": round(learned / quantile, 4), "unit": "1",
             "bar": 1.0, "met": learned > quantile},
        ]  # fmt: skip
    more = {f"{where}: {gain:+.1%}": gain > GAIN for where, gain in wins.items()}
    parts += by_case(f"a trained one serves over {GAIN:.0%} more than a quantile of past lengths", more)
    rest = [f"{name} {between(some)}" for name in ("quantile", "learned") if (some := every(found, name))]
    return verdict_of(parts, f"of the oracle's: {', '.join(rest)}" if rest else "", how="Simulated", bars=bars)


def every(found: Mapping[tuple[Any, ...], dict[str, Row]], name: str) -> list[float]:
    return [cells[name]["qps"] / cells["oracle"]["qps"] for cells in found.values() if name in cells]


def between(shares: list[float]) -> str:
    return f"{min(shares):.0%} to {max(shares):.0%}"


def draw(figure: Any, rows: list[Row]) -> None:
    found = chosen(rows)
    names = ("none", "longest", "quantile", "learned", "oracle")
    axes = figure.subplots()
    for i, name in enumerate(names):
        at = [j + (i - 2) * 0.17 for j, cells in enumerate(found.values()) if name in cells]
        axes.bar(at, [cells[name]["qps"] for cells in found.values() if name in cells], 0.16, label=name)
    labels = [f"{workload.removesuffix('_samples_1024')}\n{policy}\n{gib:g} GiB" for workload, policy, gib in found]
    axes.set_xticks(range(len(found)), labels, fontsize=7)
    axes.set_ylabel("requests a second, simulated")
    axes.legend(ncols=5, fontsize=7)


CLAIM = Claim(
    id="C17",
    rule=(
        f"A policy needs one where it serves less than {1 - NEEDED:.0%} of the oracle's requests a second in "
        f"some case; a trained one is worth having where it serves more than a quantile by over {GAIN:.0%}."
    ),
    stated="a trained predictor of output length is recommended; no system has one",
    measure=measure,
    judge=judge,
    draw=draw,
    computed=True,
)
