"""What a compiled step takes of a device's memory."""

import jax

from jllm.errors import NoRoomError
from jllm.files.fit import would_fit
from jllm.parallel.memory import gib
from jllm.programs.sizes import EngineSizes
from jllm.step.buckets import Bucket


def largest(buckets: tuple[Bucket, ...]) -> Bucket:
    """As large as any bucket of plain decoding in each of its sizes: one of them is."""
    return Bucket(*(max(sizes) for sizes in zip(*((r.decodes, r.tokens, r.chunks) for r in buckets if r.rows == 1))))


def check_step(step: jax.stages.Compiled, sizes: EngineSizes, held: int, free: int | None) -> None:
    """NoRoomError where a compiled step takes more than is free beside weights and state: exactly, what check_room can
    only reckon. held: bytes of a device's KV pages. free: bytes, None where that is unknown."""
    needs = getattr(step.memory_analysis(), "temp_size_in_bytes", None)
    if free is None or needs is None or needs <= free:
        return
    limits, bucket = sizes.limits, largest(sizes.buckets)
    fewer = limits.num_pages - -(-(needs - free) * limits.num_pages // held)
    found = [f"num_pages={fewer}"] if fewer >= limits.max_slots else []
    raise NoRoomError(
        f"a step of {bucket.decodes} decodes and {bucket.tokens} prompt tokens needs {gib(needs)}, and the device has "
        f"{gib(free)} free beside the weights and {limits.num_pages} KV pages; "
        f"{would_fit(found, 'fewer pages are not enough: lower max_slots or max_step_tokens')}"
    )
