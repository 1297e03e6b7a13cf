"""Times vLLM near its defaults on a LLaMA with random weights: decode steps, and a workload.

    pip install vllm==0.26.0 torch==2.11.0 transformers==5.17.0     # or PEER_PACKAGES=DIR, with an archive of it in DIR
    python -m experiments.peers.peer_vllm --modes bf16 --batches 1,32 --out steps.json        # one GPU, two minutes
    python -m experiments.peers.peer_vllm --modes fp8 --batches '' --workload w.json --out served.json
    python -m experiments.peers.peer_vllm --config configs/qwen3-8b.json --settings max_num_batched_tokens=16384

bf16 has weights, activations, K and V in bfloat16. fp8 is vLLM's own quantization at load, with an fp8 KV cache. A
decode step is the slope between 16 and 256 tokens after prompts of 8, so that prefill cancels. The prefix cache is off,
as prompts are random. The tokenizer is off, as no one reads the text. Sampling is vLLM's own, as FlashInfer's kernels
would have to be compiled. All else is the default: compilation, CUDA graphs, chunked prefill, asynchronous scheduling.
--settings changes it, and rows name what was changed. An engine takes a minute or more to start, most of it
compilation.

Requests are sent all at once if they all arrive at 0, else each at its arrival, between two steps. Then rows also have
the times that experiments/qps.py measures, under its names.
"""

import argparse
import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from experiments.peers.shared import (
    LLAMA_2_7B,
    NO_GPU,
    Missing,
    Output,
    Row,
    by_commas,
    command,
    find,
    load,
    parser,
    read_workload,
    seconds_left,
    versions_of,
)

NEEDS = "vllm==0.26.0 torch==2.11.0 transformers==5.17.0"
MODES: dict[str, dict[str, Any]] = {"bf16": {}, "fp8": {"quantization": "fp8", "kv_cache_dtype": "fp8"}}
LONGEST = 4096  # tokens of a sequence
PROMPT, FEW, MANY = 8, 16, 256  # tokens of a decode step's run
FIRST_TOKEN, EACH_TOKEN = 2.0, 0.050  # seconds: the limits of goodput in serving/workload.py, whose module needs JAX
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
}


def engine(mode: str, config: Path, seqs: int, tokens: int, settings: Sequence[str], folder: str) -> Any:
    """Starts vLLM on random weights of the model in a config.json. Settings win over all else."""
    os.environ |= ENVIRONMENT | {"VLLM_CACHE_ROOT": str(Path(folder) / "cache")}
    vllm = load("vllm", NEEDS)
    described = json.loads(config.read_text(encoding="utf-8")) | {"torch_dtype": "bfloat16"}
    (Path(folder) / "config.json").write_text(json.dumps(described), encoding="utf-8")
    wanted = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "max_model_len": min(LONGEST, described["max_position_embeddings"]),
        "max_num_seqs": seqs,
        "max_num_batched_tokens": tokens,
        "gpu_memory_utilization": 0.95,
        "enable_prefix_caching": False,
        "seed": 0,
    }
    return vllm.LLM(model=folder, **wanted | MODES[mode] | dict(map(value_of, settings)))


def value_of(text: str) -> tuple[str, Any]:
    """Returns the name and value of NAME=VALUE. A value that is not JSON (a number, true, false) is a text."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def setting(text: str) -> str:
    """Returns a text that is NAME=VALUE. Raises argparse's error for any other."""
    name, equals, _ = text.partition("=")
    if not (equals and name.isidentifier()):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, such as max_num_batched_tokens=16384")
    return text


def asked(
    lengths: Sequence[tuple[int, int]], temperature: float, rng: random.Random, **more: Any
) -> tuple[list[Any], list[Any]]:
    """Returns the prompts and sampling parameters of requests (prompt, output)."""
    params = load("vllm", NEEDS).SamplingParams
    prompts = [{"prompt_token_ids": [rng.randrange(3, 32000) for _ in range(prompt)]} for prompt, _ in lengths]
    options = {"temperature": temperature, "ignore_eos": True, "detokenize": False} | more
    return prompts, [params(max_tokens=output, **options) for _, output in lengths]


