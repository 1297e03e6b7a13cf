"""Reads input lines, writes result lines, and resumes interrupted runs."""

import codecs
import contextlib
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jllm.engine.request import Completion, SamplingParams, bias_by_id
from jllm.errors import InputFileError, JllmError, OutputError
from jllm.files.messages import check_messages
from jllm.files.run_identity import differing
from jllm.guides.guide import Guide
from jllm.guides.guide_schema import read_float
from pallas_kernels.one_writer import open_alone

STDIN = Path("-")
NAMES = ("model", "quantize")  # settings by the user's names
CONTENTS = ("config", "weights", "tokenizer", "scheme")  # contents of the model, which decide the results
GIVEN = ("id", "prompt", "messages", "inputs")  # keys of an input line beside sampling parameters; results repeat them
FIELDS = tuple(SamplingParams.__dataclass_fields__)
RECORD_START = b'{"index": '


@dataclass(frozen=True)
class Job:
    """Holds one request: a prompt of the command line or a line of an input file."""

    index: int  # prompt or input line, from 0
    given: dict[str, Any]  # the line's GIVEN, unchanged
    sampling: SamplingParams
    where: str = ""  # its place, for errors
    made_with: Mapping[str, object] = field(default_factory=dict)  # the given options: model, scheme, formats
    run: Mapping[str, str] = field(default_factory=dict)  # jllm.files.run_identity: the contents of these
    open_ended: bool = False  # without max_new_tokens: use the default, or what fits


@dataclass(frozen=True)
class Done:
    """Holds the results in an existing output file."""

    seeds: dict[tuple[int, int], int]  # seed of each result, by index and sample
    size: int  # bytes up to the end of the last whole line

    def missing(self, jobs: Sequence[Job]) -> list[Job]:
        """Returns the jobs that lack a result. A job with some results continues with their seed."""
        todo = []
        for job in jobs:
            seeds = [self.seeds.get((job.index, sample)) for sample in range(job.sampling.n)]
            if None in seeds:
                used = next((seed for seed in seeds if seed is not None), job.sampling.seed)
                todo.append(replace(job, sampling=replace(job.sampling, seed=used)))
        return todo


def nth_seed(seed: int | None, index: int) -> int | None:
    """Returns the seed of prompt number `index`, if `seed` was given for all."""
    return None if seed is None else (seed + index) % 2**32


def read_jobs(
    path: Path,
    base: SamplingParams,
    made_with: Mapping[str, object] = MappingProxyType({}),
    open_ended: bool = False,
) -> list[Job]:
    """Returns the requests of an input file, or of standard input (-). Blank lines count, but are skipped. `base` has
    the command line's sampling parameters; a line's own override them. Each job gets `made_with`, and `open_ended` if
    its line has no max_new_tokens. Raises InputFileError, with the line's number, for a broken line."""
    return jobs_of(read_lines(path, "prompts"), base, made_with, open_ended)


def jobs_of(
    lines: Iterable[tuple[int, str, dict[str, object]]],
    base: SamplingParams,
    made_with: Mapping[str, object],
    open_ended: bool = False,
) -> list[Job]:
    """Returns the requests of lines as read_lines yields them. See read_jobs."""

    def job(index: int, where: str, raw: dict[str, object]) -> Job:
        free = open_ended and "max_new_tokens" not in raw
        return replace(_job(raw, index, base, where), made_with=made_with, open_ended=free)

    return [job(*line) for line in lines]


def read_lines(path: Path, what: str) -> Iterator[tuple[int, str, dict[str, object]]]:
    """Yields the objects of a file of JSON lines, or of standard input (-). Each comes with its index, and its place
    for errors. `what` names the objects. Blank lines count, but are skipped. Raises InputFileError for a broken line,
    or for no lines."""
    empty, name = True, "standard input" if path == STDIN else path
    if path == STDIN and sys.stdin is None:
        raise InputFileError("standard input is closed: --input - reads JSON lines from it")
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if path == STDIN else path.open("rb") as file:
            for index, line in enumerate(file):
                line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    where = f"{name}, line {index + 1}"
                    empty = False
                    yield index, where, _parse(line, where)
    except OSError as error:
        raise InputFileError(f"cannot read {name}: {error.strerror}") from None
    if empty:
        raise InputFileError(f"{name} holds no {what}: give one JSON object a line")


