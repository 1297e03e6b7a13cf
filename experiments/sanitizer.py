"""What compute-sanitizer says of the attention kernels, on small inputs whose results are checked too.

    python -m experiments.sanitizer [--tools memcheck racecheck] [--kernels decode_attention ...] [--json]

Each kernel and format runs in a process of its own under each tool. Arrays come from cudaMalloc one by one
(XLA_PYTHON_CLIENT_ALLOCATOR=platform): in one common pool, whatever lies past an array is another's, and memcheck
would find nothing wrong. `errors` is what the tool counts; a process that failed, or whose result is wrong, makes the
result incomplete. Needs a GPU and compute-sanitizer; a machine whose runtime hides the device from the tool is named.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pallas_kernels.bench.bars import bar
from pallas_kernels.bench.command import add_result_options, interruptible

TOOLS = ("memcheck", "racecheck")
FORMATS = ("bf16", "fp8", "int8-g8", "int4-g32")  # of K and V
WIDTHS: dict[str, Any] = {"heads": (4, 2), "head_dim": 128, "page_size": 16, "dtype": "bfloat16"}
TOLERANCE = 8e-3  # of a row's norm: what rounding to bfloat16 costs, several times
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
DONE = "wrong by"


def attend_decode(kv: str) -> tuple[Any, Any]:
    from pallas_kernels.decode_attention import decode_attention, reference
    from pallas_kernels.decode_attention.cases import Case

    case = Case(lengths=(130, 1, 0, 64, 1100), k_format=kv, v_format=kv, window=None, **WIDTHS)
    inputs, scale = case.inputs(), case.scale
    out = decode_attention(*inputs, scale=scale, backend="mosaic")
    return out, reference.decode_attention(*inputs, scale, None)


def attend_prefill(kv: str) -> tuple[Any, Any]:
    from pallas_kernels.prefill_attention import prefill_attention, reference
    from pallas_kernels.prefill_attention.cases import Case

    lengths: dict[str, Any] = {"q_lens": (37, 0, 1, 130), "kv_lens": (150, 9, 129, 130), "unused": 5}
    case = Case(k_format=kv, v_format=kv, window=None, **lengths, **WIDTHS)
    inputs, scale = case.inputs(), case.scale
    out = prefill_attention(*inputs, scale=scale, backend="mosaic")
    return out, reference.prefill_attention(*inputs, scale, None)


def update_cache(kv: str) -> tuple[Any, Any]:
    """The rotated Q; what is stored is compared by the tests, to the bit."""
    from pallas_kernels.cache_update import cache_update, reference
    from pallas_kernels.cache_update.cases import Case

    arguments: tuple[Any, ...] = Case(rows=33, dropped=2, num_pages=6, k_format=kv, v_format=kv, **WIDTHS).inputs()
    return cache_update(*arguments, backend="mosaic")[0], reference.cache_update(*arguments)[0]


KERNELS: dict[str, Callable[[str], tuple[Any, Any]]] = {  # by kernel: its result and the formula's
    "decode_attention": attend_decode,
    "prefill_attention": attend_prefill,
    "cache_update": update_cache,
}


def run_kernel(kernel: str, kv: str) -> int:
    """What the tools watch: one call, and its distance from the formula."""
    import numpy as np

    out, expected = (np.asarray(x).astype(np.float64) for x in KERNELS[kernel](kv))
    wrong = float(np.linalg.norm(out - expected) / np.linalg.norm(expected))
    print(f"{DONE} {wrong:.2e}", flush=True)
    return 0 if wrong < TOLERANCE else 1


def watch(sanitizer: str, timeout: float, tool: str, kernel: str, kv: str) -> dict[str, Any]:
    """One row: a kernel and format under a tool."""
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
    row: dict[str, Any] = {"kernel": kernel, "tool": tool, "kv": kv}
    start = time.perf_counter()
    try:
        done = subprocess.run(
            [*command, "--run", kernel, kv], env=environment, capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return row | {"error": f"not done after {timeout:.0f} s"}
    row["seconds"] = round(time.perf_counter() - start, 1)
    return row | judge(done.stdout + done.stderr)


def judge(output: str) -> dict[str, Any]:
    """The tool's count of errors or hazards and what it says first, or why there is none."""
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
    """memcheck finds nothing. Racecheck's report has no bar: it does not know all that orders accesses."""
    for row in rows:
        if row["tool"] == "memcheck" and "errors" in row:
            yield bar(f"{row['kernel']} {row['kv']}, errors of memcheck", row["errors"], "1", 0, most=True)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--kernels", nargs="+", choices=list(KERNELS), default=list(KERNELS))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--jobs", type=int, default=8, help="processes at a time")
    parser.add_argument("--timeout", type=float, default=300, help="seconds that one process may take")
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="the program")
    add_result_options(parser)
    parser.add_argument("--run", nargs=2, metavar=("KERNEL", "FORMAT"), help=argparse.SUPPRESS)
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

    command = ["python", "-m", "experiments.sanitizer", *(sys.argv[1:] if argv is None else argv)]
    cases = [(tool, kernel, kv) for tool in args.tools for kernel in args.kernels for kv in args.formats]
    with ResultFile(args.results, "sanitizer", command, args.label) as result, ThreadPoolExecutor(args.jobs) as pool:
        for row in pool.map(lambda case: watch(sanitizer, args.timeout, *case), cases):
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
