"""Makes requests for the simulator: only lengths, or real prompts with the lengths of real outputs."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.serving.workload import FORMAT
from jllm.errors import InputFileError

WORKLOADS = Path(__file__).parents[1] / "workloads"


@dataclass(frozen=True)
class Sample:
    """One request of a workload as a user would send it, with its output's length."""

    prompt: tuple[int, ...]  # token ids; all 1 if a workload only has lengths
    output: int  # tokens until it stops, the end token included
    stop: tuple[str, ...] = ()  # requested stop strings


@dataclass(frozen=True)
class Workload:
    """Samples of one kind."""

    name: str
    samples: tuple[Sample, ...]
    texts: bool  # the prompts are real, so predictors can read them

    @property
    def longest_output(self) -> int:
        return max(sample.output for sample in self.samples)


def read_workload(name: str) -> Workload:
    """Returns the workload workloads/<name>.json or .jsonl, or a file's. A file has {"requests": [[prompt, output],
    ..]} in tokens. Or it has lines {"prompt": [token ids] or their number, "output": tokens, "stop": [strings]}. Raises
    InputFileError."""
    found = [path for suffix in (".json", ".jsonl") if (path := WORKLOADS / f"{name}{suffix}").exists()]
    path = found[0] if found else Path(name)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputFileError(f"{path}: no such workload, or not readable: {error}") from None
    if path.suffix == ".jsonl":
        pairs = [_line(f"{path}:{i}", line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    else:
        try:
            pairs = [(p, o, []) for p, o in json.loads(text)["requests"]]
        except (ValueError, KeyError, TypeError) as error:
            raise InputFileError(f"{path}: not a workload {FORMAT}: {error}") from None
    if not pairs:
        raise InputFileError(f"{path}: a workload needs requests")
    samples = tuple(_sample(f"{path}: request {i}", *pair) for i, pair in enumerate(pairs, 1))
    return Workload(path.stem, samples, all(isinstance(prompt, list) for prompt, *_ in pairs))


def _line(where: str, line: str) -> tuple[Any, Any, Any]:
    try:
        document = json.loads(line)
        return document["prompt"], document["output"], document.get("stop", [])
    except (ValueError, KeyError, TypeError):
        raise InputFileError(f'{where}: expected {{"prompt": [ids] or a number, "output": tokens}}') from None


def _sample(where: str, prompt: Any, output: Any, stop: Any) -> Sample:
    ids = [1] * prompt if isinstance(prompt, int) and not isinstance(prompt, bool) else prompt
    good = isinstance(ids, list) and ids and all(isinstance(i, int) and i >= 0 for i in ids)
    if not good or not isinstance(output, int) or output < 1:
        raise InputFileError(f"{where}: needs at least 1 prompt token and 1 output token")
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise InputFileError(f"{where}: stop must be a list of strings, not {stop!r}")
    return Sample(tuple(ids), output, tuple(stop))


@dataclass(frozen=True)
class Arrival:
    """A sample that is sent at a time, in seconds from the start."""

    sample: Sample
    at: float


def arrivals(samples: Sequence[Sample], count: int | None, rate: float | None, seed: int) -> Iterator[Arrival]:
    """Yields the workload once (count None), or `count` draws from it. They come all at once, or `rate` per second by a
    Poisson process. The same seed gives the same arrivals."""
    rng = np.random.default_rng(seed)
    at = 0.0
    for i in range(len(samples) if count is None else count):
        sample = samples[i if count is None else int(rng.integers(len(samples)))]
        yield Arrival(sample, at)
        if rate is not None:
            at += float(rng.exponential(1 / rate))
