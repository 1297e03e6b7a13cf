"""Reads how much memory is free on a device, or on this machine if the device is its CPU."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

GIB = 1 << 30

Memory = Callable[[], int | None]  # bytes that are free; None: unknown


def free_memory(device: jax.Device | None = None) -> int | None:
    """Returns the bytes that are free on a device, by default the one that arrays go to.

    On a GPU they are the allocator's largest free block plus the memory that it has not taken yet. Holes between arrays
    do not count. Where the allocator reports no largest block, all free memory counts. On a CPU they are nine tenths of
    host_memory, since compilers and other programs need some. It is None if the device reports nothing.
    """
    stats = device_stats(device) or {}
    if "bytes_limit" in stats:
        limit, used = stats["bytes_limit"], stats["bytes_in_use"]
        piece = stats.get("largest_free_block_bytes", 0)  # XLA's older GPU allocators always report 0
        return limit - (max(used, stats["pool_bytes"] - piece) if piece and "pool_bytes" in stats else used)
    left = host_memory() if is_host(device) else None
    return None if left is None else left - left // 10


def device_stats(device: jax.Device | None = None) -> dict[str, int] | None:
    return (device or jax.local_devices()[0]).memory_stats()


def is_host(device: jax.Device | None = None) -> bool:
    """Returns whether the device's memory is that of the machine, which other programs need as well."""
    return (device or jax.local_devices()[0]).platform == "cpu"


def out_of_memory(error: BaseException) -> bool:
    """Returns whether an error of XLA reports that a device had too little memory."""
    return "RESOURCE_EXHAUSTED" in str(error)


def gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / (1 << 20):.2f} MiB"


def host_memory(root: Path = Path("/")) -> int | None:
    """Returns the bytes that the operating system calls available. A control group of this process (such as a
    container's limit) may have fewer left, which then count. `root` is where /proc and /sys lie. It is None if
    nothing is known."""
    return min((left for left in (_available(root), *_left_to_groups(root)) if left is not None), default=None)


def _available(root: Path) -> int | None:
    """Returns the free memory of the machine. Without /proc (macOS) it is all memory, since nothing better is known."""
    found = _fields(root / "proc/meminfo").get("MemAvailable:")
    if found is not None:
        return found * 1024
    for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"):
        if name in os.sysconf_names:
            return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    return None


def _left_to_groups(root: Path) -> Iterator[int | None]:
    """Yields how much memory each control group of this process (version 1 or 2) has left of its limit. Files that the
    kernel would drop from its cache count as free."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            mount, limit, usage, cached = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            limit, usage, cached = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        inner = mount / path.lstrip("/")  # in a container it may name a place outside: the mount is the group
        for group in (inner, *inner.parents):
            if group.is_relative_to(mount):
                yield _left(group / limit, group / usage, group / "memory.stat", cached)


def _left(limit: Path, usage: Path, stat: Path, cached: str) -> int | None:
    """Returns the bytes that a group has left, or None without a limit."""
    try:
        return max(0, int(limit.read_text()) - int(usage.read_text()) + _fields(stat).get(cached, 0))
    except (OSError, ValueError):  # "max"
        return None


def _fields(file: Path) -> dict[str, int]:
    """Returns the first word of each line -> the number after it. It is empty if the file cannot be read."""
    try:
        rows = [line.split() for line in file.read_text().splitlines()]
        return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}
    except (OSError, ValueError):
        return {}