def _job(raw: dict[str, object], index: int, base: SamplingParams, where: str) -> Job:
    unknown = [key for key in raw if key not in GIVEN and key not in FIELDS]
    if unknown:
        raise InputFileError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join((*GIVEN, *FIELDS))}")
    if ("prompt" in raw) == ("messages" in raw):
        raise InputFileError(f'{where}: needs either "prompt" or "messages"')
    prompt = raw.get("prompt", "")
    ids = isinstance(prompt, list) and all(isinstance(id, int) and not isinstance(id, bool) for id in prompt)
    if not isinstance(prompt, str) and not ids:
        raise InputFileError(f'{where}: "prompt" must be text or a list of token ids, not {_short(prompt)}')
    if not isinstance(raw.get("inputs", ""), str):
        raise InputFileError(f'{where}: "inputs" must be the name of a file in --inputs, not {_short(raw["inputs"])}')
    try:
        if "messages" in raw:
            check_messages(raw["messages"])
        fields = {name: _field(name, raw[name]) for name in FIELDS if name in raw}
        sampling = replace(base, **{"seed": nth_seed(base.seed, index), **fields})
    except JllmError as error:
        raise InputFileError(f"{where}: {error}") from None
    given = {key: raw[key] for key in GIVEN if key in raw}
    try:
        json.dumps(given, allow_nan=False)  # results repeat it as JSON
    except ValueError:
        raise InputFileError(f"{where}: {' or '.join(given)} holds NaN or Infinity, which JSON does not know") from None
    return Job(index, given, sampling, where)


def _parse(line: bytes, where: str) -> dict[str, object]:
    try:
        raw = json.loads(line, parse_float=read_float, object_pairs_hook=_unique)
    except InputFileError as error:
        raise InputFileError(f"{where}: {error}") from None
    except (ValueError, RecursionError) as error:
        problem = getattr(error, "msg", "the text is not UTF-8" if isinstance(error, UnicodeError) else str(error))
        column = f" (column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
        raise InputFileError(f"{where}: not JSON: {problem}{column}") from None
    if not isinstance(raw, dict):
        raise InputFileError(f"{where}: must be a JSON object, not {_short(raw)}")
    return raw


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise InputFileError(f"key {twice!r} occurs more than once")
    return made


def _field(name: str, value: Any) -> Any:
    """Returns a sampling parameter from JSON. It is checked alone, so that an error names it."""
    boolean = isinstance(getattr(SamplingParams, name), bool)
    if boolean != isinstance(value, bool):
        raise InputFileError(f"{name} must {'' if boolean else 'not '}be true or false: {_short(value)}")
    try:
        if name == "guide" and value is not None:
            value = Guide.parse(value)
        if name == "logit_bias" and isinstance(value, dict):
            value = bias_by_id(value)
        SamplingParams(**{"logprobs": 0, name: value})  # without logprobs, logprobs_mode has no meaning
    except JllmError:
        raise
    except (TypeError, ValueError):
        raise InputFileError(f"{name} has a value of a wrong type: {_short(value)}") from None
    return value


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def record(job: Job, sample: int, completion: Completion) -> dict[str, Any]:
    """Returns the JSON object of a result. A log-probability that is not finite becomes null. `versions` has pairs: a
    version of the weights, and how many tokens in a row it drew."""
    c = completion
    made: dict[str, object] = {"index": job.index, **job.given}
    if job.sampling.n > 1:
        made["sample"] = sample
    made |= {"text": c.text, "token_ids": list(c.token_ids), "finish_reason": c.finish_reason, "seed": c.seed}
    made["settings"] = settings_of(job)
    if job.run:
        made["run"] = dict(job.run)
    if c.logprobs is not None:
        made["logprobs"] = [
            {"token_id": x.token_id, "logprob": _finite(x.logprob), "top": [[id, _finite(p)] for id, p in x.top]}
            for x in c.logprobs
        ]
    if c.prompt_logprobs is not None:
        made["prompt_logprobs"] = [_finite(x) for x in c.prompt_logprobs]
    if c.versions:
        made["versions"] = [[version, len(list(tokens))] for version, tokens in groupby(c.versions)]
    return made | {"timings": asdict(c.timings)}


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


def settings_of(job: Job) -> dict[str, object]:
    """Returns what decides a job's results, beside its prompt and seed, in JSON's types. It has the model, its options,
    and sampling parameters that differ from the defaults. It lacks n, since samples may be added later."""
    default = SamplingParams()
    made = dict(job.made_with)
    for name in FIELDS:
        value = getattr(job.sampling, name)
        if name in ("n", "seed") or value == getattr(default, name):
            continue
        if name == "logit_bias":
            value = {str(id): _finite(bias) for id, bias in value.items()}  # null: banned
        if isinstance(value, Guide):
            value = value.as_json()
        made[name] = list(value) if isinstance(value, tuple) else value
    return made


def to_json(result: dict[str, object]) -> str:
    return json.dumps(result, ensure_ascii=False, allow_nan=False) + "\n"


