"""Shows completions on a screen in the order of prompts, or writes them to a file in the order they end."""

import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Protocol

from tqdm import tqdm

from jllm.cli.display import InOrder, Speed, in_colour, write_stdout
from jllm.cli.jsonl import Done, Job, ResultsFile, record, to_json
from jllm.engine.request import Event
from jllm.errors import counted

PROMPT, TITLE, PLAIN = "\x1b[36m", "\x1b[1m", "\x1b[0m"  # cyan, bold


class Sink[J](Protocol):
    def take(self, job: J, event: Event) -> None:
        """Takes an event of a job."""

    def close(self) -> None:
        """Ends the output, after success or failure."""

    def notes(self) -> Sequence[str]:
        """Returns notes for the summary."""


class Screen:
    """Prints the command line's completions on standard output: as text while they grow, or as JSON objects."""

    def __init__(self, args: Namespace, jobs: Sequence[Job]):
        self._json, self._chat = args.json, args.chat
        self._prompts, self._samples = [_shown(job.given["prompt"]) for job in jobs], args.n
        self._terminal, self._colour = sys.stdout.isatty(), in_colour(sys.stdout)
        keys = [(job.index, sample) for job in jobs for sample in range(args.n)]
        self._out = InOrder(keys, self._heading, "" if args.json else "\n", write_stdout)
        self._out.show()

    def take(self, job: Job, event: Event) -> None:
        text, completion = event.text, event.completion
        if self._json:
            text = to_json(record(job, event.sample, completion)) if completion else ""
        self._out.add((job.index, event.sample), text, last=completion is not None)

    def close(self) -> None:
        self._out.show_rest()

    def notes(self) -> Sequence[str]:
        return ()

    def _heading(self, key: tuple[int, int]) -> str:
        """Returns the heading of a completion: its place among several, and its prompt on a terminal."""
        if self._json:
            return ""
        places = [("prompt", key[0], len(self._prompts)), ("sample", key[1], self._samples)]
        title = ", ".join(f"{name} {i + 1} of {count}" for name, i, count in places if count > 1)
        heading = self._paint(TITLE, f"== {title} ==") + "\n" if title else ""
        if self._terminal:
            heading += self._paint(PROMPT, self._prompts[key[0]]) + ("\n" if self._chat else "")
        return heading

    def _paint(self, colour: str, text: str) -> str:
        return f"{colour}{text}{PLAIN}" if self._colour else text


def _shown(prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else f"{' '.join(map(str, prompt))}\n"


def progress_bar(total: int, before: int, unit: str) -> tqdm:
    """Returns a bar on standard error that counts finished items, `before` of them from an earlier run."""
    terminal = sys.stderr.isatty()
    pace = 0.1 if terminal else 30.0  # seconds; a log file gets few lines, and none in a short run
    waits = {"mininterval": pace, "delay": 0 if terminal else pace}
    return tqdm(total=total, initial=before, unit=unit, leave=terminal, **waits)


class Lines:
    """Writes each result of an input file when it ends, and shows a progress bar."""

    def __init__(
        self, args: Namespace, todo: Sequence[Job], done: Done, total: int, speed: Speed, file: ResultsFile | None
    ):
        self._done, self._json, self._speed = done.seeds, args.json, speed
        self._left = {job.index: job.sampling.n for job in todo}
        self._total, self._before = total, total - len(todo)
        self._file = file
        if file is not None:
            file.begin(done.size)
        self._bar = progress_bar(total, self._before, " prompts")

    def take(self, job: Job, event: Event) -> None:
        if event.completion is None:
            return
        if (job.index, event.sample) not in self._done:
            line = to_json(record(job, event.sample, event.completion))
            if self._file is not None:
                self._file.write(line)
            if self._json:
                write_stdout(line)
        self._left[job.index] -= 1
        if not self._left[job.index]:
            del self._left[job.index]
            self._bar.set_postfix_str(f"{self._speed.rate:.0f} tokens/s", refresh=False)
            self._bar.update()

    def close(self) -> None:
        self._bar.close()

    def notes(self) -> Sequence[str]:
        done = f"{self._total - len(self._left)} of {counted(self._total, 'prompt')} done"
        return (done, f"{self._before} of them before") if self._before else (done,)
