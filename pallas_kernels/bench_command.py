"""The command line that the operations' benchmarks share: rows measured, printed and kept, then held to their bars."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from pallas_kernels.result_file import ResultFile

Row = dict[str, Any]


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options of all benchmarks."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("experiments/results"))
    parser.add_argument("--label", help="to tell runs of parts of a benchmark apart: a part of the result's name")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object on the last line")
    return parser


def record(
    operation: str,
    args: argparse.Namespace,
    argv: Sequence[str] | None,
    rows: Iterable[Row],
    summarize: Callable[[list[Row]], Iterable[Row]],
) -> int:
    """Measures `rows` one by one; `summarize` may complete them and gives the bars. A row with "error" makes the
    result incomplete. Returns the exit status."""
    command = ["python", "-m", f"pallas_kernels.{operation}.bench", *(sys.argv[1:] if argv is None else argv)]
    result = ResultFile(args.results, operation + (f"-{args.label}" if args.label else ""), command)
    for row in rows:
        result.add(row)
        print(row, flush=True)
    measured = result.document["rows"]
    bars = list(summarize(measured))
    result.finish(bars=bars, complete=not any("error" in row for row in measured))
    if args.json:
        print(json.dumps(result.document))
    return 0
