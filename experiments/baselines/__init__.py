"""Builds engines that lack one of jllm's ideas, to measure what the idea is worth. Each is a part that Engine takes in
place of its own (ABOUT)."""

from collections.abc import Callable
from functools import partial
from typing import Any

from experiments.baselines.schedulers import (
    PaddedPrefill,
    SeparatePadded,
    SeparateSteps,
    StaticBatches,
    StaticPadded,
)
from experiments.baselines.sorting import draw_by_sorting
from experiments.baselines.waiting import WaitingLoop
from jllm.engine.device import Device
from jllm.engine.engine import Engine
from jllm.engine.loop import Loop
from jllm.engine.scheduler import Scheduler
from jllm.model.model import Model

BASELINES = {
    "batching": ("merge", "static", "separate"), "prefill": ("ragged", "padded"), "sampling": ("threshold", "sort"),
    "host": ("late", "wait"),
}  # fmt: skip
ABOUT = {
    "batching": "static: the next batch starts when the longest member of the last one has ended; "
    "separate: a step has prompts or decodes",
    "prefill": "padded: all prompts of a step have as many rows as the longest",
    "sampling": "sort: each row's logits are sorted",
    "host": "wait: a step's tokens are read before the next step is planned",
}
DEVICES: dict[str, Callable[..., Device]] = {"threshold": Device, "sort": partial(Device, draw=draw_by_sorting)}
SCHEDULERS: dict[tuple[str, str], type[Scheduler]] = {
    ("merge", "ragged"): Scheduler,
    ("static", "ragged"): StaticBatches,
    ("merge", "padded"): PaddedPrefill,
    ("static", "padded"): StaticPadded,
    ("separate", "ragged"): SeparateSteps,
    ("separate", "padded"): SeparatePadded,
}


def engine_with(
    model: Model,
    *,
    batching: str = "merge",
    prefill: str = "ragged",
    sampling: str = "threshold",
    host: str = "late",
    device: Callable[..., Device] | None = None,
    **options: Any,
) -> Engine:
    """Returns an engine with a choice for each of BASELINES. `device` replaces the sampler's device, if given."""
    parts: dict[str, Any] = {
        "scheduler": SCHEDULERS[batching, prefill],
        "loop": WaitingLoop if host == "wait" else Loop,
    }
    return Engine(model, device=device or DEVICES[sampling], **parts, **options)
