"""Measures requests per second on a workload of conversations, and each one's latency.

    python -m experiments.qps --config configs/llama-2-7b.json --quantize w8a8 --kv-cache int8-g8
    python -m experiments.qps --rate 20 --batching static   # Poisson arrivals, with static batching
    python -m experiments.qps --guided 0.25                 # a quarter of the requests has a guide (docs/sampling.md)
    python -m experiments.qps --replicas 0 1 2              # a plain engine, then one and two in their processes
    python -m experiments.qps --replicas 0 1 2 --update --kill   # the two also take other weights, and one is killed
    python -m experiments.qps --replicas 1 2 --devices 2    # one engine on a mesh of two devices, then two on four
    python -m experiments.qps --host-only                   # no device: the slack of the schedule, the work of the host
    JAX_PLATFORMS=cpu python -m experiments.qps --url http://localhost:8000/v1 --requests 26   # of python -m jllm.serve

The workload has 1,024 prompts of random tokens, with given lengths of prompts and outputs. The sampled tokens do not
change the work. All requests start at once, or arrive at --rate by a Poisson process with a fixed seed. Everything is
compiled and --warmup requests are served before the clock starts. Then the workload runs --repeats times.

Times start at a request's arrival, so they include delays of a busy host. Percentiles use the nearest rank. They are
exact for first tokens and whole requests, and within 0.5 % between tokens. Goodput counts requests with the first token
within 2 s, and a mean of at most 50 ms per token after it. The first --cut requests, which find the engine empty, are
left out of both. Intervals are Student's t at 95 % over the repeats.

The floor adds up each step of the merge schedule (all at once, the same slots and pages) at the limits of floors.py.
The limits of an engine's devices add up. Each replica has the workload once. The plain engine of --replicas 0 has a
process of its own, so that the main one opens no GPU. All engines of a run have one folder of compiled steps, which is
`steps` in JAX_COMPILATION_CACHE_DIR if that is set. JAX's own cache is off. --batching static, --prefill padded,
--sampling sort and --host wait each remove one idea.

With --url the server's GET /v1/models tells its vocabulary and context. A server of the bundled model has room for the
first 26 requests of the default workload. The variable JLLM_API_KEY has the server's key.
"""

import argparse
import contextlib
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import Any

import jax
from jax._src.config import enable_compilation_cache

from experiments.arguments import add_bandwidth, ceilings_here, claim_memory, dtype_name, known_scheme, scheme_name
from experiments.baselines import ABOUT, BASELINES
from experiments.result_file import bar, command_line, record, refusing, rounded
from experiments.serving.changes import kill, update
from experiments.serving.engines import MEMORY, make_engine, make_model, rehearse, sampling_of
from experiments.serving.over_http import measure_url
from experiments.serving.run import run_once, warm_up
from experiments.serving.workload import FORMAT, WORKLOAD, Request, Row, read_workload, summary
from experiments.steps import peers
from experiments.steps.bars import OWN, of_own_kernels
from experiments.steps.floors import make_floors, token_bytes, workload_seconds
from experiments.steps.timer import stopwatch
from experiments.steps.words import ENDLESS
from jllm.distributed.replicas import Replicas
from jllm.engine.kv_policy import KV_POLICIES
from jllm.engine.options import PAGE_SIZES
from jllm.engine.placement import copy_to
from jllm.errors import ConfigError
from jllm.model.model import Model
from pallas_kernels.backends import OF_MODELS
from pallas_kernels.bench.bars import H200
from pallas_kernels.bench.command import Parser, add_result_options
from pallas_kernels.bench.gpus import leave_gpus, visible_gpus
from pallas_kernels.bench.numbers import fraction, gibibytes, natural, positive, positive_number, seed_number

