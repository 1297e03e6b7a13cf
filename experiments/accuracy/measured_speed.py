"""Finds each scheme's measured speed in the result files of GPUs, to set beside its accuracy."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Shape = tuple[int, int, int]  # M, K, N of a matmul
STEPS = "quant_steps"  # whole steps of a 7B model
BATCH = 64  # decoding rows of a scheme's figure
PLAIN = ("bf16", "bf16")  # the reference of times: weights, K and V
PRODUCTS = {"w8a8-all": "int8_matmul", "fp8": "fp8_matmul"}  # scheme -> benchmark of its matmul, and its name there
TORCH = "torch bf16"  # a 16-bit peer, beside the rows that are marked as such


@dataclass(frozen=True)
class Speed:
    times: float  # speed over 16-bit weights, K and V
    what: str  # what was measured, and in which files


Speeds = dict[tuple[str, str], Speed]


@dataclass(frozen=True)
class Product:
    """The time of a matmul, by the fastest kernel of its kind on one device."""

    us: float
    source: Row  # from source_of


def measured_speeds(results: Path) -> Speeds:
    """Returns the speed of each (scheme, KV format) in `results`. All are of one device: the one with most of them, or
    among equals with the newest file."""
    days: dict[str, str] = {}
    for document, _ in documents(results):
        device = document["device"]
        days[device] = max(document.get("date", ""), days.get(device, ""))
    found = [speeds_on(device, results) for device in sorted(days, key=lambda device: days[device], reverse=True)]
    return max(found, key=len, default={})


def speeds_on(device: str, results: Path) -> Speeds:
    """Returns the speeds on one device: of whole decode steps, else of a layer's matmuls. The newest file counts. Runs
    of a few layers are left out."""
    found: Speeds = {}
    for scheme, benchmark in PRODUCTS.items():
        if speed := layer_speed(device, results, benchmark):
            found[scheme, "bf16"] = speed
    for document, file in documents(results, STEPS):
        what = f"decode step of {document.get('model', 'a model')} at batch {BATCH}, {file}"
        if document["device"] == device and "--layers" not in document["command"]:
            found |= {key: Speed(times, what) for key, times in step_speeds(document["rows"]).items()}
    return found


def step_speeds(rows: Iterable[Row]) -> dict[tuple[str, str], float]:
    """Returns the speeds of decoding in one run, at the batch of BATCH rows."""
    ms = {(r["scheme"], r["kv"]): r["decode_ms"] for r in rows if r.get("batch") == BATCH and "decode_ms" in r}
    return {} if PLAIN not in ms else {key: round(ms[PLAIN] / each, 3) for key, each in ms.items() if key != PLAIN}


def layer_speed(device: str, results: Path, benchmark: str) -> Speed | None:
    """Returns the speed of a 7B layer's matmuls with BATCH rows, together. Only matmuls measured both ways on the
    device count."""
    pairs = {shape: pair for shape, pair in pairs_on(device, results, benchmark).items() if shape[0] == BATCH}
    if not pairs:
        return None
    times = sum(plain.us for _, plain in pairs.values()) / sum(ours.us for ours, _ in pairs.values())
    files = sorted({product.source["file"] for pair in pairs.values() for product in pair})
    return Speed(round(times, 3), f"{len(pairs)} products of a 7B layer at {BATCH} rows, {', '.join(files)}")


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
