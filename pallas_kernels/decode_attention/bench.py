"""Measures decode_attention on the device, next to cuDNN on contiguous keys and values, and to XLA.

    python -m pallas_kernels.decode_attention.bench [--json] [--parts bf16 formats skewed segments] [--heads 32/32 32/8]
        [--triton] [--triton-split 256 512] [--triton-warps 2 4] [--triton-stages 2 5]
        [--formats bf16 fp8 int8-g8 int8-g128 int4-g32 | int4-g128-zp int4-g32-h ..] [--consecutive]
        [--peers] [--cells 128x136 64x1024] [--computing 2] [--per-sm 1] [--split TOKENS] [--stages 8]

bench_runs.py has what is timed; all runs are compiled ahead, side by side. Bytes are those of K and V, scales included.
The ceiling is the best rate of the run, cuDNN's and a copy's included. With --peers all variants of FlashInfer run
first (pallas_kernels/bench/peers.py).
"""

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, product
from typing import Any

from pallas_kernels.bench import peers
from pallas_kernels.bench.bars import bar
from pallas_kernels.bench.command import add_triton, make_parser, record, triton_changes, triton_name
from pallas_kernels.bench.measure import copy_bandwidth
from pallas_kernels.bench.numbers import positive
from pallas_kernels.decode_attention.bench_runs import Run, cudnn, moved_bytes, paged
from pallas_kernels.decode_attention.cases import (
    BENCH_CASES,
    SEGMENT_CASES,
    SHORT_CELLS,
    SKEWED,
    UNIFORM,
    VARIANT_CASES,
    VARIANTS,
    Case,
)
from pallas_kernels.decode_attention.config import TritonConfig
from pallas_kernels.formats.kv_formats import bytes_per_token, parse_format

SEGMENT_BARS = {(32, 32): 4, (32, 8): 2}  # H, K: rows of a segment that may take 5 % longer than one
TRITON = 1 / 0.85  # of mosaic's time, at (64, 1024) and above: the most that backend triton may take
ZEROS = 1.25  # time of formats with a zero a token and head, at most this times their bytes at the run's best rate
SLACK = {"fp8": 1.15, "int8": 1.15, "int4": 1.4}  # time over bf16's, at most this times the ratio of bytes


def runs(
    parts: list[str],
    heads: list[str],
    formats: list[str],
    cells: list[tuple[int, int]],
    triton: list[dict[str, int]],
    **changes: Any,
) -> Iterator[tuple[Case, str, str | int, Run]]:
    """Yields (case, who, length, run), what decides first. The order is this kernel, Triton's with each of these
    changes, cuDNN, XLA. `cells` (rows, length) are asked for besides what the parts have."""
    cases: dict[Case, str | int] = {}
    for one in {(case.heads, case.k_format): case for case in (*BENCH_CASES, *VARIANT_CASES)}.values():
        cases |= {replace(one, lengths=(length,) * rows): length for rows, length in cells}
    if "bf16" in parts:
        cases |= {case: case.lengths[0] for case in BENCH_CASES if case.k_format == "bf16"}
    if "formats" in parts:
        sizes = {case: (len(case.lengths), case.lengths[0]) for case in (*BENCH_CASES, *VARIANT_CASES)}
        cases |= {case: size[1] for case, size in sizes.items() if size in SHORT_CELLS}
    if "skewed" in parts:
        cases |= {UNIFORM: UNIFORM.lengths[0]} | {case: name for name, case in SKEWED.items()}
    if "segments" in parts:
        cases |= {case: case.lengths[0] for case in SEGMENT_CASES}
    asked = [case for case in cases if "{}/{}".format(*case.heads) in heads and case.k_format in formats]
    cases = {case: cases[case] for case in asked}
    for case, length in cases.items():
        yield case, "mosaic", length, paged(case, "mosaic", **changes)
    for (case, length), tuned in product(cases.items(), triton):
        yield case, triton_name(tuned), length, paged(case, "triton", tuned=tuned)
    if "bf16" in parts:
        equal = {case: x for case, x in cases.items() if case.k_format == "bf16" and case in BENCH_CASES}
        for case, length in equal.items():
            yield case, "cudnn, contiguous", length, cudnn(case)
        for case, length in equal.items():
            if (len(case.lengths), length) == SHORT_CELLS[0]:
                yield case, "xla", length, paged(case, "xla")


def table(
    parts: list[str],
    heads: list[str],
    formats: list[str],
    cells: list[tuple[int, int]],
    triton: list[dict[str, int]],
    **changes: Any,
) -> Iterator[dict[str, Any]]:
    """Yields one row a run; one that fails says why."""
    with ThreadPoolExecutor(8) as pool:
        found: list[tuple[Case, str, str | int, Future[Run]]] = [
            (case, who, length, pool.submit(run.compiled))
            for case, who, length, run in runs(parts, heads, formats, cells, triton, **changes)
        ]
    yield {"kernel": "copy", "gb_s": round(copy_bandwidth() / 1e9)}
    for case, who, length, future in found:
        row: dict[str, Any] = {
            "kernel": "decode_attention", "peer": who, "R": len(case.lengths), "Q": case.width,
            "length": length, "H": case.heads[0], "K": case.heads[1], "D": case.head_dim, "P": case.page_size,
            "dtype": case.dtype, "kv": case.k_format,
        }  # fmt: skip
        try:
            us, moved = future.result().microseconds(), moved_bytes(case)
            row |= {"us": round(us, 2), "gb_s": round(moved / us / 1e3)}
        except Exception as error:  # a peer that is missing costs its own rows only
            row |= {"error": str(error).splitlines()[0][:200]}
        yield row


