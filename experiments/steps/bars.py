"""Defines the share of its floor that a whole step must reach on a Hopper GPU, by its own ceilings. Every experiment
that times steps uses these bars."""

import math
from collections.abc import Iterator
from typing import Any

from pallas_kernels.bench.bars import bar

Row = dict[str, Any]
DECODE = {  # weights, and K and V: up to a batch, the least share of the floor
    ("bf16", "bf16"): ((16, 0.88), (64, 0.86), (256, 0.82), (math.inf, 0.85)),
    ("bf16", "int8-g8"): ((math.inf, 0.80),),
    ("w8a8", "int8-g8"): ((64, 0.70), (math.inf, 0.75)),
}
OF_MODELS = {("llama-3-8b", "bf16", "bf16"): ((math.inf, 0.82),)}  # models with their own bars
PREFILL, LEAST_TOKENS = 0.78, 1024  # with bf16 weights, from that many prompt tokens on


OWN = ("default", "mosaic")  # a Hopper GPU's own backends, to which bars of shares apply


def of_own_kernels(row: Row) -> bool:
    """Returns whether a row is of the device's own kernels. A row without a backend is."""
    return row.get("backend", OWN[0]) in OWN


def decode_bars(name: str, row: Row) -> Iterator[Row]:
    """Yields the bar of a decode step's share of its floor, if its model, formats and backend have one."""
    if not of_own_kernels(row):
        return
    formats = weights_of(row), row["kv"].replace("bfloat16", "bf16")
    table = OF_MODELS.get((row.get("model", ""), *formats)) or DECODE.get(formats, ())
    for least in [share for most, share in table if row["batch"] <= most][:1]:
        yield bar(f"{name}, share of the floor", row["floor_fraction"], "1", least)


def prefill_bars(name: str, row: Row, tokens: int, share: float) -> Iterator[Row]:
    """Yields the bar of prefill's share of its floor, if that many tokens have one."""
    if weights_of(row) == "bf16" and tokens >= LEAST_TOKENS and of_own_kernels(row):
        yield bar(f"{name}, share of the floor", share, "1", PREFILL)


def weights_of(row: Row) -> str:
    """Returns bf16 for a row without a scheme, and w8a8 for all rules of that format."""
    return row.get("scheme", "bf16").removesuffix("-talk")
