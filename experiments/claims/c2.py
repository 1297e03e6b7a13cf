"""Tests C2: the VM allocator and paging vs. reserving the longest length.

The QPS workload starts at once in 512 slots, with pools of 16, 32 and 64 GiB. It is simulated with the engine's own
scheduler and policies. `reserve` takes pages for the longest output at admission, or for a whole context of 2,048
tokens. `paged` takes them as tokens come. `extent` takes a run of pages: its length is a quantile (0.9) of the lengths
so far, or the true one (oracle).
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

from experiments.claims.claim import Answer, Claim, Row, in_all, in_most, percents
from experiments.claims.simulated import CONTEXT, MODELS, Todo, cell, gain, simulated
from experiments.simulate import Case
from experiments.simulation.requests import Workload, read_workload

STATED = 2.0  # growth: three times as many
HELPS = 0.05
SLOTS = 512
POOLS = (16.0, 32.0, 64.0)
KV = (None, "int8-g8")
LONGEST, WHOLE = "the longest output", f"a context of {CONTEXT:,} tokens"  # what is reserved
CANDIDATES = (("paged", None), ("extent", "quantile"), ("extent", "oracle"))


def measure(toy: bool) -> Iterator[Row]:
    workload = read_workload("ppl_samples_1024")
    if toy:
        workload = Workload(workload.name, workload.samples[:40], texts=False)
    models, formats, pools = (MODELS[:1], KV[:1], (2.0,)) if toy else (MODELS, KV, POOLS)
    slots = 16 if toy else SLOTS
    todo: list[Todo] = []
    for model, kv, gib in product(models, formats, pools):
        for more in ({"context": CONTEXT}, {}):
            todo.append((Case(model, None, kv, "reserve", None, slots, gib), workload, more))
        for policy, predictor in CANDIDATES:
            todo.append((Case(model, None, kv, policy, predictor, slots, gib), workload, {}))
    yield from simulated(todo)


def gains(rows: list[Row], pool: float | None = None, reserved: str = "") -> list[float]:
    """Returns the gain of pages on demand over reserving, by model, format, pool and reserved length. With `pool`, only
    of pools of so many GiB. With `reserved`, only over what reserves such a length."""
    cells: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if pool in (None, row["pool_gib"]):
            cells.setdefault(cell(row, "model", "kv", "pool_gib"), []).append(row)
    return [
        gain(row, base)
        for some in cells.values()
        for row, base in product(some, some)
        if row["kv_policy"] == "paged" and base["kv_policy"] == "reserve"
        if not reserved or reserved == (WHOLE if str(base["allowed"]).startswith("context") else LONGEST)
    ]


def holds(rows: list[Row]) -> Answer:
    """Decides case by case. A gain must exceed HELPS."""
    found = gains(rows)
    return in_most(gain >= HELPS for gain in found), in_all(gain >= STATED for gain in found)


def words(rows: list[Row]) -> tuple[str, str]:
    pools = sorted({row["pool_gib"] for row in rows})
    more = [
        f"Over reserving {reserved} it is "
        f"{', '.join(f'{percents(gains(rows, pool, reserved))} in {pool:g} GiB' for pool in pools)}."
        for reserved in (LONGEST, WHOLE)
    ]
    line = f"Simulated: pages on demand serve more requests a second. {' '.join(more)}"
    return f"{percents(gains(rows))} more requests a second, simulated", line


CLAIM = Claim(
    id="C2",
    stated="+200 % requests a second",
    measure=measure,
    holds=holds,
    words=words,
    computed=True,
)
