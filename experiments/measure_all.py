"""Runs everything that needs a GPU: first the tests, side by side, then each measurement alone.

    python -m experiments.measure_all --seconds 540                 # what fits, the most important first
    python -m experiments.measure_all --only decode_attention C5    # only these; --list shows all
    python -m experiments.measure_all --only campaign triton        # by topic; without --only: campaign
    python -m experiments.measure_all --gpus 2                      # on two GPUs of one host, one command on each
    python -m experiments.measure_all --peers                       # peers on the same work, in the same files
    python -m experiments.measure_all --record                      # into experiments/results, to be committed

Commands share JAX's compile cache: `compiled` beside the results, or the folder in JAX_COMPILATION_CACHE_DIR. Each
command has its own log beside the results. It gets the seconds of its line, or the rest of --seconds. With less than
half of its seconds left, it does not start. Rows of a command that was cut off stay in its result file, which is marked
incomplete. Each of several GPUs has its share of the host's cores. Commands for several GPUs come last.
"""

import contextlib
import itertools
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from experiments.campaign import TOPICS, Command
from pallas_kernels.bench.command import Parser, add_results_folder, interruptible
from pallas_kernels.bench.numbers import positive, positive_number
from pallas_kernels.bench.peers import add_folder, asked

LEAST = 0.5  # least share of a command's seconds; with fewer left, it does not start
POLL = 0.1  # seconds between checks for a command's end


def compile_cache(results: Path) -> dict[str, str]:
    """Returns the variables that make JAX cache everything it compiles, even quick and small programs."""
    folder = results.absolute().parent / "compiled"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


@contextlib.contextmanager
def ending(stopped: threading.Event) -> Iterator[None]:
    """Sets `stopped` if an exception leaves the block. That ends all commands of other threads."""
    try:
        yield
    except BaseException:
        stopped.set()
        raise


def run(
    command: Command, results: Path, deadline: float, gpu: str | None = None, stopped: threading.Event | None = None
) -> str:
    """Runs a command on these GPUs, given as for CUDA_VISIBLE_DEVICES (None: all), and returns how it ended. Its child
    processes end with it. It ends early once `stopped` is set."""
    stopped = stopped or threading.Event()
    limit = min(command.seconds, deadline - time.monotonic())
    if stopped.is_set() or limit < LEAST * command.seconds:
        return "not begun" if stopped.is_set() else "no time left"
    log = results / "logs" / f"{command.name}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, *shlex.split(command.line.format(results=shlex.quote(str(results))))]
    start = time.monotonic()
    env = compile_cache(results) | os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
    with (
        log.open("w") as output,
        subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True) as process,
    ):
        try:
            while (status := process.poll()) is None and time.monotonic() < start + limit:
                if stopped.wait(POLL):
                    break
        finally:
            if process.poll() is None:
                end_session(process.pid)
    if status is None:
        return f"{'interrupted' if stopped.is_set() else 'cut off'} after {time.monotonic() - start:.0f} s"
    return f"{'ok' if status == 0 else f'exit status {status}'} after {time.monotonic() - start:.0f} s"


def end_session(leader: int) -> None:
    """Kills a process's group, and the groups that processes of its session started."""
    os.killpg(leader, signal.SIGKILL)
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(int(each.name)) == leader:
                os.kill(int(each.name), signal.SIGKILL)


def chosen(only: Sequence[str], peers: Path | None = None) -> list[Command]:
    """Returns the commands of these names and topics, in that order. Raises ValueError for an unknown name."""
    names = {command.name: (command,) for commands in TOPICS.values() for command in commands}
    if unknown := [name for name in only if name not in names | TOPICS]:
        known = f"topics: {', '.join(TOPICS)}; commands: {', '.join(sorted(names))}"
        raise ValueError(f"no command is called {', '.join(unknown)}; {known}")
    asked_for = dict.fromkeys(command for name in only for command in (names | TOPICS)[name])
    return [command.beside(peers) for command in asked_for]


def keep_to_share(gpu: int, of: int) -> None:
    """Binds this thread and its children to one GPU's share of the available cores."""
    cores = sorted(os.sched_getaffinity(0))
    if each := len(cores) // of:
        os.sched_setaffinity(0, cores[gpu * each : (gpu + 1) * each])


@interruptible
def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="commands or topics to run (default: campaign)")
    parser.add_argument("--seconds", type=positive_number, default=3600, help="seconds for all commands together")
    parser.add_argument(
        "--jobs", type=positive, default=8, help="number of untimed commands that run side by side on a GPU"
    )
    add_folder(parser, "peers of commands that have some")
    parser.add_argument("--gpus", type=positive, default=1, help="number of GPUs that share the commands")
    add_results_folder(parser)
    parser.add_argument("--list", action="store_true", help="only print the commands with their topics")
    args = parser.parse_args(argv)
    asked(parser, args)
    try:
        commands = chosen(args.only or (list(TOPICS) if args.list else ["campaign"]), args.peers)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.list:
        topics = {command.name: topic for topic, some in TOPICS.items() for command in some}
        for command in commands:
            about = f"{topics[command.name]:14} {command.name:20} {command.seconds:4} s"
            print(f"{about}  python {command.line.format(results=args.results)}")
        return 0
    if short := [command.name for command in commands if command.gpus > args.gpus]:
        parser.error(f"{', '.join(short)}: more GPUs are needed than --gpus {args.gpus}")
    deadline, stopped = time.monotonic() + args.seconds, threading.Event()
    outcomes: list[str] = []

    def one(command: Command, gpus: str | None) -> None:
        outcomes.append(run(command, args.results, deadline, gpus, stopped))
        print(f"{command.name}: {outcomes[-1]}", flush=True)

    def each_alone(gpu: int) -> None:
        """Runs waiting commands on one GPU, one after another."""
        keep_to_share(gpu, args.gpus)
        with contextlib.suppress(queue.Empty):
            while True:
                one(waiting.get_nowait(), names[gpu])

    names = [None] if args.gpus == 1 else [str(gpu) for gpu in range(args.gpus)]
    waiting: queue.SimpleQueue[Command] = queue.SimpleQueue()
    for command in commands:
        if command.timed and command.gpus == 1:
            waiting.put(command)
    with ThreadPoolExecutor(args.gpus * args.jobs) as threads, ending(stopped):
        list(threads.map(one, [command for command in commands if not command.timed], itertools.cycle(names)))
    with ThreadPoolExecutor(args.gpus) as threads, ending(stopped):
        list(threads.map(each_alone, range(args.gpus)))
    for command in commands:
        if command.gpus > 1:
            one(command, ",".join(map(str, range(command.gpus))))
    return 0 if all(outcome.startswith("ok") for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
