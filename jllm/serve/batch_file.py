"""Reads requests in OpenAI's batch format, and writes or resumes the file of answers."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jllm.cli.jsonl import OTHER_FILE, read_lines, written_lines
from jllm.errors import InputFileError, OutputError
from jllm.files.run_identity import digest
from jllm.serve.errors import HttpError, bad

if TYPE_CHECKING:
    from jllm.serve.requests import Served, Wanted

FIELDS = {"custom_id": str, "method": str, "url": str, "body": dict}  # all are required
ANSWER_START = b'{"id": "batch_req_'


@dataclass(frozen=True)
class Task:
    """Holds one line of the input."""

    custom_id: str
    method: str
    url: str
    body: Mapping[str, object]

    def id(self, run: Mapping[str, object]) -> str:
        """Returns the id of the answer. It depends on the request and on `run`, which has all else that decides the
        answer."""
        parts = ([self.custom_id, self.method, self.url, self.body], run)
        return "batch_req_" + digest(json.dumps(part, sort_keys=True).encode() for part in parts)


def read_tasks(path: Path) -> list[Task]:
    """Returns the requests of a file, or of standard input (-). A wrong body is left for its answer. Raises
    InputFileError, with the line's number, for a line that is no request."""
    return tasks_of(read_lines(path, "requests"))


def tasks_of(lines: Iterable[tuple[int, str, dict[str, Any]]]) -> list[Task]:
    """Returns the requests of lines as read_lines yields them. See read_tasks."""
    tasks: dict[str, Task] = {}
    for _, where, raw in lines:
        for name, kind in FIELDS.items():
            if not isinstance(raw.get(name), kind):
                raise InputFileError(f'{where}: needs "{name}", {"an object" if kind is dict else "a text"}')
        for name in raw:
            if name not in FIELDS:
                raise InputFileError(f"{where}: unknown key {name!r}; known are {', '.join(FIELDS)}")
        task = Task(**raw)
        if task.custom_id in tasks:
            raise InputFileError(f"{where}: custom_id {task.custom_id!r} occurs more than once")
        tasks[task.custom_id] = task
    return list(tasks.values())


def parse(task: Task, served: "Served") -> "Wanted":
    """Returns the checked request, as the server would read it. Raises JllmError."""
    from jllm.serve.requests import chat, completion  # JAX, which the caller may lack
    from jllm.serve.responses import response

    endpoints = {"/v1/completions": completion, "/v1/chat/completions": chat, "/v1/responses": response}
    if task.url not in endpoints:
        raise HttpError(404, f"no such path: {task.url}; {', '.join(endpoints)} are answered")
    if task.method != "POST":
        raise HttpError(405, f"{task.method} is not answered here; POST is")
    try:
        json.dumps(task.body, allow_nan=False)
    except ValueError:
        raise HttpError(400, "the body holds NaN or Infinity, which JSON does not know") from None
    body = {name: value for name, value in task.body.items() if value is not None}
    wanted = endpoints[task.url](body, served)
    if wanted.stream:
        raise bad("stream", "is not served in a batch")
    return wanted


def answer_line(task: Task, id: str, status: int, body: Mapping[str, object]) -> str:
    response = {"status_code": status, "request_id": id, "body": body}
    answer = {"id": id, "custom_id": task.custom_id, "response": response, "error": None}
    return json.dumps(answer, ensure_ascii=False, allow_nan=False) + "\n"


def read_answers(path: Path, tasks: Sequence[Task], ids: Sequence[str]) -> tuple[set[str], int]:
    """Returns which `ids` an interrupted run has answered, and the bytes up to the end of the last whole line. `ids`
    are the answer ids of `tasks`. Raises OutputError if the file holds anything else."""
    wanted = {task.custom_id: id for task, id in zip(tasks, ids, strict=True)}
    found: set[str] = set()
    size = 0
    for where, line in written_lines(path, ANSWER_START):
        try:
            raw = json.loads(line)
            id, name = raw["id"], raw["custom_id"]
            known = name in wanted
        except (ValueError, KeyError, TypeError, RecursionError):
            raise OutputError(f"{where}: not an answer; {OTHER_FILE}") from None
        if not known:
            raise OutputError(f"{where}: custom_id {name!r} is not of the input; {OTHER_FILE}")
        if id != wanted[name]:
            what = "its request, the model, its numbers, the device or a version was another"
            raise OutputError(f"{where}: custom_id {name!r} was answered by another run: {what}; {OTHER_FILE}")
        if id in found:
            raise OutputError(f"{where}: a second answer for custom_id {name!r}; {OTHER_FILE}")
        found.add(id)
        size += len(line)
    return found, size
