"""How fast each scheme was measured to be, from the result files of GPUs: what accuracy is set against."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Shape = tuple[int, int, int]  # M, K, N of a product
STEPS = "quant_steps"  # whole steps of a 7B model
BATCH = 64  # decoding rows, of the figure that stands for a scheme
PLAIN = ("bf16", "bf16")  # what times are compared with: weights, K and V
PLAIN_FILES = ("matmul", "gemm_skinny", "int8_matmul", "fp8_matmul", "weight_only_matmul")  # have 16-bit products
PRODUCTS = {"w8a8-all": "int8_matmul", "fp8": "fp8_matmul"}  # scheme -> the benchmark of its product, its peer there


@dataclass(frozen=True)
class Speed:
    times: float  # as fast as 16-bit weights, K and V
    what: str  # of what, and in which files


@dataclass(frozen=True)
class Product:
    """A product's time by the fastest of its kind, on one device."""

    us: float
    file: str


def measured_speeds(results: Path) -> dict[tuple[str, str], Speed]:
    """(scheme, KV format) -> its speed, for those that some file in `results` has: whole decode steps, else the
    products of a layer. Of several files the newest counts; a CPU's and runs of a few layers are left out."""
    found = {}
    for scheme, benchmark in PRODUCTS.items():
        if speed := layer_speed(results, benchmark):
            found[scheme, "bf16"] = speed
    for document, file in documents(results, STEPS):
        what = f"decode step of {document.get('model', 'a model')} at batch {BATCH}, {file}"
        if "--layers" not in document["command"]:
            found |= {key: Speed(times, what) for key, times in step_speeds(document["rows"]).items()}
    return found


def step_speeds(rows: Iterable[Row]) -> dict[tuple[str, str], float]:
    """Of decoding at BATCH, as measured in one run."""
    ms = {(r["scheme"], r["kv"]): r["decode_ms"] for r in rows if r.get("batch") == BATCH and "decode_ms" in r}
    return {} if PLAIN not in ms else {key: round(ms[PLAIN] / each, 3) for key, each in ms.items() if key != PLAIN}


def layer_speed(results: Path, benchmark: str) -> Speed | None:
    """Of a 7B layer's products with BATCH rows, those that were measured both ways, together."""
    pairs = {shape: pair for shape, pair in product_pairs(results, benchmark).items() if shape[0] == BATCH}
    if not pairs:
        return None
    times = sum(plain.us for _, plain in pairs.values()) / sum(ours.us for ours, _ in pairs.values())
    files = sorted({product.file for pair in pairs.values() for product in pair})
    return Speed(round(times, 3), f"{len(pairs)} products of a 7B layer at {BATCH} rows, {', '.join(files)}")


def product_pairs(results: Path, benchmark: str) -> dict[Shape, tuple[Product, Product]]:
    """Products of a benchmark's own kernel, and the fastest of bfloat16 that any file of the same device has."""
    found: dict[Shape, tuple[Product, Product]] = {}
    for document, file in documents(results, benchmark):  # the newest last
        ours = {shape: Product(us, file) for shape, us in product_times(document["rows"], {"peer": benchmark})}
        plain = plain_products(results, document["device"])
        found |= {shape: (ours[shape], plain[shape]) for shape in ours.keys() & plain.keys()}
    return dict(sorted(found.items()))


def plain_products(results: Path, device: str) -> dict[Shape, Product]:
    found: dict[Shape, Product] = {}
    for experiment in PLAIN_FILES:
        for document, file in documents(results, experiment):
            for shape, us in product_times(document["rows"], {"dtype": "bfloat16"}):
                if document["device"] == device and (shape not in found or us < found[shape].us):
                    found[shape] = Product(us, file)
    return found


def product_times(rows: Iterable[Row], wanted: Row) -> Iterator[tuple[Shape, float]]:
    """Shape and us of the rows that have all that is wanted."""
    for row in rows:
        if wanted.items() <= row.items() and {"M", "K", "N", "us"} <= row.keys():
            yield (row["M"], row["K"], row["N"]), row["us"]


def documents(results: Path, experiment: str) -> Iterator[tuple[Row, str]]:
    """Result files of one experiment on a GPU, the oldest first, and their names."""
    for file in sorted(results.glob(f"{experiment}-*.json")):
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # not a result
        if document.get("experiment") == experiment and document.get("device", "cpu") != "cpu":
            yield document, file.name
