"""C11: prompts head to tail, without padding, save prefill work over prompts padded to the longest of their step.

Step: the first prompts of the QPS workload, some at a time, as one step of exactly their tokens and as one of as
many rows for each as the longest has; each such group of the workload's first 512 adds to the shares of work, one of
16 prompts is timed both ways, alternated. Attention reads no padding in either, which a padded system's would. QPS: the
workload through the engine under both policies (contest.py).
"""

import statistics
from collections.abc import Callable, Iterator
from itertools import batched
from typing import Any

import jax.numpy as jnp

from experiments.claims.claim import Claim, Part, Row, Verdict, microseconds, verdict_of
from experiments.claims.contest import ROUNDS, contest, contest_of, draw_qps, gain_parts
from experiments.claims.serving import make_model, workload
from experiments.serving.workload import half_interval
from experiments.steps.timer import StepTimer, chunk_of, layout_of, pool_for
from jllm.engine.layout import pack_chunks
from jllm.pretrained import Model

BATCHES = (4, 16, 64)  # prompts in a step
GROUPED = 512  # prompts of the workload that are put into groups
STATED = 0.5
TYPICAL = 16  # prompts of the step that is timed, whose share decides
PAGE = 16


def measure(toy: bool) -> Iterator[Row]:
    yield from contest(toy, {"ragged": "usual", "padded": "padded"})
    contest_of(toy).free()  # steps have a pool of their own
    model = make_model(toy)
    lengths = [request.prompt for request in workload(toy)][:GROUPED]
    for batch in (2,) if toy else BATCHES:
        groups = [group for group in batched(lengths, batch) if len(group) == batch]
        padded = sum(batch * max(group) for group in groups)
        row: Row = {"prompts": batch, "tokens": sum(map(sum, groups)), "padded_rows": padded}
        row["work_saved"] = round(1 - row["tokens"] / padded, 4)
        if batch != TYPICAL and not toy:
            yield row
            continue
        # The group whose share is nearest to that of all.
        group = min(groups, key=lambda group: abs(1 - sum(group) / (batch * max(group)) - row["work_saved"]))
        sizes = sum(group), batch * max(group)
        steps = [step_of(model, group, rows) for rows in sizes]
        times = [[microseconds(step) for step in steps] for _ in range(ROUNDS)]
        saved = [1 - ragged / padded for ragged, padded in times]
        us = [statistics.fmean(each) for each in zip(*times)]
        row |= {"timed_tokens": sizes[0], "timed_rows": sizes[1], "rounds": ROUNDS}
        row |= {"ragged_us": round(us[0], 1), "padded_us": round(us[1], 1)}
        yield row | {
            "time_saved": round(statistics.fmean(saved), 4),
            "time_saved_ci": round(half_interval(saved) or 0.0, 4),
        }


def step_of(model: Model, lengths: tuple[int, ...], rows: int) -> Callable[[], Any]:
    """One step that prefills prompts of these lengths on as many rows, to be called."""
    timer = StepTimer(model.params, model.config, pool_for(len(lengths), max(lengths), PAGE, None))
    layout = layout_of(tokens=rows, prompts=len(lengths))
    buffer = pack_chunks(layout, [chunk_of(slot, 0, n, n) for slot, n in enumerate(lengths)])
    call = timer.repeated(timer.lower(layout).compile(), buffer, 0)
    if int(jnp.min(call())) < 0:
        raise AssertionError("a prompt made no token")
    return call


def judge(rows: list[Row]) -> Verdict:
    steps = [row for row in rows if "work_saved" in row]
    if not any("time_saved" in row for row in steps):
        return verdict_of([Part("no step was measured", False)])
    parts = [
        Part(f"{row['work_saved']:.0%} of rows at {row['prompts']} prompts a step", row["work_saved"] >= STATED)
        for row in steps
    ]
    for row in steps:
        if "time_saved" in row:
            low, high = (row["time_saved"] + side * row.get("time_saved_ci", 0.0) for side in (-1, 1))
            interval = f" [{low:.1%}, {high:.1%}]" if "time_saved_ci" in row else ", timed once"
            holds = True if low >= STATED else False if high < STATED else None
            parts.append(Part(f"{row['time_saved']:.0%} of the time at {row['prompts']}{interval}", holds))
    served, size, waits = gain_parts(rows, "ragged", "padded", stated=())
    return verdict_of(parts, *(f"on the workload of {size} {part.said}" for part in served), waits)


def draw(figure: Any, rows: list[Row]) -> None:
    left, right = figure.subplots(1, 2)
    steps = [row for row in rows if "work_saved" in row]
    for i, (key, label) in enumerate((("work_saved", "rows"), ("time_saved", "time"))):
        found = [(x + 0.4 * i - 0.2, 100 * row[key]) for x, row in enumerate(steps) if key in row]
        if found:  # of a run that was cut off there may be none
            left.bar(*zip(*found), 0.38, label=label)
    left.axhline(100 * STATED, color="black", linestyle="--", linewidth=1, label="as stated")
    left.set_xticks(range(len(steps)), [str(row["prompts"]) for row in steps])
    left.set_xlabel("prompts in a step")
    left.set_ylabel("% saved")
    left.legend()
    draw_qps(right, rows)


CLAIM = Claim(
    id="C11",
    rule=f"{STATED:.0%} or more of the rows, and of the time, with all of its interval where there is one, is saved.",
    stated=">= 50 %",
    measure=measure,
    judge=judge,
    draw=draw,
    serves=True,
    alternates=True,
)
