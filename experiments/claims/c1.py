"""Tests C1: dynamic batching vs. static batches, which wait for their longest member.

One engine runs under two policies (contest.py). Either requests join and leave at every step, or they come in batches
of as many as there are slots. A static batch prefills, then decodes as many rows as it has members until the last one
ends.
"""

from collections.abc import Iterator

from experiments.claims.claim import Answer, Claim, Row
from experiments.claims.contest import contest, gain_holds, gain_of, gain_words

STATED = (1.0, 2.0)  # growth of requests per second, from and to


def measure(toy: bool) -> Iterator[Row]:
    yield from contest(toy, {"dynamic": "usual", "static": "static"})


def holds(rows: list[Row]) -> Answer:
    return gain_holds(gain_of(rows, "dynamic", "static"), *STATED)


def words(rows: list[Row]) -> tuple[str, str]:
    return gain_words("Dynamic batching", gain_of(rows, "dynamic", "static"), *STATED)


CLAIM = Claim(
    id="C1",
    stated="+100 % requests a second, elsewhere +100 to +200 %",
    measure=measure,
    holds=holds,
    words=words,
    serves=True,
    alternates=True,
)
