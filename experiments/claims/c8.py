"""C8: INT4 weights with 16-bit inputs against 16-bit weights, by batch: whole decode steps of LLaMA-2-7B.

The steps are those of experiments.quant_steps: every slot at 136 tokens of KV in bfloat16, INT4 in groups of 128, both
formats in one run. A GPU times them, with the kernels named (mosaic), so that no product falls back to XLA's; elsewhere
the rows are those of quant_steps' newest complete file of each device, which each names, and each device has an answer.
Beside what was measured stands what bytes and peaks alone would allow, the ratio of the two floors: INT4 codes are read
in a quarter of the time, but multiplied in 16 bits like the others, so the gain shrinks as K, V and operations grow
with the batch.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments import quant_steps
from experiments.accuracy.measured_speed import STEPS, newest, source_of
from experiments.claims.claim import Claim, Interval, Part, Row, Verdict, interval_of, verdict_of
from experiments.report import floors_today
from experiments.steps.speedups import speedups, speedups_in_turn
from jllm.config import load_config
from pallas_kernels.backends import on_hopper
from pallas_kernels.bench.bars import bar

RESULTS = Path(__file__).parents[1] / "results"
CONFIG = Path(__file__).parents[2] / "configs" / "llama-2-7b.json"
INT4 = "w4a16-g128"
BATCHES, TOY_BATCHES = (1, 16, 64, 128, 256, 512), (1, 4)
STATED = {64: 1.3, 128: 1.2}  # times as fast: at least at 64, at most at 128
LARGE = 1.5  # at least at batch 1, where the claim names no figure


def measure(toy: bool) -> Iterator[Row]:
    yield from timed(toy) if toy or on_hopper() else recorded(RESULTS)


def recorded(results: Path) -> Iterator[Row]:
    """Yields decode steps of both formats from the newest complete file of each GPU."""
    for document, file in newest(results, STEPS):
        steps = [row for row in floors_today.with_floors(document) if "decode_ms" in row and row["kv"] == "bf16"]
        found = [row for scheme in ("bf16", INT4) for row in steps if row["scheme"] == scheme]
        yield from beside_floors(row | source_of(document, file) for row in found)


def timed(toy: bool) -> Iterator[Row]:
    config = load_config(CONFIG)
    if toy:
        sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "num_kv_heads": 2}
        config = replace(config, **sizes, head_dim=32, vocab_size=256, num_layers=1, windows=config.windows[:1])
    batches = ",".join(map(str, TOY_BATCHES if toy else BATCHES))
    flags = ["--schemes", "bf16", INT4, "--stages", f"decode:bf16:{batches}"]
    flags += [] if toy else ["--backend", "mosaic"]
    yield from beside_floors(quant_steps.rows(config, quant_steps.parse_args(flags)))


def beside_floors(rows: Iterable[Row]) -> Iterator[Row]:
    """Adds what bytes and peaks alone would allow: bf16 comes first."""
    floors: dict[int, float] = {}
    for row in rows:
        if row.get("scheme") == "bf16" and "floor_ms" in row:
            floors[row["batch"]] = row["floor_ms"]
        allowed = floors.get(row.get("batch", 0))
        if row.get("floor_ms") and allowed:
            row["floor_over_bf16"] = round(allowed / row["floor_ms"], 3)
        yield row


def times_of(rows: list[Row]) -> dict[int, Interval]:
    """Batch -> how many times as fast as bf16: the mean over the rounds, of older files the best time's."""
    rounds = speedups_in_turn(rows, INT4, "decode")
    best = speedups(rows, INT4, "decode")
    return {batch: interval_of(rounds.get(batch, [times])) for batch, times in best.items()}


def judge(rows: list[Row]) -> Verdict:
    times = times_of(rows)
    limits = {1: LARGE, **STATED}
    parts, bars = [], []
    for batch, limit in limits.items():
        if batch not in times:
            parts.append(Part(f"batch {batch}: not measured", False))
            continue
        found, most = times[batch], batch == 128
        reached = found.reaches(limit)
        holds = not reached if most and reached is not None else reached
        side = f"at {'most' if most else 'least'}"
        parts.append(Part(f"{side} {limit:g} times as fast at batch {batch}: {found.shown('{:.2f}')}", holds))
        name = f"INT4 over bf16, decode step, batch {batch}: {side}"
        made = bar(name, round(found.mean, 3), "1", limit, most=most) | {"met": holds is True}
        bars.append(made | ({"open": True} if holds is None else {}))
    lost = next((batch for batch, each in times.items() if each.mean < 1), None)
    rest = [f"{each.mean:.2f} times at batch {batch}" for batch, each in times.items() if batch not in limits]
    slower = f"slower than bf16 from batch {lost} on" if lost else "never slower than bf16"
    contexts = sorted({row["context"] for row in rows if "context" in row})
    how = f"Decode steps at context {', '.join(map(str, contexts))}" if contexts else ""
    return verdict_of(parts, ", ".join(rest), slower, how=how, bars=bars)


def draw(figure: Any, rows: list[Row]) -> None:
    left, right = figure.subplots(1, 2)
    for device, some in (CLAIM.of_devices(rows) or {"": rows}).items():
        where = device.replace("NVIDIA", ",")
        for scheme in ("bf16", INT4):
            found = [row for row in some if row["scheme"] == scheme]
            batches, ms = [row["batch"] for row in found], [row["decode_ms"] for row in found]
            left.loglog(batches, ms, "o-", base=2, label=f"{scheme}{where}")
        times = {batch: each.mean for batch, each in times_of(some).items()}
        right.semilogx(list(times), list(times.values()), "o-", base=2, label=f"measured{where}")
        right.semilogx(batches, [row.get("floor_over_bf16") for row in found], ":", base=2, label=f"floors{where}")
    left.set_ylabel("ms a decode step")
    left.legend(fontsize=7)
    right.semilogx(list(STATED), list(STATED.values()), "x", base=2, label="stated")
    right.axhline(1, linewidth=0.8, color="black")
    right.set_ylabel("INT4, times as fast as bf16")
    right.legend(fontsize=7)
    for axes in (left, right):
        axes.set_xlabel("batch")
        axes.set_xticks(batches, [str(batch) for batch in batches])


CLAIM = Claim(
    id="C8",
    rule=(
        "Batch by batch, parts and bars alike, by all of the 95 % interval over the rounds, of older files without "
        f"rounds by the best time; where the claim names no figure, at batch 1, large is {LARGE:g} times as fast or "
        "more."
    ),
    stated="large at batch 1, +30 % at 64, at most 20 % at 128",
    measure=measure,
    judge=judge,
    draw=draw,
    computed=True,
    by_device=True,
)
