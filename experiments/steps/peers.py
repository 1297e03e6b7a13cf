"""Runs others on the same work on the same device, with scripts of experiments/peers. Each runs in its own process
(pallas_kernels/bench/peers.py), before JAX takes the device's memory.

    peer_torch.py --rows bf16:b1:in8 --budget-s S --out FILE    LLaMA-7B: static cache, torch.compile, CUDA graphs
    peer_vllm.py --workload FILE --batches B,.. --out FILE      vLLM on the same --config: decode steps or the workload
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

from experiments.peers.peer_vllm import setting
from experiments.result_file import rounded
from jllm.files.families import FAMILIES
from jllm.files.hf_config import load_config
from pallas_kernels.bench import peers
from pallas_kernels.bench.command import Parser
from pallas_kernels.bench.peers import asked, made_by, run_script

Row = dict[str, Any]
COMPILED, SERVING, VLLM = "torch.compile and CUDA graphs", "transformers' continuous batching", "vLLM"
SERVERS = ("transformers", "vllm")  # serve the workload
MODEL = "llama-2-7b"
BY_VLLM = ("llama", "mistral", "qwen2", "qwen3")  # model types that vLLM's script also runs
SHAPES = {(8, 256): "in8", (1024, 1024): "in1024"}  # input and output, by peer_torch's name
WARM_UP = "warm-up"  # the repeat of a run that compiles as it goes
START_S = 150  # time for vLLM's engine to start
OF_RUNS = {"run": "repeat", "wall_s": "seconds", "req_s": "qps", "out_tok_s": "output_tokens_s"}  # our names


def counts(row: Row) -> bool:
    """Returns whether a row is a complete run of the workload, all at once and no warm-up. A peer's figure is the mean
    of such runs."""
    whole = "peer" in row and "qps" in row and not row.get("cut_off")
    return whole and row.get("rate") is None and row.get("repeat") != WARM_UP


def add_options(parser: argparse.ArgumentParser, names: Sequence[str], seconds: float) -> None:
    """Adds the options of a command that can also run these peers."""
    peers.add_options(parser, "peers on LLaMA-2-7B, or vLLM on --config (experiments/steps/peers.py)", seconds)
    parser.add_argument("--peer-names", choices=names, nargs="+", default=names, help="peers to run (default: all)")
    further = "further arguments of vllm.LLM, such as max_num_batched_tokens=16384; rows name them"
    parser.add_argument("--peer-settings", type=setting, nargs="+", default=[], metavar="NAME=VALUE", help=further)


def check_options(parser: Parser, args: argparse.Namespace) -> None:
    """Ends the command if there are no scripts, or if one would measure another model."""
    if not asked(parser, args):
        return
    if args.peer_settings and "vllm" not in args.peer_names:
        parser.error("--peer-settings are vLLM's: add vllm to --peer-names")
    given = getattr(args, "model", None)
    if (model := Path(given or args.config).stem) == MODEL:
        return
    if given or [*args.peer_names] != ["vllm"]:
        parser.error(f"--peers measures {MODEL}, not {model}: another takes --config, and --peer-names vllm alone")
    if (kind := FAMILIES[load_config(args.config).architecture].model_type) not in BY_VLLM:
        parser.error(f"--peers measures {', '.join(BY_VLLM)} by vLLM, not {model}, whose model_type is {kind}")


def of_vllm(args: argparse.Namespace) -> list[str]:
    """Returns the options of vLLM's script that a command's own decide."""
    config = [] if getattr(args, "model", None) else ["--config", str(args.config)]
    return [*config, "--cut", str(getattr(args, "cut", 0)), "--settings", *args.peer_settings]


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


def vllm_steps(
    folder: Path, cases: Iterable[tuple[int, int, int]], quantized: bool, seconds: float, more: Sequence[str] = ()
) -> list[Row]:
    """Returns vLLM's decode steps of cases with 8 tokens in and 256 out, which its script measures."""
    batches = [batch for batch, *shape in cases if shape == [8, 256]]
    return _vllm(folder, [], batches, 0, quantized, seconds, more) if batches else []


def serving(
    folder: Path,
    lengths: Sequence[tuple[int, int, float]],
    quantized: bool,
    repeats: int,
    seconds: float,
    names: Sequence[str] = SERVERS,
    more: Sequence[str] = (),
) -> list[Row]:
    """Returns requests (prompt, output, arrival in seconds) served by vLLM, and by transformers if nothing is
    quantized.

    transformers serves them at least twice, since its first run records graphs and does not count. `more` are options
    of vLLM's script (of_vllm).
    """
    found: list[Row] = []
    if "transformers" in names and not quantized:
        found = _transformers(folder, lengths, max(2, repeats), seconds)
    if "vllm" in names:
        seconds += max(at for *_, at in lengths)  # the last one cannot end before
        found += _vllm(folder, lengths, [], repeats, quantized, seconds * repeats, more)
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
    more: Sequence[str],
) -> list[Row]:
    """Returns vLLM's rows. `seconds` starts once its engine runs."""
    bits = "fp8" if quantized else "bf16"
    with tempfile.TemporaryDirectory() as temporary:
        options = ["--modes", bits, "--workload", _workload(temporary, lengths), "--repeats", str(repeats)]
        options += ["--batches", ",".join(map(str, batches)), "--seqs", str(max(512, *batches, 0))]
        options += ["--budget", str(START_S + seconds), *more]
        found = run_script(folder / "peer_vllm.py", options, START_S + seconds + 30)
    return [rounded({"peer": VLLM, "weights": bits, "kv": bits} | row) for row in _by_vllm(found, len(lengths))]


def _by_vllm(found: Sequence[Row], requests: int) -> Iterator[Row]:
    """Yields a row for each run of the workload and for each batch that was only decoded. Runs also have the seconds
    until the engine ran."""
    start = next(({"start_s": row["start_s"]} for row in found if row.get("kind") == "engine"), {})
    for row in found:
        named = {key: row[key] for key in ("settings",) if key in row} | made_by(row)
        if "error" in row:
            yield {"error": row["error"]} | named
        elif row.get("kind") == "qps":
            own = {OF_RUNS.get(key, key): value for key, value in row.items() if key not in ("kind", "mode", *named)}
            yield {"repeat": own.pop("repeat"), "requests": requests} | own | start | named
        elif row.get("kind") == "decode":
            tokens_s = row["tok_s"]
            step = {"batch": row["batch"], "input": 8, "output": 256, "decode_ms": row["ms"], "tokens_s": tokens_s}
            yield step | named


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
