"""C27: half of the tokens that static batching computes are not wanted.

Counted from the lengths of two workloads; nothing runs. A static batch of requests, in the order in which they came or
in one of SHUFFLES random ones, decodes until its longest member has ended, and computes a token for each member at
every step. `unwanted` is the share of these tokens that come after their own request's end. Where prompts are padded to
the longest of their batch, `padded` is the share of prompt rows that are padding. An answer that was cut off by a limit
ends there for both, so that a limit of the longest output changes nothing.
"""

import random
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from experiments.claims.claim import Claim, Part, Row, Verdict, verdict_of
from experiments.simulation.requests import read_workload

WORKLOADS = ("ppl_samples_1024", "stories")
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SHUFFLES = 100
STATED = 0.5


def measure(toy: bool) -> Iterator[Row]:
    for name in WORKLOADS[:1] if toy else WORKLOADS:
        samples = read_workload(name).samples
        prompts, outputs = [len(s.prompt) for s in samples], [s.output for s in samples]
        for batch in BATCHES:
            shares = [unwanted_share(order, batch) for order in shuffled(outputs)]
            yield {
                "workload": name, "source": "counted", "requests": len(samples), "batch": batch,
                "unwanted": round(unwanted_share(outputs, batch), 4),
                "unwanted_shuffled": round(statistics.mean(shares), 4),
                "unwanted_low": round(min(shares), 4), "unwanted_high": round(max(shares), 4),
                "padded": round(unwanted_share(prompts, batch), 4),
            }  # fmt: skip


def unwanted_share(lengths: Sequence[int], batch: int) -> float:
    """Of batches of consecutive requests, each of whose members costs as much as the longest: the share beyond what
    the members need themselves."""
    batches = [lengths[i : i + batch] for i in range(0, len(lengths), batch)]
    return 1 - sum(lengths) / sum(len(members) * max(members) for members in batches)


def shuffled(lengths: Sequence[int]) -> Iterator[list[int]]:
    """The lengths in random orders, the same ones each time."""
    rng = random.Random(0)
    for _ in range(SHUFFLES):
        yield rng.sample(lengths, len(lengths))


def judge(rows: list[Row]) -> Verdict:
    parts, figures = [], []
    for name in dict.fromkeys(row["workload"] for row in rows):
        found = {row["batch"]: row["unwanted_shuffled"] for row in rows if row["workload"] == name}
        reached = [batch for batch, share in found.items() if share >= STATED]
        below = [f"{share:.0%} at {batch}" for batch, share in found.items() if batch > 1 and share < STATED]
        some = [batch for batch in (2, 8, 32, 128, 512) if batch in found]
        figures.append(f"{name}: {', '.join(f'{found[b]:.0%} at {b}' for b in some)}")
        if reached:
            parts.append(Part(f"half from batch {min(reached)} on ({name})", True))
        if below:
            parts.append(Part(f"{', '.join(below)} ({name})", False))
    return verdict_of(parts, *figures)


def draw(figure: Any, rows: list[Row]) -> None:
    axes = figure.subplots()
    for name in dict.fromkeys(row["workload"] for row in rows):
        found = [row for row in rows if row["workload"] == name]
        at, high = [row["batch"] for row in found], [100 * row["unwanted_high"] for row in found]
        axes.plot(at, [100 * row["unwanted_shuffled"] for row in found], marker="o", label=f"{name}: output tokens")
        axes.fill_between(at, [100 * row["unwanted_low"] for row in found], high, alpha=0.2)
        axes.plot(at, [100 * row["padded"] for row in found], linestyle=":", label=f"{name}: padding of prompts")
    axes.axhline(100 * STATED, color="black", linestyle="--", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(BATCHES, [str(batch) for batch in BATCHES])
    axes.set_ylim(0, 100)
    axes.set_xlabel("requests in a static batch")
    axes.set_ylabel("% of what is computed")
    axes.legend(fontsize=7)


CLAIM = Claim(
    id="C27",
    rule=f"{STATED:.0%} or more of the computed tokens, the mean of {SHUFFLES} orders of the requests.",
    stated="half of the computed tokens are not wanted",
    measure=measure,
    judge=judge,
    draw=draw,
    computed=True,
)
