"""C3: host work beside the device's against a host that waits for each step.

The QPS workload, all sent at once, through the same engine: step t + 1 is planned and dispatched before the tokens of
step t are read, or each step is read before the next is planned.
"""

from collections.abc import Iterator
from typing import Any

from experiments.claims.claim import Claim, Row, Verdict
from experiments.claims.serving import contest, draw_qps, gain_of


def measure(toy: bool) -> Iterator[Row]:
    yield from contest(toy, {"pipelined": {"host": "late"}, "waiting": {"host": "wait"}})


def judge(rows: list[Row]) -> Verdict:
    return gain_of(rows, "pipelined", "waiting", least=0.05)


def draw(figure: Any, rows: list[Row]) -> None:
    draw_qps(figure.subplots(), rows)


CLAIM = Claim(
    id="C3",
    stated="QPS +5 to +10 % (elsewhere +10 to +20, +30 to +50 %)",
    measure=measure,
    judge=judge,
    draw=draw,
    serves=True,
)
