"""What compute-sanitizer says of kernels, on small inputs whose results are checked too.

    python -m experiments.sanitizer [--tools memcheck racecheck] [--kernels decode_attention ...] [--json]
    python -m experiments.sanitizer --backend triton        # those that have such a kernel

Attention and the cache update run with K and V in several formats, products with several numbers of rows or weights,
sampling with filters of all kinds: a `case` each. Each kernel and case runs in a process of its own under each tool.
Arrays come from cudaMalloc one by one (XLA_PYTHON_CLIENT_ALLOCATOR=platform): in one common pool, whatever lies past an
array is another's, and memcheck would find nothing wrong. `errors` is what the tool counts; a process that failed, or
whose result is wrong, makes the result incomplete. Needs a GPU and compute-sanitizer; a machine whose runtime hides the
device from the tool is named.
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
from dataclasses import dataclass
from typing import Any, cast

from experiments.result_file import command_line
from pallas_kernels.bench.bars import bar
from pallas_kernels.bench.command import add_result_options, interruptible

Result = tuple[Any, Any]  # a kernel's, and the formula's
TOOLS = ("memcheck", "racecheck")
FORMATS = ("bf16", "fp8", "int8-g8", "int4-g32", "int4-g32-zp", "int8-g128-zp")  # of K and V
ROTATED = ("bf16-h", "int4-g32-h", "int8-g8-zp-h")  # likewise; Triton has none
WIDTHS: dict[str, Any] = {"heads": (4, 2), "head_dim": 128, "page_size": 16, "dtype": "bfloat16"}
TOLERANCE = 8e-3  # of a row's norm: what rounding to bfloat16 costs, several times
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
DONE = "wrong by"


def attend_decode(kv: str, backend: str) -> Result:
    from pallas_kernels.decode_attention import decode_attention, reference
    from pallas_kernels.decode_attention.cases import Case

    case = Case(lengths=(130, 1, 0, 64, 1100), k_format=kv, v_format=kv, window=None, **WIDTHS)
    inputs, scale = case.inputs(), case.scale
    out = decode_attention(*inputs, scale=scale, backend=backend)
    return out, reference.decode_attention(*inputs, scale, None)


def attend_prefill(kv: str, backend: str) -> Result:
    from pallas_kernels.prefill_attention import prefill_attention, reference
    from pallas_kernels.prefill_attention.cases import Case

    lengths: dict[str, Any] = {"q_lens": (37, 0, 1, 130), "kv_lens": (150, 9, 129, 130), "unused": 5}
    case = Case(k_format=kv, v_format=kv, window=None, **lengths, **WIDTHS)
    inputs, scale = case.inputs(), case.scale
    out = prefill_attention(*inputs, scale=scale, backend=backend)
    return out, reference.prefill_attention(*inputs, scale, None)


def update_cache(kv: str, backend: str) -> Result:
    """The rotated Q; what is stored is compared by the tests, to the bit."""
    from pallas_kernels.cache_update import cache_update, reference
    from pallas_kernels.cache_update.cases import Case

    arguments: tuple[Any, ...] = Case(rows=33, dropped=2, num_pages=6, k_format=kv, v_format=kv, **WIDTHS).inputs()
    return cache_update(*arguments, backend=backend)[0], reference.cache_update(*arguments)[0]


def multiply(rows: str, backend: str) -> Result:
    from pallas_kernels.matmul import matmul, reference
    from pallas_kernels.matmul.cases import Case

    x, w, added = Case((int(rows),), 320, 1024, "bfloat16", bias=True, residual=True).inputs()
    bias, residual = added["bias"], added["residual"]
    return matmul(x, w, bias=bias, residual=residual, backend=backend), reference.matmul(x, w, bias, residual)


def multiply_int8(rows: str, backend: str) -> Result:
    from pallas_kernels.int8_matmul import int8_matmul
    from pallas_kernels.scaled_matmul.cases import Case
    from pallas_kernels.scaled_matmul.reference import scaled_matmul

    inputs: tuple[Any, ...] = Case(int(rows), 320, 1024, "int8", bias=True, residual=True).inputs()
    out = int8_matmul(*inputs[:4], bias=inputs[4], residual=inputs[5], backend=backend)
    return out, scaled_matmul(*inputs)


def quantize_and_multiply(rows: str, backend: str) -> Result:
    """The product of rows that it norms and quantizes itself."""
    import jax.numpy as jnp
    import numpy as np

    from pallas_kernels.norm_quant.reference import normalize
    from pallas_kernels.scaled_matmul.cases import Case
    from pallas_kernels.scaled_matmul.plain_rows import of_plain_rows
    from pallas_kernels.scaled_matmul.reference import scaled_matmul

    codes, w, _, w_scale, bias, residual = Case(int(rows), 320, 1024, "int8", bias=True, residual=True).inputs()
    assert codes is not None
    assert w is not None
    assert w_scale is not None
    x, norm = (jnp.asarray(array, "bfloat16") for array in (codes, np.ones(1024)))
    added: dict[str, Any] = {"bias": bias, "residual": residual}
    out = of_plain_rows(x, w, w_scale, norm=norm, eps=1e-5, **added, backend=backend)
    ones = np.ones(len(x))
    return out, scaled_matmul(normalize(np.asarray(x), 1e-5), w, ones, w_scale, bias, residual)


def multiply_groups(rows: str, backend: str) -> Result:
    """Of rows with a scale for every 128 columns, which gate and up projection and SiLU make."""
    import jax.numpy as jnp

    from pallas_kernels.int8_matmul import int8_matmul
    from pallas_kernels.quantized_rows import QuantizedRows
    from pallas_kernels.reference_rows import quantize_rows
    from pallas_kernels.scaled_matmul.cases import Case
    from pallas_kernels.scaled_matmul.gated import scaled_swiglu
    from pallas_kernels.scaled_matmul.reference import scaled_matmul
    from pallas_kernels.silu_mul_quant.reference import silu_mul

    first: tuple[Any, ...] = Case(int(rows), 1024, 640, "int8").inputs()
    x, w, x_scale, w_scale, *_ = first
    _, down, _, of_down, *_ = cast("tuple[Any, ...]", Case(1, 320, 512, "int8").inputs())
    dtype = jnp.dtype("bfloat16")
    made = scaled_swiglu(QuantizedRows(x, x_scale), w, w_scale, group=128, dtype=dtype, backend=backend)
    out = int8_matmul(made.values, down, made.scales, of_down, backend=backend)
    of_columns = quantize_rows(silu_mul(scaled_matmul(*first).astype(dtype)).astype(dtype), "int8", 128)
    return out, scaled_matmul(of_columns.values, down, of_columns.scales, of_down, None, None)


def multiply_codes(which: str, backend: str) -> Result:
    """`which`: the format of the weight and the rows of x."""
    from pallas_kernels.weight_only_matmul import reference, weight_only_matmul

    x, w, bias, residual = codes(which)
    out = weight_only_matmul(x, w, bias=bias, residual=residual, backend=backend)
    return out, reference.weight_only_matmul(x, w, bias, residual)


def multiply_codes_by_warp(which: str, backend: str) -> Result:
    """The same by products of single warps, cut so that their ring goes round."""
    from pallas_kernels.weight_only_matmul import mosaic_sm90, reference, weight_only_matmul
    from pallas_kernels.weight_only_matmul.config import Config

    x, w, bias, residual = codes(which)
    if backend == "mosaic":
        config = Config(tokens=-(-len(x) // 8) * 8, fold=1, warpgroups=1, stages=3, by_warp=True)
        out = mosaic_sm90.weight_only_matmul(x, w, bias, residual, x.dtype, config=config)
    else:
        out = weight_only_matmul(x, w, bias=bias, residual=residual, backend=backend)
    return out, reference.weight_only_matmul(x, w, bias, residual)


def codes(which: str) -> tuple[Any, ...]:
    """x, a weight, bias and residual of a product by codes."""
    from pallas_kernels.weight_only_matmul.cases import Case

    name, _, rows = which.partition(":")
    return Case((int(rows),), 320, 1024, name, bias=True, residual=True).inputs()


def draw(vocabulary: str, backend: str) -> Result:
    """Tokens, of rows with all filters."""
    import jax.numpy as jnp
    import numpy as np

    from pallas_kernels.sample import reference, sample
    from pallas_kernels.sample.cases import MIXED, arguments

    logits = 3 * np.random.default_rng(0).normal(size=(len(MIXED), int(vocabulary))).astype(np.float32)
    asked = arguments(list(MIXED))
    return sample(jnp.asarray(logits), *asked, backend=backend)[0], reference.sample(logits, *asked)[0]


@dataclass(frozen=True)
class Kernel:
    run: Callable[[str, str], Result]  # of a case, by a backend: its result and the formula's
    cases: tuple[str, ...]
    backends: tuple[str, ...] = ("mosaic", "triton")


KERNELS = {
    "decode_attention": Kernel(attend_decode, FORMATS),
    "prefill_attention": Kernel(attend_prefill, FORMATS),
    "cache_update": Kernel(update_cache, FORMATS),
    "decode_attention over rotated K and V": Kernel(attend_decode, ROTATED, ("mosaic",)),
    "prefill_attention over rotated K and V": Kernel(attend_prefill, ROTATED, ("mosaic",)),
    "cache_update of rotated K and V": Kernel(update_cache, ROTATED, ("mosaic",)),
    "matmul": Kernel(multiply, ("1", "8", "64"), ("mosaic",)),
    "int8_matmul": Kernel(multiply_int8, ("1", "17", "200")),
    "norm_quant and int8_matmul": Kernel(quantize_and_multiply, ("1", "9"), ("mosaic",)),
    "gate and up and int8_matmul by groups": Kernel(multiply_groups, ("1", "9", "64", "70"), ("mosaic",)),
    "weight_only_matmul": Kernel(
        multiply_codes,
        (
            *("w4a16-g128:1", "w4a16-g128:9", "nf4:1", "nf4:33"),
            *("w8a16:1", "w8a16:5", "w8a16:70", "w8a16-g32-zp:3", "fp8-weight:8"),
        ),
    ),
    "weight_only_matmul by warp": Kernel(
        multiply_codes_by_warp, ("w4a16-g128:9", "w4a16-g32-zp:5", "nf4:16"), ("mosaic",)
    ),
    "sample": Kernel(draw, ("512", "4100")),
}


def run_kernel(kernel: str, case: str, backend: str) -> int:
    """What the tools watch: one call, and its distance from the formula."""
    import numpy as np

    out, expected = (np.asarray(x).astype(np.float64) for x in KERNELS[kernel].run(case, backend))
    wrong = float(np.linalg.norm(out - expected) / np.linalg.norm(expected))
    print(f"{DONE} {wrong:.2e}", flush=True)
    return 0 if wrong < TOLERANCE else 1


def watch(sanitizer: str, timeout: float, backend: str, tool: str, kernel: str, case: str) -> dict[str, Any]:
    """One row: a kernel and case under a tool."""
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
    start = time.perf_counter()
    try:
        done = subprocess.run(
            [*command, "--run", kernel, case, backend], env=environment, capture_output=True, text=True, timeout=timeout
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
            what = row["kv"] if "kv" in row else f"{row['case']} {row['backend']}"  # files before 2026-11-24 have kv
            yield bar(f"{row['kernel']} {what}, errors of memcheck", row["errors"], "1", 0, most=True)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--kernels", nargs="+", choices=list(KERNELS), default=list(KERNELS))
    parser.add_argument("--backend", choices=("mosaic", "triton"), default="mosaic", help="whose kernels")
    parser.add_argument("--cases", nargs="+", metavar="CASE", help="of the kernels' cases these alone, such as bf16")
    parser.add_argument("--jobs", type=int, default=8, help="processes at a time")
    parser.add_argument("--timeout", type=float, default=300, help="seconds that one process may take")
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="the program")
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
