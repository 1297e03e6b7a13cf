"""Guides tried in a process of their own before the engine compiles them.

llguidance is native code, which recurses as deep as a guide nests, and may take any time and memory. What kills a
process here is an error of the guide, and the engine's own process goes on. Such a process imports llguidance and no
JAX. It begins with the first guide and stays, and another takes its place after it was killed.

A trial does what the engine will do: it compiles the guide, and draws some tokens by its masks.
"""

import contextlib
import os
import pickle
import queue
import random
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from subprocess import DEVNULL, PIPE
from typing import Any, NamedTuple

from jllm.errors import RequestError
from jllm.guides.grammars import make_matcher, one_line
from jllm.guides.guide import Guide

MOST = 2  # processes: a small guide does not wait for one large one
SECONDS = 5.0  # of processor time that compiling a guide may take, and as many to feed it tokens
MASK_SECONDS = 1.0  # of processor time for the first mask, which a step waits for
PATIENCE = 60.0  # seconds for a trial, on a machine that does much else, and for a process to begin
MEMORY = 1 << 30  # bytes that a process may take beside its tokenizer
STACK = 2 << 20  # bytes of the smallest stack that guides run on: that of llguidance's own threads
WALKS, STEPS = 3, 32  # texts that a trial draws, and tokens of each
FIRST_MASK = "its first mask"
NO_WAY_ON = "NoExtension"  # begins llguidance's errors where no byte may follow
COMMAND = (sys.executable, "-P", "-c", f"from {__name__} import main; main()")
READING = "reading it"  # the stage before a process tells of one


class Words(NamedTuple):
    """A vocabulary: the bytes of each id, none for special tokens."""

    tokens: Sequence[bytes]
    eos_ids: Sequence[int]


class Job(NamedTuple):
    """A guide to be tried, and within what."""

    guide: Guide
    seconds: float
    mask_seconds: float
    stack: int  # bytes


class Verdict(NamedTuple):
    """Holds the outcome of a trial."""

    problem: str | None  # None: the guide passed
    lasting: bool = True  # False: another trial of the same guide may end otherwise


class Trials:
    """The processes that try guides of one vocabulary. For any number of threads."""

    def __init__(self, words: Words, command: Sequence[str] = COMMAND):
        self._words, self._command = words, command
        self._idle: queue.LifoQueue[subprocess.Popen | None] = queue.LifoQueue()
        self._all = set[subprocess.Popen]()
        for _ in range(MOST):
            self._idle.put(None)
        weakref.finalize(self, _end_all, self._all)

    def begin(self) -> None:
        """Has a process ready for the first guide. Raises RequestError where there can be none."""
        child = self._idle.get()
        try:
            child = child or self._begin()
        finally:
            self._idle.put(child)

    def verdict(self, guide: Guide) -> Verdict:
        """Tries a guide. Raises RequestError where no process can begin."""
        child, job = self._idle.get(), Job(guide, SECONDS, MASK_SECONDS, _stack())
        try:
            for again in (True, False):
                child = child or self._begin()
                stage, found, late = _ask(child, job)
                if found is not None:
                    return found
                status, child = self._end(child), None
                if not (again and stage == READING and not late):  # it may have been ended while it waited
                    break
            lasting = not late and status != -signal.SIGKILL  # which is not what the guide does
            return Verdict(f"the guide ({guide.kind}) is refused: {stage} {_why(status, late)}", lasting)
        except BaseException:  # Ctrl-C, say: its answer to this guide must not be taken for the next one's
            if child is not None:
                self._end(child)
                child = None
            raise
        finally:
            self._idle.put(child)

    def _begin(self) -> subprocess.Popen:
        path = os.pathsep.join(place or os.getcwd() for place in sys.path)
        more: dict[str, Any] = {"stdin": PIPE, "stdout": PIPE, "stderr": DEVNULL}
        more["env"] = os.environ | {"PYTHONPATH": path}
        try:
            # In a session of its own: Ctrl+C is for the engine's process, at whose end this one ends too.
            child = subprocess.Popen(self._command, start_new_session=True, **more)
        except OSError as error:
            raise RequestError(f"a guide needs a process to be tried in, which cannot begin: {error}") from None
        self._all.add(child)
        try:
            begun = _ask(child, (self._words, MEMORY))[1]
        except BaseException:
            self._end(child)
            raise
        if begun is None:
            status = self._end(child)
            raise RequestError(f"a guide needs a process to be tried in, which ended as it began (status {status})")
        return child

    def _end(self, child: subprocess.Popen) -> int:
        """Ends a process, if it has not, and returns how it ended."""
        self._all.discard(child)
        return _end_one(child)


def _ask(child: subprocess.Popen, job: Any) -> tuple[str, Verdict | None, bool]:
    """Returns what a process was doing last, its verdict, None where it ended before, and whether it had to be
    killed."""
    assert child.stdin is not None
    assert child.stdout is not None
    stage, late = READING, threading.Event()

    def kill() -> None:
        late.set()
        child.kill()

    timer = threading.Timer(PATIENCE, kill)
    timer.start()
    try:
        child.stdin.write(pickle.dumps(job))
        child.stdin.flush()
        while not isinstance(said := pickle.load(child.stdout), Verdict):
            stage = said
        return stage, said, False
    except (OSError, EOFError, ValueError, pickle.UnpicklingError):
        return stage, None, late.is_set()
    finally:
        timer.cancel()


