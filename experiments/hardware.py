"""Prints the hardware table of PPL.LLM's slides, for LLaMA-7B in 16 bits, beside our own estimates.

    python -m experiments.hardware                                  # every device of configs/devices
    python -m experiments.hardware --devices a10 l4 h100-sxm
    python -m experiments.hardware --config qwen3-30b-a3b           # our estimate for another model, also a mixture

The slides' rules (`slides_`) use a device's memory in GB, bandwidth and dense 16-bit arithmetic. Weights take 12 GB and
a request a quarter of one, so 4 (GB - 12) requests fit. A step reads all of the memory at 0.8 of the bandwidth, in 1250
GB / (GB/s) ms. Tokens per second are requests over that time. Arithmetic takes 22.8 GFLOP per request, as if nothing
else ran. Value for money is a million tokens per dollar of rent (configs/devices). A device without a price has none.

In our estimate a request is CONTEXT tokens of bf16 K and V, a quarter of a GiB. `same_ms` is a step of the slides'
batch, even if it does not fit. `requests` is the largest batch that fits nine tenths of the memory beside the weights.
`step_ms` and `tokens_s` are of that batch. Steps reach the same shares of a data sheet as on an H200 (steps/sheets.py),
with the kernels that the device runs: Mosaic's on Hopper, Triton's from 8.0 to 8.9, and plain XLA on older devices and
AMD's. Only H200 and H100 were measured. `check` rows compare the estimate with their steps, to which it was not fitted.
`off_by` is estimated over measured, less one.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from experiments.claims.claim import text_table
from experiments.report.documents import read_result
from experiments.result_file import ResultFile, command_line, refusing, rounded, told
from experiments.steps.cost_model import (
    RESULTS,
    Row,
    Shares,
    calibrated,
    each_once,
    fit,
    model_shapes,
    newest,
    recorded_steps,
    reference_floor,
)
from experiments.steps.devices import SHEETS, DeviceSheet, device_sheet, device_sheets
from experiments.steps.floors import step_work
from experiments.steps.sheets import MEMORY_SHARE, cost_on, kv_token_bytes, triton_shares
from jllm.errors import InputFileError
from jllm.model.model import Model
from jllm.model.params import tree_bytes
from pallas_kernels.bench.command import Parser, add_result_options

MODEL, CONTEXT = "llama-2-7b", 512
HOPPER = re.compile(r"NVIDIA G?H\d+")
GFLOP, WEIGHTS_GB, REQUESTS_GB, READ = (
    22.8,
    12,
    4,
    0.8,
)  # the slides': per token; weights; per request; bandwidth
CHECKS = (  # files of measured steps on one device: (name, device in the name, its sheet, the backend that ran)
    ("decode_step-two", "h100-80gb-hbm3", "h100-sxm", "mosaic"),
    ("throughput_llama-2-7b_bf16_kv-bf16", "h200", "h200-sxm", "mosaic"),
    ("throughput_llama-2-7b_bf16_kv-bf16-three-triton", "h200", "h200-sxm", "triton"),
    ("throughput_llama-2-7b_bf16_kv-bf16-three-xla", "h200", "h200-sxm", "xla"),
)


def backend_of(sheet: DeviceSheet) -> str:
    """Returns the backend of a device. Triton's kernels need bfloat16, which NVIDIA has from 8.0 on."""
    if HOPPER.match(sheet.name):
        return "mosaic"
    return "triton" if sheet.name.startswith("NVIDIA") and "bf16" in sheet.dense_tflops else "xla"


def shares_by_backend(results: Path = RESULTS) -> dict[str, Shares]:
    """Returns the share of an H200's limits that each backend's steps reached. Raises InputFileError if no file has
    it."""
    found = newest(results, "decode_step")
    if found is None:
        raise InputFileError(f"{results}: no decode_step-DATE-h200.json to take shares of the floor from")
    name, document = found
    model = model_shapes(MODEL)
    rows = [{key: v for key, v in r.items() if key != "backend"} for r in document["rows"] if r["backend"] == "xla"]
    steps = recorded_steps({"rows": rows})
    plain = fit(steps, reference_floor(model), kv_token_bytes(model.config), f"{name}, xla")
    return {"mosaic": calibrated(None, results), "triton": triton_shares(results), "xla": plain}


def slides_row(sheet: DeviceSheet) -> Row:
    """Returns a device's row by the slides' rules."""
    requests = REQUESTS_GB * (sheet.memory_gb - WEIGHTS_GB)
    memory_ms = 1e3 / READ * sheet.memory_gb / sheet.bandwidth_gb_s
    tokens_s = 1e3 * requests / memory_ms
    row = {"slides_requests": requests, "slides_ms": memory_ms, "slides_tokens_s": tokens_s}
    row["slides_compute_ms"] = requests * GFLOP / (sheet.peak16 / 1e12)
    return row | {"slides_mtokens_usd": value(tokens_s, sheet)}


