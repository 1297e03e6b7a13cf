"""Writes each answer of a batch into the file once its request has ended."""

from collections.abc import Mapping, Sequence

from jllm.cli.jsonl import ResultsFile
from jllm.cli.sinks import progress_bar
from jllm.engine.request import Event
from jllm.serve.answers import Answer
from jllm.serve.batch_file import Task, answer_line
from jllm.serve.errors import HttpError
from jllm.serve.requests import Served, Wanted
from jllm.serve.responses import answer_to

PromptKey = tuple[str, int]  # the id of an answer, and the index of a prompt in its request


class Answers:
    """Is the Sink (jllm/cli/sinks.py) of a batch."""

    def __init__(
        self,
        file: ResultsFile,
        todo: Mapping[str, Task],
        wanted: Mapping[str, Wanted],
        served: Served,
        total: int,
    ):
        self._file, self._todo, self._wanted, self._served = file, todo, wanted, served
        self._begun: dict[str, Answer] = {}
        self._left: dict[str, int] = {}  # unfinished samples by answer
        self._failed: dict[str, HttpError] = {}
        self._total, self._before = total, total - len(todo)
        self._done = self._errors = 0
        self._bar = progress_bar(total, self._before, " requests")

    def take(self, job: PromptKey, event: Event) -> None:
        """Records the end of a sample. Writes the answer with the last sample of a request. Ignores other events."""
        id, place = job
        if event.completion is None:
            return
        if id not in self._begun:
            wanted = self._wanted[id]
            self._begun[id] = answer_to(wanted, self._served)
            self._left[id] = len(wanted.prompts) * wanted.sampling.n
        try:
            self._begun[id].add(event._replace(id=place))
        except HttpError as error:
            self._failed[id] = error
        self._left[id] -= 1
        if not self._left[id]:
            del self._left[id]
            answer, failed = self._begun.pop(id), self._failed.pop(id, None)
            self.end(id, *((200, answer.whole()) if failed is None else (failed.status, failed.body())))

    def end(self, id: str, status: int, body: Mapping[str, object]) -> None:
        """Writes the answer of a request."""
        self._file.write(answer_line(self._todo[id], id, status, body))
        self._done += 1
        self._errors += status != 200
        self._bar.update()

    def close(self) -> None:
        self._bar.close()

    def notes(self) -> Sequence[str]:
        done = [f"{self._before + self._done} of {self._total} requests answered"]
        done += [f"{self._before} of them before"] if self._before else []
        return [*done, f"{self._errors} with an error"] if self._errors else done
