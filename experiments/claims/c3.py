"""C3: host work beside the device's against a host that waits for each step.

The same engine under its two policies (contest.py): step t + 1 is planned and dispatched before the tokens of step t
are read, or each step is read before the next is planned.
"""

from collections.abc import Iterator
from typing import Any

from experiments.claims.claim import Claim, Row, Verdict, verdict_of
from experiments.claims.contest import RULE, contest, draw_qps, gain_parts


def measure(toy: bool) -> Iterator[Row]:
    yield from contest(toy, {"pipelined": "usual", "waiting": "waiting"})


def judge(rows: list[Row]) -> Verdict:
    parts, size, waits = gain_parts(rows, "pipelined", "waiting", stated=(0.05, 0.10, 0.30))
    return verdict_of(parts, waits, how=size)


def draw(figure: Any, rows: list[Row]) -> None:
    draw_qps(figure.subplots(), rows)


CLAIM = Claim(
    id="C3",
    rule=RULE,
    stated="QPS +5 to +10 % (elsewhere +10 to +20, +30 to +50 %)",
    measure=measure,
    judge=judge,
    draw=draw,
    serves=True,
    alternates=True,
)
