"""C1: dynamic batching against static batches, which wait for their longest member.

The same engine under its two policies (contest.py): requests join and leave at every step, or come in batches of as
many as there are slots, prefill, and decode in as many rows as the batch has members until the last has ended.
"""

from collections.abc import Iterator
from typing import Any

from experiments.claims.claim import Claim, Row, Verdict, verdict_of
from experiments.claims.contest import RULE, contest, draw_qps, gain_parts


def measure(toy: bool) -> Iterator[Row]:
    yield from contest(toy, {"dynamic": "usual", "static": "static"})


def judge(rows: list[Row]) -> Verdict:
    parts, size, waits = gain_parts(rows, "dynamic", "static", stated=(1.0,))
    return verdict_of(parts, waits, how=size)


def draw(figure: Any, rows: list[Row]) -> None:
    draw_qps(figure.subplots(), rows)


CLAIM = Claim(
    id="C1",
    rule=RULE,
    stated="QPS +100 % (elsewhere +100 to +200 %)",
    measure=measure,
    judge=judge,
    draw=draw,
    serves=True,
    alternates=True,
)
