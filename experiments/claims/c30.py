"""Tests C30: attention by CUDA cores suffices for decode; tensor cores gain nothing.

FlashInfer has both: a decode kernel on CUDA cores, and kernels on tensor cores (its prefill kernels fa2 and fa3 with
one query per sequence, and TensorRT-LLM's XQA). Rows come from each device's newest file in which one job timed all of
them and ours: `python -m pallas_kernels.decode_attention.bench --parts bf16 --peers`. The faster variant of a kind
counts. K and V have 16 bits, and all read the same bytes. `times` is the tensor cores' time over the CUDA cores'. It is
far below 1 only if arithmetic, not memory, decides.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.claims.c5 import surely
from experiments.claims.claim import RESULTS, Answer, Claim, Row, in_all, in_most, spread
from experiments.claims.recorded import source_of
from pallas_kernels.bench.peers import FLASHINFER, best

CUDA = ("cuda", "cuda-g")
TENSOR = ("tc", "tc-g", "fa3", "xqa")
SHAPE = ("R", "length", "H", "K")
ENOUGH = 0.95  # share of the tensor cores' speed
COMMAND = "python -m pallas_kernels.decode_attention.bench --parts bf16 --peers --record"


def measure(toy: bool) -> Iterator[Row]:
    yield from recorded(RESULTS)


def recorded(results: Path) -> Iterator[Row]:
    """Yields the rows of each device's newest complete file with both kinds."""
    files = results.glob("decode_attention*.json")
    documents = [(path.name, json.loads(path.read_text(encoding="utf-8"))) for path in files]
    answered: set[str] = set()
    for name, document in sorted(documents, key=lambda found: found[1]["date"], reverse=True):
        if document["device"] in answered or not document["complete"]:
            continue
        rows = document["rows"]
        cuda, tensor = (best(kind(rows, variants), FLASHINFER, SHAPE) for variants in (CUDA, TENSOR))
        own = best((row for row in rows if row.get("kv") == "bf16" and row.get("Q", 1) == 1), "mosaic", SHAPE)
        for cell in [cell for cell in cuda if cell in tensor]:
            row: Row = dict(zip(SHAPE, cell)) | {"cuda_us": cuda[cell], "tensor_us": tensor[cell]}
            row |= {"us": own[cell]} if cell in own else {}
            yield row | {"times": round(tensor[cell] / cuda[cell], 3)} | source_of(document, name)
        if cuda and tensor:
            answered.add(document["device"])
    if not answered:
        yield {"error": f"no file has FlashInfer's variants: {COMMAND}"}


def kind(rows: Sequence[Row], variants: Sequence[str]) -> Iterator[Row]:
    return (row for row in rows if row.get("variant") in variants)


def holds(rows: list[Row]) -> Answer:
    """Decides case by case, on each device. ENOUGH of the tensor cores' speed suffices."""
    sides = [surely(row["times"], ENOUGH) for row in rows]
    return in_most(sides), in_all(sides)


def words(rows: list[Row]) -> tuple[str, str]:
    times = spread(row["times"] for row in rows)
    line = f"Decode attention by CUDA cores has {times} times the speed that tensor cores give it."
    return f"{times} times the tensor cores' speed", line


CLAIM = Claim(
    id="C30",
    stated="CUDA cores suffice for decode",
    measure=measure,
    holds=holds,
    words=words,
    computed=True,
)
