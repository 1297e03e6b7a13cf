"""Serves a workload of requests with transformers' continuous batching, on LLaMA-2-7B with random weights.

    pip install transformers==5.17.0 torch==2.11.0 accelerate
    pip install flash-attn==2.8.3      # its fast path; or PEER_PACKAGES=DIR, with an archive of it in DIR
    python -m experiments.peers.peer_hf --workload w.json --requests 64 --out served.json     # one GPU, two minutes

With flash-attn, transformers uses pages, CUDA graphs and asynchronous batching. Without it (or with --attn sdpa), it
gathers K and V for PyTorch's attention, which is far slower with many requests. Sampling is greedy, no token ends an
answer, and blocks are not shared. Each request makes output_len tokens from a random prompt, and keeps its arrival
time. The first pass records graphs as new sizes come, so only later passes count.
"""

import argparse
import importlib
import json
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

from experiments.peers.shared import (
    LLAMA_2_7B,
    Missing,
    Output,
    Row,
    command,
    find,
    load,
    load_torch,
    parser,
    read_workload,
    said,
    versions_of,
)

NEEDS = "transformers==5.17.0 torch==2.11.0 accelerate"


def model_of(torch: Any, transformers: Any) -> Any:
    described = json.loads(LLAMA_2_7B.read_text(encoding="utf-8"))
    kept = {key: value for key, value in described.items() if key not in ("rope_scaling", "rope_theta", "torch_dtype")}
    config = transformers.LlamaConfig(**kept | {"eos_token_id": None, "pad_token_id": 0})
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    settings = {"eos_token_id": None, "pad_token_id": 0, "do_sample": False}
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    return model.to("cuda").eval()


def serve(model: Any, transformers: Any, requests: list[Row], args: argparse.Namespace, output: Output) -> None:
    """Adds a row for each pass of the workload through one manager."""
    rng = random.Random(1)
    prompts = [[rng.randrange(3, model.config.vocab_size) for _ in range(each["prompt_len"])] for each in requests]
    longest = max(each["output_len"] for each in requests)
    generation = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0, "max_new_tokens": longest}
    batching = importlib.import_module("transformers.generation.continuous_batching.utils")
    hints = {"max_prompt_length": max(map(len, prompts)), "max_generated_length": longest}
    with model.continuous_batching_context_manager(
        generation_config=transformers.GenerationConfig(**generation),
        continuous_batching_config=transformers.ContinuousBatchingConfig(allow_block_sharing=False),
        block=True,
        timeout=10,
        warmup=True,
        workload_hints=batching.WorkloadHints(**hints, num_requests=len(prompts)),
    ) as manager:
        few = [each | {"output_len": 4, "arrival": 0.0} for each in requests[:4]]
        passed("warm", manager, few, [prompt[:8] for prompt in prompts], 60)
        for i in range(args.passes):
            row = passed(f"pass{i}", manager, requests, prompts, args.cb_limit_s)
            output.add({"part": "cb", "attn": model.config._attn_implementation, "run": i} | row)
            if row["cut_off"] or row["finished"] < len(requests):
                manager.stop(block=True, timeout=20, hard_stop=True)
                return


def passed(name: str, manager: Any, requests: list[Row], prompts: list[list[int]], limit: float) -> Row:
    """Sends requests as they arrive, waits for all of them or for `limit` seconds, and returns the results."""
    done: dict[str, Any] = {}
    begin = time.perf_counter()

    def send() -> None:
        for i, (each, prompt) in enumerate(zip(requests, prompts)):
            time.sleep(max(0.0, each["arrival"] - (time.perf_counter() - begin)))
            options = {"max_new_tokens": each["output_len"], "eos_token_id": -1, "record_timestamps": True}
            manager.add_request(prompt, request_id=f"{name}-{i}", **options)

    threading.Thread(target=send, daemon=True).start()
    while len(done) < len(requests) and time.perf_counter() - begin < limit:
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished() and result.request_id.startswith(f"{name}-"):
            done[result.request_id] = result
        elif result is None and not manager.is_running():
            raise ValueError(f"transformers' manager ended early: {manager.background_thread_status.fatal_error}")
    return summary(list(done.values()), len(requests), time.perf_counter() - begin)


def summary(results: list[Any], asked: int, seconds: float) -> Row:
    """Returns measures of finished requests. Times come from their own time stamps, if all have them."""
    good = [each for each in results if each.error is None]
    stamped = [each for each in good if each.timestamps]
    if len(stamped) == asked:
        seconds = max(each.timestamps[-1] for each in stamped) - min(each.created_time for each in stamped)
    tokens = sum(len(each.generated_tokens) for each in good)
    first = [each.timestamps[0] - each.created_time for each in stamped]
    whole = [each.timestamps[-1] - each.created_time for each in stamped]
    row = {
        "requests": asked,
        "finished": len(good),
        "cut_off": len(results) < asked,
        "seconds": seconds,
        "tok_s": tokens / seconds,
        "req_s": len(good) / seconds,
        "ttft_p50_s": at(first, 0.5),
        "ttft_p99_s": at(first, 0.99),
        "latency_p50_s": at(whole, 0.5),
    }
    errors = sorted({str(each.error)[:160] for each in results if each.error is not None})
    return row | ({"errors": errors} if errors else {})


def at(values: list[float], share: float) -> float:
    """Returns a quantile by the nearest value, or 0 without values."""
    return sorted(values)[round(share * (len(values) - 1))] if values else 0.0


def run(args: argparse.Namespace) -> None:
    requests = read_workload(args.workload)[: args.requests]
    if not requests:
        raise ValueError(f"{args.workload}: has no requests")
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if args.attn == "flash" and not find("flash_attn"):  # transformers looks for it once, on import
        raise Missing("flash_attn cannot be imported: pip install flash-attn==2.8.3, or ask for --attn sdpa")
    torch = load_torch(NEEDS)
    transformers = load("transformers", NEEDS)
    flash = ["flash_attn"] if args.attn == "flash" else []
    output = Output(args.out, versions_of("transformers", "torch", *flash))
    try:
        serve(model_of(torch, transformers), transformers, requests, args, output)
    except Exception as error:  # transformers may raise anything
        output.add({"part": "cb", "error": said(error)})


def options() -> argparse.ArgumentParser:
    made = parser(__doc__, 330)
    made.add_argument(
        "--workload", required=True, type=Path, help="JSON file with a list of {prompt_len, output_len, arrival}"
    )
    made.add_argument("--requests", type=int, help="number of requests, from the first on (default: all)")
    made.add_argument("--parts", choices=["cb"], default="cb", help="parts; it only has continuous batching")
    made.add_argument(
        "--attn", choices=["flash", "sdpa"], default="flash", help="attention (default: flash, by flash-attn)"
    )
    made.add_argument("--passes", type=int, default=2, help="passes of the workload; the first warms up (default: 2)")
    made.add_argument("--cb-limit-s", type=float, default=110, help="most seconds of a pass (default: 110)")
    return made


if __name__ == "__main__":
    sys.exit(command(run, options()))
