"""Compares a recorded schedule with a cost model: the time of each step, and the model's."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from experiments.simulation.trace import Trace, TracedStep
from experiments.steps.cost_model import CostModel, Shares, fit
from experiments.steps.floors import Work, step_work
from jllm.errors import InputFileError

Row = dict[str, Any]
LEAST = 3  # steps of each half


@dataclass(frozen=True)
class Recorded:
    """One step of a trace: its work, the rows that it computed, and its seconds."""

    work: Work
    rows: int
    seconds: float


def traced_work(step: TracedStep) -> Work:
    """Returns a step's work, as floors.work_of does for a plan."""
    return step_work(step.decodes, step.keys, (chunk[2:] for chunk in step.chunks))


def recorded(trace: Trace) -> list[Recorded]:
    """Returns the steps that were read. A step begins at its dispatch, or when the previous one was read if that is
    later. It ends when it was read. The first step of each bucket is left out, as it may have compiled. Raises
    InputFileError for a trace with too few steps."""
    found, seen, free = [], set(), 0.0
    for step in trace.steps:
        if step.read is None:
            continue
        begin, free = max(free, step.dispatched), step.read
        if step.bucket in seen:
            found.append(Recorded(traced_work(step), step.bucket.size, step.read - begin))
        seen.add(step.bucket)
    if len(found) < 2 * LEAST:
        raise InputFileError(f"a trace of {len(found)} steps after the first of each size is too short to replay")
    return found


def replay(trace: Trace, cost: CostModel) -> Iterator[Row]:
    """Yields a row of the model as it is. Then yields a row of the same model fitted to the first half of the steps.
    The second half judges both. Errors are the mean of |simulated / recorded - 1| over steps, and that of the sum."""
    steps = recorded(trace)
    half = len(steps) // 2
    computed = [(replace(s.work, tokens=s.rows - s.work.decodes), s.seconds) for s in steps[:half]]
    fitted = fit(computed, cost.floor, cost.token_bytes, "the trace's first half", relative=False)
    for name, shares, some in (("as calibrated", cost.shares, steps), ("fitted", fitted, steps[half:])):
        yield {"part": "replay", "model": name, **compare(some, CostModel(cost.floor, cost.token_bytes, shares))}


def compare(steps: list[Recorded], cost: CostModel) -> Row:
    simulated = [cost.seconds(s.work, s.rows) for s in steps]
    measured = [s.seconds for s in steps]
    each = [abs(a / max(b, 1e-9) - 1) for a, b in zip(simulated, measured)]
    s: Shares = cost.shares
    found = {
        "steps": len(steps), "recorded_s": sum(measured), "simulated_s": sum(simulated),
        "error_mean": sum(each) / len(each), "error_sum": sum(simulated) / max(sum(measured), 1e-9) - 1,
        "fixed_ms": 1e3 * s.fixed * cost.floor.layers, "products": s.products, "attention": s.attention,
    }  # fmt: skip
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in found.items()}