def read_results(path: Path, jobs: Sequence[Job]) -> Done:
    """Returns the results of an interrupted run in its output file, if there is one. An incomplete last line does not
    count. Raises OutputError, and leaves the file as it is, if it holds anything but these jobs' results."""
    seeds: dict[tuple[int, int], int] = {}
    size = 0
    by_index = {job.index: job for job in jobs}
    for where, line in written_lines(path, RECORD_START):
        key, seed = _read_result(line, by_index, where)
        if key in seeds:
            raise OutputError(f"{where}: a second result for index {key[0]}; {OTHER_FILE}")
        seeds[key] = seed
        size += len(line)
    return Done(seeds, size)


def written_lines(path: Path, start: bytes) -> Iterator[tuple[str, bytes]]:
    """Yields the lines of an output file, each with its place for errors. An incomplete last line is left out, if it
    begins like a result, with `start`. Raises OutputError."""
    if not path.is_file():  # does not exist yet, or is a pipe or device
        return
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n") and (line.startswith(start) or start.startswith(line)):
                    return
                yield f"{path}, line {number}", line
    except OSError as error:
        raise OutputError(f"cannot read {path} to resume it: {error.strerror}") from None


OTHER_FILE = "it is not an output of this input, and is not changed: choose another --output"


def _read_result(line: bytes, jobs: dict[int, Job], where: str) -> tuple[tuple[int, int], int]:
    try:
        raw = json.loads(line)
        index, sample, seed = raw["index"], raw.get("sample", 0), raw["seed"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise OutputError(f"{where}: not a result; {OTHER_FILE}") from None
    if any(type(number) is not int for number in (index, sample, seed)) or not 0 <= seed < 2**32:
        raise OutputError(f"{where}: not a result: its index, sample or seed is invalid; {OTHER_FILE}")
    job = jobs.get(index)
    if job is None:
        raise OutputError(f"{where}: index {index} is not a prompt of the input; {OTHER_FILE}")
    if sample not in range(job.sampling.n):
        raise OutputError(f"{where}: sample {sample} is not one of {job.sampling.n}; {OTHER_FILE}")
    for key in GIVEN:
        if (key in raw, raw.get(key)) != (key in job.given, job.given.get(key)):
            raise OutputError(f"{where}: its {key} is not that of {job.where}; {OTHER_FILE}")
    settings, run = raw.get("settings"), raw.get("run", {})
    if not isinstance(settings, dict) or not isinstance(run, dict) or (job.run and not run):
        raise OutputError(f"{where}: lacks the settings and weights it was made with; {OTHER_FILE}")
    there, here = {**settings, **run}, {**settings_of(job), **job.run}
    if job.sampling.seed is not None:  # a random seed may differ
        there, here = there | {"seed": seed}, here | {"seed": job.sampling.seed}
    keys = differing(there, here)
    if job.run and not set(keys) & set(CONTENTS):
        keys = [key for key in keys if key not in NAMES]
    if keys:
        then, now = (_short(made[keys[0]]) if keys[0] in made else "the default" for made in (there, here))
        raise OutputError(
            f"{where}: was made with {keys[0]} {then}, and now it is {now}; choose another --output, or remove this one"
        )
    return (index, sample), seed


class ResultsFile:
    """Is an output file that only this process writes. It adds whole lines, each at once and unbuffered. Raises
    OutputError on failure; the file then ends with the last whole line. A new file that stays empty is removed."""

    def __init__(self, path: Path):
        if not path.absolute().parent.is_dir():
            raise OutputError(f"cannot write {path}: there is no directory {path.parent}")
        self._path, self._made = path, not path.exists()
        with self._guard():
            file = open_alone(path)
        if file is None:
            raise OutputError(f"another process is writing {path}: wait for its end, or choose another --output")
        self._file, self._size = file, os.fstat(file.fileno()).st_size

    def begin(self, size: int) -> None:
        """Truncates the file to this many bytes."""
        self._size = size
        if self._path.is_file():
            with self._guard():
                self._file.truncate(size)

    def write(self, text: str) -> None:
        # Only lone surrogates cannot be encoded; backslashreplace turns them into JSON escapes.
        line = text.encode("utf-8", "backslashreplace")
        with self._guard():
            rest = memoryview(line)
            while rest:
                rest = rest[self._file.write(rest) :]
        self._size += len(line)

    def close(self) -> None:
        with self._guard():
            if self._made and not self._size:
                self._path.unlink(missing_ok=True)
            self._file.close()

    @contextlib.contextmanager
    def _guard(self):
        try:
            yield
        except OSError as error:
            with contextlib.suppress(OSError, AttributeError):
                os.ftruncate(self._file.fileno(), self._size)  # a full disk may have taken part of the line
            reason = error.strerror or error
            raise OutputError(f"cannot write {self._path}: {reason}; what was written before is kept") from None