def generate(llm: Any, lengths: Sequence[tuple[int, int]], temperature: float, rng: random.Random) -> float:
    """Returns the seconds in which all requests (prompt, output) are served, sent at once."""
    prompts, wanted = asked(lengths, temperature, rng)
    begin = time.perf_counter()
    served = llm.generate(prompts, wanted, use_tqdm=False)
    seconds = time.perf_counter() - begin
    check(sum(len(each.outputs[0].token_ids) for each in served), lengths)
    return seconds


def check(made: int, lengths: Sequence[tuple[int, int]]) -> None:
    """Raises ValueError if requests (prompt, output) did not make as many tokens as they asked for."""
    if made != (wanted := sum(output for _, output in lengths)):
        raise ValueError(f"vLLM made {made} tokens where {wanted} were asked for")


def serve(llm: Any, requests: Sequence[Row], rng: random.Random) -> tuple[float, list[list[float]]]:
    """Sends requests as they arrive. Returns the seconds until the last one ended, and when each one's tokens came.
    Tokens that come together share the time since the one before."""
    kind = importlib.import_module("vllm.sampling_params").RequestOutputKind
    lengths = [(each["prompt_len"], each["output_len"]) for each in requests]
    prompts, wanted = asked(lengths, 1.0, rng, output_kind=kind.DELTA)
    engine, coming, came = llm.llm_engine, deque(range(len(requests))), [list[float]() for _ in requests]
    begin = time.perf_counter()
    while coming or engine.has_unfinished_requests():
        while coming and requests[coming[0]]["arrival"] <= time.perf_counter() - begin:
            i = coming.popleft()
            engine.add_request(str(i), prompts[i], wanted[i])
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, requests[coming[0]]["arrival"] - (time.perf_counter() - begin)))
            continue
        found = engine.step()
        now = time.perf_counter() - begin
        for each in found:
            times, count = came[int(each.request_id)], len(each.outputs[0].token_ids)
            gap = (now - times[-1]) / count if times and count else 0.0
            times += [now - gap * later for later in reversed(range(count))]
    seconds = time.perf_counter() - begin
    check(sum(map(len, came)), lengths)
    return seconds, came


