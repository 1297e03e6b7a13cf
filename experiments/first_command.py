"""Times the README's first command, from its start in a shell to the last of 64 tokens.

    python -m experiments.first_command

Each repeat starts it twice with its own compile cache: first empty, then as the first start left it.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from tqdm import tqdm

from experiments.result_file import Row, bar, command_line, record
from pallas_kernels.bench.command import Parser, add_result_options, interruptible
from pallas_kernels.bench.numbers import positive

TOKENS = 64
BARS = {"cold": 15.0, "cached": 6.0}  # seconds, on two CPU cores


def start(cache: Path) -> float:
    """Returns the seconds of one start."""
    command = [sys.executable, "-m", "jllm.generate", "Once upon a time", "--compile-cache", str(cache)]
    options = ["--max-new-tokens", str(TOKENS), "--ignore-eos", "--seed", "1", "--json"]
    begin = time.perf_counter()
    done = subprocess.run(command + options, capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - begin
    if len(json.loads(done.stdout)["token_ids"]) != TOKENS:
        raise AssertionError(f"expected {TOKENS} tokens: {done.stdout}")
    return seconds


def measure(repeats: int) -> Iterator[Row]:
    for repeat in tqdm(range(repeats), delay=2):
        with tempfile.TemporaryDirectory() as cache:
            for state in BARS:
                yield {"repeat": repeat, "compile_cache": state, "seconds": round(start(Path(cache)), 2)}


def bars(rows: list[Row]) -> Iterator[Row]:
    for state, most in BARS.items():
        if seconds := [row["seconds"] for row in rows if row["compile_cache"] == state]:
            yield bar(f"{state} start to the last of {TOKENS} tokens", median(seconds), "s", most, most=True)


@interruptible
def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("--repeats", type=positive, default=3, help="number of pairs of starts")
    add_result_options(parser)
    args = parser.parse_args(argv)
    command = command_line("first_command", argv)
    return record(args, "first_command", command, measure(args.repeats), bars=bars)


if __name__ == "__main__":
    sys.exit(main())
