"""Tests C11: prompts without padding save prefill work over prompts padded to the longest of their step.

Step: the first prompts of the QPS workload form a step of exactly their tokens, or of as many rows per prompt as the
longest has. Groups of the first 512 prompts give the shares of work. One group of 16 prompts is timed both ways, in
turn. Attention reads no padding in either, although a padded system's would. QPS: the workload runs through the engine
under both policies (contest.py).
"""

import statistics
from collections.abc import Callable, Iterator
from itertools import batched
from typing import Any

import jax.numpy as jnp

from experiments.claims.claim import (
    NOT_TESTED,
    Answer,
    Claim,
    Interval,
    Row,
    in_all,
    in_most,
    interval_in,
    microseconds,
    percents,
)
from experiments.claims.contest import ROUNDS, contest, contest_of
from experiments.claims.serving import make_model, workload
from experiments.serving.workload import half_interval
from experiments.steps.timer import StepTimer, chunk_of, layout_of, pool_for
from jllm.model.model import Model
from jllm.programs.packed_step import pack_chunks

BATCHES = (4, 16, 64)  # prompts in a step
GROUPED = 512  # prompts of the workload that form groups
LEAST, STATED = 0.05, 0.5  # least share that counts as saved, and the stated one
TYPICAL = 16  # prompts of the timed step, whose share decides
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
    """Returns a function that prefills prompts of these lengths in one step of as many rows."""
    timer = StepTimer(model.params, model.config, pool_for(len(lengths), max(lengths), PAGE, None))
    layout = layout_of(tokens=rows, prompts=len(lengths))
    buffer = pack_chunks(layout, [chunk_of(slot, 0, n, n) for slot, n in enumerate(lengths)])
    call = timer.repeated(timer.lower(layout).compile(), buffer, 0)
    if int(jnp.min(call())) < 0:
        raise AssertionError("a prompt made no token")
    return call


def holds(rows: list[Row]) -> Answer:
    """Decides by the rows of each step, and by the time of the timed one."""
    if not any("time_saved" in row for row in rows):
        return NOT_TESTED, ""
    saved = [Interval(row["work_saved"], 0.0, 1) for row in rows if "work_saved" in row]
    saved += [interval_in(row, "time_saved") for row in rows if "time_saved" in row]
    return in_most(each.reaches(LEAST) for each in saved), in_all(each.reaches(STATED) for each in saved)


def words(rows: list[Row]) -> tuple[str, str]:
    work, took = (percents(row[key] for row in rows if key in row) for key in ("work_saved", "time_saved"))
    line = f"Prompts head to tail save {work} of a step's rows, and {took} of its time."
    return f"{work} of rows, {took} of the time", line


CLAIM = Claim(
    id="C11",
    stated="50 % or more of prefill's work",
    measure=measure,
    holds=holds,
    words=words,
    serves=True,
    alternates=True,
)
