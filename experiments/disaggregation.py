"""Measures prefill and decode apart: its effect on tail latency of first and later tokens, and on throughput.

    python -m experiments.disaggregation --layers 8                  # two GPUs: levels -1, 0 and 1, measured
    python -m experiments.disaggregation --simulate --gpus 2 8       # whole models on more GPUs, simulated

Level -1 merges prompts and decodes in one step. Level 0 computes them in separate steps on one GPU. Level 1 has one GPU
for prompts and one for decodes, with pages copied from device to device (jllm/distributed/disaggregated.py). It takes
two GPUs. So level -1 also runs on two, as replicas: the claim compares these two.

Prompts and outputs have random lengths, half to three halves of --prompt and --output, the same for every level. They
start at once (the throughput), then arrive by a Poisson process at each --load. A load is a share of level -1's
throughput on one GPU, times the number of GPUs. Weights are random, of the model's first --layers. Times are those of
experiments.qps.

In a simulation, the engine's own scheduler plans each engine's steps, and the cost model gives their time
(steps/cost_model.py). Pages arrive a copy's time after a first token (configs/links). With g GPUs level -1 is g
replicas. Level 1 has each split of --splits into GPUs for prompts and for decodes. Models are whole, by default
LLaMA-2-7B, and the throughput behind loads is simulated too.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.arguments import claim_memory, dtype_name
from experiments.baselines import SeparateSteps
from experiments.result_file import command_line, record, refusing, rounded
from experiments.serving.run import serve
from experiments.serving.workload import Request, percentile
from experiments.simulate import Costs, make_costs
from experiments.simulation.apart import apart, merged
from experiments.simulation.requests import Arrival, Sample
from experiments.simulation.run import Simulation
from experiments.steps.links import read_link
from experiments.steps.timer import model_config, random_params
from jllm.distributed.disaggregated import Disaggregated
from jllm.distributed.handover import joining_buckets
from jllm.distributed.replicas import Replicas
from jllm.engine.engine import Engine
from jllm.engine.options import EngineOptions
from jllm.engine.request import SamplingParams
from jllm.errors import ConfigError
from jllm.model.model import Model
from jllm.step.buckets import Bucket, make_buckets
from pallas_kernels.bench.command import Parser, add_result_options
from pallas_kernels.bench.numbers import gibibytes, positive

Row = dict[str, Any]
LEVELS = ("merged", "replicas", "apart", "separate")  # levels -1, -1 on two GPUs, 1, 0
LEVEL = {"merged": -1, "separate": 0, "replicas": -1, "apart": 1}
LINK = "h200-nvlink"
PAGE = 16


def workload(args: argparse.Namespace, rate: float | None, seed: int = 0) -> list[Request]:
    """Returns requests with arrivals, which are the same for the same rate and seed."""
    rng = np.random.default_rng(seed)

    def lengths(mean: int) -> list[int]:
        return rng.integers(max(1, mean // 2), mean + mean // 2 + 1, args.requests).tolist()

    prompts, outputs = lengths(args.prompt), lengths(args.output)
    at = np.zeros(args.requests) if rate is None else np.cumsum(rng.exponential(1 / rate, args.requests))
    return [Request(p, o, float(t - at[0])) for p, o, t in zip(prompts, outputs, at)]


# Measured


def sizes(args: argparse.Namespace, steps: str) -> dict[str, Any]:
    """Returns the options of every engine: pages for all slots, and the folder of compiled steps."""
    longest = 3 * (args.prompt + args.output) // 2 + 1
    return {
        "max_slots": args.slots, "max_step_tokens": args.slots + args.step_tokens, "page_size": PAGE,
        "num_pages": args.slots * -(-longest // PAGE) * 5 // 4, "executables": steps,
    }  # fmt: skip


def buckets(slots: int, tokens: int) -> tuple[Bucket, ...]:
    """Returns sizes for decodes alone and with prompts. They are few, since each takes seconds to compile."""
    return tuple(Bucket(slots, n, min(slots, n)) for n in (0, tokens))


def options_of(level: str, args: argparse.Namespace, steps: str) -> tuple[Row, Row]:
    """Returns options of a level's engines, with changes for engines that only compute prompts."""
    S, T = args.slots, args.step_tokens
    options, usual = sizes(args, steps), buckets(S, T)
    if level == "separate":  # steps of prompts alone are as small as possible
        alone = tuple(Bucket(1, b.tokens, b.chunks) for b in usual if b.tokens)
        return options | {"buckets": (*usual, *alone)}, {}
    if level != "apart":
        return options | {"buckets": usual}, {}
    P = min(S, args.prefill_slots)
    joining = tuple(Bucket(S, n, min(S, n)) for n in (0, min(16, T), T))
    return options | {"buckets": joining}, {"max_slots": P, "max_step_tokens": P + T, "buckets": buckets(P, T)}


