"""Tests C3: host work beside the device's vs. a host that waits for each step.

One engine runs under two policies (contest.py). Either step t + 1 is planned and dispatched before the tokens of step t
are read, or each step is read before the next is planned.
"""

from collections.abc import Iterator

from experiments.claims.claim import Answer, Claim, Row
from experiments.claims.contest import contest, gain_holds, gain_of, gain_words

STATED = (0.05, 0.10)  # growth of requests per second, from and to


def measure(toy: bool) -> Iterator[Row]:
    yield from contest(toy, {"pipelined": "usual", "waiting": "waiting"})


def holds(rows: list[Row]) -> Answer:
    return gain_holds(gain_of(rows, "pipelined", "waiting"), *STATED)


def words(rows: list[Row]) -> tuple[str, str]:
    return gain_words("Pipelined host work", gain_of(rows, "pipelined", "waiting"), *STATED)


CLAIM = Claim(
    id="C3",
    stated="+5 to +10 % requests a second",
    measure=measure,
    holds=holds,
    words=words,
    serves=True,
    alternates=True,
)
