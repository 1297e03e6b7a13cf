"""C21: KV dequantization hides behind memory even at ten times its arithmetic.

Decode attention over int8 pages in groups of 8, the costliest there are, whose dequantization (codes and scales to
floats, products, rounding) is done 1 to 10 times over in registers. The result is the same to the bit, and a barrier
keeps the compiler from seeing that it is the same work again. Work that hides costs nothing: then time is that of the
bytes, at the rate at which the same kernel reads pages of bfloat16, which need no such work. All are timed in each
of ROUNDS, one after the other; a ratio is within a round, the mean of all with its 95 % interval (Student's t).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from statistics import mean
from typing import Any

import jax.numpy as jnp

from experiments.claims.claim import Claim, Row, Verdict, by_case, interval_in, over_rounds, verdict_of
from experiments.claims.decoding import cell_of, compiled, moved_bytes, paged, size
from pallas_kernels.decode_attention.cases import BENCH_CASES, Case

REPEATS = (1, 2, 4, 10)
STATED, ROUNDS = 10, 5
HIDDEN = 1.15  # times the time of the bytes: what counts as hidden
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
    """The mean time of its rounds, and the rate at which it reads pages in that."""
    return {"us": round(mean(us), 2), "gb_s": round(moved_bytes(case) / mean(us) / 1e3)}


def judge(rows: list[Row]) -> Verdict:
    found = {times: [row["over_bytes"] for row in rows if row["dequantized"] == times] for times in REPEATS}
    texts = [f"{times} times: {min(ratios):.2f} to {max(ratios):.2f}" for times, ratios in found.items() if ratios]
    of = {(cell_of(row), row["dequantized"]): interval_in(row, "over_bytes") for row in rows}
    hidden = {
        f"{cell}: {of[cell, 1].shown('{:.2f}')} once and {ratio.shown('{:.2f}')} at {STATED}x": ratio.within(0, HIDDEN)
        for (cell, times), ratio in of.items()
        if times == STATED
    }
    return verdict_of(
        by_case(f"hidden at {STATED}x", hidden), f"time over that of the bytes, dequantized {', '.join(texts)}"
    )


def draw(figure: Any, rows: list[Row]) -> None:
    axes = figure.subplots()
    for cell in dict.fromkeys((row["R"], row["length"], row["H"], row["K"]) for row in rows):
        of_cell = [row for row in rows if (row["R"], row["length"], row["H"], row["K"]) == cell and row["dequantized"]]
        label = f"{cell[0]} x {cell[1]}, H/K {cell[2]}/{cell[3]}"
        axes.plot([row["dequantized"] for row in of_cell], [row["over_bytes"] for row in of_cell], "o-", label=label)
    axes.axhline(HIDDEN, color="gray", linewidth=1, label="hidden")
    axes.axvline(STATED, color="black", linestyle="--", linewidth=1, label="as stated")
    axes.set_xscale("log")
    axes.set_xticks(REPEATS, [str(times) for times in REPEATS])
    axes.set_xlabel("times that K and V are dequantized")
    axes.set_ylabel("time over that of the bytes")
    axes.set_ylim(bottom=0)
    axes.legend()


CLAIM = Claim(
    id="C21",
    rule=(
        f"Hidden is at most {HIDDEN:g} times the time of the bytes at the rate of bfloat16 pages, with all of the 95 % "
        "interval over its rounds; where the interval has room for either it is open. Beside it "
        f"stands what dequantizing once takes: a case that misses even then does not miss because of {STATED}x."
    ),
    stated=f"hidden at {STATED}x",
    measure=measure,
    judge=judge,
    draw=draw,
    hopper=True,
)