def value(tokens_s: float, sheet: DeviceSheet) -> float | None:
    """Returns million tokens per dollar of rent."""
    return None if sheet.price is None else 3600 * tokens_s / sheet.price.usd_hour / 1e6


def estimate_row(sheet: DeviceSheet, model: Model, shares: Shares, same: int) -> Row:
    """Returns our estimate for a device, with a step of `same` requests too."""
    cost = cost_on(sheet, model, shares)

    def seconds(batch: int) -> float:
        return cost.seconds(step_work(batch, batch * CONTEXT))

    requests = int((MEMORY_SHARE * sheet.memory - tree_bytes(model.params)) // (CONTEXT * cost.token_bytes))
    row: Row = {"same_ms": 1e3 * seconds(same), "requests": max(0, requests)}
    if requests < 1:
        return row | {"step_ms": None, "tokens_s": None, "mtokens_usd": None}
    tokens_s = requests / seconds(requests)
    return row | {"step_ms": 1e3 * seconds(requests), "tokens_s": tokens_s, "mtokens_usd": value(tokens_s, sheet)}


def table(sheets: Iterable[DeviceSheet], shares: dict[str, Shares], name: str = MODEL) -> Iterator[Row]:
    """Yields a row for each device. The slides' rules are for MODEL alone."""
    model = model_shapes(name)
    for sheet in sheets:
        row: Row = {"part": "table", "device": sheet.name, "memory_gb": sheet.memory_gb}
        row |= {"bandwidth_gb_s": sheet.bandwidth_gb_s, "tflops": sheet.peak16 / 1e12}
        price = sheet.price
        row |= {"usd_hour": price and price.usd_hour, "offer": price and f"{price.offer}, read {price.read}"}
        slides, backend = slides_row(sheet), backend_of(sheet)
        same = round(slides["slides_requests"])
        row |= (slides if name == MODEL else {"same_requests": same}) | {"backend": backend, "kind": "estimated"}
        yield rounded(row | estimate_row(sheet, model, shares[backend], same))


def checks(shares: dict[str, Shares], results: Path = RESULTS) -> list[Row]:
    """Returns the estimate beside every step of CHECKS that one device made alone. Each case comes once, from its
    newest file."""
    model = model_shapes(MODEL)
    found: list[tuple[str, Row]] = []
    for name, device, sheet, backend in CHECKS:
        for path in sorted(results.glob(f"{name}-{'[0-9]' * 8}-{device}.json"))[-1:]:
            cost = cost_on(device_sheet(sheet), model, shares[backend])
            document = read_result(path)
            for row in document["rows"]:
                if "decode_ms" not in row or row.get("devices", 1) != 1 or row.get("model") != MODEL:
                    continue
                batch, context = row["batch"], row.get("context") or row["input"] + row["output"] // 2
                ms = 1e3 * cost.seconds(step_work(batch, batch * context))
                check = rounded({
                    "part": "check", "device": device_sheet(sheet).name, "backend": backend, "batch": batch,
                    "context": context, "measured_ms": row["decode_ms"], "estimated_ms": ms,
                    "off_by": ms / row["decode_ms"] - 1, "file": path.name,
                })  # fmt: skip
                found.append((document["date"], check))
    return each_once(found)


def errors(rows: Iterable[Row]) -> Iterator[Row]:
    """Yields the largest error of each device and backend."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row["part"] == "check":
            found.setdefault((row["device"], row["backend"]), []).append(row["off_by"])
    for (device, backend), some in found.items():
        about = {"part": "error", "device": device, "backend": backend, "steps": len(some)}
        yield about | {"least": min(some), "most": max(some), "largest": max(map(abs, some))}


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--devices", nargs="+", metavar="NAME", help=f"devices of {SHEETS.name}/ (default: all)")
    parser.add_argument("--config", default=MODEL, help="model of our estimate: a name in configs/, or a path")
    add_result_options(parser)
    return parser.parse_args(argv)


@refusing
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    shares = shares_by_backend()
    sheets = [device_sheet(name) for name in args.devices] if args.devices else list(device_sheets().values())
    rows = [*table(sheets, shares, args.config), *(checks(shares) if args.config == MODEL else ())]
    rows += errors(rows)
    sources = {backend: f"{found.source}, fitted within {found.error:.1%}" for backend, found in shares.items()}
    how: Row = {"model": args.config, "shares_of": sources}
    with ResultFile(args.results, "hardware", command_line("hardware", argv), args.label, **how) as result:
        result.fill(rows, shown=lambda row: False)
    print(text_table([{k: v for k, v in row.items() if k not in ("part", "kind", "offer", "file")} for row in rows]))
    return told(args, result)


if __name__ == "__main__":
    sys.exit(main())
