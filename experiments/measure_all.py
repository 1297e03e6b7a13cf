"""Everything that wants a GPU, in one go: the tests first, side by side, then each measurement alone.

    python -m experiments.measure_all --seconds 540                 # what fits, the most wanted first
    python -m experiments.measure_all --only decode_attention C5    # these alone; --list names all
    python -m experiments.measure_all --gpus 2                      # on two GPUs of one host, one on each at a time
    python -m experiments.measure_all --peers DIR                   # others' side of the same work in the same files
    python -m experiments.measure_all --record                      # into experiments/results, to be committed

What JAX compiles is kept for the commands after it and for another time: beside the results directory, in `compiled`,
unless JAX_COMPILATION_CACHE_DIR names another place. A command gets its own log beside the results, and at most the
seconds that its line says, or what is left of --seconds. One that fails or is cut off costs the others nothing: what
it had measured is in its result file, marked incomplete.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue

from pallas_kernels.bench.command import add_results_folder, interruptible
from pallas_kernels.bench.peers import asked

BATCHES = "1,16,64,128,256,512"
QUANT_STAGES = f"decode:bf16:{BATCHES} prefill:bf16:{BATCHES} decode:int8-g8:1,64,128,256,512:bf16,w8a8-talk"

LEAST = 10  # seconds: with fewer left, nothing is begun


@dataclass(frozen=True)
class Command:
    """One line for Python, and the seconds that it may take. {results} becomes the results' directory."""

    name: str
    line: str
    seconds: int
    timed: bool = True  # alone on the device; tests run side by side
    peer_seconds: int = 0  # more, where others are measured beside it; 0: it has none

    def beside(self, peers: Path | None) -> "Command":
        """The command with others' scripts beside it, where it has any."""
        if peers is None or not self.peer_seconds:
            return self
        line = f"{self.line} --peers {shlex.quote(str(peers))}"
        return replace(self, line=line, seconds=self.seconds + self.peer_seconds)


COMMANDS = (
    Command(
        "tests",
        "-m pytest -o addopts= -p no:benchmark -v -n 12 --dist worksteal -m gpu --tb=short --results={results} tests",
        480,
        timed=False,
    ),
    Command("sanitizer", "-m experiments.sanitizer --jobs 4 --results {results}", 150, timed=False),
    Command("C13", "-m experiments.claims C13 --results {results}", 130),
    Command("C19", "-m experiments.claims C19 --results {results}", 90),
    Command("qps_kv", "-m experiments.qps --kv-cache int8-g8 --repeats 2 --results {results}", 200),
    Command(
        "decode_step",
        "-m experiments.decode_step --batch 1 16 64 128 256 --backend xla default --results {results}",
        90,
    ),
    Command("step_profile", "-m experiments.step_profile --batch 1 64 256 --results {results}", 60),
    Command(
        "step_profile_w8a8",
        "-m experiments.step_profile --scheme w8a8 --kv-cache int8-g8 --batch 1 64 256 --context 136"
        " --results {results}",
        60,
    ),
    Command(
        "step_profile_serve",
        "-m experiments.step_profile --kind serve --batch 1 512 --context 136 --steps 16 --results {results}",
        150,
    ),
    Command(
        "throughput",
        "-m experiments.throughput --scheme bf16 --kv-cache bf16 --results {results}",
        260,
        peer_seconds=300,
    ),
    Command("start_up", "-m experiments.start_up --results {results}", 240),
    Command("qps", "-m experiments.qps --repeats 3 --results {results}", 200, peer_seconds=400),
    Command("decode_attention", "-m pallas_kernels.decode_attention.bench --results {results}", 170, peer_seconds=60),
    Command("prefill_attention", "-m pallas_kernels.prefill_attention.bench --results {results}", 130, peer_seconds=40),
    Command(
        "quant_steps",
        "-m experiments.quant_steps --backend mosaic --steps 20 --repeats 2 --threads 14"
        f" --stages {QUANT_STAGES} --results {{results}}",
        560,
    ),
    Command("C16", "-m experiments.claims C16 --results {results}", 60),
    Command("throughput_kv", "-m experiments.throughput --scheme bf16 --kv-cache int8-g8 --results {results}", 250),
    Command(
        "throughput_w8a8",
        "-m experiments.throughput --scheme w8a8 --kv-cache int8-g8 --results {results}",
        250,
        peer_seconds=300,
    ),
    Command(
        "throughput_8b",
        "-m experiments.throughput --config configs/llama-3-8b.json --scheme bf16 --kv-cache bf16 --results {results}",
        250,
    ),
    Command(
        "qps_w8a8",
        "-m experiments.qps --quantize w8a8 --kv-cache int8-g8 --repeats 3 --results {results}",
        220,
        peer_seconds=260,
    ),
    # One process: two minutes of compiling, and each round's run of the usual policies, are shared.
    Command("serving", "-m experiments.claims C1 C3 C11 C4 --results {results}", 560),
    Command("C24", "-m experiments.claims C24 --results {results}", 240),
    Command("C26", "-m experiments.claims C26 --results {results}", 240),
    Command("C25", "-m experiments.claims C25 --results {results}", 300),
    Command("loads", "-m experiments.claims C28 C23 --results {results}", 560),  # compiling is shared
    Command(
        "decode_by_warpgroups",
        "-m pallas_kernels.decode_attention.bench --parts formats --heads 32/32 --by-warpgroups --label by-warpgroups"
        " --results {results}",
        60,
    ),
    Command(
        "weight_only_matmul",
        "-m pallas_kernels.weight_only_matmul.bench --rows 1 16 64 512"
        " --formats w4a16-g128 nf4 w8a16 fp8-weight --results {results}",
        70,
    ),
    Command(
        "swiglu", "-m pallas_kernels.swiglu.bench --rows 1 16 64 128 256 --widths 11008 --tune --results {results}", 60
    ),
    Command("matmul", "-m pallas_kernels.matmul.bench --results {results}", 120),
    Command(
        "fp8_matmul",
        "-m pallas_kernels.fp8_matmul.bench --peer-rows 1 64 512 --seconds 40 --results {results}",
        60,
        peer_seconds=60,
    ),
    Command(
        "int8_matmul",
        "-m pallas_kernels.int8_matmul.bench --peer-rows 1 16 64 512 --seconds 40 --results {results}",
        60,
        peer_seconds=60,
    ),
    Command("C5", "-m experiments.claims C5 --results {results}", 100),
    Command("C31", "-m experiments.claims C31 --results {results}", 90),
    Command("C21", "-m experiments.claims C21 --results {results}", 90),
    Command("C22", "-m experiments.claims C22 --results {results}", 90),
    Command("silu_mul_quant", "-m pallas_kernels.silu_mul_quant.bench --rows 1 8192 128 512 --results {results}", 60),
    Command("sample", "-m pallas_kernels.sample.bench --results {results}", 90),
    Command("speculation", "-m experiments.speculation acceptance --results {results}", 300),
    Command("speculation_claims", "-m experiments.speculation claims --results {results}", 300),
    Command("speculation_7b", "-m experiments.speculation steps --threads 14 --results {results}", 300),
    Command(
        "speculation_8b",
        "-m experiments.speculation steps --config configs/llama-3-8b.json --results {results}",
        300,
    ),
    Command("move_tokens", "-m pallas_kernels.move_tokens.bench --results {results}", 120),
    Command("norm_quant", "-m pallas_kernels.norm_quant.bench --rows 1 8192 128 512 --results {results}", 60),
    Command("kv_measured", "-m experiments.kv_measured --requests 384 --results {results}", 260),
    Command(
        "weight_only_middle",
        "-m pallas_kernels.weight_only_matmul.bench --rows 128 256 --formats w4a16-g128 nf4 w8a16 fp8-weight"
        " --label middle --results {results}",
        60,
    ),
    Command("C18", "-m experiments.claims C18 --results {results}", 160),
    Command("C14", "-m experiments.claims C14 --results {results}", 120),
)


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


