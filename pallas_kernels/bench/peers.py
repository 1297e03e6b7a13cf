"""Runs others' kernels beside ours: scripts of experiments/peers, each in a process of its own.

They must run before JAX takes the device's memory.

    peer_flashinfer.py --parts decode --budget-s S --out FILE    FlashInfer's paged attention (or prefill)
    peer_kernels.py --parts gemm --budget-s S --out FILE         torch's matmuls

`--peers` asks for them, `--peers DIR` for scripts of the same names in another folder. Each writes a JSON object with
"rows", what it measured, and "versions", the peer's. Where one is missing or fails, its row says why. Every variant is
kept: a row's peer is who made it, its `variant` which of its own ways. `best` returns the fastest. A row names its
`script` and, as its `version`, the packages that ran. Times are of CUDA graphs by CUDA events, which include the gaps
between kernels. Ours are the profiler's.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pallas_kernels.bench.command import Parser
from pallas_kernels.bench.numbers import positive_number

Row = dict[str, Any]
ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "experiments" / "peers"
FLASHINFER = "FlashInfer"
OF_PEERS = ("peer_names", "peer_seconds")  # options that --peers alone gives a meaning
PRODUCTS = {  # kinds of peer_kernels' products: whose, and which of its ways
    "bf16": ("torch bf16", "mm"),
    "int8": ("torch int8", "_int_mm"),
    "fp8t": ("torch fp8", "a scale a tensor"),
    "fp8r": ("torch fp8", "a scale a row"),
}


def add_options(parser: argparse.ArgumentParser, what: str, seconds: float) -> None:
    """Adds options to a command that can show others' figures beside its own."""
    add_folder(parser, what)
    parser.add_argument("--peer-seconds", type=positive_number, default=seconds, help="for each of its runs")


def add_folder(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds --peers, alone or with the folder of the scripts."""
    about = f"{what} beside ours, by scripts in DIR (default: experiments/peers)"
    parser.add_argument("--peers", type=Path, nargs="?", const=SCRIPTS, metavar="DIR", help=about)


def asked(parser: Parser, args: argparse.Namespace) -> bool:
    """Returns whether others are to be measured. Ends the command where their folder is not there, and where one of
    OF_PEERS is given without --peers."""
    if args.peers is not None and not args.peers.is_dir():
        parser.error(f"--peers {args.peers} is not a folder")
    if args.peers is None:
        parser.refuse(OF_PEERS, "{} is about others' side: give --peers, too")
    return args.peers is not None


def decode_attention(directory: Path, seconds: float) -> Iterator[Row]:
    """Runs FlashInfer over shuffled pages, one query a sequence: by CUDA cores, by tensor cores, and through XQA."""
    for row in _flashinfer(directory, "decode", seconds):
        if "batch" in row:
            shape = {"R": row["batch"], "Q": 1, "length": row["ctx"]}
            row = _attention("decode_attention", row, shape) | _figures(row, "gbs", "gb_s", 2) | made_by(row)
        yield row


def prefill_attention(directory: Path, seconds: float) -> Iterator[Row]:
    """Runs FlashInfer's causal attention over shuffled pages, by its kernels fa2 and fa3."""
    for row in _flashinfer(directory, "prefill", seconds):
        if "batch" in row:
            lengths = [row["ctx"]] * row["batch"]
            shape = {"q_lens": lengths, "kv_lens": lengths}
            row = _attention("prefill_attention", row, shape) | _figures(row, "tflops", "tflop_s", 1) | made_by(row)
        yield row


def products(directory: Path, seconds: float) -> Iterator[Row]:
    """Runs torch's matmuls of bf16, int8 and fp8 with the rows that it was given; padded ones are left out."""
    options = ["--parts", "gemm", "--budget-s", str(seconds)]
    for row in run_script(directory / "peer_kernels.py", options, 1.5 * seconds):
        if "kind" not in row:
            yield {"kernel": "scaled_matmul", "peer": "torch", **row}
        elif not row.get("note"):
            peer, variant = PRODUCTS[row["kind"]]
            shape = {"M": row["M"], "K": row["K"], "N": row["N"], "variant": variant}
            figures = _figures(row, "tflops", "tflop_s", 2) | made_by(row)
            yield {"kernel": "scaled_matmul", "peer": peer} | shape | figures


def _flashinfer(directory: Path, part: str, seconds: float) -> Iterator[Row]:
    options = ["--parts", part, "--budget-s", str(seconds)]
    for row in run_script(directory / "peer_flashinfer.py", options, 1.5 * seconds):
        if "batch" in row:
            yield row
        else:  # a variant that fails its check, or the whole script
            variant = {"variant": row["backend"].removeprefix("fi-")} if "backend" in row else {}
            heads = {"H": row["hq"], "K": row["hk"]} if "hq" in row else {}
            error = row.get("error", "no batch in its row")
            yield {"kernel": f"{part}_attention", "peer": FLASHINFER, **variant, **heads, "error": error} | made_by(row)


def _attention(kernel: str, row: Row, shape: Row) -> Row:
    heads = {"H": row["hq"], "K": row["hk"], "D": 128, "P": row["page"], "dtype": "bfloat16", "kv": "bf16"}
    return {"kernel": kernel, "peer": FLASHINFER, "variant": row["backend"].removeprefix("fi-"), **shape, **heads}


def _figures(row: Row, theirs: str, ours: str, digits: int) -> Row:
    if "error" in row:
        return {"error": row["error"]}
    return {"us": round(row["us"], digits), ours: round(row[theirs])}


def made_by(row: Row) -> Row:
    """Returns what a row of ours keeps of a peer's: its script, and the versions that it ran."""
    return {key: row[key] for key in ("script", "version") if key in row}


def best(rows: Iterable[Row], peer: str, shape: Sequence[str]) -> dict[tuple[Any, ...], float]:
    """Returns the microseconds of the peer's fastest variant, by the values of these keys; lists as tuples."""
    found: dict[tuple[Any, ...], float] = {}
    for row in rows:
        if row.get("peer") == peer and "us" in row:
            key = tuple(tuple(x) if isinstance(x, list) else x for x in (row[name] for name in shape))
            found[key] = min(row["us"], found.get(key, row["us"]))
    return found


def run_script(script: Path, options: Sequence[str], seconds: float) -> list[Row]:
    """Returns what a script wrote, each row with the script and its versions; then why, where it failed or wrote
    nothing. Ends all processes that it began."""
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "out.json"
        command = [sys.executable, str(script), *options, "--out", str(out)]
        print(f"peer: {script.name} {' '.join(options)}", file=sys.stderr, flush=True)
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        environment = os.environ | {"PYTHONPATH": paths}
        with subprocess.Popen(command, **pipes, env=environment, start_new_session=True) as running:
            try:
                lines = running.communicate(timeout=seconds)[0].strip().splitlines()
                status = running.returncode
                why = f"exit status {status}" + (f": {lines[-1][:200]}" if lines else "")
            except subprocess.TimeoutExpired:
                status, why = -1, f"took more than {seconds:.0f} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(running.pid, signal.SIGKILL)
        try:
            found = json.loads(out.read_text())
        except (OSError, ValueError):
            found = []
    document = found if isinstance(found, dict) else {"rows": found}
    versions = document.get("versions")
    made = {"script": script.name, "version": versions} if versions else {}
    rows = [row | made for row in document["rows"]]
    return rows + [{"error": why}] if status or not rows else rows
