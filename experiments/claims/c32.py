"""Tests C32: below about 100 billion parameters a decode step stays under 50 ms.

Rows are measured steps from experiments.decode_step's files, with 16-bit weights, K and V. They are of whole models by
our own kernels, each case from the newest file that has it. Cases without a file are not tested, such as larger models
and full memories.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from experiments.claims.c5 import NOISE
from experiments.claims.claim import RESULTS, Answer, Claim, Row, in_all, in_most, interval_of, spread
from experiments.claims.recorded import source_of
from experiments.steps.cost_model import model_shapes
from jllm.model.params import tree_bytes

OURS = ("default", "mosaic")  # backends; on a Hopper GPU the default is mosaic
WIDE = "bfloat16"
STATED_MS, STATED_BILLIONS = 50.0, 100.0
NEARLY = 0.9  # share of the stated parameters that decides about the largest


def measure(toy: bool) -> Iterator[Row]:
    yield from recorded(RESULTS)


def recorded(results: Path) -> Iterator[Row]:
    """Yields the measured steps of each model, device, number of devices, batch and context."""
    files = [(json.loads(path.read_text(encoding="utf-8")), path.name) for path in results.glob("decode_step-*.json")]
    found: dict[tuple[object, ...], Row] = {}
    for document, name in sorted(files, key=lambda found: (found[0]["date"], found[1])):
        for row in document["rows"] if "--layers" not in document["command"].split() else ():
            if row.get("scheme", "bf16") != "bf16" or row["kv"] != WIDE or row["backend"] not in OURS:
                continue
            case = {"model": row["model"], "billions": billions(row["model"]), "ranks": row.get("devices", 1)}
            case |= {"batch": row["batch"], "context": row["context"]}
            found[document["device"], *case.values()] = case | {"ms": row["decode_ms"]} | source_of(document, name)
    yield from found.values()


@cache
def billions(model: str) -> float:
    """Returns a model's parameters in billions, at two bytes each."""
    return round(tree_bytes(model_shapes(model).params) / 2e9, 1)


def below(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["billions"] < STATED_BILLIONS]


def holds(rows: list[Row]) -> Answer:
    """Decides by each measured step of a model below the stated size. The size stays open until a model of nearly that
    size was measured."""
    over = [interval_of([row["ms"]], NOISE * STATED_MS).reaches(STATED_MS) for row in below(rows)]
    sides = [None if side is None else not side for side in over]
    large = any(row["billions"] >= NEARLY * STATED_BILLIONS for row in below(rows))
    return in_most(sides), "open" if in_all(sides) == "yes" and not large else in_all(sides)


def words(rows: list[Row]) -> tuple[str, str]:
    ms, sizes, keys = (spread((row[key] for row in below(rows)), "{:.3g}") for key in ("ms", "billions", "context"))
    line = f"Measured decode steps of {sizes} billion parameters take {ms} ms at {keys} keys."
    return f"{ms} ms, of {sizes} billion parameters", line


CLAIM = Claim(
    id="C32",
    stated="under 50 ms below 100 billion parameters",
    measure=measure,
    holds=holds,
    words=words,
    computed=True,
)