def run(command: Command, results: Path, deadline: float, gpu: str | None = None) -> str:
    """Runs it on this GPU (as CUDA_VISIBLE_DEVICES names it; None: whichever), its output in a log of its own; says how
    it ended. What it had started itself ends with it."""
    limit = min(command.seconds, deadline - time.monotonic())
    if limit < LEAST:
        return "no time left"
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
            status = process.wait(limit)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return f"cut off after {limit:.0f} s"
    return f"{'ok' if status == 0 else f'exit status {status}'} after {time.monotonic() - start:.0f} s"


def chosen(only: list[str] | None, peers: Path | None = None) -> list[Command]:
    """The commands of these names, in the order of the list. Raises ValueError for a name that no command has."""
    names = {command.name for command in COMMANDS}
    if unknown := [name for name in only or () if name not in names]:
        raise ValueError(f"no command is called {', '.join(unknown)}; commands: {', '.join(sorted(names))}")
    return [command.beside(peers) for command in COMMANDS if only is None or command.name in only]


def drain(queue: SimpleQueue[Command]) -> Iterator[Command]:
    """What is in the queue, until it is empty; several threads may share it."""
    while True:
        try:
            yield queue.get_nowait()
        except Empty:
            return


@interruptible
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these commands alone")
    parser.add_argument("--seconds", type=float, default=3600, help="for all together")
    parser.add_argument(
        "--jobs", type=int, default=8, help="commands that run side by side on a GPU, where they are not timed"
    )
    parser.add_argument("--peers", type=Path, metavar="DIR", help="others' side beside those that have one")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs to spread the commands over")
    add_results_folder(parser)
    parser.add_argument("--list", action="store_true", help="print the commands, and run none")
    args = parser.parse_args(argv)
    asked(parser, args)
    try:
        commands = chosen(args.only, args.peers)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.list:
        for command in commands:
            print(f"{command.name:20} {command.seconds:4} s  python {command.line.format(results=args.results)}")
        return 0
    if args.gpus < 1 or args.jobs < 1:
        parser.error("--gpus and --jobs must be at least 1")
    deadline = time.monotonic() + args.seconds
    outcomes = []
    gpus: list[str | None] = [None] if args.gpus == 1 else [str(i) for i in range(args.gpus)]

    def one(command: Command, gpu: str | None) -> None:
        outcomes.append(run(command, args.results, deadline, gpu))
        print(f"{command.name}: {outcomes[-1]}", flush=True)

    def spread(commands: list[Command], workers: list[str | None]) -> None:
        """Each worker takes the next command as soon as it has done with one."""
        queue: SimpleQueue[Command] = SimpleQueue()
        for command in commands:
            queue.put(command)

        def work(gpu: str | None) -> None:
            for command in drain(queue):
                one(command, gpu)

        with ThreadPoolExecutor(len(workers)) as pool:
            list(pool.map(work, workers))

    spread([command for command in commands if not command.timed], gpus * args.jobs)
    spread([command for command in commands if command.timed], gpus)
    return 0 if all(outcome.startswith("ok") for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
