"""Times vLLM near its defaults on a LLaMA with random weights: decode steps, and a workload sent all at once.

    pip install vllm==0.26.0 torch==2.11.0 transformers==5.17.0     # or PEER_PACKAGES=DIR, with an archive of it in DIR
    python -m experiments.peers.peer_vllm --modes bf16 --batches 1,32 --out steps.json        # one GPU, two minutes
    python -m experiments.peers.peer_vllm --modes fp8 --batches '' --workload w.json --out served.json

bf16 has weights, activations, K and V in bfloat16. fp8 is vLLM's own quantization at load, with an fp8 KV cache. A
decode step is the slope between 16 and 256 tokens after prompts of 8, so that prefill cancels. The prefix cache is off,
as prompts are random. The tokenizer is off, as no one reads the text. Sampling is vLLM's own, as FlashInfer's kernels
would have to be compiled. All else is the default: compilation, CUDA graphs, chunked prefill, asynchronous scheduling.
An engine takes a minute or more to start, most of it compilation.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.peers.shared import (
    LLAMA_2_7B,
    NO_GPU,
    Missing,
    Output,
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
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
}


def engine(mode: str, config: Path, seqs: int, tokens: int, folder: str) -> Any:
    """Starts vLLM on random weights of the model in a config.json."""
    os.environ |= ENVIRONMENT | {"VLLM_CACHE_ROOT": str(Path(folder) / "cache")}
    vllm = load("vllm", NEEDS)
    described = json.loads(config.read_text(encoding="utf-8")) | {"torch_dtype": "bfloat16"}
    (Path(folder) / "config.json").write_text(json.dumps(described), encoding="utf-8")
    return vllm.LLM(
        model=folder,
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=min(LONGEST, described["max_position_embeddings"]),
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        gpu_memory_utilization=0.95,
        enable_prefix_caching=False,
        seed=0,
        **MODES[mode],
    )


def generate(llm: Any, lengths: Sequence[tuple[int, int]], temperature: float, rng: random.Random) -> float:
    """Returns the seconds in which all requests (prompt, output) are served, sent at once."""
    params = load("vllm", NEEDS).SamplingParams
    prompts = [{"prompt_token_ids": [rng.randrange(3, 32000) for _ in range(prompt)]} for prompt, _ in lengths]
    options = {"temperature": temperature, "ignore_eos": True, "detokenize": False}
    wanted = [params(max_tokens=output, **options) for _, output in lengths]
    begin = time.perf_counter()
    served = llm.generate(prompts, wanted, use_tqdm=False)
    seconds = time.perf_counter() - begin
    made, asked = (sum(each) for each in ([len(r.outputs[0].token_ids) for r in served], [o for _, o in lengths]))
    if made != asked:
        raise ValueError(f"vLLM made {made} tokens where {asked} were asked for")
    return seconds


def measure(llm: Any, mode: str, args: argparse.Namespace, output: Output) -> None:
    """Adds a row for each decoded batch, and for each run of the workload."""
    rng = random.Random(1)
    generate(llm, [(PROMPT, PROMPT)] * 4, 0.0, rng)
    for batch in map(int, args.batches):
        about = {"mode": mode, "kind": "decode", "batch": batch}

        def step(batch: int = batch) -> dict[str, Any]:
            generate(llm, [(PROMPT, FEW)] * batch, 0.0, rng)
            few, many = (min(generate(llm, [(PROMPT, n)] * batch, 0.0, rng) for _ in range(2)) for n in (FEW, MANY))
            ms = 1e3 * (many - few) / (MANY - FEW)
            return {"ms": ms, "wall_ms": 1e3 * many / MANY, "tok_s": batch * MANY / many}

        output.attempt(about, step) if seconds_left(args) > 0 else output.add(about | {"error": "no time left"})
    if args.workload is None:
        return
    lengths = [(each["prompt_len"], each["output_len"]) for each in read_workload(args.workload)]
    for i in range(args.repeats if lengths else 0):
        about = {"mode": mode, "kind": "qps", "run": i}

        def served() -> dict[str, Any]:
            seconds, made = generate(llm, lengths, 1.0, rng), sum(output for _, output in lengths)
            return {"wall_s": seconds, "req_s": len(lengths) / seconds, "out_tok_s": made / seconds}

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
        llm = engine(mode, args.config, args.seqs, args.tokens, folder)
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
        "--workload", type=Path, help="JSON file with a list of {prompt_len, output_len}, sent all at once"
    )
    made.add_argument("--repeats", type=int, default=2, help="runs of the workload (default: 2)")
    made.add_argument("--seqs", type=int, default=512, help="most sequences at once (default: 512)")
    made.add_argument("--tokens", type=int, default=8192, help="most tokens of a step (default: 8192)")
    made.add_argument("--config", type=Path, default=LLAMA_2_7B, help="the model's config.json (default: LLaMA-2-7B)")
    return made


if __name__ == "__main__":
    sys.exit(command(run, options()))
