"""Tests C8: INT4 weights with 16-bit inputs vs. 16-bit weights, by batch, in whole decode steps of LLaMA-2-7B.

The steps are those of experiments.quant_steps. Every slot has 136 tokens of KV in bfloat16. INT4 has groups of 128. One
run times both formats. A GPU times them with named kernels (mosaic), so that no matmul falls back to XLA's. Elsewhere
rows come from quant_steps' newest complete file of each device, and name it. INT4 codes take a quarter of the bytes,
but are multiplied in 16 bits. So the gain shrinks as K, V and operations grow with the batch.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments import quant_steps
from experiments.claims.claim import RESULTS, Answer, Claim, Interval, Row, in_all, in_most, interval_of, spread
from experiments.claims.recorded import STEPS, newest, source_of
from jllm.files.hf_config import load_config
from pallas_kernels.backends import on_hopper

CONFIG = Path(__file__).parents[2] / "configs" / "llama-2-7b.json"
INT4 = "w4a16-g128"
BATCHES, TOY_BATCHES = (1, 16, 64, 128, 256, 512), (1, 4)
MOST_AT = 128
STATED = {64: 1.3, MOST_AT: 1.2}  # speed-up: at least at 64, at most at 128
LARGE = 1.5  # least at batch 1, where the claim has no figure


def measure(toy: bool) -> Iterator[Row]:
    yield from timed(toy) if toy or on_hopper() else recorded(RESULTS)


def recorded(results: Path) -> Iterator[Row]:
    """Yields decode steps of both formats from the newest complete file of each GPU."""
    for document, file in newest(results, STEPS):
        steps = [row for row in document["rows"] if "decode_ms" in row and row["kv"] == "bf16"]
        found = [row for scheme in ("bf16", INT4) for row in steps if row["scheme"] == scheme]
        yield from (row | source_of(document, file) for row in found)


def timed(toy: bool) -> Iterator[Row]:
    config = load_config(CONFIG)
    if toy:
        sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "num_kv_heads": 2}
        config = replace(config, **sizes, head_dim=32, vocab_size=256, num_layers=1, windows=config.windows[:1])
    batches = ",".join(map(str, TOY_BATCHES if toy else BATCHES))
    flags = ["--schemes", "bf16", INT4, "--stages", f"decode:bf16:{batches}"]
    flags += [] if toy else ["--backend", "mosaic"]
    yield from quant_steps.rows(config, quant_steps.parse_args(flags))


def times_of(rows: list[Row]) -> dict[int, Interval]:
    """Returns the speed over bf16 by batch. It is the mean over the rounds, or in older files that of the best time."""
    runs = {(row["scheme"], row["batch"]): row["decode_ms_runs"] for row in rows if "decode_ms_runs" in row}
    found = {}
    for row in rows:
        if row["scheme"] == INT4 and "over_bf16" in row:
            ours, wide = (runs.get((scheme, row["batch"]), []) for scheme in (INT4, "bf16"))
            times = [a / b for a, b in zip(wide, ours)]
            found[row["batch"]] = interval_of(times or [row["over_bf16"]])
    return found


def holds(rows: list[Row]) -> Answer:
    """Decides by each device's batches. INT4 must reach a least speed-up at some, and not exceed one at another."""
    found = [times_of(some) for some in by_device(rows).values()]
    limits = {1: LARGE, **STATED}
    helps = [times[batch].reaches(1.0) for times in found for batch in limits if batch != MOST_AT and batch in times]
    sides = [
        (batch, times[batch].reaches(least)) for times in found for batch, least in limits.items() if batch in times
    ]
    stated = [not side if batch == MOST_AT and side is not None else side for batch, side in sides]
    return in_most(helps), in_all(stated)


def words(rows: list[Row]) -> tuple[str, str]:
    found = [times_of(some) for some in by_device(rows).values()]
    said = {batch: spread(times[batch].mean for times in found if batch in times) for batch in (1, 64)}
    line = f"INT4 steps are {said[1]} times as fast at batch 1, and {said[64]} times at batch 64."
    return f"{said[1]} times at batch 1, {said[64]} at 64", line


def by_device(rows: list[Row]) -> dict[str, list[Row]]:
    devices = dict.fromkeys(row.get("measured_on", "") for row in rows)
    return {device: [row for row in rows if row.get("measured_on", "") == device] for device in devices}


CLAIM = Claim(
    id="C8",
    stated="large at batch 1, +30% at 64, at most +20% at 128",
    measure=measure,
    holds=holds,
    words=words,
    computed=True,
)
