"""Runs others' kernels beside ours: scripts of experiments/peers, each in a process of its own.

They must run before JAX takes the device's memory.

    peer_flashinfer.py --parts decode --budget-s S --out FILE    FlashInfer's paged attention (or prefill)
    peer_kernels.py --parts gemm --budget-s S --out FILE         torch's matmuls

`--peers` asks for them, `--peers DIR` for scripts of the same names in another folder. Each writes a JSON object with
its "rows" and the peer's "versions". If a script is missing or fails, its row says why. All variants are kept: `peer`
names the maker of a kernel, and `variant` one of the maker's kernels. `best` returns the fastest. A row also has the
`script`, and the packages that ran as its `version`. Times are of CUDA graphs by CUDA events, which include the gaps
between kernels. Our own times are the profiler's.
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
OF_PEERS = ("peer_names", "peer_settings", "peer_seconds")  # options that mean something only with --peers
PRODUCTS = {  # peer and variant of each kind of product of peer_kernels.py
    "bf16": ("torch bf16", "mm"),
    "int8": ("torch int8", "_int_mm"),
    "fp8t": ("torch fp8", "a scale a tensor"),
    "fp8r": ("torch fp8", "a scale a row"),
}


def add_options(parser: argparse.ArgumentParser, what: str, seconds: float) -> None:
    """Adds the options of a command that can measure peers beside our own kernels."""
    add_folder(parser, what)
    parser.add_argument("--peer-seconds", type=positive_number, default=seconds, help="seconds for each run of a peer")


def add_folder(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds --peers, alone or with the folder of the scripts."""
    about = f"also measure {what}, by scripts in DIR (default: experiments/peers)"
    parser.add_argument("--peers", type=Path, nargs="?", const=SCRIPTS, metavar="DIR", help=about)


def asked(parser: Parser, args: argparse.Namespace) -> bool:
    """Returns whether to measure peers. Ends the command if their folder is missing, or if one of OF_PEERS is given
    without --peers."""
    if args.peers is not None and not args.peers.is_dir():
        parser.error(f"--peers {args.peers} is not a folder")
    if args.peers is None:
        parser.refuse(OF_PEERS, "{} needs --peers")
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
    """Returns the fields of a peer's row that our row keeps: its script, and the versions that it ran."""
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
    """Runs a script, and returns its rows, each with the script and its versions. The last row has the error if the
    script failed or wrote nothing. Ends all processes that the script started."""
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
