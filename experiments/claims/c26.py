"""Tests C26: at full memory, the larger batch of an int8 KV cache gives about 50 % more tokens per second than bf16's.

LLaMA-2-7B has bf16 weights. K and V are in bf16, or in int8 with a scale for every 8 values (62.5 % of the bytes).

`full`: whole batches of one prompt and output length fill an H200's memory in each format (experiments.throughput). A
Hopper GPU measures prefill and decode; elsewhere a cost model for each format computes them. `recorded`: measured whole
batches of experiments.throughput, to which the cost models are fitted, with the models' results. `requests`
(simulated): the QPS workload at once, each format with its best number of slots.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments import throughput
from experiments.claims.claim import RESULTS, Answer, Claim, Row, in_all, in_most, percents
from experiments.claims.loads import MODEL, simulate, simulates
from experiments.claims.recorded import source_of
from experiments.claims.serving import workload
from experiments.result_file import rounded
from experiments.serving.engines import pages_of_h200
from experiments.simulate import Costs
from experiments.steps.batches import WholeBatch
from experiments.steps.cost_model import Shares, fit, make_cost_model, model_shapes
from jllm.parallel.memory import free_memory

CONFIG = Path(__file__).parents[2] / "configs" / f"{MODEL}.json"
WIDE, SMALL = "bf16", "int8-g8"
PAGE, STEP_TOKENS = 16, 4096
SHAPES = ((128, 256), (1024, 1024), (2048, 2048))  # tokens of each prompt and output
COUNT, SLOTS = 4096, (512, 1024, 1536)
STATED, LEAST = 0.5, 0.4  # +50 %, and what is about that


def measure(toy: bool) -> Iterator[Row]:
    found = recorded(RESULTS)
    formats = {kv: fitted(kv, found) for kv in (WIDE, SMALL)}
    memory = {} if toy or simulates(toy) else {"memory": free_memory() or 0}
    for kv, costs in formats.items():
        cases = full_batches(costs, kv, SHAPES[:1] if toy else SHAPES, **memory)
        full = (costed(case, costs) for case in cases) if toy or simulates(toy) else timed(CONFIG, kv, cases)
        yield from ({"part": "full", "kv": kv, **row} for row in full)
    for row in found:
        yield {**row, "simulated_tokens_s": costed(whole(row), formats[row["kv"]])["tokens_s"]}
    for kv, costs in formats.items() if simulates(toy) else ():
        yield max((requests(costs, kv, slots) for slots in SLOTS), key=lambda row: row["qps"])


def fitted(kv: str, rows: list[Row]) -> Costs:
    """Returns the costs of steps with K and V in a format, fitted to recorded decode steps and prefills."""
    model, kv_cache = model_shapes(MODEL), None if kv == WIDE else kv
    plain = make_cost_model(model, kv_cache, Shares())
    of_kv = [row for row in rows if row["kv"] == kv]
    steps = [(whole(row).decode_work, row["decode_ms"] / 1e3) for row in of_kv]
    for row in of_kv:
        work = whole(row).prefill(STEP_TOKENS).work(whole(row))
        steps.append((work[0], row["prefill_ms"] / 1e3 / len(work)))
    file = of_kv[0]["file"] if of_kv else "no file"
    return Costs(model, make_cost_model(model, kv_cache, fit(steps, plain.floor, plain.token_bytes, file)))


def whole(row: Row) -> WholeBatch:
    return WholeBatch(row["batch"], row["input"], row["output"])


def full_batches(costs: Costs, kv: str, shapes: Sequence[tuple[int, int]], **memory: float) -> list[WholeBatch]:
    """Returns whole batches of each shape, as many sequences as an H200 or other `memory` (bytes) holds."""
    pages = pages_of_h200(costs.model, PAGE, None if kv == WIDE else kv, 1, **memory)
    return [WholeBatch(pages // -(-(prompt + output) // PAGE), prompt, output) for prompt, output in shapes]


def costed(case: WholeBatch, costs: Costs) -> Row:
    """Returns the row of a whole batch by the cost model."""
    prefill = sum(costs.cost.seconds(work) for work in case.prefill(STEP_TOKENS).work(case))
    decode = costs.cost.seconds(case.decode_work)
    row = {"prefill_ms": 1e3 * prefill, "decode_ms": 1e3 * decode}
    row["tokens_s"] = case.batch * case.output / (prefill + case.output * decode)
    return {"source": "simulated", **vars(case), **rounded(row)}


def timed(config: Path, kv: str, cases: Sequence[WholeBatch], *more: str) -> Iterator[Row]:
    """Yields the rows of whole batches on this device. A row has "error" if the batch did not fit."""
    shapes = [f"{case.batch}x{case.input}x{case.output}" for case in cases]
    flags = ["--config", str(config), "--scheme", "bf16", "--step-tokens", str(STEP_TOKENS), *more]
    args = throughput.parse_args([*flags, "--kv-cache", kv, "--rows", *shapes])
    kept = ("batch", "input", "output", "prefill_ms", "decode_ms", "tokens_s", "memory_gib", "error")
    for row in throughput.rows(args):
        yield {"source": "measured"} | {name: row[name] for name in kept if name in row}


def recorded(results: Path) -> list[Row]:
    """Returns whole batches of both formats, from the files of the day of bf16's newest. Labelled files add what others
    lack."""
    names = [f"throughput_{MODEL}_bf16_kv-{kv}" for kv in (WIDE, SMALL)]
    day = max((path.name.split("-")[-2] for path in results.glob(f"{names[0]}-{'[0-9]' * 8}-h200.json")), default="")
    found: dict[tuple[Any, ...], Row] = {}
    for kv, name in zip((WIDE, SMALL), names):
        for path in sorted(results.glob(f"{name}-*{day}-h200.json")):
            document = json.loads(path.read_text(encoding="utf-8"))
            for row in document["rows"]:
                if "tokens_s" not in row or "peer" in row:
                    continue
                kept = ("batch", "input", "output", "prefill_ms", "decode_ms", "tokens_s", "memory_gib")
                about = {"part": "recorded", "kv": kv, "source": "measured"} | {key: row[key] for key in kept}
                found.setdefault((kv, *(row[key] for key in kept[:3])), about | source_of(document, path.name))
    return list(found.values())


def requests(costs: Costs, kv: str, slots: int) -> Row:
    known = workload(False)
    settings = {"slots": slots, "max_step_tokens": slots + 1536, "kv_cache": None if kv == WIDE else kv}
    row = simulate(costs, [known[i % len(known)] for i in range(COUNT)], **settings)
    return {"part": "requests", "kv": kv, "slots": slots, **row}


def gains(rows: list[Row], part: str) -> dict[tuple[Any, ...], float]:
    """Returns the gain of int8 over bf16 in tokens per second at full memory, by prompt and output. None, None stands
    for the workload."""
    found: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        if row["part"] == part:
            speed = row["output_tokens_s"] if part == "requests" else row["tokens_s"]
            found.setdefault((row.get("input"), row.get("output")), {})[row["kv"]] = speed
    return {case: both[SMALL] / both[WIDE] - 1 for case, both in found.items() if len(both) == 2}


def holds(rows: list[Row]) -> Answer:
    """Decides by each length at full memory. LEAST counts as about the stated gain."""
    found = every_gain(rows)
    return in_most(gain > 0 for gain in found), in_all(gain >= LEAST for gain in found)


def words(rows: list[Row]) -> tuple[str, str]:
    more, source = percents(every_gain(rows)), next(row["source"] for row in rows if row["part"] == "full")
    line = f"At full memory an int8 KV cache makes {more} more tokens a second, {source}."
    return f"{more} more tokens a second, {source}", line


def every_gain(rows: list[Row]) -> list[float]:
    full = gains(rows, "full")
    return [*full.values(), *gains(rows, "requests").values()] if full else []


CLAIM = Claim(
    id="C26",
    stated="about +50 % tokens a second",
    measure=measure,
    holds=holds,
    words=words,
    serves=True,
    computed=True,
)
