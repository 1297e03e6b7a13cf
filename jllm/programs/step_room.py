"""Checks the device memory that a compiled step takes."""

import jax

from jllm.errors import NoRoomError
from jllm.files.fit import would_fit
from jllm.parallel.memory import gib
from jllm.programs.sizes import EngineSizes
from jllm.step.buckets import Bucket


def largest(buckets: tuple[Bucket, ...]) -> Bucket:
    """Returns the bucket of plain decoding that is the largest in every size."""
    return Bucket(*(max(sizes) for sizes in zip(*((r.decodes, r.tokens, r.chunks) for r in buckets if r.rows == 1))))


def check_step(step: jax.stages.Compiled, sizes: EngineSizes, held: int, free: int | None) -> None:
    """Raises NoRoomError where a compiled step takes more memory than is free beside weights and state.

    This is exact, while check_room only estimates. `held` is the bytes of a device's KV pages. `free` is in bytes, None
    if unknown.
    """
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
