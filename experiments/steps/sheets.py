"""Estimates the cost of steps on a device from its data sheet alone.

The device reaches as much of its data sheet (configs/devices) as an H200 does of its own. The shares of floors come
from an H200's measured steps. The estimate ignores the device's caches, tensor cores, multiprocessors and host.
"""

import json
from pathlib import Path
from typing import Any

from experiments.steps.cost_model import (
    RESULTS,
    CostModel,
    Shares,
    fit,
    model_shapes,
    recorded_steps,
    reference_floor,
)
from experiments.steps.devices import REFERENCE, Ceilings, DeviceSheet, device_sheet
from experiments.steps.floors import Floor, make_floor
from jllm.errors import InputFileError
from jllm.model.model import Model

MEMORY_SHARE = 0.9  # share of a device's memory for weights, K and V


def triton_shares(results: Path = RESULTS) -> Shares:
    """Returns the shares of backend triton's decode steps. Raises InputFileError if no file has three of them."""
    for path in sorted(results.glob(f"decode_step-triton-{'[0-9]' * 8}-h200.json"), reverse=True):
        document = json.loads(path.read_text(encoding="utf-8"))
        rows = [row for row in document["rows"] if row.get("backend") == "triton"]
        (name,) = {row["model"] for row in rows}
        model = model_shapes(name)
        return fit(recorded_steps({"rows": rows}), reference_floor(model), kv_token_bytes(model.config), path.name)
    raise InputFileError(f"{results}: no decode_step-triton-DATE-h200.json to take shares of the floor from")


def kv_token_bytes(config: Any) -> int:
    """Returns the bytes of K and V of a token in bf16, all layers."""
    return 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim


def floor_on(sheet: DeviceSheet, model: Model) -> Floor:
    """Returns the floor of steps on a device. The device reaches as much of its sheet as an H200 does of its own.
    Raises KeyError for weights whose arithmetic the device lacks."""
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
    """Returns the cost of a 16-bit model's steps on a device with only a data sheet."""
    return CostModel(floor_on(sheet, model), kv_token_bytes(model.config), shares)
