"""What others do with the same work on the same device, by scripts in a folder that is given, each in a process of its
own. They must run before JAX takes the device's memory.

    DIR/peer_torch.py --rows bf16:b1:in8 --budget-s S --out FILE    LLaMA-7B: static cache, torch.compile, CUDA graphs
    DIR/peer_hf.py --parts cb --workload FILE --out FILE            LLaMA-7B: transformers' continuous batching
    DIR/peer_vllm.py --workload FILE --batches B,.. --out FILE      LLaMA-7B: vLLM, decode steps and the workload

Each writes a JSON list of what it measured, or an object with the list as its "rows". Where one is missing or fails,
its row says why.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.result_file import rounded

Row = dict[str, Any]
COMPILED, SERVING, VLLM = "torch.compile and CUDA graphs", "transformers' continuous batching", "vLLM"
MODEL = "llama-2-7b"
BATCHES = (1, 32, 128)  # of the compiled steps, 8 tokens in and 256 out


def add_options(parser: argparse.ArgumentParser, seconds: float) -> None:
    """Options of a command that can show PyTorch's side beside its own."""
    parser.add_argument("--peers", type=Path, metavar="DIR", help="others' side of LLaMA-7B, by scripts (peers.py)")
    parser.add_argument("--peer-seconds", type=float, default=seconds, help="for each of its runs")


def check_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the command where there are no such scripts, or they would measure another model."""
    if args.peers is None:
        return
    if not args.peers.is_dir():
        parser.error(f"--peers {args.peers} is not a folder")
    model = Path(getattr(args, "model", None) or args.config).stem
    if model != MODEL:
        parser.error(f"--peers measures {MODEL}, not {model}")


def compiled_steps(folder: Path, seconds: float) -> list[Row]:
    """The best variant of each batch that torch compiled: milliseconds of prefill and of a decode step."""
    rows = ",".join(f"bf16:b{batch}:in8" for batch in BATCHES)
    found = _run(folder / "peer_torch.py", ["--rows", rows, "--budget-s", str(seconds)], seconds * 1.5)
    best: dict[int, Row] = {}
    for row in found:
        if "error" in row:
            best.setdefault(row.get("batch", 0), {"peer": COMPILED} | row)
        elif row["decode_ms"] < best.get(row["batch"], {}).get("decode_ms", float("inf")):
            best[row["batch"]] = rounded({
                "peer": COMPILED, "batch": row["batch"], "input": row["input_len"], "output": row["output_len"],
                "prefill_ms": row["prefill_ms"], "decode_ms": row["decode_ms"], "memory_gib": row["mem_gib"],
                "tokens_s": _tokens_s(row), "variant": f"{row['mode']}/{row['attn']}",
            })  # fmt: skip
    return list(best.values())


def _tokens_s(row: Row) -> float:
    """As throughput.py has it: of the output, over the time of prefill and of all decode steps."""
    ms = row["prefill_ms"] + row["output_len"] * row["decode_ms"]
    return 1e3 * row["batch"] * row["output_len"] / ms


def serving(folder: Path, lengths: Sequence[tuple[int, int, float]], seconds: float) -> list[Row]:
    """Requests (prompt, output, arrival in seconds) served by transformers and by vLLM.

    transformers serves them twice, as it records its graphs as it goes. vLLM's script sends all at once, so requests
    that arrive later are an error of its row; it has decode steps of some batches too.
    """
    workload = [{"prompt_len": p, "output_len": o, "arrival": at} for p, o, at in lengths]
    most = 3 * seconds + 120
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "workload.json"
        path.write_text(json.dumps(workload))
        options = ["--parts", "cb", "--workload", str(path), "--cb-limit-s", str(seconds)]
        found = _run(folder / "peer_hf.py", options, most)
        if any(at > 0 for *_, at in lengths):
            by_vllm: list[Row] = [{"error": "its script sends all requests at once"}]
        else:
            batches = ",".join(map(str, BATCHES))
            options = ["--modes", "bf16", "--workload", str(path), "--batches", batches, "--budget", str(most)]
            by_vllm = _run(folder / "peer_vllm.py", options, most + 30)
    return [*_by_transformers(found), *_by_vllm(by_vllm)]


def _by_vllm(found: Sequence[Row]) -> Iterator[Row]:
    """A row for each run of the workload and for each batch that was only decoded."""
    for row in found:
        if row.get("kind") == "qps":
            row = {
                "repeat": row["run"], "seconds": row["wall_s"], "qps": row["req_s"],
                "output_tokens_s": row["out_tok_s"],
            }  # fmt: skip
        elif row.get("kind") == "decode":
            row = {"batch": row["batch"], "input": 8, "output": 256, "decode_ms": row["ms"], "tokens_s": row["tok_s"]}
        elif "error" not in row:
            continue
        yield rounded({"peer": VLLM} | row)


def _by_transformers(found: Sequence[Row]) -> Iterator[Row]:
    for row in found:
        if "error" not in row:
            row = {
                "repeat": row["run"], "attention": row["attn"], "requests": row["finished"], "seconds": row["seconds"],
                "qps": row["req_s"], "output_tokens_s": row["tok_s"], "ttft_ms_p50": 1e3 * row["ttft_p50_s"],
                "ttft_ms_p99": 1e3 * row["ttft_p99_s"], "e2e_ms_p50": 1e3 * row["latency_p50_s"],
                "cut_off": row["cut_off"],
            }  # fmt: skip
        yield rounded({"peer": SERVING} | row)


def _run(script: Path, options: Sequence[str], seconds: float) -> list[Row]:
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
