"""Tests C21: KV dequantization hides behind memory even at ten times its arithmetic.

Decode attention reads int8 pages in groups of 8, the most expensive format. It repeats the dequantization (codes and
scales to floats, products, rounding) 1 to 10 times in registers. The result is bitwise the same. A barrier hides the
repetition from the compiler. Hidden work costs nothing: the time is then that of the bytes, at the same kernel's rate
over bfloat16 pages. Each round times all, one after the other. A ratio is within a round; the result is the mean with
its 95 % interval (Student's t).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from statistics import mean

import jax.numpy as jnp

from experiments.claims.claim import Answer, Claim, Interval, Row, in_all, in_most, interval_in, over_rounds, spread
from experiments.claims.decoding import compiled, moved_bytes, paged, size
from pallas_kernels.decode_attention.cases import BENCH_CASES, Case

REPEATS = (1, 2, 4, 10)
STATED, ROUNDS = 10, 5
HIDDEN = 1.15  # multiple of the bytes' time that counts as hidden
KV, PLAIN = "int8-g8", "bf16"


def measure(toy: bool) -> Iterator[Row]:
    cases = [case for case in BENCH_CASES if case.k_format == KV]
    plain = [replace(case, k_format=PLAIN, v_format=PLAIN) for case in cases]
    runs = compiled([*map(paged, plain), *(paged(case, times) for case in cases for times in REPEATS)])
    of_plain, repeated = runs[: len(cases)], iter(runs[len(cases) :])
    for case, same, run in zip(cases, plain, of_plain):
        each = [run, *islice(repeated, len(REPEATS))]
        found = [[one.timed() for one in each] for _ in range(ROUNDS)]
        plain_us, *repeated_us = ([us for us, _ in rounds] for rounds in zip(*found))
        rates = [moved_bytes(same) / us / 1e3 for us in plain_us]
        yield size(case) | {"kv": PLAIN, "dequantized": 0, **time_of(same, plain_us), "over_bytes": 1.0}
        for at, (times, taken) in enumerate(zip(REPEATS, repeated_us), 1):
            row: Row = size(case) | {"kv": KV, "dequantized": times}
            if not jnp.array_equal(found[0][at][1], found[0][1][1]):
                yield row | {"error": "the result is not the same as of dequantizing once"}
                continue
            over = [us * rate * 1e3 / moved_bytes(case) for us, rate in zip(taken, rates)]
            yield row | time_of(case, taken) | over_rounds("over_bytes", over)


def time_of(case: Case, us: Sequence[float]) -> Row:
    """Returns the mean time of its rounds, and its rate of reading pages."""
    return {"us": round(mean(us), 2), "gb_s": round(moved_bytes(case) / mean(us) / 1e3)}


def over_bytes(rows: list[Row], times: int) -> list[Interval]:
    return [interval_in(row, "over_bytes") for row in rows if row["dequantized"] == times]


def holds(rows: list[Row]) -> Answer:
    """Decides case by case. Hidden means at most HIDDEN times the bytes' time, once and at the stated repetitions."""
    once, stated = ([over.within(0, HIDDEN) for over in over_bytes(rows, times)] for times in (1, STATED))
    return in_most(once), in_all(stated)


def words(rows: list[Row]) -> tuple[str, str]:
    once, stated = (spread(over.mean for over in over_bytes(rows, times)) for times in (1, STATED))
    line = f"Dequantizing once takes {once} times as long as the bytes, and {STATED} times over {stated} times."
    return f"{stated} times the bytes' time at {STATED}x", line


CLAIM = Claim(
    id="C21",
    stated="hidden at 10 times its arithmetic",
    measure=measure,
    holds=holds,
    words=words,
    hopper=True,
)
