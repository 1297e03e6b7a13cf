"""How long the README's first command takes, from the shell's point of view, to the last of 64 tokens.

    python -m experiments.first_command

Each repeat starts it twice with a compile cache of its own: once empty, once as the first start left it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from experiments.result_file import ResultFile

TOKENS = 64
BARS = {"cold": 15.0, "cached": 6.0}  # seconds, on two CPU cores


def start(cache: Path) -> float:
    """Seconds that one start takes."""
    command = [sys.executable, "-m", "jllm.generate", "Once upon a time", "--compile-cache", str(cache)]
    options = ["--max-new-tokens", str(TOKENS), "--ignore-eos", "--seed", "1", "--json"]
    begin = time.perf_counter()
    done = subprocess.run(command + options, capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - begin
    if len(json.loads(done.stdout)["token_ids"]) != TOKENS:
        raise AssertionError(f"expected {TOKENS} tokens: {done.stdout}")
    return seconds


def measure(repeats: int) -> list[dict[str, Any]]:
    rows = []
    for repeat in tqdm(range(repeats), delay=2):
        with tempfile.TemporaryDirectory() as cache:
            for state in BARS:
                rows.append({"repeat": repeat, "compile_cache": state, "seconds": round(start(Path(cache)), 2)})
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--results", type=Path, default=Path("experiments/results"))
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object on the last line")
    args = parser.parse_args(argv)
    result = ResultFile(args.results, "first_command", ["python", "-m", "experiments.first_command"])
    for row in measure(args.repeats):
        result.add(row)
    bars = []
    for state, bar in BARS.items():
        value = median(row["seconds"] for row in result.document["rows"] if row["compile_cache"] == state)
        name = f"{state} start to the last of {TOKENS} tokens"
        bars.append({"name": name, "value": value, "unit": "s", "bar": bar, "met": value <= bar})
        print(f"{name}: {value:.1f} s (bar: {bar:.0f} s)")
    result.finish(bars=bars, complete=True)
    if args.json:
        print(json.dumps(result.document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
