"""Everything that wants a GPU, in one go: the tests first, side by side, then each measurement alone.

    python -m experiments.measure_all --seconds 540                 # what fits, the most wanted first
    python -m experiments.measure_all --only decode_attention C5    # these alone; --list names all
    python -m experiments.measure_all --only campaign triton        # by topic; without --only: campaign
    python -m experiments.measure_all --gpus 2                      # on two GPUs of one host, one command on each
    python -m experiments.measure_all --gpus 4 --only two-gpus qps  # pairs beside others; what takes all is last
    python -m experiments.measure_all --peers                       # others' side of the same work in the same files
    python -m experiments.measure_all --record                      # into experiments/results, to be committed

What JAX compiles is kept for the commands after it and for another time: beside the results directory, in `compiled`,
unless JAX_COMPILATION_CACHE_DIR names another place. A command gets its own log beside the results, and at most the
seconds that its line says, or what is left of --seconds; where that is less than half of them it is not begun, and a
shorter one may be. One that fails or is cut off costs the others nothing: what it had measured is in its result file,
marked incomplete. Of several GPUs each has its share of the host's cores, so that what one command compiles takes no
time from the host's work of another.
"""

import contextlib
import itertools
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from experiments.campaign import TOPICS, Command
from pallas_kernels.bench.command import Parser, add_results_folder, interruptible
from pallas_kernels.bench.numbers import positive, positive_number
from pallas_kernels.bench.peers import add_folder, asked

LEAST = 0.5  # of a command's seconds: with fewer left, it is not begun
POLL = 0.1  # seconds between looks at whether a command has ended


def compile_cache(results: Path) -> dict[str, str]:
    """What makes JAX keep all that it compiles, quick and small programs too."""
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
    """Sets it where the block is left by an exception: what other threads run ends with it."""
    try:
        yield
    except BaseException:
        stopped.set()
        raise


def run(
    command: Command, results: Path, deadline: float, gpu: str | None = None, stopped: threading.Event | None = None
) -> str:
    """Runs it on this GPU (as CUDA_VISIBLE_DEVICES names it; None: whichever), its output in a log of its own; says how
    it ended. What it had started itself ends with it, and it ends once `stopped` is set."""
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
    """Its group, and the groups that processes of its session began."""
    os.killpg(leader, signal.SIGKILL)
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(int(each.name)) == leader:
                os.kill(int(each.name), signal.SIGKILL)


def chosen(only: Sequence[str], peers: Path | None = None) -> list[Command]:
    """The commands of these names and topics, in the order in which they are asked for. Raises ValueError for another
    name."""
    names = {command.name: (command,) for commands in TOPICS.values() for command in commands}
    if unknown := [name for name in only if name not in names | TOPICS]:
        known = f"topics: {', '.join(TOPICS)}; commands: {', '.join(sorted(names))}"
        raise ValueError(f"no command is called {', '.join(unknown)}; {known}")
    asked_for = dict.fromkeys(command for name in only for command in (names | TOPICS)[name])
    return [command.beside(peers) for command in asked_for]


def keep_to_share(gpus: range, of: int) -> None:
    """Binds this thread, and so what it starts, to the share that these of all GPUs have of the cores it may use."""
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // of
    if each:
        os.sched_setaffinity(0, cores[gpus.start * each : gpus.stop * each])


def next_one(waiting: Sequence[Command], free: Set[int], gpus: int) -> tuple[Command, range] | None:
    """The first command that has room on GPUs that are free, and these: a pair has neighbours, from an even one on. The
    first GPUs are kept for what takes several, as long as some of it waits."""
    most = max((command.gpus for command in waiting), default=1)
    for command in waiting:
        starts = range(most if command.gpus == 1 < most else 0, gpus - command.gpus + 1, command.gpus)
        for block in (range(start, start + command.gpus) for start in starts):
            if free >= {*block}:
                return command, block
    return None


def spread(commands: Sequence[Command], gpus: int, alone: Callable[[Command, range], range]) -> None:
    """Runs commands, each in a thread as soon as there is room for it on the GPUs."""
    waiting, free, running = list(commands), set(range(gpus)), set[Future[range]]()
    while waiting or running:
        while found := next_one(waiting, free, gpus):
            command, block = found
            waiting.remove(command)
            free -= {*block}
            thread = ThreadPoolExecutor(1)  # of its own, since it keeps to some of the cores
            running.add(thread.submit(alone, command, block))
            thread.shutdown(wait=False)
        done, running = wait(running, return_when=FIRST_COMPLETED)
        free |= {gpu for each in done for gpu in each.result()}


@interruptible
def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these commands or topics (default: campaign)")
    parser.add_argument("--seconds", type=positive_number, default=3600, help="for all together")
    parser.add_argument(
        "--jobs", type=positive, default=8, help="commands that run side by side on a GPU, where they are not timed"
    )
    add_folder(parser, "others' side of those that have one")
    parser.add_argument("--gpus", type=positive, default=1, help="GPUs to spread the commands over")
    add_results_folder(parser)
    parser.add_argument("--list", action="store_true", help="print the commands with their topics, and run none")
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
    deadline = time.monotonic() + args.seconds
    outcomes, stopped = [], threading.Event()

    def one(command: Command, gpus: range | None) -> None:
        gpu = None if gpus is None else ",".join(map(str, gpus))
        outcomes.append(run(command, args.results, deadline, gpu, stopped))
        print(f"{command.name}: {outcomes[-1]}", flush=True)

    def alone(command: Command, gpus: range) -> range:
        """On these GPUs, and their share of the cores. Returns the GPUs, which are free again."""
        if args.gpus > 1:
            keep_to_share(gpus, args.gpus)
        one(command, gpus if args.gpus > 1 else None)
        return gpus

    with ThreadPoolExecutor(args.gpus * args.jobs) as threads, ending(stopped):
        untimed = [command for command in commands if not command.timed]
        on = [None] if args.gpus == 1 else [range(i, i + 1) for i in range(args.gpus)]
        list(threads.map(one, untimed, itertools.cycle(on)))
    few = [command for command in commands if command.timed and (command.gpus == 1 or 2 * command.gpus <= args.gpus)]
    many = [command for command in commands if command.timed and command not in few]
    with ending(stopped):
        for waiting in (few, *([command] for command in many)):
            spread(waiting, args.gpus, alone)
    return 0 if all(outcome.startswith("ok") for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
