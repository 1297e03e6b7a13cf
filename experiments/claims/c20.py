"""Tests C20: the KV cache's share of memory at capacity, by model and device.

Rows follow from the models' shapes and the devices' data sheets; nothing runs. Weights have 16 bits. A row uses the
fewest devices (1, 2, 4, 8 or 16) that hold the weights and a tenth more. The rest of the usable memory is K and V. The
share is that of K and V in both together. `share_of_8` is the share on eight devices, a usual number for large models.
Of the model with 176B parameters, which is no LLaMA, only the size of its weights is known. The share needs nothing
else.
"""

from collections.abc import Iterator

from experiments.claims.claim import Answer, Claim, Row, in_all, in_most, percents
from experiments.steps.cost_model import model_shapes
from experiments.steps.devices import DeviceSheet, device_sheets
from experiments.steps.floors import token_bytes
from jllm.model.params import tree_bytes

MODELS = ("llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3-8b", "llama-3-70b", "llama-3.1-405b")
LARGE = "176B"  # parameters, as BLOOM has
DEVICES = (1, 2, 4, 8, 16)
KV = (None, "int8-g8")
CONTEXT = 1024  # tokens of the sequences that fill the cache
USABLE = 0.9  # share of a device's memory
ROOM = 0.1  # room for K and V, as a share of the weights
STATED = {"llama-2-7b": 0.84, LARGE: 0.5}
ABOUT = 0.05  # allowed shortfall
GIB = 1 << 30


def measure(toy: bool) -> Iterator[Row]:
    for name in (*MODELS[:1], LARGE) if toy else (*MODELS, LARGE):
        model = None if name == LARGE else model_shapes(name)
        weights = 2 * 176e9 if model is None else float(tree_bytes(model.params))
        for kv in KV[:1] if model is None else KV:
            token = None if model is None else token_bytes(model, kv)
            for sheet in device_sheets().values():
                yield share_row(name, weights, kv, token, sheet)


def share_row(name: str, weights: float, kv: str | None, token: float | None, sheet: DeviceSheet) -> Row:
    usable = USABLE * sheet.memory
    row: Row = {
        "device": sheet.name, "source": "data sheet", "model": name, "kv": kv or "bf16",
        "weights_gib": round(weights / GIB, 1),
    }  # fmt: skip
    devices = next((n for n in DEVICES if n * usable >= (1 + ROOM) * weights), None)
    if devices is None:
        return row | {"devices": None}
    cache = devices * usable - weights
    found: Row = {
        "devices": devices, "kv_gib": round(cache / GIB, 1), "share": round(cache / (cache + weights), 4),
        "share_of_8": round(max(0.0, 1 - weights / (8 * usable)), 4),
    }  # fmt: skip
    if token is not None:
        found |= {
            "token_kib": round(token / 1024, 2), "sequences": int(cache / (CONTEXT * token)),
            "half_at": int(weights / (CONTEXT * token)),  # sequences whose K and V are as large as the weights
        }  # fmt: skip
    return row | found


def fitting(rows: list[Row]) -> list[Row]:
    """Returns the rows of devices that hold the model."""
    return [row for row in rows if row["devices"] is not None]


def share_of(rows: list[Row], name: str) -> float | None:
    """Returns the share on the fewest devices of 80 GB that hold a model, or None."""
    found = [row for row in fitting(rows) if row["model"] == name and row["kv"] == "bf16"]
    of_80 = (row["share"] for row in found if "80 GB" in row["device"] or "80GB" in row["device"])
    return next(of_80, None)


def holds(rows: list[Row]) -> Answer:
    """Decides by the models with a stated figure, on devices of 80 GB. K and V must outweigh the weights, and take
    about the stated share or more."""
    found = {name: share for name in STATED if (share := share_of(rows, name)) is not None}
    sides = in_all(share >= STATED[name] - ABOUT for name, share in found.items())
    return in_most(share > 0.5 for share in found.values()), sides


def words(rows: list[Row]) -> tuple[str, str]:
    found = {name: share for name in STATED if (share := share_of(rows, name)) is not None}
    said = " and ".join(f"{percents([share])} for {name}" for name, share in found.items())
    return f"{said}, computed", f"K and V take {said} of a full memory."


CLAIM = Claim(
    id="C20",
    stated="84 % for 7B, over 50 % for 176B",
    measure=measure,
    holds=holds,
    words=words,
    computed=True,
)
