"""Reads the rows of a job that many workers share, cuts them into shards, and finds the rows that a folder has.

A row is a request of OpenAI's batch format, or one as jllm.generate reads it. Its id covers everything that decides its
result. So every worker gives the same row the same name. This module needs no JAX.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from jllm.cli.jsonl import Job, jobs_of, read_lines, settings_of
from jllm.engine.request import SamplingParams
from jllm.errors import ConfigError, InputFileError, OutputError, how_to_install
from jllm.files.run_identity import digest
from jllm.serve.batch_file import Task, tasks_of

SHARDS = "part-*.jsonl"


@dataclass(frozen=True)
class Row:
    id: str
    asked: Job | Task

    @property
    def seed(self) -> int:
        """Returns the seed of a row that has none. A row that runs twice gets the same seed."""
        return int(self.id.rpartition("_")[2][:8], 16)


@dataclass(frozen=True)
class Shard:
    """Holds rows that one worker answers together."""

    rows: tuple[Row, ...]

    @property
    def name(self) -> str:
        """Returns the name of its file, which is the same for the same rows."""
        return f"part-{digest(row.id.encode() for row in self.rows)[:16]}.jsonl"


def read_rows(path: Path, made_with: Mapping[str, object]) -> list[Job | Task]:
    """Returns the rows of a file of JSON lines (- is standard input) or of a .parquet file. Raises InputFileError, with
    the line or row, for a broken row and for a repeated id."""
    lines = list(_parquet(path) if path.suffix == ".parquet" else read_lines(path, "rows"))
    if "custom_id" in lines[0][2]:
        return list(tasks_of(lines))
    jobs = jobs_of(lines, SamplingParams(), made_with, open_ended=True)
    seen: set[str] = set()
    for job in jobs:
        name = json.dumps(job.given["id"]) if "id" in job.given else None
        if name in seen:
            raise InputFileError(f"{job.where}: id {name} occurs more than once")
        seen |= set() if name is None else {name}
    return list(jobs)


def _parquet(path: Path) -> Iterator[tuple[int, str, dict[str, object]]]:
    if find_spec("pyarrow") is None:
        raise ConfigError(f"a .parquet file needs pyarrow: {how_to_install('ray')}")
    import pyarrow
    from pyarrow import parquet

    try:
        rows = parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise InputFileError(f"cannot read {path}: {str(error).splitlines()[0]}") from None
    if not rows:
        raise InputFileError(f"{path} holds no rows")
    for index, row in enumerate(rows):
        yield index, f"{path}, row {index + 1}", {name: value for name, value in row.items() if value is not None}


def with_ids(asked: Sequence[Job | Task], run: Mapping[str, str], made_with: Mapping[str, object]) -> list[Row]:
    """Returns each row with its id. run: the model's identity and package versions; made_with: the options that were
    given."""

    def name(one: Job | Task) -> str:
        if isinstance(one, Task):
            return one.id({**made_with, **run})
        place = None if "id" in one.given else one.index
        parts = [place, one.given, settings_of(one), one.sampling.seed, one.sampling.n, dict(run)]
        return "row_" + digest([json.dumps(parts, sort_keys=True).encode()])

    return [Row(name(one), one) for one in asked]


def shards_of(rows: Sequence[Row], size: int) -> list[Shard]:
    return [Shard(tuple(rows[at : at + size])) for at in range(0, len(rows), size)]


def read_done(folder: Path, rows: Sequence[Row]) -> set[str]:
    """Returns the ids of rows whose results a folder has. Raises OutputError if a shard is damaged, belongs to other
    rows, or repeats a row."""
    known, where = {row.id for row in rows}, dict[str, Path]()
    for path in sorted(folder.glob(SHARDS)):
        here: set[str] = set()
        try:
            for line in path.read_bytes().splitlines():
                found = json.loads(line)
                here.add(str(found.get("row", found.get("id"))))
        except (OSError, ValueError, AttributeError) as error:
            raise OutputError(f"{path} is damaged ({error}): remove it, and its rows are done again") from None
        for id in here:
            if id not in known:
                what = "another input, model or version, or other numbers"
                raise OutputError(f"{path} has results of another run ({what}): choose another --output")
            if id in where:
                raise OutputError(f"{path} and {where[id].name} have results of the same row: remove one of them")
            where[id] = path
    return set(where)