def latencies(requests: Sequence[Row], came: Sequence[Sequence[float]], seconds: float, cut: int) -> Row:
    """Returns percentiles in milliseconds and goodput, as serving/workload.py defines them. Of the first `cut`
    arrivals, only the times between tokens count."""
    counted = list(zip(requests, came, strict=True))[cut:]
    first = [times[0] - each["arrival"] for each, times in counted]
    whole = [times[-1] - each["arrival"] for each, times in counted]
    gaps = [later - sooner for times in came for sooner, later in pairwise(times)]
    each_token = [(t - f) / max(1, each["output_len"] - 1) for (each, _), f, t in zip(counted, first, whole)]
    share = sum(f <= FIRST_TOKEN and t <= EACH_TOKEN for f, t in zip(first, each_token)) / len(counted)
    return {
        f"{name}_ms_p{p}": 1e3 * sorted(values)[-(-p * len(values) // 100) - 1] if values else None
        for name, values in (("ttft", first), ("itl", gaps), ("e2e", whole))
        for p in (50, 90, 99)
    } | {"good_share": share, "goodput": share * len(requests) / seconds}


def measure(llm: Any, mode: str, args: argparse.Namespace, output: Output) -> None:
    """Adds a row for each decoded batch, and for each run of the workload."""
    rng, named = random.Random(1), {"settings": " ".join(args.settings)} if args.settings else {}
    generate(llm, [(PROMPT, PROMPT)] * 4, 0.0, rng)
    for batch in map(int, args.batches):
        about = {"mode": mode, "kind": "decode", "batch": batch} | named

        def step(batch: int = batch) -> dict[str, Any]:
            generate(llm, [(PROMPT, FEW)] * batch, 0.0, rng)
            few, many = (min(generate(llm, [(PROMPT, n)] * batch, 0.0, rng) for _ in range(2)) for n in (FEW, MANY))
            ms = 1e3 * (many - few) / (MANY - FEW)
            return {"ms": ms, "wall_ms": 1e3 * many / MANY, "tok_s": batch * MANY / many}

        output.attempt(about, step) if seconds_left(args) > 0 else output.add(about | {"error": "no time left"})
    if args.workload is None:
        return
    requests = sorted(read_workload(args.workload), key=lambda each: each["arrival"])
    lengths = [(each["prompt_len"], each["output_len"]) for each in requests]
    for i in range(args.repeats if lengths else 0):
        about = {"mode": mode, "kind": "qps", "run": i} | named

        def served() -> dict[str, Any]:
            more: Row = {}
            if requests[-1]["arrival"] > 0:
                seconds, came = serve(llm, requests, rng)
                more = latencies(requests, came, seconds, args.cut)
            else:
                seconds = generate(llm, lengths, 1.0, rng)
            made = sum(output for _, output in lengths)
            return {"wall_s": seconds, "req_s": len(lengths) / seconds, "out_tok_s": made / seconds} | more

        output.attempt(about, served) if seconds_left(args) > 0 else output.add(about | {"error": "no time left"})


def run(args: argparse.Namespace) -> None:
    if unknown := [mode for mode in args.modes if mode not in MODES]:
        raise ValueError(f"--modes {','.join(unknown)}: must be of {','.join(MODES)}")
    if args.workload is not None:
        read_workload(args.workload)  # fails before minutes are spent
    if not find("vllm"):
        raise Missing(f"vllm cannot be imported: pip install {NEEDS}")
    if not Path("/dev/nvidiactl").exists():  # asking torch would spoil CUDA for the engine's process
        raise Missing(NO_GPU)
    if len(args.modes) > 1:
        one_by_one(args)
        return
    (mode,) = args.modes
    output = Output(args.out, versions_of("vllm", "torch"))
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        llm = engine(mode, args.config, args.seqs, args.tokens, args.settings, folder)
        output.add({"mode": mode, "kind": "engine", "start_s": round(time.monotonic() - begin, 1)})
        measure(llm, mode, args, output)


def one_by_one(args: argparse.Namespace) -> None:
    """Runs each mode in its own process, since an engine releases GPU memory only when its process ends."""
    output = Output(args.out, versions_of("vllm", "torch"))
    for mode in args.modes:
        with tempfile.TemporaryDirectory() as folder:
            part = Path(folder) / "part.json"
            options = ["--modes", mode, "--batches", ",".join(args.batches), "--repeats", str(args.repeats)]
            options += ["--seqs", str(args.seqs), "--tokens", str(args.tokens), "--config", str(args.config)]
            options += ["--cut", str(args.cut), "--settings", *args.settings]
            options += ["--budget-s", str(seconds_left(args)), "--out", str(part)]
            options += [] if args.workload is None else ["--workload", str(args.workload)]
            done = subprocess.run([sys.executable, "-m", "experiments.peers.peer_vllm", *options])
            rows = json.loads(part.read_text(encoding="utf-8"))["rows"] if part.exists() else []
            for row in rows if not done.returncode else [*rows, {"mode": mode, "error": f"exit {done.returncode}"}]:
                output.add(row)


def options() -> argparse.ArgumentParser:
    made = parser(__doc__, 560)
    made.add_argument("--modes", type=by_commas, default=[*MODES], help="modes: bf16, fp8 (default: both)")
    made.add_argument(
        "--batches", type=by_commas, default=["1", "32", "128", "512"], help="batches to decode (default: four)"
    )
    made.add_argument(
        "--workload", type=Path, help="JSON file with a list of {prompt_len, output_len, arrival (default: 0)}"
    )
    made.add_argument("--repeats", type=int, default=2, help="runs of the workload (default: 2)")
    made.add_argument("--cut", type=int, default=0, help="first arrivals to leave out of latencies (default: 0)")
    made.add_argument("--seqs", type=int, default=512, help="most sequences at once (default: 512)")
    made.add_argument("--tokens", type=int, default=8192, help="most tokens of a step (default: 8192)")
    made.add_argument("--config", type=Path, default=LLAMA_2_7B, help="the model's config.json (default: LLaMA-2-7B)")
    made.add_argument(
        "--settings", type=setting, nargs="*", default=[], metavar="NAME=VALUE", help="further arguments of vllm.LLM"
    )
    return made


if __name__ == "__main__":
    sys.exit(command(run, options()))
