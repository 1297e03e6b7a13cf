"""Tests C14: prefill takes at most a tenth of a generation's time, by prompt and output length.

A generation is the prefill of a batch's prompts, then one decode step per output token, at the middle length of K and
V. experiments.throughput times whole steps alike. Each round times prefill, then decoding. The share is the mean with
its 95 % interval (Student's t).
"""

import argparse
from collections.abc import Iterator
from statistics import mean

from experiments.claims.claim import Answer, Claim, Interval, Row, in_all, in_most, interval_in, over_rounds, percents
from experiments.claims.shapes import config_of, random_params
from experiments.result_file import rounded
from experiments.steps.batches import WholeBatch
from experiments.throughput import Bench, parse_args

LENGTHS = ((8, 256), (128, 512), (512, 128), (512, 512), (2048, 128))
BATCHES = (1, 32)
WORKLOAD = (114, 321)  # mean prompt and output of the QPS workload
STATED = 0.10
ROUNDS = 3


def measure(toy: bool) -> Iterator[Row]:
    cases = [WholeBatch(batch, *pair) for batch in BATCHES for pair in (*LENGTHS, WORKLOAD)]
    if toy:
        cases = [WholeBatch(2, 8, 16)]
    config = config_of(toy)
    params = random_params(config, toy)
    sizes = ["--step-tokens", "16", "--steps", "2", "--seconds", "0.02"] if toy else ["--step-tokens", "4096"]
    args = parse_args([*sizes, "--repeats", str(ROUNDS)])
    bench = Bench(params, config, cases, argparse.Namespace(**{**vars(args), "kv_cache": "f32" if toy else "bf16"}))
    for case in cases:
        times = list(zip(bench.prefill(case), bench.decode(case)))
        prefill, decode = mean(each for each, _ in times), mean(each for _, each in times)
        yield {
            "batch": case.batch, "input": case.input, "output": case.output,
            **rounded({
                "prefill_ms": 1e3 * prefill, "decode_ms": 1e3 * decode,
                "tokens_s": case.batch * case.output / (prefill + case.output * decode),
            }),
            **over_rounds("prefill_share", [first / (first + case.output * each) for first, each in times]),
        }  # fmt: skip


def shares(rows: list[Row]) -> list[Interval]:
    return [interval_in(row, "prefill_share") for row in rows]


def holds(rows: list[Row]) -> Answer:
    """Decides case by case. Decoding must take the larger part, and prefill at most the stated share."""
    found = shares(rows)
    return in_most(share.within(0, 0.5) for share in found), in_all(share.within(0, STATED) for share in found)


def words(rows: list[Row]) -> tuple[str, str]:
    found = shares(rows)
    few = sum(share.within(0, STATED) is True for share in found)
    inside = f"at most {percents([STATED])} in {few} of {len(found)}"
    taken = percents((share.mean for share in found), "{:.1f}")
    return f"{taken}, {inside}", f"Prefill takes {taken} of a generation, and {inside} cases."


CLAIM = Claim(
    id="C14",
    stated="prefill <= 10 %, decode >= 90 %",
    measure=measure,
    holds=holds,
    words=words,
)
