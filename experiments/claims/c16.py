"""Tests C16: moving a running sequence's K and V to host memory and back cannot pay.

Rows follow from data sheets alone. They compare two times. One is a decode step at its floor, with memory full of
sequences of one length. The other moves one sequence's K and V over the host's link. There are two uses:

stream: part of the cache stays in host memory and comes in every step. During a step the link moves at most
`stream_share` of what the step reads. So many more sequences could run, if nothing else cost anything.

swap: a preempted sequence is copied out and later back in. The alternative is to compute its K and V again by a prefill
at its floor. That takes device time, while copies could run beside other work.

The last row measures a link, by copies of one array to the host and back. Without a GPU it comes from this claim's
newest file.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims.claim import RESULTS, Answer, Claim, Row, in_all, in_most, spread
from experiments.claims.recorded import newest, source_of
from experiments.steps.cost_model import CostModel, model_shapes
from experiments.steps.devices import DeviceSheet, device_sheets
from experiments.steps.floors import make_floor, step_work, token_bytes
from jllm.model.model import Model
from jllm.model.params import tree_bytes

MODELS = ("llama-2-7b", "llama-3-8b")
KV = (None, "int8-g8")
CONTEXTS = (512, 2048, 8192)
USABLE = 0.9  # share of a device's memory
PAYS = 0.10  # least growth of sequences that makes streaming worthwhile
GB = 1e9
MIB = 1 << 20


def measure(toy: bool) -> Iterator[Row]:
    sheets = device_sheets()
    for name in MODELS[:1] if toy else MODELS:
        model = model_shapes(name)
        for kv in KV:
            for sheet in sheets.values():
                for context in CONTEXTS[:1] if toy else CONTEXTS:
                    yield device_row(model, name, kv, sheet, context)
    if toy or jax.default_backend() != "cpu":
        yield copies((16 if toy else 1024) * MIB)
    else:
        yield from recorded(RESULTS)


def recorded(results: Path) -> Iterator[Row]:
    """Yields the measured link of a GPU, from this claim's newest file."""
    for document, file in newest(results, "claims-C16")[-1:]:
        yield from (row | source_of(document, file) for row in document["rows"] if row.get("source") == "measured")


def device_row(model: Model, name: str, kv: str | None, sheet: DeviceSheet, context: int) -> Row:
    row: Row = {"device": sheet.name, "source": "data sheet", "model": name, "kv": kv or "bf16", "context": context}
    each = context * token_bytes(model, kv)
    batch = int((USABLE * sheet.memory - tree_bytes(model.params)) // each)
    if batch < 1:
        return row | {"batch": 0}
    floor = make_floor(model.params, model.config, sheet.nominal)
    cost = CostModel(floor, token_bytes(model, kv))
    step = cost.seconds(step_work(batch, batch * context))
    again = cost.seconds(step_work(0, 0, [(0, context, True)]))
    transfer = each / sheet.host_rate
    found = {
        "batch": batch, "kv_mib": each / MIB, "gb_ms": 1e3 * GB / sheet.host_rate, "step_ms": 1e3 * step,
        "transfer_ms": 1e3 * transfer, "transfer_steps": transfer / step,
        "break_even_context": step * sheet.host_rate / token_bytes(model, kv),
        "stream_share": step * sheet.host_rate / (batch * each),
        "recompute_ms": 1e3 * again, "swap_over_recompute": 2 * transfer / again,
    }  # fmt: skip
    return row | {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in found.items()}


def copies(nbytes: int) -> Row:
    """Returns the times of an array's way to the host and back, medians of five. Memory is page-locked if the device
    supports it."""
    device = jax.devices()[0]
    kinds = {memory.kind for memory in device.addressable_memories()}
    array = jax.block_until_ready(jax.device_put(jnp.zeros(nbytes // 4, jnp.float32), device))
    if "pinned_host" in kinds and jax.default_backend() != "cpu":
        where, there = "pinned_host", jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        host: Any = jax.block_until_ready(jax.device_put(array, there))
        out = _seconds(lambda: jax.block_until_ready(jax.device_put(array, there)))
    else:
        where, host = "numpy", np.zeros(nbytes // 4, np.float32)
        out = _seconds(lambda: np.array(array, copy=True))
    back = jax.sharding.SingleDeviceSharding(device)
    # A backend in host memory may use a numpy array directly, so this one copies nothing by itself.
    into = _seconds(lambda: jax.block_until_ready(jax.device_put(host, back, may_alias=False)))
    return {
        "device": device.device_kind, "source": "measured", "mib": nbytes // MIB, "host_memory": where,
        "to_host_gb_s": float(f"{nbytes / out / GB:.4g}"), "to_device_gb_s": float(f"{nbytes / into / GB:.4g}"),
    }  # fmt: skip


def _seconds(copy: Callable[[], Any]) -> float:
    copy()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        copy()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def computed_rows(rows: list[Row]) -> list[Row]:
    """Returns the rows of devices with room for a sequence."""
    return [row for row in rows if row["source"] == "data sheet" and row["batch"]]


def holds(rows: list[Row]) -> Answer:
    """Decides by device, model, format and length. Offload does not pay if streaming adds at most PAYS sequences and
    swapping is no faster than recomputing."""
    found = computed_rows(rows)
    vain = (row["stream_share"] <= PAYS and row["swap_over_recompute"] >= 1 for row in found)
    return in_most(vain), in_all(row["gb_ms"] >= row["step_ms"] for row in found)


def words(rows: list[Row]) -> tuple[str, str]:
    found = computed_rows(rows)
    steps = spread((row["gb_ms"] / row["step_ms"] for row in found), "{:.2g}")
    beats = f"in {sum(row['swap_over_recompute'] < 1 for row in found)} of {len(found)}"
    line = f"Moving K and V out and in is quicker than computing them again {beats} computed cases."
    return f"{steps} steps a GB; swapping quicker {beats}", line


CLAIM = Claim(
    id="C16",
    stated="1 GB over PCIe 4.0 takes a whole decode step",
    measure=measure,
    holds=holds,
    words=words,
    computed=True,
)
