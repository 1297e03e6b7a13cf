"""Times PyTorch's matmuls of bfloat16, int8 and fp8, at the shapes of a LLaMA-2-7B layer.

    pip install torch==2.11.0
    python -m experiments.peers.peer_kernels --out products.json     # one GPU, half a minute

bf16 is torch.mm. int8 is torch._int_mm, which needs at least 17 rows. fp8 is torch._scaled_mm with fast sums and a
scale for each tensor (fp8t) or each row and column (fp8r). PyTorch has these without another library. Each time is of a
CUDA graph whose calls rotate through weights, so that none stays in the L2 cache.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from experiments.peers.shared import (
    Output,
    by_commas,
    command,
    copies_of,
    graph_us,
    load_torch,
    parser,
    seconds_left,
    versions_of,
)

SHAPES = ((4096, 12288), (4096, 4096), (4096, 22016), (11008, 4096))  # K, N
ROWS = (1, 16, 32, 64, 128, 256, 512, 1024, 4096)
KINDS = ("bf16", "int8", "fp8t", "fp8r")


def calls(torch: Any, kind: str, m: int, k: int, n: int) -> list[Callable[[], Any]]:
    """Returns calls of the same matmul, each with other weights."""
    size = 2 if kind == "bf16" else 1
    count = copies_of(size * k * n)
    if kind == "int8":
        x, *weights = (
            torch.randint(-127, 128, (rows, k), device="cuda", dtype=torch.int8) for rows in [m] + count * [n]
        )
        return [partial(torch._int_mm, x, w.t()) for w in weights]
    dtype = torch.bfloat16 if kind == "bf16" else torch.float8_e4m3fn
    x, *weights = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16).to(dtype) for rows in [m] + count * [n])
    if kind == "bf16":
        return [partial(torch.mm, x, w.t()) for w in weights]
    shapes = ((), ()) if kind == "fp8t" else ((m, 1), (1, n))
    of_x, of_w = (torch.ones(shape, device="cuda") for shape in shapes)
    options = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    return [partial(torch._scaled_mm, x, w.t(), of_x, of_w, **options) for w in weights]


def run(args: argparse.Namespace) -> None:
    torch = load_torch()
    output = Output(args.out, versions_of("torch"))
    for k, n in SHAPES:
        for kind in args.kinds:
            for m in args.rows:
                about = {"part": "gemm", "kind": kind, "M": m, "K": k, "N": n}
                if kind == "int8" and m <= 16:
                    continue
                if seconds_left(args) < 0:
                    output.add(about | {"error": "no time left"})
                    continue

                def measured(kind: str = kind, m: int = m, k: int = k, n: int = n) -> dict[str, float]:
                    us = graph_us(torch, calls(torch, kind, m, k, n))
                    return {"us": us, "tflops": 2 * m * n * k / us / 1e6}

                output.attempt(about, measured)


def options() -> argparse.ArgumentParser:
    made = parser(__doc__, 60)
    made.add_argument("--parts", choices=["gemm"], default="gemm", help="parts; it only has matmuls")
    made.add_argument("--kinds", type=by_commas, default=KINDS, help=f"of {','.join(KINDS)} (default: all)")
    made.add_argument("--rows", type=lambda text: [int(m) for m in by_commas(text)], default=ROWS, metavar="M,..")
    return made


if __name__ == "__main__":
    sys.exit(command(run, options()))
