"""C24: the Merge Step itself, prompts and decodes in one step, over prompts and decodes in steps of their own.

Everything else is the same: requests, engine and device; requests join and leave at every step in both (what static
batches cost is C1). A step of prompts comes as soon as there is a prompt and a free slot, and who decodes sits it out.

`at once`: requests of the QPS workload, all there from the start, so that slots are refilled all the time. `at a load`:
those that arrive in some seconds at LOAD of what merged steps served at once; of the first third times
between tokens count alone. `shapes`,
simulated alone: prompts and outputs of half to three halves of a mean length, four times as many as slots. Each policy
counts with the step size that is its best; a GPU measures STEPS' middle one at MEASURED slots, and no shapes. `two
policies`: what a result file of experiments.disaggregation measured of the same two, of which device and layers it
says.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from experiments.accuracy.measured_speed import source_of
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
from experiments.claims.simulated import GAIN
from experiments.serving.workload import Request
from experiments.simulate import Costs, make_costs

POLICIES = {"merged": "merge", "separate": "separate"}
SLOTS, MEASURED = (32, 128, 512), 128
STEPS = (128, 512, 1536)  # prompt tokens that fit a step in which every slot decodes
TOY_SIZE = 2, 6
COUNT = 512  # requests that a GPU is sent at once
LOAD = 0.7
SECONDS = {"measured": 20.0, "simulated": 300.0}
SHAPES = ((48, 8), (48, 32), (48, 128), (512, 32), (512, 128), (1024, 64))  # mean prompt and output
STATED = 1.0  # +100 %


def measure(toy: bool, seconds: float | None = None) -> Iterator[Row]:
    costs = make_costs(MODEL, None, None) if simulates(toy) else None
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
    """Returns requests of half to three halves of two mean lengths, all at once; the same ones each time."""
    rng = np.random.default_rng(0)
    prompts, outputs = (rng.integers(max(1, n // 2), n + n // 2 + 1, count).tolist() for n in (prompt, output))
    return [Request(p, o, 0.0) for p, o in zip(prompts, outputs)]


def recorded(results: Path) -> Iterator[Row]:
    """Throughputs of the two policies on one GPU in the newest measured file of experiments.disaggregation."""
    for path in sorted(results.glob(f"disaggregation-{'[0-9]' * 8}-*.json"))[-1:]:
        document = json.loads(path.read_text(encoding="utf-8"))
        for row in document["rows"]:
            if row.get("how") in POLICIES and row.get("load", 0) is None:
                kept = {name: row[name] for name in ("how", "slots", "layers", "prompt", "output", "qps")}
                about = {"part": "two policies", "policy": kept.pop("how"), "source": "measured"}
                yield about | kept | source_of(document, path.name)


def gains(rows: Iterable[Row], part: str) -> dict[tuple[Any, ...], float]:
    """Merged over separate steps in requests a second, each policy at its best step size: by slots, prompt, output."""
    best: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        if row["part"] == part:
            of_case = best.setdefault((row["slots"], row.get("prompt"), row.get("output")), {})
            of_case[row["policy"]] = max(row["qps"], of_case.get(row["policy"], 0.0))
    return {case: qps["merged"] / qps["separate"] - 1 for case, qps in best.items() if len(qps) == 2}


def every_gain(rows: list[Row]) -> list[Interval]:
    """Returns gains at all lengths: simulated ones without noise, those of single runs with that of two runs."""
    simulated = any(row["source"] == "simulated" for row in rows if row["part"] == "at once")
    noise = {"at once": 0.0 if simulated else NOISE, "shapes": 0.0, "two policies": NOISE}
    return [interval_of([gain], noise[part]) for part in noise for gain in gains(rows, part).values()]


def holds(rows: list[Row]) -> Answer:
    """Decides by each length and number of slots; what is simulated is to gain more than GAIN."""
    if not gains(rows, "at once"):
        return NOT_TESTED, ""
    found = every_gain(rows)
    helps = [gain.reaches(0.0) if gain.half else gain.mean > GAIN for gain in found]
    return in_most(helps), in_all(gain.reaches(STATED) for gain in found)


def words(rows: list[Row]) -> tuple[str, str]:
    more = percents(gain.mean for gain in every_gain(rows))
    source = next(row["source"] for row in rows if row["part"] == "at once")
    line = f"Merged steps serve {more} more requests a second than separate ones, {source}."
    return f"{more} more requests a second, {source}", line


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
