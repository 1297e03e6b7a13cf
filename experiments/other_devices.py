"""What decode steps should take under backend "triton" on GPUs that were never measured: an estimate, and labelled as
one.

    python -m experiments.other_devices --devices a100-sxm-80gb a10 rtx-4090 --batch 1 16 64

The step's floor (steps/floors.py) is taken at the device's data sheet (configs/devices) times what an H200 reached of
its own, in bandwidth and in arithmetic; the shares of the floor that products and attention reach, and the fixed time
of a step, are those of the newest decode_step file with a label "triton". What such GPUs do otherwise (smaller caches,
other tensor cores, fewer multiprocessors, a slower host) is not in it. `fits` says whether the weights in bf16 and the
batch's K and V are within nine tenths of the memory; a step that does not fit has no time.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.result_file import command_line, record, rounded
from experiments.steps.cost_model import (
    CONFIGS,
    RESULTS,
    CostModel,
    Row,
    Shares,
    fit,
    model_shapes,
    recorded_steps,
    reference_floor,
)
from experiments.steps.devices import REFERENCE, Ceilings, DeviceSheet, device_sheet
from experiments.steps.floors import Floor, make_floor, step_work
from jllm.errors import InputFileError
from jllm.fit import tree_bytes
from jllm.pretrained import Model
from pallas_kernels.bench.command import Parser, add_result_options, interruptible
from pallas_kernels.bench.numbers import positive

MEMORY_SHARE = 0.9


def triton_shares(results: Path = RESULTS) -> Shares:
    """Shares of backend triton's decode steps. Raises InputFileError where no file has three of them."""
    for path in sorted(results.glob(f"decode_step-triton-{'[0-9]' * 8}-h200.json"), reverse=True):
        document = json.loads(path.read_text(encoding="utf-8"))
        rows = [row for row in document["rows"] if row.get("backend") == "triton"]
        (name,) = {row["model"] for row in rows}
        model = model_shapes(name)
        return fit(recorded_steps({"rows": rows}), reference_floor(model), kv_token_bytes(model.config), path.name)
    raise InputFileError(f"{results}: no decode_step-triton-DATE-h200.json to take shares of the floor from")


def kv_token_bytes(config: Any) -> int:
    """Bytes of K and V of a token in bf16, all layers."""
    return 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim


def floor_on(sheet: DeviceSheet, model: Model) -> Floor:
    """The floor of steps on a device that reaches as much of its sheet as an H200 does of its own. Raises KeyError for
    weights whose arithmetic the device does not have."""
    own = device_sheet(REFERENCE)
    kinds = {
        kind: sheet.dense_tflops[kind] / own.dense_tflops[kind]
        for kind in ("int8", "fp8")
        if kind in sheet.dense_tflops
    }
    of_peak = {None: sheet.peak16 / own.peak16} | kinds
    best = own.ceilings
    peaks = {kind: best.peaks[kind] * share for kind, share in of_peak.items()}
    bandwidth = best.bandwidth / own.bandwidth * sheet.bandwidth
    source = f"the data sheet of {sheet.name}, at the shares that {own.name} reached of its own"
    return make_floor(model.params, model.config, Ceilings(bandwidth, peaks, best.attention * of_peak[None], source))


def cost_on(sheet: DeviceSheet, model: Model, shares: Shares) -> CostModel:
    """The cost of steps of a model in 16 bits on a device of which the data sheet alone is known."""
    return CostModel(floor_on(sheet, model), kv_token_bytes(model.config), shares)


def rows(args: argparse.Namespace) -> Iterator[Row]:
    model, shares = model_shapes(args.model), triton_shares()
    weights = tree_bytes(model.params)
    for name in args.devices:
        sheet = device_sheet(name)
        cost = cost_on(sheet, model, shares)
        for batch in args.batch:
            work = step_work(batch, batch * (args.context + 1))
            fits = weights + work.keys * cost.token_bytes <= MEMORY_SHARE * sheet.memory
            row: Row = {"device": sheet.name, "model": args.model, "batch": batch, "context": args.context}
            row |= {"kind": "estimated", "shares_of": shares.source, "fit_error": shares.error, "fits": fits}
            if fits:
                seconds = cost.seconds(work)
                row |= {"decode_ms": 1e3 * seconds, "tokens_s": batch / seconds}
            yield rounded(row)


@interruptible
def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    names = sorted(path.stem for path in CONFIGS.glob("*.json"))
    parser.add_argument("--model", choices=names, default="llama-2-7b", metavar="NAME", help="one of configs/")
    parser.add_argument(
        "--devices", nargs="+", default=["a100-sxm-80gb", "a10", "rtx-4090"], metavar="NAME", help="of configs/devices"
    )
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 16, 64], help="sequences that decode")
    parser.add_argument("--context", type=positive, default=256, help="tokens of each")
    add_result_options(parser)
    args = parser.parse_args(argv)
    command = command_line("other_devices", argv)
    return record(args, "other_devices", command, rows(args))


if __name__ == "__main__":
    sys.exit(main())