def _why(status: int, late: bool) -> str:
    """Says from its status why a process ended."""
    if late:
        return f"took more than {PATIENCE:g} s"
    if status == -signal.SIGPROF:
        return "took too much processor time"
    if status in (-signal.SIGSEGV, -signal.SIGBUS):
        return "went deeper than a stack holds: it nests, or refers, too deeply"
    if status in (-signal.SIGABRT, -signal.SIGKILL):
        return f"took more than {MEMORY >> 20} MiB of memory, or failed"
    return f"failed (status {status})"


def _stack() -> int:
    """Returns half of the smallest stack that guides run on in this process: the rest is for their callers."""
    default = resource.getrlimit(resource.RLIMIT_STACK)[0]
    own = threading.stack_size() or (default if default > 0 else STACK)
    return max(min(STACK, own) // 2, 1 << 16)


def _end_one(child: subprocess.Popen) -> int:
    child.kill()
    for pipe in (child.stdin, child.stdout):
        with contextlib.suppress(OSError):  # what it never read
            if pipe is not None:
                pipe.close()
    return child.wait()


def _end_all(children: set[subprocess.Popen]) -> None:
    for child in children:
        _end_one(child)


# In the process that tries them


def main() -> None:
    """Answers jobs of standard input until that ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def tell(what: str | Verdict) -> None:
        answers.write(pickle.dumps(what))
        answers.flush()

    with contextlib.suppress(OSError):
        os.nice(5)  # steps that run go first
    with contextlib.suppress(EOFError, OSError):  # whose engine is gone
        words, memory = pickle.load(sys.stdin.buffer)
        tokenizer = _tokenizer(words)
        _limit_memory(memory)
        tell(Verdict(None))
        while True:
            tell(_timed(pickle.load(sys.stdin.buffer), partial(trial, tokenizer, words), tell))


Begin = Callable[[str], None]  # of a stage


def _timed(job: Job, trial: Callable[[Guide, Begin], Verdict], tell: Begin) -> Verdict:
    """Runs a trial, each stage of which has its time: a signal ends the process then, whatever native code does."""

    def begin(stage: str) -> None:
        signal.setitimer(signal.ITIMER_PROF, job.mask_seconds if stage == FIRST_MASK else job.seconds)
        tell(stage)

    found: list[Verdict] = []
    threading.stack_size(job.stack)
    thread = threading.Thread(target=lambda: found.append(trial(job.guide, begin)))
    thread.start()
    thread.join()
    signal.setitimer(signal.ITIMER_PROF, 0)
    return found[0]


def trial(tokenizer: Any, words: Words, guide: Guide, begin: Begin) -> Verdict:
    """Does what an engine does with a guide, on this thread, and tells each stage as it begins."""
    try:
        begin("compiling it")
        matcher = make_matcher(tokenizer, guide)
        begin(FIRST_MASK)
        first = matcher.deep_copy()
        if not any(first.compute_bitmask()) or first.get_error().startswith(NO_WAY_ON):
            return Verdict(f"the guide ({guide.kind}) allows no text that the model's tokens can write")
        begin("feeding it tokens")
        for walk in range(WALKS):
            if problem := _walk(matcher.deep_copy(), words.eos_ids, random.Random(walk)):
                return Verdict(f"the guide ({guide.kind}) is too complex: {problem}")
        return Verdict(None)
    except RequestError as error:
        return Verdict(str(error))
    except BaseException as error:  # a panic of native code is no Exception
        return Verdict(f"the guide ({guide.kind}) is refused: {type(error).__name__}: {one_line(str(error))}")


def _walk(state: Any, eos_ids: Sequence[int], rng: random.Random) -> str | None:
    """Draws some tokens that the masks allow, and returns what went wrong. That no token goes on is nothing wrong: the
    model's tokens may not write what the guide wants next."""
    for _ in range(STEPS):
        token = _one_of(state.compute_bitmask(), eos_ids, rng)
        if token is None or state.is_error() or not state.consume_token(token):
            break
        state.compute_ff_tokens()
    problem = one_line(state.get_error())
    return None if problem.startswith(NO_WAY_ON) else problem or None


def _one_of(mask: bytes, eos_ids: Sequence[int], rng: random.Random) -> int | None:
    """Returns a token that a mask allows, but for those that end the text."""
    bits = bytearray(mask)
    for eos in eos_ids:
        bits[eos // 8] &= ~(1 << eos % 8)
    start = rng.randrange(len(bits))
    for begin, part in ((start, bits[start:]), (0, bits)):
        if rest := part.lstrip(b"\0"):
            at = begin + len(part) - len(rest)
            return 8 * at + rng.choice([bit for bit in range(8) if rest[0] >> bit & 1])
    return None


def _tokenizer(words: Words) -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Greedy(words)), n_vocab=len(words.tokens), eos_token=list(words.eos_ids))


class _Greedy:
    """A tokenizer as llguidance wants it, which takes the longest token each time: trials need no better one."""

    bos_token_id = None
    special_token_ids: Sequence[int] = ()

    def __init__(self, words: Words):
        self.tokens, self.eos_token_id = words.tokens, words.eos_ids[0]
        self._ids = {token: id for id, token in enumerate(words.tokens) if token}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str | bytes) -> list[int]:
        data, ids = text.encode() if isinstance(text, str) else text, []
        while data:
            sizes = (size for size in range(min(self._longest, len(data)), 0, -1) if data[:size] in self._ids)
            size = next(sizes, 0)
            ids += [self._ids[data[:size]]] if size else []
            data = data[size or 1 :]
        return ids


def _limit_memory(more: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # a system that tells no sizes has no such limit
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + more, now + more))