OVER_HTTP = (  # options of a run against a server
    *("url", "stream", "config", "workload", "requests", "rate", "seed", "warmup", "repeats"),
    *("temperature", "top_k", "top_p", "min_p", "results", "label", "json"),
)
BARS = {("bfloat16", "bf16"): (38.0, 1.25), ("w8a8", "int8-g8"): (56.0, 1.6)}  # requests per second, and over vLLM's
TRITON = 0.8  # least share of the requests per second of the device's own kernels
REPLICA = 0.95  # share of one engine's requests per second that each replica must add
ONE = 0.98  # share of a plain engine's requests per second that one in a process must have
PLAIN = {"llama-2-7b": 0.985, None: 0.975}  # share that each of several must add, by model
CHANGES = ("update", "kill")  # options of the most engines, after their repeats
SETTINGS = ("workload", *MEMORY, "pool_gib", "allow")  # in rows if they are not the default


def measure(model: Model, requests: list[Request], args: argparse.Namespace) -> Iterator[Row]:
    """Yields a row per repeat and then their summary, one backend after the other. Each replica has the workload once,
    if all is sent at once: as much work as for one engine."""
    for replicas, backend in product(args.replicas or [None], args.backend):
        changed = replicas is not None and replicas == max(args.replicas)
        changes = {name: getattr(args, name) and changed for name in CHANGES}
        own = argparse.Namespace(**{**vars(args), "replicas": replicas or None, **changes})
        each = requests * (replicas or 1) if args.rate is None else requests
        if replicas == 0:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
                yield from alone.submit(measure_plain, each, own, backend).result()
        else:
            yield from measure_one(model, each, own, backend)


def measure_plain(requests: list[Request], args: argparse.Namespace, backend: str) -> list[Row]:
    """Returns measure_one's rows in a process that has not used JAX, with as many GPUs as one of --replicas."""
    if gpus := visible_gpus():
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[: args.devices or 1])
    with enable_compilation_cache(False):
        model = make_model(args)
        if args.devices is None:  # placed as Replicas do it, so that they find this engine's compiled steps
            model = copy_to(jax.local_devices()[0], model)
        return list(measure_one(model, requests, args, backend))