def bars(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields bars: what each row's time is held to.

    - bf16: the time of FlashInfer's fastest variant, where it ran.
    - Other formats: bf16's time by the ratio of bytes and the slack.
    - Skewed lengths: uniform ones' time and a margin.
    - Segments: one row's time and a margin.
    - Backend triton: mosaic's.
    """
    found, triton = (
        {
            (row["H"], row["K"], row["R"], row["length"], row["kv"], row.get("Q", 1)): row["us"]
            for row in rows
            if row.get("peer") == who and "us" in row
        }
        for who in ("mosaic", "triton")
    )
    flashinfer = peers.best(rows, peers.FLASHINFER, ("H", "K", "R", "length"))
    own = {(*case,): us for (*case, width), us in found.items() if width == 1}
    for (heads, kv_heads, count, length, kv), us in own.items():
        limit = flashinfer.get((heads, kv_heads, count, length)) if kv == "bf16" else None
        bf16 = own.get((heads, kv_heads, count, length, "bf16"))
        if kv != "bf16" and bf16 is not None:
            stored, plain = (
                bytes_per_token(128, kv_heads, fmt, fmt) for fmt in (parse_format(x, 128) for x in (kv, "bf16"))
            )
            limit = round(bf16 * stored / plain * SLACK[kv.split("-")[0]], 2)
        if kv.endswith("g128-zp"):
            fmt = parse_format(kv, 128)
            moved = count * length * bytes_per_token(128, kv_heads, fmt, fmt)
            limit = round(ZEROS * moved / _ceiling(rows) / 1e3, 2)
        uniform = own.get((heads, kv_heads, len(UNIFORM.lengths), UNIFORM.lengths[0], kv))
        if isinstance(length, str) and uniform is not None:
            limit = round(1.15 * uniform, 2)
        if limit is not None:
            yield bar(f"(R, length)=({count}, {length}) H/K={heads}/{kv_heads} {kv}", us, "us", limit, most=True)
    for (heads, kv_heads, count, length, kv, width), us in found.items():
        one = own.get((heads, kv_heads, count, length, kv))
        if one is not None and SEGMENT_BARS.get((heads, kv_heads)) == width:
            name = f"(R, length)=({count}, {length}) H/K={heads}/{kv_heads} {kv} Q={width}"
            yield bar(name, us, "us", round(1.05 * one, 2), most=True)
    for (heads, kv_heads, count, length, kv, width), us in triton.items():
        mosaic = own.get((heads, kv_heads, count, length, kv))
        if mosaic is not None and isinstance(length, int) and count * length >= 64 * 1024 and width == 1:
            limit = round(mosaic * TRITON, 2)
            yield bar(f"triton (R, length)=({count}, {length}) H/K={heads}/{kv_heads} {kv}", us, "us", limit, most=True)


def summarize(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Adds each row's share of the run's best bandwidth, and yields the bars."""
    ceiling = _ceiling(rows)
    for row in rows:
        if "us" in row:
            row["fraction"] = round(row["gb_s"] / ceiling, 3)
    return bars(rows)


def _ceiling(rows: list[dict[str, Any]]) -> float:
    """Returns the run's best rate, in GB/s."""
    return max((row["gb_s"] for row in rows if "gb_s" in row), default=0.0)


def parse_cell(text: str) -> tuple[int, int]:
    """Parses 128x136 as (128, 136). Raises argparse's error for another form."""
    rows, _, length = text.partition("x")
    if not (rows.isdecimal() and length.isdecimal() and int(rows) and int(length)):
        raise argparse.ArgumentTypeError(f"{text!r} is not ROWSxLENGTH, such as 128x136")
    return int(rows), int(length)


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parts = ["bf16", "formats", "skewed", "segments"]
    parser.add_argument("--parts", nargs="*", choices=parts, default=parts[:3], help="(--parts alone: none of them)")
    parser.add_argument(
        "--cells", type=parse_cell, nargs="+", default=[], metavar="ROWSxLENGTH", help="besides, in all formats"
    )
    parser.add_argument(
        "--heads",
        nargs="+",
        choices=["32/32", "32/8"],
        default=["32/32", "32/8"],
        metavar="H/K",
        help="of queries and of K and V",
    )
    formats = sorted({case.k_format for case in BENCH_CASES})
    known = [*formats, *VARIANTS]
    parser.add_argument("--formats", nargs="+", choices=known, default=formats, help="of K and V, among the parts'")
    add_triton(parser, TritonConfig)
    parser.add_argument("--stages", type=positive, default=8, help="tiles in flight, at most")
    parser.add_argument("--computing", type=int, choices=[1, 2], help="warpgroups, of a head each")
    parser.add_argument(
        "--split", type=positive, help="tokens of a work item: with --computing 1 twice as many are usual"
    )
    parser.add_argument(
        "--per-sm", type=positive, help="workers that share a multiprocessor (these three: as configured)"
    )
    parser.add_argument("--consecutive", action="store_true", help="pages with consecutive numbers, not shuffled ones")
    peers.add_options(parser, "FlashInfer's paged attention", 60)
    args = parser.parse_args(argv)
    beside = list(peers.decode_attention(args.peers, args.peer_seconds)) if peers.asked(parser, args) else []
    changes = {"stages": args.stages, "consecutive": args.consecutive}
    tuned = {name: getattr(args, name) for name in ("computing", "per_sm", "split")}
    changes |= {name: value for name, value in tuned.items() if value is not None}
    triton = triton_changes(args, TritonConfig)
    rows = table(args.parts, args.heads, args.formats, args.cells, triton, **changes)
    return record("decode_attention", args, argv, chain(beside, rows), summarize)


if __name__ == "__main__":
    sys.exit(main())
