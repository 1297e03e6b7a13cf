"""Tries guides in a separate process before the engine compiles them.

llguidance is native code. It recurses as deep as a guide nests, and may take any time and memory. If it kills the
process here, that is an error of the guide, and the engine's own process goes on. A trial process imports llguidance
and no JAX. It begins with the first guide and stays. If it was killed, another takes its place.

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
from typing import TYPE_CHECKING, Any, NamedTuple

from jllm.errors import RequestError
from jllm.guides.grammars import make_matcher, one_line
from jllm.guides.guide import Guide

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST = 2  # processes, so that a small guide does not wait for one large one
SECONDS = 5.0  # of processor time to compile a guide, and again to feed it tokens
MASK_SECONDS = 1.0  # of processor time for the first mask, since a step waits for it
PATIENCE = 60.0  # seconds for a trial on a busy machine, and for a process to begin
MEMORY = 1 << 30  # bytes that a process may take besides its tokenizer
STACK = 2 << 20  # bytes of the smallest stack that guides run on, in llguidance's own threads
WALKS, STEPS = 3, 32  # texts that a trial draws, and tokens in each
FIRST_MASK = "its first mask"
NO_WAY_ON = "NoExtension"  # llguidance's errors begin with it where no byte may follow
COMMAND = (sys.executable, "-P", "-c", f"from {__name__} import main; main()")
READING = "reading it"  # the stage before a process reports one


class Words(NamedTuple):
    """Holds a vocabulary: the bytes of each id, empty for special tokens."""

    tokens: Sequence[bytes]
    eos_ids: Sequence[int]


class Job(NamedTuple):
    """Holds a guide to try, and the limits of its trial."""

    guide: Guide
    seconds: float
    mask_seconds: float
    stack: int  # bytes


class Verdict(NamedTuple):
    """Holds the outcome of a trial."""

    problem: str | None  # None: the guide passed
    lasting: bool = True  # False: another trial of the same guide may end otherwise


class Trials:
    """Owns the processes that try guides of one vocabulary. Any number of threads may use it."""

    def __init__(self, words: Words, command: Sequence[str] = COMMAND):
        self._words, self._command = words, command
        self._idle: queue.LifoQueue[subprocess.Popen | None] = queue.LifoQueue()
        self._all = set[subprocess.Popen]()
        for _ in range(MOST):
            self._idle.put(None)
        weakref.finalize(self, _end_all, self._all)

    def begin(self) -> None:
        """Starts a process for the first guide. Raises RequestError if none can start."""
        child = self._idle.get()
        try:
            child = child or self._begin()
        finally:
            self._idle.put(child)

    def verdict(self, guide: Guide) -> Verdict:
        """Tries a guide and returns the outcome. Raises RequestError if no process can start."""
        child, job = self._idle.get(), Job(guide, SECONDS, MASK_SECONDS, _stack())
        try:
            for again in (True, False):
                child = child or self._begin()
                stage, found, late = _ask(child, job)
                if found is not None:
                    return found
                status, child = self._end(child), None
                if not (again and stage == READING and not late):  # something may have ended it while it waited
                    break
            lasting = not late and status != -signal.SIGKILL  # SIGKILL does not come from the guide
            return Verdict(f"the guide ({guide.kind}) is refused: {stage} {_why(status, late)}", lasting)
        except BaseException:  # such as Ctrl-C: a late answer must not count for the next guide
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
            # In a session of its own, since Ctrl+C is for the engine's process. It ends this one at its own end.
            child = subprocess.Popen(self._command, start_new_session=True, **more)
        except OSError as error:
            raise RequestError(f"a guide needs a trial process, which cannot start: {error}") from None
        self._all.add(child)
        try:
            begun = _ask(child, (self._words, MEMORY))[1]
        except BaseException:
            self._end(child)
            raise
        if begun is None:
            status = self._end(child)
            raise RequestError(f"a guide needs a trial process, which ended at its start (status {status})")
        return child

    def _end(self, child: subprocess.Popen) -> int:
        """Ends a process if it still runs, and returns its exit status."""
        self._all.discard(child)
        return _end_one(child)


def _ask(child: subprocess.Popen, job: object) -> tuple[str, Verdict | None, bool]:
    """Returns a process's last stage, its verdict, and whether it had to be killed. The verdict is None if the process
    ended first."""
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
    """Returns the reason why a process ended, from its status."""
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
    """Returns half of the smallest stack that guides run on in this process. The other half is for their callers."""
    default = resource.getrlimit(resource.RLIMIT_STACK)[0]
    own = threading.stack_size() or (default if default > 0 else STACK)
    return max(min(STACK, own) // 2, 1 << 16)


def _end_one(child: subprocess.Popen) -> int:
    child.kill()
    for pipe in (child.stdin, child.stdout):
        with contextlib.suppress(OSError):  # unread input
            if pipe is not None:
                pipe.close()
    return child.wait()


def _end_all(children: set[subprocess.Popen]) -> None:
    for child in children:
        _end_one(child)


# In the trial process


def main() -> None:
    """Answers jobs of standard input until it ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def tell(what: str | Verdict) -> None:
        answers.write(pickle.dumps(what))
        answers.flush()

    with contextlib.suppress(OSError):
        os.nice(5)  # steps that run go first
    with contextlib.suppress(EOFError, OSError):  # the engine is gone
        words, memory = pickle.load(sys.stdin.buffer)
        tokenizer = _tokenizer(words)
        _limit_memory(memory)
        tell(Verdict(None))
        while True:
            tell(_timed(pickle.load(sys.stdin.buffer), partial(trial, tokenizer, words), tell))


