"""Reads the result files of GPUs, from which claims take measured rows."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Shape = tuple[int, int, int]  # M, K, N of a matmul
STEPS = "quant_steps"  # whole steps of a 7B model
PLAIN = ("bf16", "bf16")  # the reference of times: weights, K and V
TORCH = "torch bf16"  # a 16-bit peer, beside the rows that are marked as such


@dataclass(frozen=True)
class Product:
    """The time of a matmul, by the fastest kernel of its kind on one device."""

    us: float
    source: Row  # from source_of


def pairs_on(device: str, results: Path, benchmark: str) -> dict[Shape, tuple[Product, Product]]:
    """Returns the matmuls of a benchmark's own kernel and of bfloat16, each by the fastest run on a device."""
    ours, plain = fastest_products(results, device, benchmark), fastest_products(results, device)
    return {shape: (ours[shape], plain[shape]) for shape in sorted(ours.keys() & plain.keys())}


def fastest_products(results: Path, device: str, peer: str | None = None) -> dict[Shape, Product]:
    """Returns the matmuls of a kernel, or of bfloat16. The fastest of all runs on a device counts, with labelled runs
    and torch's."""
    found: dict[Shape, Product] = {}
    for document, file in documents(results):
        for row in document["rows"] if document["device"] == device else ():
            plain = row.get("dtype") == "bfloat16" or row.get("scheme") == "bf16" or row.get("peer") == TORCH
            if not {"M", "K", "N", "us"} <= row.keys() or not (plain if peer is None else row.get("peer") == peer):
                continue
            shape = row["M"], row["K"], row["N"]
            if shape not in found or row["us"] < found[shape].us:
                found[shape] = Product(row["us"], source_of(document, file))
    return found


def source_of(document: Row, file: str) -> Row:
    """Returns the row's source, if its figures come from another result: that result, and the device that measured
    it."""
    return {"file": file, "measured_on": document["device"]}


def newest(results: Path, experiment: str) -> list[tuple[Row, str]]:
    """Returns the newest complete file of an experiment on each GPU, with its name, oldest first."""
    found: dict[str, tuple[Row, str]] = {}
    for document, file in documents(results, experiment):
        if document.get("complete", True):
            found.pop(document["device"], None)
            found[document["device"]] = document, file
    return list(found.values())


def documents(results: Path, experiment: str | None = None) -> Iterator[tuple[Row, str]]:
    """Yields the result files of one experiment (unlabelled), or of all, on GPUs. The oldest comes first, each with its
    name."""
    for file in sorted(results.glob(f"{experiment or '*'}-*.json")):
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # not a result
        if not isinstance(document, dict) or not {"experiment", "device", "command", "rows"} <= document.keys():
            continue
        if experiment in (None, document["experiment"]) and document["device"] != "cpu":
            yield document, file.name
