"""Tests C24: the merged step, with prompts and decodes in one step, vs. separate steps.

All else is the same: requests, engine and device. Requests join and leave at every step in both (C1 tests static
batches). A step of prompts runs as soon as there is a prompt and a free slot. Decoding sequences wait for it.

`at once`: requests of the QPS workload, all there from the start, so that slots are refilled all the time. `at a load`:
requests arrive for some seconds at a share of the merged steps' throughput. In the first third only times between
tokens count. `shapes` (simulated): prompts and outputs of half to three halves of a mean length, four times as many as
slots. Each policy counts at its best step size. A GPU measures only the median step size, and no shapes. Another
machine simulates shapes, and takes the other parts from the newest file of a GPU, or simulates them too. `two
policies`: measured rows from a result file of experiments.disaggregation, with its device and layers.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from experiments.claims.claim import (
    NOT_TESTED,
    RESULTS,
    Answer,
    Claim,
    Interval,
    Row,
    in_all,
    in_most,
    interval_of,
    percents,
)
from experiments.claims.contest import NOISE
from experiments.claims.loads import MODEL, Serve, from_settled, server, simulate, simulates
from experiments.claims.recorded import newest, source_of
from experiments.claims.simulated import GAIN
from experiments.serving.workload import Request
from experiments.simulate import Costs, make_costs

POLICIES = {"merged": "merge", "separate": "separate"}
SLOTS, MEASURED = (32, 128, 512), 128
STEPS = (128, 512, 1536)  # prompt tokens that fit a step in which every slot decodes
TOY_SIZE = 2, 6
COUNT = 512  # requests that a GPU gets at once
LOAD = 0.7
SECONDS = {"measured": 20.0, "simulated": 300.0}
SHAPES = ((48, 8), (48, 32), (48, 128), (512, 32), (512, 128), (1024, 64))  # mean prompt and output
STATED = 1.0  # +100 %


def measure(toy: bool, seconds: float | None = None) -> Iterator[Row]:
    costs = make_costs(MODEL, None, None) if simulates(toy) else None
    if costs is not None and (known := list(on_gpus(RESULTS))):
        yield from known
        yield from of_shapes(costs)
        yield from recorded(RESULTS)
        return
    serve = server(toy, costs)
    best: dict[str, Row] = {}
    for row in at_once(serve, toy, costs is not None):
        yield row
        if toy or row["slots"] == MEASURED:
            best[row["policy"]] = max(best.get(row["policy"], row), row, key=lambda row: row["qps"])
    rate = round(LOAD * best["merged"]["qps"], 2)
    for policy, row in best.items():
        slots, tokens = row["slots"], row["step_tokens"]
        settings = {"batching": POLICIES[policy], "slots": slots, "max_step_tokens": slots + tokens}
        found = from_settled(serve, toy, rate, seconds or SECONDS["simulated" if costs else "measured"], **settings)
        yield {"part": "at a load", "policy": policy, "slots": slots, "step_tokens": tokens, **found}
    if costs is not None:
        yield from of_shapes(costs)
    yield from recorded(RESULTS)


def at_once(serve: Serve, toy: bool, simulated: bool) -> Iterator[Row]:
    sizes = [TOY_SIZE] if toy else [*product(SLOTS, STEPS)] if simulated else [(MEASURED, STEPS[1])]
    for slots, tokens in sizes:
        for policy, batching in POLICIES.items():
            found = serve(
                count=None if simulated else COUNT, batching=batching, slots=slots, max_step_tokens=slots + tokens
            )
            yield {"part": "at once", "policy": policy, "slots": slots, "step_tokens": tokens} | found


def of_shapes(costs: Costs) -> Iterator[Row]:
    for slots, tokens, (prompt, output) in product(SLOTS, STEPS, SHAPES):
        requests = around(prompt, output, 4 * slots)
        about = {"slots": slots, "step_tokens": tokens, "prompt": prompt, "output": output}
        for policy, batching in POLICIES.items():
            found = simulate(costs, requests, batching=batching, slots=slots, max_step_tokens=slots + tokens)
            yield {"part": "shapes", "policy": policy, **about, **found}


def around(prompt: int, output: int, count: int) -> list[Request]:
    """Returns requests of half to three halves of two mean lengths, all at once. They are always the same."""
    rng = np.random.default_rng(0)
    prompts, outputs = (rng.integers(max(1, n // 2), n + n // 2 + 1, count).tolist() for n in (prompt, output))
    return [Request(p, o, 0.0) for p, o in zip(prompts, outputs)]


def recorded(results: Path) -> Iterator[Row]:
    """Yields the throughputs of both policies from the newest measured file of experiments.disaggregation on one
    GPU."""
    for path in sorted(results.glob(f"disaggregation-{'[0-9]' * 8}-*.json"))[-1:]:
        document = json.loads(path.read_text(encoding="utf-8"))
        for row in document["rows"]:
            if row.get("how") in POLICIES and row.get("load", 0) is None:
                kept = {name: row[name] for name in ("how", "slots", "layers", "prompt", "output", "qps")}
                about = {"part": "two policies", "policy": kept.pop("how"), "source": "measured"}
                yield about | kept | source_of(document, path.name)


def on_gpus(results: Path) -> Iterator[Row]:
    """Yields what the newest file of this claim has from a GPU."""
    files = [(document, file) for document, file in newest(results, "claims-C24") if document["device"] != "cpu"]
    for document, file in files[-1:]:
        for row in document["rows"]:
            if row["part"] in ("at once", "at a load"):
                yield row | source_of(document, file)


def gains(rows: Iterable[Row], part: str) -> dict[tuple[Any, ...], float]:
    """Returns merged over separate steps in requests per second, by slots, prompt and output. Each policy counts at its
    best step size."""
    best: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        if row["part"] == part:
            of_case = best.setdefault((row["slots"], row.get("prompt"), row.get("output")), {})
            of_case[row["policy"]] = max(row["qps"], of_case.get(row["policy"], 0.0))
    return {case: qps["merged"] / qps["separate"] - 1 for case, qps in best.items() if len(qps) == 2}


def decisive(rows: list[Row]) -> list[Interval]:
    """Returns the gains that decide: measured ones, with the noise of two runs, or else simulated ones without."""
    simulated = any(row["source"] == "simulated" for row in rows if row["part"] == "at once")
    noise = {"at once": 0.0, "shapes": 0.0} if simulated else {"at once": NOISE}
    noise["two policies"] = NOISE
    return [interval_of([gain], noise[part]) for part in noise for gain in gains(rows, part).values()]


def holds(rows: list[Row]) -> Answer:
    """Decides by each length and number of slots. Simulated cases must exceed GAIN."""
    if not gains(rows, "at once"):
        return NOT_TESTED, ""
    found = decisive(rows)
    helps = [gain.reaches(0.0) if gain.half else gain.mean > GAIN for gain in found]
    return in_most(helps), in_all(gain.reaches(STATED) for gain in found)


def words(rows: list[Row]) -> tuple[str, str]:
    more = percents(gain.mean for gain in decisive(rows))
    shapes = gains(rows, "shapes").items()
    line = f"erged steps serve {more} more requests a second than separate ones"
    if any(row["source"] == "simulated" for row in rows if row["part"] == "at once"):
        return f"{more} more requests a second, simulated", f"Simulated: m{line}."
    if not shapes:
        return f"{more} more requests a second, measured", f"M{line}, measured."
    few, many = (percents(gain for case, gain in shapes if case[0] == slots) for slots in (SLOTS[0], SLOTS[-1]))
    curve = f"Simulated, by lengths: {few} more in {SLOTS[0]} slots, {many} in {SLOTS[-1]}."
    measured = f"{more} more requests a second, measured; {percents(gain for _, gain in shapes)} simulated"
    return measured, f"M{line}, measured. {curve}"


CLAIM = Claim(
    id="C24",
    stated="+100 % requests a second",
    measure=measure,
    holds=holds,
    words=words,
    serves=True,
    computed=True,
    lasts=True,
)
