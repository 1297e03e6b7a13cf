"""C30: attention by CUDA cores suffices for decode; tensor cores gain nothing.

FlashInfer has both: its decode kernel by CUDA cores, and its kernels by tensor cores (its prefill kernels fa2 and fa3
with one query a sequence, and TensorRT-LLM's XQA). Rows are of each device's newest file in which one job timed all of
them, and ours: `python -m pallas_kernels.decode_attention.bench --parts bf16 --peers`. Each device has an answer. The
faster variant of a kind counts. K and V have 16 bits, and bytes are the same for all, so that `times`, the tensor
cores' time over the CUDA cores', is far below 1 only where arithmetic and not memory decides.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.accuracy.measured_speed import source_of
from experiments.claims.c5 import NOISE, surely
from experiments.claims.claim import Claim, Row, Verdict, by_case, verdict_of
from experiments.report.documents import read_result
from pallas_kernels.bench.peers import FLASHINFER, best

RESULTS = Path(__file__).parents[1] / "results"
CUDA = ("cuda", "cuda-g")
TENSOR = ("tc", "tc-g", "fa3", "xqa")
SHAPE = ("R", "length", "H", "K")
ENOUGH = 0.95  # of the tensor cores' speed
COMMAND = "python -m pallas_kernels.decode_attention.bench --parts bf16 --peers --record"


def measure(toy: bool) -> Iterator[Row]:
    yield from recorded(RESULTS)


def recorded(results: Path) -> Iterator[Row]:
    """Yields those of each device's newest complete file that has both kinds."""
    documents = [(path.name, read_result(path)) for path in results.glob("decode_attention*.json")]
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


def judge(rows: list[Row]) -> Verdict:
    parts, figures = [], []
    for heads, kv_heads in dict.fromkeys((row["H"], row["K"]) for row in rows):
        some = [row for row in rows if (row["H"], row["K"]) == (heads, kv_heads)]
        enough = {f"{row['R']} x {row['length']}: {row['times']:.3f}": surely(row["times"], ENOUGH) for row in some}
        parts += by_case(f"enough with {heads}/{kv_heads} heads", enough)
        times = [row["times"] for row in some]
        figures.append(
            f"{heads}/{kv_heads} heads: {min(times):.2f} to {max(times):.2f} times as fast by CUDA cores as by tensor "
            "cores"
        )
    return verdict_of(parts, *figures)


def draw(figure: Any, rows: list[Row]) -> None:
    axes = figure.subplots()
    for i, name in enumerate(("cuda_us", "tensor_us", "us")):
        label = {"cuda_us": "FlashInfer, CUDA cores", "tensor_us": "FlashInfer, tensor cores", "us": "ours"}[name]
        axes.bar([x + 0.27 * (i - 1) for x in range(len(rows))], [row.get(name, 0) for row in rows], 0.25, label=label)
    axes.set_xticks(range(len(rows)), [f"{r['R']} x {r['length']}\n{r['H']}/{r['K']}" for r in rows], fontsize=6)
    axes.set_yscale("log")
    axes.set_ylabel("us of decode attention")
    axes.legend(fontsize=7)


CLAIM = Claim(
    id="C30",
    rule=(
        f"In each case CUDA cores reach {ENOUGH:.0%} of the tensor cores' speed. Within {NOISE:.0%} of that it is "
        "open, as by so much times of the same kernel have differed from process to process."
    ),
    stated="CUDA cores suffice for decode",
    measure=measure,
    judge=judge,
    draw=draw,
    by_device=True,
    computed=True,
)