Begin = Callable[[str], None]  # called with each stage


def _timed(job: Job, trial: Callable[[Guide, Begin], Verdict], tell: Begin) -> Verdict:
    """Runs a trial with a time limit for each stage. At the limit a signal ends the process, whatever native code
    does."""

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


def trial(tokenizer: "LLTokenizer", words: Words, guide: Guide, begin: Begin) -> Verdict:
    """Tries a guide on this thread as an engine would use it, and reports each stage when it begins."""
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
    except BaseException as error:  # a panic of native code is not an Exception
        return Verdict(f"the guide ({guide.kind}) is refused: {type(error).__name__}: {one_line(str(error))}")


def _walk(state: "LLMatcher", eos_ids: Sequence[int], rng: random.Random) -> str | None:
    """Draws some tokens that the masks allow, and returns the problem or None. A dead end is not a problem: the model's
    tokens may not be able to write what the guide requires next."""
    for _ in range(STEPS):
        token = _one_of(state.compute_bitmask(), eos_ids, rng)
        if token is None or state.is_error() or not state.consume_token(token):
            break
        state.compute_ff_tokens()
    problem = one_line(state.get_error())
    return None if problem.startswith(NO_WAY_ON) else problem or None


def _one_of(mask: bytes, eos_ids: Sequence[int], rng: random.Random) -> int | None:
    """Returns a token that a mask allows, without the tokens that end the text, or None."""
    bits = bytearray(mask)
    for eos in eos_ids:
        bits[eos // 8] &= ~(1 << eos % 8)
    start = rng.randrange(len(bits))
    for begin, part in ((start, bits[start:]), (0, bits)):
        if rest := part.lstrip(b"\0"):
            at = begin + len(part) - len(rest)
            return 8 * at + rng.choice([bit for bit in range(8) if rest[0] >> bit & 1])
    return None


def _tokenizer(words: Words) -> "LLTokenizer":
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Greedy(words)), n_vocab=len(words.tokens), eos_token=list(words.eos_ids))


class _Greedy:
    """Is a tokenizer for llguidance that takes the longest token each time. Trials need no better one."""

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
    with contextlib.suppress(OSError, ValueError):  # without /proc there is no such limit
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + more, now + more))
