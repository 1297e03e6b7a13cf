"""C1: dynamic batching against static batches, which wait for their longest member.

The QPS workload, all sent at once, through the same engine under its two policies: requests join and leave at every
step, or come in batches of as many as there are slots, prefill, and decode in as many rows as the batch has members
until the last has ended.
"""

from collections.abc import Iterator
from typing import Any

from experiments.claims.claim import Claim, Row, Verdict
from experiments.claims.serving import contest, draw_qps, gain_of


def measure(toy: bool) -> Iterator[Row]:
    yield from contest(toy, {"dynamic": {"batching": "merge"}, "static": {"batching": "static"}})


def judge(rows: list[Row]) -> Verdict:
    return gain_of(rows, "dynamic", "static", least=1.0)


def draw(figure: Any, rows: list[Row]) -> None:
    draw_qps(figure.subplots(), rows)


CLAIM = Claim(
    id="C1", stated="QPS +100 % (elsewhere +100 to +200 %)", measure=measure, judge=judge, draw=draw, serves=True
)
