"""Measures times on a GPU from the profiler's record of what ran, without the host and its dispatch."""

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


def device_us(run: Callable[[], Any], repeats: int = 5) -> float:
    """Returns the microseconds that the device's kernels and copies take in one `run()`, gaps between them left out.
    `run` returns arrays; it is called once before, and `repeats` times for the mean."""
    jax.block_until_ready(run())
    return sum(microseconds for _, microseconds in kernels(run, repeats)) / repeats


def device_us_of_each(runs: Sequence[Callable[[], Any]], repeats: int = 3, pause_s: float = 0.01) -> list[float]:
    """Returns device_us of several at once, one recording for all. The pauses between them tell them apart."""

    def run_all() -> list[Any]:
        for run in runs:
            time.sleep(pause_s)
            jax.block_until_ready([run() for _ in range(repeats)])
        return []

    run_all()
    events, times = timeline(run_all), list[float]()
    end = -math.inf
    for event in events:
        if event.start_us - end > pause_s / 2 * 1e6:
            times.append(0.0)
        times[-1] += event.us / repeats
        end = event.start_us + event.us
    if len(times) != len(runs):
        raise RuntimeError(f"{len(runs)} runs left {len(times)} separate marks in the recording")
    return times


def kernels(run: Callable[[], Any], repeats: int = 1) -> list[tuple[str, float]]:
    """Returns name and microseconds of each kernel or copy that `repeats` calls of `run` put on the device, in
    order."""
    return [(event.name, event.us) for event in timeline(run, repeats)]


class Event(NamedTuple):
    """Describes one kernel or copy on the device."""

    name: str
    start_us: float
    us: float


def timeline(run: Callable[[], Any], repeats: int = 1, python: bool = True) -> list[Event]:
    """Returns what `repeats` calls of `run` put on the device, in order. Without `python` the profiler does not follow
    Python, which takes time. Raises RuntimeError where it saw nothing."""
    options = jax.profiler.ProfileOptions()
    if not python:
        options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory, profiler_options=options):
            jax.block_until_ready([run() for _ in range(repeats)][-1])
        (path,) = Path(directory).rglob("*.xplane.pb")
        planes = [plane for plane in jax.profiler.ProfileData.from_file(str(path)).planes if "GPU" in plane.name]
        lines = [line for plane in planes for line in plane.lines if "Stream" in line.name]
        found = [Event(event.name, event.start_ns / 1e3, event.duration_ns / 1e3) for x in lines for event in x.events]
    if not found:
        raise RuntimeError("the profiler recorded nothing on a GPU")
    return sorted(found, key=lambda event: event.start_us)


def copy_bandwidth(gib: int = 2) -> float:
    """Returns the bytes a second, read plus written, of an elementwise pass over an array that no cache holds."""
    x = jnp.zeros((gib << 30) // 4, jnp.float32)
    increment = jax.jit(lambda x: x + 1)
    return 2 * x.nbytes / (device_us(lambda: increment(x)) * 1e-6)