def make(level: str, model: Model, args: argparse.Namespace, steps: str) -> Engine | Replicas:
    options, prefill = options_of(level, args, steps)
    if level == "replicas":
        return Replicas(model, 2, threads=True, **options)  # as the engines of "apart" are, with the same arrays
    if level == "apart":
        return Disaggregated(model, prefill=prefill, **options)
    if level == "separate":
        return Engine(model, scheduler=SeparateSteps, **options)
    return Engine(model, **options)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yields rows of all levels. All engines exist from the start, so that they compile side by side; one at a time has
    requests."""
    config = model_config(args.config, args.layers)
    model = Model(config, random_params(config, args.dtype))
    start, capacity = time.perf_counter(), 0.0
    sampling = SamplingParams(temperature=1.0, ignore_eos=True)
    for level in args.levels:
        if level in ("replicas", "apart") and len(jax.local_devices()) < 2:
            raise ConfigError(f"{level} takes two devices, and there is one: leave it out of --levels")
    # Without files, a replica would compile again at its first run: jit's own cache is per device.
    with tempfile.TemporaryDirectory() as steps, ThreadPoolExecutor(len(args.levels)) as threads:
        engines = {level: make(level, model, args, steps) for level in args.levels}
        first, *others = engines.values()
        first.compile_ahead([sampling])  # its files have most of what the others need
        list(threads.map(lambda engine: engine.compile_ahead([sampling]), others))
    loaded = [f"{level} {m['compile_loaded']} of {m['compile_programs']}" for level, m in _metrics(engines)]
    what = f"all is compiled; from files: {', '.join(loaded)}"
    print(f"{time.perf_counter() - start:.0f} s: {what}", file=sys.stderr, flush=True)
    for level, engine in engines.items():
        gpus = 2 if isinstance(engine, Replicas) else 1
        about: Row = {
            "part": "measured", "model": Path(args.config).stem, "layers": config.num_layers, "level": LEVEL[level],
            "how": level, "gpus": gpus, "slots": args.slots, "prompt": args.prompt, "output": args.output,
        }  # fmt: skip
        warm = [Request(r.prompt, min(8, r.output), 0.0) for r in workload(args, None, 1)[: args.warmup]]
        serve(engine, warm, sampling, 1)
        for i, load in enumerate((None, *args.load)):
            rate = None if load is None else load * capacity * gpus
            rows = []
            for repeat in range(args.repeats):
                engine.reset_metrics()
                requests = workload(args, rate)
                served, seconds = serve(engine, requests, sampling, 2 + 7 * i + repeat)
                rows.append(figures(served, seconds, engine.metrics()))
            row = {name: float(np.median([each[name] for each in rows])) for name in rows[0]}
            if load is None and level == "merged":
                capacity = row["qps"]
            yield about | {"load": load, "rate": rate, "repeats": args.repeats} | rounded(row)
        engine.close()
        print(f"{time.perf_counter() - start:.0f} s: {level} is measured", file=sys.stderr, flush=True)


def _metrics(engines: dict[str, Engine | Replicas]) -> Iterator[tuple[str, Row]]:
    for level, engine in engines.items():
        yield level, engine.metrics()


def figures(served: list[Any], seconds: float, metrics: Row) -> Row:
    between = metrics["inter_token_s"]
    first = [each.first_token for each in served]
    row: Row = {"qps": len(served) / seconds, "output_tokens_s": sum(s.request.output for s in served) / seconds}
    row |= {f"ttft_ms_p{p}": 1e3 * percentile(first, p) for p in (50, 90, 99)}
    row |= {f"itl_ms_p{p}": 1e3 * between[f"p{p}"] for p in (50, 90, 99)}
    return row | {"itl_ms_max": 1e3 * between["max"], "preempted": metrics["preemptions"]}


# Simulated


def simulation_of(args: argparse.Namespace, costs: Costs, level: str) -> Callable[..., Simulation]:
    """Returns a function that makes an engine of a level, of the kind that the caller names."""
    S, T = args.slots, args.step_tokens
    token_pages = int(args.pool_gib * (1 << 30) / (PAGE * costs.cost.token_bytes))

    def make(kind: type[Simulation]) -> Simulation:
        options: Row = {"max_slots": S, "page_size": PAGE, "num_pages": token_pages, "max_step_tokens": S + T}
        more: Row = {}
        found = make_buckets(S, S + T)
        if level == "separate":
            found = (*found, *{Bucket(1, b.tokens, b.chunks) for b in found if b.tokens})
            more["scheduler"] = SeparateSteps
        if kind.__name__ == "Decodes":
            found = joining_buckets(S, S + T)
        options["buckets"] = tuple(found)
        longest = 3 * args.output // 2 + 1
        return kind(costs.model.config, EngineOptions(**options), costs.cost, longest, **more)

    return make


def simulate(args: argparse.Namespace) -> Iterator[Row]:
    costs, link = make_costs(Path(args.config).stem, args.quantize, args.kv_cache), read_link(LINK)

    def copy(tokens: int) -> float:
        return link.copy.seconds(tokens * costs.cost.token_bytes)

    runs: list[tuple[str, int, str, Any]] = []
    for gpus in args.gpus:
        for level in ("merged", "separate"):
            runs.append((level, gpus, "", partial(merged, simulation_of(args, costs, level), engines=gpus)))
        for share in args.splits:
            first = max(1, min(gpus - 1, round(share * gpus)))
            if gpus > 1:
                of = simulation_of(args, costs, "apart")
                run = partial(apart, of, prefill=first, decode=gpus - first, copy=copy)
                runs.append(("apart", gpus, f"{first}+{gpus - first}", run))
    one = argparse.Namespace(**vars(args))
    capacity = merged(simulation_of(args, costs, "merged"), _arrivals(one, None), 1).figures()["qps"]
    seen = set()
    for level, gpus, split, run in runs:
        if (level, gpus, split) in seen:
            continue
        seen.add((level, gpus, split))
        many = argparse.Namespace(**{**vars(args), "requests": args.requests * gpus})
        about: Row = {
            "part": "simulated", "model": Path(args.config).stem, "scheme": args.quantize or "bf16",
            "kv": args.kv_cache or "bf16", "level": LEVEL[level], "how": level, "gpus": gpus, "split": split,
            "slots": args.slots, "prompt": args.prompt, "output": args.output,
        }  # fmt: skip
        for load in (None, *args.load):
            rate = None if load is None else load * capacity * gpus
            yield about | {"load": load, "rate": rate} | rounded(run(_arrivals(many, rate)).figures())


def _arrivals(args: argparse.Namespace, rate: float | None) -> list[Arrival]:
    return [Arrival(Sample((1,) * r.prompt, r.output), r.arrival) for r in workload(args, rate)]


def with_claim(rows: Iterator[Row]) -> Iterator[Row]:
    """Yields the rows, then the claim's comparison: apart over merged on as many GPUs, at equal load."""
    found = []
    for row in rows:
        found.append(row)
        yield row
    for row in (row for row in found if row["how"] == "apart"):
        key = ("part", "model", "gpus", "load")
        same = [one for one in found if one["level"] == -1 and all(one[name] == row[name] for name in key)]
        if same:
            names = ("output_tokens_s", "ttft_ms_p99", "itl_ms_p99")
            ratios = {f"{name}_over_merged": row[name] / same[0][name] for name in names}
            about = {"part": "claim", "of": row["part"], "model": row["model"], "how": "apart", "gpus": row["gpus"]}
            yield rounded({**about, "split": row.get("split", "1+1"), "load": row["load"], **ratios})


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument(
        "--config", default="configs/llama-2-7b.json", help="file with the model's shape (a config.json)"
    )
    parser.add_argument("--layers", type=positive, default=8, help="number of its layers to measure (simulated: all)")
    parser.add_argument("--dtype", type=dtype_name, default="bfloat16", help="dtype of random weights")
    parser.add_argument(
        "--levels", nargs="+", choices=LEVELS, default=list(LEVELS), help="levels to measure, merged first"
    )
    parser.add_argument(
        "--load", type=float, nargs="*", default=[0.4, 0.7], help="loads, as shares of the merged throughput"
    )
    parser.add_argument("--requests", type=positive, default=160, help="requests per run (simulated: per GPU)")
    parser.add_argument("--prompt", type=positive, default=1024, help="mean tokens of a prompt")
    parser.add_argument("--output", type=positive, default=64, help="mean tokens of an output")
    parser.add_argument("--slots", type=positive, default=32, help="most sequences that run at once")
    parser.add_argument(
        "--prefill-slots", type=positive, default=8, help="most sequences at once in an engine for prompts"
    )
    parser.add_argument("--step-tokens", type=positive, default=1024, help="most prompt tokens in a step")
    parser.add_argument("--warmup", type=positive, default=16, help="requests served before the clock starts")
    parser.add_argument("--repeats", type=positive, default=1, help="runs of each level; the median counts")
    parser.add_argument("--simulate", action="store_true", help="simulate with the cost model, without a device")
    parser.add_argument("--gpus", type=positive, nargs="+", default=[2, 8], help="numbers of simulated GPUs")
    parser.add_argument(
        "--splits", type=float, nargs="+", default=[0.25, 0.5, 0.75], help="shares of the GPUs for prompts"
    )
    parser.add_argument("--quantize", help="scheme of the weights, simulated (default: bf16)")
    parser.add_argument("--kv-cache", help="KV format, simulated (default: bf16)")
    parser.add_argument("--pool-gib", type=gibibytes, default=100.0, help="size of each page pool in GiB, simulated")
    add_result_options(parser)
    args = parser.parse_args(argv)
    if not args.simulate and args.levels[0] != "merged":
        parser.error("--levels begins with merged, whose throughput loads are shares of")
    if any(not 0 < load < 10 for load in args.load) or any(not 0 < share < 1 for share in args.splits):
        parser.error("--load must be above 0, and --splits between 0 and 1")
    return args


def name_of(args: argparse.Namespace) -> str:
    return "disaggregation_simulated" if args.simulate else "disaggregation"


@refusing
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    command = command_line("disaggregation", argv)
    if not args.simulate:
        claim_memory()
    rows = simulate(args) if args.simulate else measure(args)
    return record(args, name_of(args), command, with_claim(rows))


if __name__ == "__main__":
    sys.exit(main())
