"""Runs kernels under compute-sanitizer, on small inputs whose results are checked too.

    python -m experiments.sanitizer [--tools memcheck racecheck] [--kernels decode_attention ...] [--json]
    python -m experiments.sanitizer --backend triton        # kernels with a Triton form

Attention and the cache update have a `case` for each of several KV formats. Matmuls have one for several numbers of
rows or weights, and sampling for filters of all kinds. Each kernel and case runs in its own process under each tool.
Arrays come from cudaMalloc one by one (XLA_PYTHON_CLIENT_ALLOCATOR=platform). In a common pool, memory past an array
belongs to another one, and memcheck would find no error. `errors` is the tool's count. A process that failed, or has a
wrong result, makes the result incomplete. It needs a GPU and compute-sanitizer. If the runtime hides the device from
the tool, the row's error names that.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from experiments.result_file import command_line
from experiments.sanitized_calls import KERNELS
from pallas_kernels.bench.bars import bar
from pallas_kernels.bench.command import Parser, add_result_options, interruptible
from pallas_kernels.bench.numbers import positive, positive_number

TOOLS = ("memcheck", "racecheck")
TOLERANCE = 8e-3  # relative to a row's norm: several times the cost of rounding to bfloat16
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
DONE = "wrong by"
TRIES = 2


def run_kernel(kernel: str, case: str, backend: str) -> int:
    """Runs what the tools watch: one call. Returns its distance from the formula."""
    import numpy as np

    out, expected = (np.asarray(x).astype(np.float64) for x in KERNELS[kernel].run(case, backend))
    wrong = float(np.linalg.norm(out - expected) / np.linalg.norm(expected))
    print(f"{DONE} {wrong:.2e}", flush=True)
    return 0 if wrong < TOLERANCE else 1


def watch(sanitizer: str, timeout: float, backend: str, tool: str, kernel: str, case: str) -> dict[str, Any]:
    """Returns the row of a kernel and case under a tool. Some processes under memcheck hang, with cases that usually
    take seconds. So each is tried a second time, and the row's `tries` counts."""
    options = ["--report-api-errors", "no"] if tool == "memcheck" else ["--racecheck-report", "all"]
    command = [
        sanitizer,
        "--tool",
        tool,
        "--print-limit",
        "20",
        *options,
        sys.executable,
        "-m",
        "experiments.sanitizer",
    ]
    environment = {
        **os.environ, "XLA_PYTHON_CLIENT_ALLOCATOR": "platform", "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }  # fmt: skip
    row: dict[str, Any] = {"kernel": kernel, "backend": backend, "tool": tool, "case": case}
    for tries in range(1, TRIES + 1):
        start = time.perf_counter()
        process = subprocess.Popen(
            [*command, "--run", kernel, case, backend], env=environment, text=True, process_group=0,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the tool and what it watches
            process.communicate()
            continue
        row |= {"seconds": round(time.perf_counter() - start, 1)} | ({"tries": tries} if tries > 1 else {})
        return row | judge(output)
    return row | {"error": f"not done after {timeout:g} s, {TRIES} times"}


def judge(output: str) -> dict[str, Any]:
    """Returns the tool's count of errors or hazards and its first message, or the reason for having none."""
    reports = [line.removeprefix("=========").strip() for line in output.splitlines() if line.startswith("=========")]
    said = [line for line in reports if line and not line.startswith(("COMPUTE-SANITIZER", "ERROR SUMMARY"))]
    wrong, summary = re.search(rf"{DONE} (\S+)", output), SUMMARY.search(output)
    if wrong is None or summary is None:
        lines = said or [line for line in output.splitlines() if line.strip()] or ["it printed nothing"]
        return {"error": f"the kernel did not run: {lines[0 if said else -1][:300]}"}
    found = {"errors": int(summary[1] or summary[2]), "wrong": float(wrong[1])}
    if found["wrong"] >= TOLERANCE:
        return found | {"error": f"the result is wrong by {wrong[1]} of its norm"}
    return found | ({"report": " | ".join(said[:12])[:1500]} if found["errors"] else {})


def bars(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the bar that memcheck finds nothing. Racecheck's report has no bar, as it does not know every way to order
    accesses."""
    for row in rows:
        if row["tool"] == "memcheck" and "errors" in row:
            name = f"{row['kernel']} {row['case']} {row['backend']}, errors of memcheck"
            yield bar(name, row["errors"], "1", 0, most=True)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS), help="tools of compute-sanitizer")
    parser.add_argument("--kernels", nargs="+", choices=list(KERNELS), default=list(KERNELS), help="kernels to run")
    parser.add_argument("--backend", choices=("mosaic", "triton"), default="mosaic", help="backend of the kernels")
    parser.add_argument("--cases", nargs="+", metavar="CASE", help="run only these cases of the kernels, such as bf16")
    parser.add_argument("--jobs", type=positive, default=8, help="number of processes at a time")
    parser.add_argument(
        "--timeout",
        type=positive_number,
        default=60,
        help="limit in seconds of a process, which is tried a second time",
    )
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="path of the program")
    add_result_options(parser)
    parser.add_argument("--run", nargs=3, metavar=("KERNEL", "CASE", "BACKEND"), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


@interruptible
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if args.run:
        return run_kernel(*args.run)
    sanitizer = shutil.which(args.sanitizer)
    if sanitizer is None:
        print(f"error: no program {args.sanitizer!r} on the path: it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    from experiments.result_file import ResultFile

    command = command_line("sanitizer", argv)
    cases = [
        (tool, kernel, case)
        for tool in args.tools
        for kernel in args.kernels
        for case in KERNELS[kernel].cases
        if args.backend in KERNELS[kernel].backends and (args.cases is None or case in args.cases)
    ]
    if not cases:
        print("error: --kernels, --backend and --cases leave nothing to run", file=sys.stderr)
        return 2
    with ResultFile(args.results, "sanitizer", command, args.label) as result, ThreadPoolExecutor(args.jobs) as pool:
        for row in pool.map(lambda case: watch(sanitizer, args.timeout, args.backend, *case), cases):
            result.add(row)
            print(
                {key: value for key, value in row.items() if key != "report"}, row.get("report", "")[:200], flush=True
            )
        rows = result.document["rows"]
        complete = not any("error" in row for row in rows)
        result.finish(bars=list(bars(rows)), complete=complete)
    if args.json:
        print(json.dumps(result.document))
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
