"""Tests C25: FP8 weights and activations serve about as fast as INT8, and both serve faster than INT4 weights.

Steps of LLaMA-2-7B come from the newest file of experiments.quant_steps, with all schemes in one run. Requests per
second are of the QPS workload, all at once. A Hopper GPU measures them. Elsewhere they are simulated, with a cost model
per scheme. It is fitted to the same steps, which are of the device in `steps_of`; `fit_error` is its largest error. The
pool is that of an H200. Serving means larger steps, from SERVING rows on. Below that INT4 reads the fewest bytes, which
C8 tests.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    spread,
)
from experiments.claims.contest import NOISE
from experiments.claims.loads import MODEL, server, simulates
from experiments.claims.recorded import STEPS, newest, source_of
from experiments.quant_steps import Case, parse_args
from experiments.simulate import Costs
from experiments.steps.cost_model import Shares, fit, make_cost_model, model_shapes

SCHEMES = {"fp8": "fp8", "int8": "w8a8-all", "int4": "w4a16-g128"}  # all linear layers quantized
TOY_INT4 = "w4a16-g32"  # a toy's rows are shorter than a group of 128
SERVING = 64
TOY_SLOTS = 2
SLOTS, COUNT = 128, 512  # served at once on a GPU, and simulated; the simulation also has all in 512 slots
ABOUT = 0.05  # distance of two that are about equal


def measure(toy: bool) -> Iterator[Row]:
    source, found = recorded(RESULTS)
    for name, scheme in SCHEMES.items():
        for row in found:
            if row["scheme"] == scheme:
                kept = {key: row[key] for key in ("kind", "batch", "ms")}
                yield {"part": "step", "format": name, "source": "measured", **kept, **source}
    sizes = [(TOY_SLOTS, None)] if toy else [(SLOTS, COUNT), (512, None)][: 1 + simulates(toy)]
    for slots, count in sizes:
        for name, scheme in SCHEMES.items():
            costs = fitted(scheme, found, source.get("file", "")) if simulates(toy) else None
            row = server(toy, costs)(count=count, slots=slots, quantize=TOY_INT4 if toy and name == "int4" else scheme)
            if costs is not None:
                row |= {"fit_error": round(costs.cost.shares.error or 0.0, 3), "steps_of": source["measured_on"]}
            yield {"part": "requests", "format": name, "slots": slots, **row}


def recorded(results: Path) -> tuple[Row, list[Row]]:
    """Returns the identity of the newest quant_steps file, and its steps over 16-bit pages. A step has scheme, kind,
    batch, context and ms."""
    for document, file in newest(results, STEPS)[-1:]:
        rows = [row for row in document["rows"] if row.get("kv") == "bf16"]
        found = [(row, kind) for row in rows for kind in ("decode", "prefill") if f"{kind}_ms" in row]
        names = ("scheme", "batch", "kv")
        return source_of(document, file), [
            {name: row[name] for name in names}
            | {"kind": kind, "context": row.get("context", 0), "ms": row[f"{kind}_ms"]}
            for row, kind in found
        ]
    return {}, []


def fitted(scheme: str, rows: list[Row], file: str) -> Costs:
    """Returns the costs of steps with a scheme's weights, fitted to the measured ones."""
    model, options = model_shapes(MODEL, scheme), parse_args([])
    plain = make_cost_model(model, None, Shares())
    steps = []
    for row in rows:
        if row["scheme"] == scheme:
            case = Case(scheme, row["kind"], row["batch"], row["kv"])
            steps.append((case.work(row["context"], options.input), row["ms"] / 1e3))
    return Costs(model, make_cost_model(model, None, fit(steps, plain.floor, plain.token_bytes, file)))


def ratios(rows: list[Row], name: str, over: str) -> dict[tuple[Any, ...], float]:
    """Returns a format's speed over another's: of steps by kind and batch, of requests by slots."""
    speed = {}
    for row in rows:
        case = (row["kind"], row["batch"]) if row["part"] == "step" else ("requests", row["slots"])
        speed[row["format"], case] = 1 / row["ms"] if row["part"] == "step" else row["qps"]
    both = [case for of, case in speed if of == name and (over, case) in speed]
    return {case: speed[name, case] / speed[over, case] for case in both}


def cases(rows: list[Row], name: str, over: str) -> list[Interval]:
    """Returns a format's speed over another's in serving: of steps from SERVING rows on, and of requests per second.
    Requests have the noise of two runs, or the cost model's largest error if they are simulated."""
    margin = max((row["fit_error"] for row in rows if "fit_error" in row), default=NOISE)
    found = [case for case in ratios(rows, name, over).items() if case[0][0] == "requests" or case[0][1] >= SERVING]
    return [interval_of([times], margin if kind == "requests" else 0.0) for (kind, _), times in found]


def above(rows: list[Row]) -> list[Interval]:
    return cases(rows, "fp8", "int4") + cases(rows, "int8", "int4")


def holds(rows: list[Row]) -> Answer:
    """Decides by whether both are faster than INT4. The size needs FP8 about as fast as INT8."""
    if not all(cases(rows, *pair) for pair in (("fp8", "int8"), ("fp8", "int4"))):
        return NOT_TESTED, ""
    about = in_all(times.within(1 - ABOUT, 1 + ABOUT) for times in cases(rows, "fp8", "int8"))
    return in_most(times.reaches(1.0) for times in above(rows)), about


def words(rows: list[Row]) -> tuple[str, str]:
    level, over = (spread(times.mean for times in some) for some in (cases(rows, "fp8", "int8"), above(rows)))
    line = f"FP8 is {level} times as fast as INT8, and both are {over} times INT4."
    return f"FP8 {level} times INT8, both {over} times INT4", line


CLAIM = Claim(
    id="C25",
    stated="FP8 about INT8, both above INT4",
    measure=measure,
    holds=holds,
    words=words,
    serves=True,
    computed=True,
)