def measure_one(model: Model, requests: list[Request], args: argparse.Namespace, backend: str) -> Iterator[Row]:
    sampling = sampling_of(args)
    about = {
        "model": Path(args.model or args.config).stem, "scheme": scheme_name(args.quantize or args.dtype),
        "kv": args.kv_cache or str(model.params.dtype), "backend": backend, "slots": args.slots, "rate": args.rate,
        **{name: getattr(args, name) for name in BASELINES},
        **{name: getattr(args, name) for name in SETTINGS[1:] if getattr(args, name)},
        **({} if args.guided is None else {"guided": args.guided}),
        **{name: getattr(args, name) for name in ("devices", "replicas", "compile_processes") if getattr(args, name)},
        **({} if args.workload == WORKLOAD else {"workload": args.workload.stem}),
    }  # fmt: skip
    engine = make_engine(model, args, backend=None if backend == OWN[0] else backend)
    start, note = time.perf_counter(), stopwatch()
    guided = args.guided or 0.0
    like = [sampling, replace(sampling, guide=ENDLESS, ignore_eos=False)] if guided else [sampling]
    compiled = engine.compile_ahead(like)
    note(f"compiled {compiled} sizes of steps")
    warmed = warm_up(engine, requests, args)
    about |= {"compiled": compiled, "start_s": round(time.perf_counter() - start, 2)}
    if args.steps is not None:
        about["loaded"] = engine.metrics()["compile_loaded"]
    note(f"served {warmed} requests to warm up")
    least: dict[str, float] = {}
    if args.rate is None:
        floors = make_floors(model.params, model.config, ceilings_here(args), args.devices)
        lengths = [(r.prompt, r.output) for r in requests[: len(requests) // (args.replicas or 1)]]
        how = lengths, engine.sizes.limits, list(floors.values()), token_bytes(model, args.kv_cache)
        least = dict(zip(floors, workload_seconds(*how), strict=True))
    rows, busy_s = [], math.inf
    for repeat in range(args.repeats):
        row, busy = run_once(engine, requests, args)
        busy_s = min(busy_s, busy)
        note(f"repeat {repeat}: {row['requests']} requests in {row['seconds']:.2f} s")
        rows.append(row)
        yield {**about, "repeat": repeat, **rounded(rows[-1] | of_floors(least, row["seconds"]))}
    total = summary(rows)
    if args.host_only:
        total = {key: total[key] for key in ("repeats", "requests", "seconds", "slack", "steps", "preemptions")}
        total["host_us"] = 1e6 * busy_s / sum(r.output for r in requests)
    total |= of_floors(least, None if args.host_only else total["seconds"])
    yield {**about, "repeat": "host only" if args.host_only else "mean", **rounded(total)}
    if isinstance(engine, Replicas) and args.update:
        yield {**about, **rounded(update(engine, requests, args, model.params))}
    if isinstance(engine, Replicas) and args.kill:
        yield {**about, **rounded(kill(engine, requests, args))}
    engine.close()


def of_floors(least: Mapping[str, float], seconds: float | None) -> Row:
    """Returns the seconds of floors, and their shares of a run's."""
    shares = {} if seconds is None else {f"{name}_fraction": each / seconds for name, each in least.items()}
    return {f"{name}_s": each for name, each in least.items()} | shares


def bars(rows: Sequence[Row]) -> Iterator[Row]:
    """Yields bars of the mean, or of the last repeat so far. They apply to the whole workload on an H200, or to its
    schedule alone. The device's own kernels are compared with vLLM's in the same job, and Triton's with the device's
    own."""
    rows = [row for row in rows if "change" not in row]
    last = {row.get("backend", OWN[0]): row for row in rows if "peer" not in row}
    row = next((row for row in last.values() if of_own_kernels(row)), None)
    if row is None or "over" in row:
        return
    whole = row["requests"] == 1024 * row.get("replicas", 1) and row["rate"] is None and row["slots"] == 512
    merged = all(row.get(name, choices[0]) == choices[0] for name, choices in BASELINES.items())
    if not (whole and merged) or any(row.get(name) for name in SETTINGS) or "guided" in row:
        return
    if "replicas" in row or "devices" in row:
        yield from replica_bars(row, rows)
        return
    where = f"QPS workload, {row['model']} {row['scheme']} KV {row['kv']}"
    if "host_us" in row:
        yield bar(f"{where}, host work a running request a step", row["host_us"], "us", 5.0, most=True)
    elif found := BARS.get((row["scheme"], row["kv"].replace("bfloat16", "bf16"))):
        yield bar(f"{where}, requests a second", row["qps"], "1/s", found[0], of=H200)
        if vllm := [each["qps"] for each in rows if each.get("peer") == peers.VLLM and peers.counts(each)]:
            times = row["qps"] / statistics.fmean(vllm)
            yield bar(f"{where}, times as many as vLLM", round(times, 3), "1", found[1])
    if "triton" in last:
        yield bar(f"{where}, triton over the default", round(last["triton"]["qps"] / row["qps"], 3), "1", TRITON)
    yield bar(f"{where}, ladder slack", row["slack"], "1", 0.06, most=True)


def replica_bars(row: Row, rows: Sequence[Row]) -> Iterator[Row]:
    """Yields bars of replicas' means over those of one, and of a plain engine (0)."""
    means = {
        each.get("replicas", 0): each["qps"] for each in rows if each.get("repeat") == "mean" and "peer" not in each
    }
    on = f" of {row['devices']} devices" if "devices" in row else ""
    what = f"QPS workload, {row['model']} {row['scheme']} KV {row['kv']}"
    for count, qps in means.items():
        if count > 1 and 1 in means:
            yield bar(f"{what}, {count} replicas{on} over one", round(qps / means[1], 3), "1", REPLICA * count)
        if count and 0 in means:
            some = f"{count} replicas" if count > 1 else "a replica"
            least = ONE if count == 1 else PLAIN.get(row["model"], PLAIN[None]) * count
            yield bar(f"{what}, {some}{on} over a plain engine", round(qps / means[0], 3), "1", least)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument(
        "--config",
        default="configs/llama-2-7b.json",
        help="file with the shape (a config.json) of a model with random weights; with --url: of the vocabulary, if "
        "the server does not tell it",
    )
    parser.add_argument("--model", help="directory or id of a model, instead of random weights")
    parser.add_argument("--dtype", type=dtype_name, default="bfloat16", help="dtype of random weights")
    parser.add_argument("--quantize", type=known_scheme, help="scheme of the weights")
    parser.add_argument("--workload", type=Path, default=WORKLOAD, help=f"JSON file {FORMAT}, in tokens")
    parser.add_argument("--requests", type=positive, help="number of requests, from the first on")
    parser.add_argument(
        "--rate", type=positive_number, help="requests per second of Poisson arrivals (default: all at once)"
    )
    parser.add_argument("--seed", type=seed_number, default=0, help="seed of arrivals and prompts")
    parser.add_argument(
        "--warmup", type=natural, default=32, help="requests served before the clock starts, 16 tokens each"
    )
    parser.add_argument("--cut", type=natural, default=0, help="first arrivals to leave out of percentiles and goodput")
    parser.add_argument("--repeats", type=positive, default=3, help="number of runs, for a mean and its interval")
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="temperature of all requests; 0: the likeliest token"
    )
    parser.add_argument("--top-k", type=natural, default=0, help="number of likeliest tokens to draw from; 0: all")
    parser.add_argument("--top-p", type=float, default=1.0, help="share of probability to draw from")
    parser.add_argument("--min-p", type=float, default=0.0, help="least probability, as a share of the greatest")
    parser.add_argument("--slots", type=positive, default=512, help="most sequences that run at once")
    parser.add_argument("--devices", type=positive, metavar="N", help="number of devices of each engine")
    each = "numbers of engines, one after another, each on --devices; --slots and --requests are per engine; "
    each += "0: a plain engine, to compare with"
    parser.add_argument("--replicas", type=natural, nargs="+", metavar="N", help=each)
    parser.add_argument("--page-size", type=int, choices=PAGE_SIZES, default=16, help="tokens per KV page")
    parser.add_argument(
        "--pages", dest="num_pages", type=positive, help="pages in the pool (default: as memory allows)"
    )
    parser.add_argument("--pool-gib", type=gibibytes, help="size of the pool in GiB, instead of --pages")
    parser.add_argument("--kv-policy", choices=KV_POLICIES, help="KV policy (default: paged)")
    parser.add_argument("--length-predictor", help="length predictor of admission: a name, or learned:FILE")
    parser.add_argument("--admission-quantile", type=float, help="quantile of predicted lengths")
    whose = "file of the schedules of the warm-up and each repeat, for experiments.simulate --replay"
    parser.add_argument("--trace", help=whose)
    parser.add_argument("--allow", type=positive, default=0, help="tokens that each request allows, at least its own")
    parser.add_argument(
        "--step-tokens", dest="max_step_tokens", type=positive, default=2048, help="most prompt tokens in a step"
    )
    parser.add_argument("--kv-cache", help="KV format (default: the weights' dtype)")
    parser.add_argument(
        "--backend",
        nargs="+",
        choices=("default", *OF_MODELS),
        default=OWN[:1],
        help="backends, one after another (default: chosen for the device)",
    )
    processes = "extra processes that trace steps while an engine starts (default: as docs/serving.md says)"
    parser.add_argument("--compile-processes", type=natural, metavar="N", help=processes)
    updates = "after the repeats of the most --replicas, let all take other weights in the middle of a run"
    parser.add_argument("--update", action="store_true", help=updates)
    kills = "after the repeats of the most --replicas, kill the process of one in the middle of a run"
    parser.add_argument("--kill", action="store_true", help=kills)
    share = "share of requests with a guide; 0: none, but with texts, as a baseline"
    parser.add_argument("--guided", type=fraction, metavar="SHARE", help=share)
    for name, choices in BASELINES.items():
        parser.add_argument(f"--{name}", choices=choices, default=choices[0], help=ABOUT[name])
    parser.add_argument("--host-only", action="store_true", help="use no device: measure slack and the host's work")
    add_bandwidth(parser)
    parser.add_argument(
        "--url", metavar="http://HOST:PORT/v1", help="send the workload to a server, instead of a model"
    )
    parser.add_argument("--stream", action="store_true", help="with --url: stream every request")
    peers.add_options(parser, peers.SERVERS, 110)
    add_result_options(parser)
    parser.set_defaults(steps=None)
    args = parser.parse_args(argv)
    peers.check_options(parser, args)
    if args.stream and args.url is None:
        parser.error("--stream needs --url")
    if args.url is not None:
        parser.refuse(vars(args).keys() - set(OVER_HTTP), "{} has no meaning with --url: the server decides it")
    if args.guided is not None and (args.host_only or args.model):
        parser.error("--guided is of random weights: leave --host-only and --model out beside it")
    if args.replicas and (args.length_predictor or args.admission_quantile):
        parser.error("--length-predictor and --admission-quantile are of one engine: leave --replicas out beside them")
    if (args.replicas or args.devices) and args.host_only:
        parser.error("--replicas and --devices are of devices, and --host-only does without")
    if (args.update or args.kill) and max(args.replicas or [0]) < 1 + args.kill:
        parser.error("--update needs at least one of --replicas, and --kill at least two")
    if args.replicas and args.trace:
        parser.error("--trace is of one engine: leave --replicas out beside it")
    if len(args.backend) > 1 and args.trace:
        parser.error("--trace is of one engine, and each --backend has its own: give one beside it")
    if args.peers and args.host_only:
        parser.error("--peers measures a device, and --host-only does without")
    if args.pool_gib is not None and args.num_pages:
        parser.error("--pool-gib and --pages are two sizes of the pool: leave one out")
    return args


def serve_peers(requests: list[Request], args: argparse.Namespace) -> list[dict[str, Any]]:
    lengths = [(r.prompt, r.output, r.arrival) for r in requests]
    how = args.quantize is not None, args.repeats, args.peer_seconds, args.peer_names, peers.of_vllm(args)
    return [row | {"rate": args.rate} for row in peers.serving(args.peers, lengths, *how)]


def name_of(args: argparse.Namespace) -> str:
    """Returns the name of the result. It has the run's subject, and policies that are not the default."""
    if args.url is not None:
        return "_".join(["qps_http", *(["stream"] if args.stream else [])])
    parts = ["qps_host" if args.host_only else "qps", Path(args.model or args.config).stem]
    parts += [scheme_name(args.quantize or args.dtype), f"kv-{args.kv_cache}" if args.kv_cache else ""]
    parts += [getattr(args, name) for name, choices in BASELINES.items() if getattr(args, name) != choices[0]]
    parts += [(getattr(args, name) or "").partition(":")[0] for name in MEMORY[:2]]
    parts += ["" if args.devices is None else f"devices{args.devices}"]
    parts += ["" if args.replicas is None else f"replicas{'-'.join(map(str, args.replicas))}"]
    parts += ["" if args.pool_gib is None else f"{args.pool_gib:g}gib"]
    parts += ["" if args.guided is None else f"guided{args.guided:g}"]
    parts += ["" if args.rate is None else f"rate{args.rate:g}"]
    return "_".join(part.replace(",", "-").replace("=", "-") for part in parts if part)


@refusing
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if args.url is None and not args.host_only:  # a server may hold the memory of this host's GPUs
        claim_memory()
    if args.replicas:
        leave_gpus()
    sampling_of(args)  # a bad request fails before weights take minutes to build
    requests = read_workload(args.workload, args.requests, args.rate, args.seed)
    if not 0 <= args.cut < len(requests):
        raise ConfigError(f"--cut must leave some of {len(requests)} requests, not cut {args.cut}")
    beside = serve_peers(requests, args) if args.peers else []
    if args.url is None and not args.model:
        rehearse(args, max(r.prompt + max(r.output, args.allow) for r in requests))
    with steps_folder(args) as args.steps, enable_compilation_cache(False):
        ours = measure(make_model(args), requests, args) if args.url is None else measure_url(requests, args)
        command = command_line("qps", argv)
        about = {} if args.rate is not None or args.url is not None else {"ceilings": ceilings_here(args).document}
        rows = chain(beside, ours)
        return record(args, name_of(args), command, rows, bars=bars, shown=lambda row: "peer" not in row, **about)


@contextlib.contextmanager
def steps_folder(args: argparse.Namespace) -> Iterator[Path | None]:
    """Yields the folder of compiled steps that all engines share. It is None where no device runs any."""
    if args.url is not None or args.host_only:
        yield None
    elif kept := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        yield Path(kept) / "steps"
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)


if __name__ == "__main__":
    sys.exit(main())
