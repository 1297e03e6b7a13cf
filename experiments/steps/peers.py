"""Runs others on the same work on the same device, with scripts of experiments/peers. Each runs in its own process
(pallas_kernels/bench/peers.py), before JAX takes the device's memory.

    peer_torch.py --rows bf16:b1:in8 --budget-s S --out FILE    LLaMA-7B: static cache, torch.compile, CUDA graphs
    peer_vllm.py --workload FILE --batches B,.. --out FILE      LLaMA-7B: vLLM, decode steps or the workload
    peer_hf.py --parts cb --workload FILE --out FILE            LLaMA-7B: transformers' continuous batching

Every measured variant and repeat is a row; `weights` and `kv` give the bits. The first two have 16 or 8 bits, like the
run beside them. vLLM's 8 bits are fp8, with an fp8 cache. torch's are w8a8 or w8a16 with a 16-bit cache. transformers
only has 16 bits.
"""

import argparse
import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.result_file import rounded
from pallas_kernels.bench import peers
from pallas_kernels.bench.command import Parser
from pallas_kernels.bench.peers import asked, made_by, run_script

Row = dict[str, Any]
COMPILED, SERVING, VLLM = "torch.compile and CUDA graphs", "transformers' continuous batching", "vLLM"
SERVERS = ("transformers", "vllm")  # serve the workload
MODEL = "llama-2-7b"
SHAPES = {(8, 256): "in8", (1024, 1024): "in1024"}  # input and output, by peer_torch's name
WARM_UP = "warm-up"  # the repeat of a run that compiles as it goes
START_S = 150  # time for vLLM's engine to start


def counts(row: Row) -> bool:
    """Returns whether a row is a complete run of the workload, other than a warm-up. A peer's figure is the mean of
    such runs."""
    return "peer" in row and "qps" in row and not row.get("cut_off") and row.get("repeat") != WARM_UP


def add_options(parser: argparse.ArgumentParser, names: Sequence[str], seconds: float) -> None:
    """Adds the options of a command that can also run these peers."""
    peers.add_options(parser, "peers on LLaMA-2-7B (experiments/steps/peers.py)", seconds)
    parser.add_argument("--peer-names", choices=names, nargs="+", default=names, help="peers to run (default: all)")


def check_options(parser: Parser, args: argparse.Namespace) -> None:
    """Ends the command if there are no scripts, or if they would measure another model."""
    model = Path(getattr(args, "model", None) or args.config).stem
    if asked(parser, args) and model != MODEL:
        parser.error(f"--peers measures {MODEL}, not {model}")


def compiled_steps(folder: Path, cases: Iterable[tuple[int, int, int]], quantized: bool, seconds: float) -> list[Row]:
    """Returns the variants that torch compiled, for the cases (batch, input, output) in its script. A row has
    milliseconds of prefill and of a decode step."""
    schemes = ("wo8", "w8a8") if quantized else ("bf16",)
    wanted = [f"{q}:b{b}:{SHAPES[i, o]}" for b, i, o in cases if (i, o) in SHAPES for q in schemes]
    if not wanted:
        return []
    options = ["--rows", ",".join(wanted), "--budget-s", str(seconds)]
    return [rounded(_compiled(row)) for row in run_script(folder / "peer_torch.py", options, seconds * 1.5)]


def _compiled(row: Row) -> Row:
    if "batch" not in row:
        return {"peer": COMPILED, **row}
    about = {
        "peer": COMPILED, "weights": {"wo8": "w8a16"}.get(row["quant"], row["quant"]), "kv": "bf16",
        "batch": row["batch"], "input": row["input_len"], "output": row["output_len"],
        "variant": f"{row['mode']}/{row['attn']}", **made_by(row),
    }  # fmt: skip
    if "error" in row:
        return about | {"error": row["error"]}
    return about | {
        "prefill_ms": row["prefill_ms"], "decode_ms": row["decode_ms"], "memory_gib": row["mem_gib"],
        "tokens_s": _tokens_s(row),
    }  # fmt: skip


def _tokens_s(row: Row) -> float:
    """Returns tokens/s of the output, over the time of prefill and of all decode steps, as in throughput.py."""
    ms = row["prefill_ms"] + row["output_len"] * row["decode_ms"]
    return 1e3 * row["batch"] * row["output_len"] / ms


