"""How much memory is free: from the device, from the operating system, and within the limits of control groups."""

import os
from pathlib import Path

import pytest

from jllm.parallel import memory
from jllm.parallel.memory import free_memory, host_memory

UNLIMITED = 9223372036854771712  # how version 1 says it


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 999 kB\nMemAvailable:    500 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def group(path: str, limit, used: int, cached: int, version: int = 2) -> dict[str, str]:
    """Files of a control group."""
    if version == 2:
        base = f"sys/fs/cgroup/{path}"
        names = {"memory.max": limit, "memory.current": used, "memory.stat": f"anon 7\ninactive_file {cached}"}
    else:
        base = f"sys/fs/cgroup/memory/{path}"
        stat = f"inactive_file 1\ntotal_inactive_file {cached}"
        names = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}
    return {f"{base}{name}": f"{value}\n" for name, value in names.items()}


NO_CGROUP = {}
V2 = {"proc/self/cgroup": "0::/user.slice/job\n"}
V1 = {"proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/docker/a1\n0::/\n"}


@pytest.mark.parametrize(
    ("files", "free"),
    [
        (NO_CGROUP, 500 * 1024),
        (V2 | group("user.slice/job/", "max", 10, 0), 500 * 1024),
        (V2 | group("user.slice/job/", 9000, 4000, 300), 5300),
        (V2 | group("user.slice/job/", 9000, 4000, 0) | group("user.slice/", 5000, 4500, 100), 600),  # of all in it
        (V2 | group("", 8000, 3000, 0), 5000),  # a container that sees its own group at the mount
        (V2 | group("user.slice/job/", 9000, 9500, 0), 0),
        (V2 | group("user.slice/job/", 10**9, 0, 0), 500 * 1024),
        (V1 | group("docker/a1/", 7000, 2000, 50, version=1), 5050),
        (V1 | group("docker/a1/", UNLIMITED, 2000, 0, version=1), 500 * 1024),
        (V1 | group("", 6000, 2000, 0, version=1), 4000),
    ],
)
def test_the_least_of_what_the_system_and_the_groups_have_left(tmp_path, files, free):
    assert host_memory(tree(tmp_path, files)) == free


def test_without_proc_the_machine_is_asked_for_its_pages(tmp_path, monkeypatch):
    sizes = {"SC_PHYS_PAGES": 100, "SC_PAGE_SIZE": 4096}  # as macOS has them
    monkeypatch.setattr(os, "sysconf_names", sizes)
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    assert host_memory(tmp_path) == 409_600
    monkeypatch.setattr(os, "sysconf_names", {})
    assert host_memory(tmp_path) is None


def test_a_device_says_itself_what_it_has_and_a_cpu_has_what_the_system_has(monkeypatch):
    found = free_memory()
    assert found is not None
    assert found > 1 << 20
    monkeypatch.setattr(memory, "host_memory", lambda: 1000)
    assert free_memory() == 900
    monkeypatch.setattr(memory, "host_memory", lambda: None)
    assert free_memory() is None
    monkeypatch.setattr(memory, "host_memory", lambda: 1000)
    monkeypatch.setattr(memory, "is_host", lambda device: False)
    assert free_memory() is None  # another device, which does not say
    monkeypatch.setattr(memory, "device_stats", lambda device: {"bytes_limit": 100, "bytes_in_use": 58})
    assert free_memory() == 42
    pieces = {"bytes_limit": 100, "bytes_in_use": 58, "pool_bytes": 90, "largest_free_block_bytes": 20}
    monkeypatch.setattr(memory, "device_stats", lambda device: pieces)
    assert free_memory() == 30  # 12 bytes are in holes
    pieces |= {"pool_bytes": 100, "largest_free_block_bytes": 0}
    assert free_memory() == 42  # of which no piece is named: there is one, since the pool has more than is in use
    pieces |= {"bytes_in_use": 0, "pool_bytes": 0, "largest_free_block_bytes": 0}
    assert free_memory() == 100  # nothing was taken of the device so far
