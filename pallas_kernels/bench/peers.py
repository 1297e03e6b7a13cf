"""Others' kernels beside ours: scripts in a folder that is given, each in a process of its own. They must run before
JAX takes the device's memory.

    DIR/peer_flashinfer.py --parts decode --budget-s S --out FILE    FlashInfer's paged attention (or prefill)
    DIR/peer_kernels.py --parts gemm --budget-s S --out FILE         torch's products

Each writes a JSON list of what it measured, or an object with the list as its "rows"; where one is missing or fails,
its row says why. Every variant is kept: a row's peer is who made it, its `variant` which of its own ways; `best` has
the fastest. Times are of CUDA graphs by CUDA events, which have the gaps between kernels in them; ours are the
profiler's.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pallas_kernels.bench.command import Parser
from pallas_kernels.bench.numbers import positive_number

Row = dict[str, Any]
FLASHINFER = "FlashInfer"
OF_PEERS = ("peer_names", "peer_seconds")  # options that --peers alone gives a meaning
PRODUCTS = {  # kinds of peer_kernels' products: whose, and which of its ways
    "bf16": ("torch bf16", "mm"),
    "int8": ("torch int8", "_int_mm"),
    "fp8t": ("torch fp8", "a scale a tensor"),
    "fp8r": ("torch fp8", "a scale a row"),
}


def add_options(parser: argparse.ArgumentParser, what: str, seconds: float) -> None:
    """Options of a command that can show others' side beside its own."""
    parser.add_argument("--peers", type=Path, metavar="DIR", help=f"{what}, by scripts in DIR")
    parser.add_argument("--peer-seconds", type=positive_number, default=seconds, help="for each of its runs")


def asked(parser: Parser, args: argparse.Namespace) -> bool:
    """Whether others are to be measured. Ends the command where their folder is not there, and where one of OF_PEERS
    is given without --peers."""
    if args.peers is not None and not args.peers.is_dir():
        parser.error(f"--peers {args.peers} is not a folder")
    if args.peers is None:
        parser.refuse(OF_PEERS, "{} is about others' side: give --peers DIR, too")
    return args.peers is not None


def decode_attention(directory: Path, seconds: float) -> Iterator[Row]:
    """FlashInfer over shuffled pages, one query a sequence: by CUDA cores, by tensor cores, and through XQA."""
    for row in _flashinfer(directory, "decode", seconds):
        if "batch" in row:
            shape = {"R": row["batch"], "Q": 1, "length": row["ctx"]}
            row = _attention("decode_attention", row, shape) | _figures(row, "gbs", "gb_s", 2)
        yield row


def prefill_attention(directory: Path, seconds: float) -> Iterator[Row]:
    """FlashInfer's causal attention over shuffled pages, by its kernels fa2 and fa3."""
    for row in _flashinfer(directory, "prefill", seconds):
        if "batch" in row:
            lengths = [row["ctx"]] * row["batch"]
            shape = {"q_lens": lengths, "kv_lens": lengths}
            row = _attention("prefill_attention", row, shape) | _figures(row, "tflops", "tflop_s", 1)
        yield row


def products(directory: Path, seconds: float) -> Iterator[Row]:
    """torch's products of bf16, int8 and fp8, with the rows that it was given: those padded to more are left out."""
    options = ["--parts", "gemm", "--budget-s", str(seconds)]
    for row in run_script(directory / "peer_kernels.py", options, 1.5 * seconds):
        if "kind" not in row:
            yield {"kernel": "scaled_matmul", "peer": "torch", **row}
        elif not row.get("note"):
            peer, variant = PRODUCTS[row["kind"]]
            shape = {"M": row["M"], "K": row["K"], "N": row["N"], "variant": variant}
            yield {"kernel": "scaled_matmul", "peer": peer} | shape | _figures(row, "tflops", "tflop_s", 2)


def _flashinfer(directory: Path, part: str, seconds: float) -> Iterator[Row]:
    options = ["--parts", part, "--budget-s", str(seconds)]
    for row in run_script(directory / "peer_flashinfer.py", options, 1.5 * seconds):
        if "batch" in row:
            yield row
        else:  # a variant that fails its check, or the whole script
            variant = {"variant": row["backend"].removeprefix("fi-")} if "backend" in row else {}
            heads = {"H": row["hq"], "K": row["hk"]} if "hq" in row else {}
            error = row.get("error", "no batch in its row")
            yield {"kernel": f"{part}_attention", "peer": FLASHINFER, **variant, **heads, "error": error}


def _attention(kernel: str, row: Row, shape: Row) -> Row:
    heads = {"H": row["hq"], "K": row["hk"], "D": 128, "P": row["page"], "dtype": "bfloat16", "kv": "bf16"}
    return {"kernel": kernel, "peer": FLASHINFER, "variant": row["backend"].removeprefix("fi-"), **shape, **heads}


def _figures(row: Row, theirs: str, ours: str, digits: int) -> Row:
    if "error" in row:
        return {"error": row["error"]}
    return {"us": round(row["us"], digits), ours: round(row[theirs])}


def best(rows: Iterable[Row], peer: str, shape: Sequence[str]) -> dict[tuple[Any, ...], float]:
    """The microseconds of the peer's fastest variant, by the values of these keys; lists as tuples."""
    found: dict[tuple[Any, ...], float] = {}
    for row in rows:
        if row.get("peer") == peer and "us" in row:
            key = tuple(tuple(x) if isinstance(x, list) else x for x in (row[name] for name in shape))
            found[key] = min(row["us"], found.get(key, row["us"]))
    return found


def run_script(script: Path, options: Sequence[str], seconds: float) -> list[Row]:
    """What a script wrote; then, where it failed or wrote nothing, why."""
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "out.json"
        command = [sys.executable, str(script), *options, "--out", str(out)]
        print(f"peer: {script.name} {' '.join(options)}", file=sys.stderr, flush=True)
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds)
            status, said = done.returncode, done.stdout.strip().splitlines()
            why = f"exit status {status}" + (f": {said[-1][:200]}" if said else "")
        except subprocess.TimeoutExpired:
            status, why = -1, f"took more than {seconds:.0f} s"
        try:
            found = json.loads(out.read_text())
            rows = found["rows"] if isinstance(found, dict) else found
        except (OSError, ValueError):
            rows = []
    return rows + [{"error": why}] if status or not rows else rows
