"""C14: prefill takes at most a tenth of a generation's time, by prompt and output length.

Whole prefill and decode steps of a batch, as experiments.throughput times them: a generation is the prefill of all its
prompts and one decode step for each token of the output, at the length that K and V have in the middle of it. Both are
timed ROUNDS times, prefill first; the share is the mean of as many, with its 95 % interval (Student's t).
"""

import argparse
from collections.abc import Iterator
from statistics import mean
from typing import Any

from experiments.claims.claim import Claim, Row, Verdict, by_case, interval_in, over_rounds, verdict_of
from experiments.claims.shapes import config_of, random_params
from experiments.result_file import rounded
from experiments.steps.batches import WholeBatch
from experiments.throughput import Bench, parse_args

LENGTHS = ((8, 256), (128, 512), (512, 128), (512, 512), (2048, 128))
BATCHES = (1, 32)
WORKLOAD = (114, 321)  # prompt and output of the QPS workload, on average
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


def judge(rows: list[Row]) -> Verdict:
    shares = {f"{row['batch']} x {row['input']} -> {row['output']}": interval_in(row, "prefill_share") for row in rows}
    under = {f"{name}: {share.shown('{:.1f}', 100, '%')}": share.within(0, STATED) for name, share in shares.items()}
    means = [share.mean for share in shares.values()]
    typical = [row for row in rows if (row["input"], row["output"]) == WORKLOAD]
    return verdict_of(
        by_case(f"prefill takes at most {STATED:.0%} of a generation", under),
        f"{min(means):.1%} to {max(means):.1%} in all",
        *(f"{row['prefill_share']:.1%} at batch {row['batch']} and the workload's mean lengths" for row in typical),
    )


def draw(figure: Any, rows: list[Row]) -> None:
    axes = figure.subplots()
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    lengths = list(dict.fromkeys((row["input"], row["output"]) for row in rows))
    for i, batch in enumerate(batches):
        of_batch = {(r["input"], r["output"]): 100 * r["prefill_share"] for r in rows if r["batch"] == batch}
        at = [j + (i - (len(batches) - 1) / 2) * 0.4 for j in range(len(lengths))]
        axes.bar(at, [of_batch.get(pair, 0.0) for pair in lengths], 0.38, label=f"batch {batch}")
    axes.axhline(100 * STATED, color="black", linestyle="--", linewidth=1, label="as stated")
    axes.set_xticks(range(len(lengths)), [f"{a} -> {b}" for a, b in lengths], fontsize=7)
    axes.set_ylabel("% of the time that is prefill")
    axes.legend()


CLAIM = Claim(
    id="C14",
    rule=(
        f"In each case prefill takes at most {STATED:.0%} of the time, with all of the 95 % interval over its rounds; "
        "where the interval has room for either it is open."
    ),
    stated="prefill <= 10 %, decode >= 90 %",
    measure=measure,
    judge=judge,
    draw=draw,
)