def vllm_steps(folder: Path, cases: Iterable[tuple[int, int, int]], quantized: bool, seconds: float) -> list[Row]:
    """Returns vLLM's decode steps of cases with 8 tokens in and 256 out, which its script measures."""
    batches = [batch for batch, *shape in cases if shape == [8, 256]]
    return _vllm(folder, [], batches, 0, quantized, seconds) if batches else []


def serving(
    folder: Path,
    lengths: Sequence[tuple[int, int, float]],
    quantized: bool,
    repeats: int,
    seconds: float,
    names: Sequence[str] = SERVERS,
) -> list[Row]:
    """Returns requests (prompt, output, arrival in seconds) served by vLLM, and by transformers if nothing is
    quantized.

    transformers serves them at least twice, since its first run records graphs and does not count. vLLM's script sends
    all at once, so later arrivals are an error in its row.
    """
    found: list[Row] = []
    if "transformers" in names and not quantized:
        found = _transformers(folder, lengths, max(2, repeats), seconds)
    if "vllm" in names and any(at > 0 for *_, at in lengths):
        found.append({"peer": VLLM, "error": "its script sends all requests at once"})
    elif "vllm" in names:
        found += _vllm(folder, lengths, [], repeats, quantized, seconds * repeats)
    return found


def _workload(folder: str, lengths: Sequence[tuple[int, int, float]]) -> str:
    path = Path(folder) / "workload.json"
    path.write_text(json.dumps([{"prompt_len": p, "output_len": o, "arrival": at} for p, o, at in lengths]))
    return str(path)


def _vllm(
    folder: Path,
    lengths: Sequence[tuple[int, int, float]],
    batches: Sequence[int],
    repeats: int,
    quantized: bool,
    seconds: float,
) -> list[Row]:
    """Returns vLLM's rows. `seconds` starts once its engine runs."""
    bits = "fp8" if quantized else "bf16"
    with tempfile.TemporaryDirectory() as temporary:
        options = ["--modes", bits, "--workload", _workload(temporary, lengths), "--repeats", str(repeats)]
        options += ["--batches", ",".join(map(str, batches)), "--seqs", str(max(512, *batches, 0))]
        options += ["--budget", str(START_S + seconds)]
        found = run_script(folder / "peer_vllm.py", options, START_S + seconds + 30)
    return [rounded({"peer": VLLM, "weights": bits, "kv": bits} | row) for row in _by_vllm(found, len(lengths))]


def _by_vllm(found: Sequence[Row], requests: int) -> Iterator[Row]:
    """Yields a row for each run of the workload and for each batch that was only decoded."""
    for row in found:
        if "error" in row:
            yield {"error": row["error"], **made_by(row)}
        elif row.get("kind") == "qps":
            yield {
                "repeat": row["run"], "requests": requests, "seconds": row["wall_s"], "qps": row["req_s"],
                "output_tokens_s": row["out_tok_s"], **made_by(row),
            }  # fmt: skip
        elif row.get("kind") == "decode":
            tokens_s = row["tok_s"]
            step = {"batch": row["batch"], "input": 8, "output": 256, "decode_ms": row["ms"], "tokens_s": tokens_s}
            yield step | made_by(row)


def _transformers(folder: Path, lengths: Sequence[tuple[int, int, float]], passes: int, seconds: float) -> list[Row]:
    """Returns rows of serving by flash-attn over pages. Rows name the attention that ran."""
    with tempfile.TemporaryDirectory() as temporary:
        options = ["--parts", "cb", "--attn", "flash", "--workload", _workload(temporary, lengths)]
        options += ["--passes", str(passes), "--cb-limit-s", str(seconds)]
        found = run_script(folder / "peer_hf.py", options, (passes + 1) * seconds + 120)
    return [
        rounded({"peer": SERVING, "weights": "bf16", "kv": "bf16"} | (row if "error" in row else _served(row)))
        for row in found
    ]


def _served(row: Row) -> Row:
    return {
        "repeat": row["run"] - 1 if row["run"] else WARM_UP, "attention": row["attn"], "requests": row["finished"],
        "seconds": row["seconds"], "qps": row["req_s"], "output_tokens_s": row["tok_s"],
        "ttft_ms_p50": 1e3 * row["ttft_p50_s"], "ttft_ms_p99": 1e3 * row["ttft_p99_s"],
        "e2e_ms_p50": 1e3 * row["latency_p50_s"], "cut_off": row["cut_off"], **made_by(row),
    }  # fmt: skip
