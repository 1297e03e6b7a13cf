"""Requests a second on a workload of conversations, and how long each of them waited.

    python -m experiments.qps --config configs/llama-2-7b.json --quantize w8a8 --kv-cache int8-g8
    python -m experiments.qps --rate 20 --batching static   # Poisson arrivals, and what static batching makes of them
    python -m experiments.qps --guided 0.25                 # a quarter of the requests has a guide (docs/guided.md)
    python -m experiments.qps --host-only                   # no device: the slack of the schedule, the work of the host
    JAX_PLATFORMS=cpu python -m experiments.qps --url http://localhost:8000/v1 --stream   # of a server of jllm.serve

1,024 prompts of random tokens, of the lengths that the workload says, each continued to its given length whatever is
sampled: the work is the same for everyone. All are sent at once, or at --rate by a Poisson process of a fixed seed.
Everything is compiled and --warmup requests are served before the clock starts; then the workload runs --repeats times.

Times count from a request's arrival: what a busy host adds before it takes one in is part of them. A percentile is
that of the nearest rank, exact for first tokens and whole requests, within 0.5 % between tokens. Goodput counts
requests with the first token within 2 s and at most 50 ms a token from there on average; the first --cut requests to
arrive, which find the engine empty, count for neither. Intervals are Student's t at 95 % over the repeats.

The floor adds up each step of the merge schedule (all at once, the same slots and pages) at the limits of floors.py.
--batching static, --prefill padded, --sampling sort and --host wait each take one idea away.
"""

import argparse
import asyncio
import json
import math
import os
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.arguments import MEMORY_SHARE, add_bandwidth, ceilings_here, claim_memory, positive, scheme_name
from experiments.baselines import BASELINES, engine_with
from experiments.result_file import bar, command_line, record, refusing, rounded
from experiments.steps import peers, wire
from experiments.steps.bars import OWN, of_own_kernels
from experiments.steps.floors import make_floor, workload_seconds
from experiments.steps.words import ENDLESS, is_guided, words_tokenizer
from jllm.cache import cache_bytes, make_cache, parse_kv_cache
from jllm.checkpoint import init_params
from jllm.config import load_config
from jllm.engine.device import Device
from jllm.engine.engine import Engine
from jllm.engine.layout import WHOLE
from jllm.engine.metrics import nearest_rank
from jllm.engine.replicas import Replicas
from jllm.engine.request import SamplingParams
from jllm.engine.room import SHARE
from jllm.errors import ConfigError, InputFileError
from jllm.fit import tree_bytes
from jllm.kv_policies.options import KV_POLICIES
from jllm.params import Params
from jllm.pretrained import Model, load
from jllm.quant.quantize import quantize
from jllm.state import Outputs
from pallas_kernels.bench.bars import H200
from pallas_kernels.bench.command import add_result_options

Row = dict[str, Any]
WORKLOAD = Path(__file__).parent / "workloads" / "ppl_samples_1024.json"
FIRST_TOKEN, EACH_TOKEN = 2.0, 0.050  # seconds: what goodput allows
PERCENTILES = (50, 90, 99)
OVER_HTTP = (  # options of a run against a server
    *("url", "stream", "config", "workload", "requests", "rate", "seed", "warmup", "repeats"),
    *("temperature", "top_k", "top_p", "min_p", "results", "label", "json"),
)
BARS = {("bfloat16", "bf16"): (38.0, 1.25), ("w8a8", "int8-g8"): (56.0, 1.6)}  # requests a second, and over vLLM's
TRITON = 0.8  # of the requests a second by the device's own kernels, at least
REPLICA = 0.95  # of one engine's requests a second, that each of several adds
MEMORY = ("kv_policy", "length_predictor", "admission_quantile")  # options of the engine's memory
SETTINGS = ("workload", *MEMORY, "pool_gib", "allow")  # in rows where they are not the default
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # Student's t, two-sided, 1 .. 9 degrees
DEVICE_BYTES = 139 << 30  # of an H200, where there is none


@dataclass(frozen=True)
class Request:
    """One of the workload."""

    prompt: int  # tokens
    output: int
    arrival: float  # seconds from the start


@dataclass(frozen=True)
class Served:
    """How a request fared: seconds from its arrival."""

    request: Request
    first_token: float
    total: float

    @property
    def good(self) -> bool:
        each = (self.total - self.first_token) / max(1, self.request.output - 1)
        return self.first_token <= FIRST_TOKEN and each <= EACH_TOKEN


class HostOnly(Device):
    """Takes no time and has no memory: what an Engine does on it is the host's work alone."""

    def renew(self) -> None:
        self._state = None

    def run(self, buffer, layout, variant) -> Outputs:
        self.programs.used.add((layout.bucket, variant, WHOLE))
        tokens: Any = np.ones(layout.bucket.decodes * layout.bucket.rows + layout.bucket.chunks, np.int32)
        return Outputs(tokens, None, None, None, None)

    def copy_pages(self, copies) -> None:
        pass

    def compile_ahead(self, variant) -> int:
        return 0


def read_workload(path: Path, count: int | None, rate: float | None, seed: int) -> list[Request]:
    """The first `count` requests of a file, with arrivals. Raises InputFileError where it is not a workload."""
    try:
        lengths = [(int(p), int(o)) for p, o in json.loads(path.read_text(encoding="utf-8"))["requests"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputFileError(f"{path}: not a workload with requests [prompt, output]: {error}") from None
    lengths = lengths[:count]
    if not lengths or min(min(pair) for pair in lengths) < 1:
        raise InputFileError(f"{path}: a workload needs requests, each of at least 1 prompt and 1 output token")
    gaps = np.zeros(len(lengths)) if rate is None else np.random.default_rng(seed).exponential(1 / rate, len(lengths))
    return [Request(p, o, float(at)) for (p, o), at in zip(lengths, np.cumsum(gaps) - gaps[0])]


def serve(
    engine: Engine | Replicas,
    requests: Sequence[Request],
    sampling: SamplingParams,
    seed: int,
    allow: int = 0,
    guided: float = 0,
) -> tuple[list[Served], float]:
    """Sends requests as they arrive; how each fared, and the seconds until the last had ended. A request that allows
    more tokens than it wants is aborted once it has what it wants. A share of them is guided, at the same lengths."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, engine.vocab_size, r.prompt).tolist() for r in requests]
    params = [
        SamplingParams(**{**vars(sampling), "max_new_tokens": max(allow, r.output), "seed": i})
        for i, r in enumerate(requests)
    ]
    params = [replace(p, guide=ENDLESS, ignore_eos=False) if is_guided(i, guided) else p for i, p in enumerate(params)]
    coming, known, served = deque(range(len(requests))), {}, []
    made: Counter[int] = Counter()
    start = time.perf_counter()
    while coming or engine.has_work:
        now = time.perf_counter() - start
        while coming and requests[coming[0]].arrival <= now:
            i = coming.popleft()
            delay = time.perf_counter() - start - requests[i].arrival
            known[engine.submit(prompts[i], params[i])] = (requests[i], delay)
        if not engine.has_work:
            time.sleep(max(0.0, requests[coming[0]].arrival - (time.perf_counter() - start)))
            continue
        for event in engine.step():
            made[event.id] += len(event.token_ids)
            if event.completion is None:
                if made[event.id] == known[event.id][0].output:
                    engine.abort(event.id)
            else:
                request, delay = known.pop(event.id)
                t, reason = event.completion.timings, event.completion.finish_reason
                del made[event.id]
                if t.output_tokens != request.output or t.first_token is None:
                    raise RuntimeError(f"a request made {t.output_tokens} of {request.output} tokens ({reason})")
                served.append(Served(request, t.first_token + delay, t.total + delay))
    return served, time.perf_counter() - start


def percentile(values: Sequence[float], p: float) -> float:
    """That of the nearest rank, exactly."""
    return sorted(values)[nearest_rank(p, len(values)) - 1]


def repeat_row(served: list[Served], seconds: float, metrics: dict[str, Any], cut: int) -> Row:
    """The figures of one run of the workload."""
    between = {p: metrics["inter_token_s"][f"p{p}"] for p in PERCENTILES}
    names = (
        "slack", "preemptions", "recomputed_tokens", "steps", "pages_peak", "pages_total", "compiled_steps",
        "running_mean", "running_peak", "wasted_share", "fragmentation_mean",
    )  # fmt: skip
    return served_row(served, seconds, between, cut) | {name: metrics[name] for name in names}


def served_row(served: Sequence[Served], seconds: float, between: Mapping[int, float | None], cut: int) -> Row:
    """What a run's requests say; `between` are percentiles of the seconds between tokens, by their number."""
    everything = [s.request for s in served]
    counted = sorted(served, key=lambda s: s.request.arrival)[cut:]
    row: Row = {
        "requests": len(served), "seconds": seconds, "qps": len(served) / seconds,
        "input_tokens_s": sum(r.prompt for r in everything) / seconds,
        "output_tokens_s": sum(r.output for r in everything) / seconds,
    }  # fmt: skip
    for p in PERCENTILES:
        row[f"ttft_ms_p{p}"] = 1e3 * percentile([s.first_token for s in counted], p)
    for p in PERCENTILES:
        at = between[p]
        row[f"itl_ms_p{p}"] = None if at is None else 1e3 * at
    for p in PERCENTILES:
        row[f"e2e_ms_p{p}"] = 1e3 * percentile([s.total for s in counted], p)
    good = sum(s.good for s in counted)
    return row | {"good_share": good / len(counted), "goodput": good / len(counted) * row["qps"]}


def summary(rows: Sequence[Row]) -> Row:
    """Means over the repeats; `<name>_ci` is half of the 95 % interval, None for a single repeat."""
    found: Row = {"repeats": len(rows)}
    for name in rows[0]:
        values = [row[name] for row in rows]
        found[name] = None if None in values else statistics.fmean(values)
        if name in ("qps", "output_tokens_s", "ttft_ms_p50", "itl_ms_p99", "e2e_ms_p50", "goodput"):
            found[f"{name}_ci"] = None if None in values else half_interval(values)
    return found


def half_interval(values: Sequence[float]) -> float | None:
    """Student's t at 95 %; None for fewer than two values. Beyond ten, the t of nine degrees, a little too wide."""
    n = len(values)
    if n < 2:
        return None
    return T_95[min(n - 1, len(T_95)) - 1] * statistics.stdev(values) / math.sqrt(n)


def make_model(args: argparse.Namespace) -> Model:
    if args.model:
        return load(args.model, quantize=args.quantize)
    config = load_config(args.config)

    def make() -> Params:
        return init_params(config, jax.random.key(0), jnp.dtype(args.dtype))

    params = jax.eval_shape(make) if args.host_only else make()  # shapes are enough for the host
    tokenizer = None if args.guided is None else words_tokenizer(config.vocab_size)
    return Model(config, quantize(params, args.quantize) if args.quantize else params, tokenizer)


def token_bytes(model: Model, kv_cache: str | None) -> float:
    """Bytes of one token's K and V, all layers."""
    formats = parse_kv_cache(kv_cache, model.config, model.params.dtype)
    return cache_bytes(jax.eval_shape(lambda: make_cache(model.config, 1, 16, formats))) / 16


def pages_of_h200(model: Model, page_size: int, kv_cache: str | None, least: int) -> int:
    """How many pages an H200 has room for beside the weights, but no fewer than `least`."""
    free = SHARE * (MEMORY_SHARE * DEVICE_BYTES - tree_bytes(model.params))
    return max(least, int(free / (page_size * token_bytes(model, kv_cache))))


def sampling_of(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p, ignore_eos=True
    )


def make_engine(
    model: Model, args: argparse.Namespace, device: Callable[..., Device] | None = None, backend: str | None = None
) -> Engine | Replicas:
    """By the options; `device` makes it one in place of its sampler's. `backend`: None is the best for the device."""
    names = ("page_size", "num_pages", "max_step_tokens", "kv_cache", "trace", *MEMORY, *BASELINES)
    options = {"max_slots": args.slots, "backend": backend} | {name: getattr(args, name) for name in names}
    if args.pool_gib is not None:
        options["num_pages"] = int(args.pool_gib * (1 << 30) / (args.page_size * token_bytes(model, args.kv_cache)))
    if args.replicas is not None:
        return Replicas(model, args.replicas, make=engine_with, **options)
    if not args.host_only:
        return engine_with(model, device=device, **options)
    options["num_pages"] = options["num_pages"] or pages_of_h200(model, args.page_size, args.kv_cache, args.slots)
    return engine_with(model, device=HostOnly, **options)


def warm_up(engine: Engine | Replicas, requests: Sequence[Request], args: argparse.Namespace) -> int:
    """Serves the first --warmup requests, of a few tokens each; returns how many."""
    warm = [Request(r.prompt, min(r.output, 16), 0.0) for r in requests[: args.warmup]]
    if warm:
        serve(engine, warm, sampling_of(args), args.seed, guided=args.guided or 0.0)
    return len(warm)


def run_once(engine: Engine | Replicas, requests: Sequence[Request], args: argparse.Namespace) -> tuple[Row, float]:
    """The figures of one run of the workload, and the seconds that this thread was busy."""
    engine.reset_metrics()
    engine.reset_prefix_cache()  # each run has the same prompts
    busy = time.thread_time()
    served, seconds = serve(engine, requests, sampling_of(args), args.seed, args.allow, args.guided or 0.0)
    return repeat_row(served, seconds, engine.metrics(), args.cut), time.thread_time() - busy


def measure(model: Model, requests: list[Request], args: argparse.Namespace) -> Iterator[Row]:
    """A row for each repeat and then their summary, of one backend after the other. Each replica has the workload once,
    where all is sent at once: as much work as one alone."""
    for replicas, backend in product(args.replicas or [None], args.backend):
        own = argparse.Namespace(**{**vars(args), "replicas": replicas})
        each = requests * (replicas or 1) if args.rate is None else requests
        yield from measure_one(model, each, own, backend)


def measure_one(model: Model, requests: list[Request], args: argparse.Namespace, backend: str) -> Iterator[Row]:
    sampling = sampling_of(args)
    about = {
        "model": Path(args.model or args.config).stem, "scheme": scheme_name(args.quantize or args.dtype),
        "kv": args.kv_cache or str(model.params.dtype), "backend": backend, "slots": args.slots, "rate": args.rate,
        **{name: getattr(args, name) for name in BASELINES},
        **{name: getattr(args, name) for name in SETTINGS[1:] if getattr(args, name)},
        **({} if args.guided is None else {"guided": args.guided}),
        **({} if args.replicas is None else {"replicas": args.replicas}),
        **({} if args.workload == WORKLOAD else {"workload": args.workload.stem}),
    }  # fmt: skip
    engine = make_engine(model, args, backend=None if backend == OWN[0] else backend)
    start = time.perf_counter()

    def note(text: str) -> None:
        print(f"{time.perf_counter() - start:.0f} s: {text}", file=sys.stderr, flush=True)

    guided = args.guided or 0.0
    like = [sampling, replace(sampling, guide=ENDLESS, ignore_eos=False)] if guided else [sampling]
    compiled = engine.compile_ahead(like)
    note(f"compiled {compiled} sizes of steps")
    warmed = warm_up(engine, requests, args)
    about |= {"compiled": compiled, "start_s": round(time.perf_counter() - start, 2)}
    note(f"served {warmed} requests to warm up")
    least = None
    if args.rate is None:
        floor = make_floor(model.params, model.config, ceilings_here(args))
        lengths = [(r.prompt, r.output) for r in requests]
        least = workload_seconds(lengths, engine.sizes.limits, floor, token_bytes(model, args.kv_cache))
        least /= args.replicas or 1
    rows, busy_s = [], math.inf
    for repeat in range(args.repeats):
        row, busy = run_once(engine, requests, args)
        busy_s = min(busy_s, busy)
        note(f"repeat {repeat}: {row['requests']} requests in {row['seconds']:.2f} s")
        rows.append(row)
        share = {} if least is None else {"floor_s": least, "floor_fraction": least / row["seconds"]}
        yield {**about, "repeat": repeat, **rounded(rows[-1] | share)}
    total = summary(rows)
    if args.host_only:
        total = {key: total[key] for key in ("repeats", "requests", "seconds", "slack", "steps", "preemptions")}
        total["host_us"] = 1e6 * busy_s / sum(r.output for r in requests)
    if least is not None:
        total |= (
            {"floor_s": least} if args.host_only else {"floor_s": least, "floor_fraction": least / total["seconds"]}
        )
    yield {**about, "repeat": "host only" if args.host_only else "mean", **rounded(total)}
    engine.close()


def measure_url(requests: list[Request], args: argparse.Namespace) -> Iterator[Row]:
    """A row for each repeat over HTTP and then their summary. The prompts are of --config's vocabulary."""
    target = wire.Target.of(args.url, os.environ.get("JLLM_API_KEY"))
    names = ("temperature", "top_k", "top_p", "min_p")
    body = {name: getattr(args, name) for name in names} | {"ignore_eos": True, "stream": args.stream}
    vocab = load_config(Path(args.config)).vocab_size

    def run(some: Sequence[Request], seed: int) -> tuple[list[wire.Answered], float]:
        return asyncio.run(wire.serve(target, [(r.prompt, r.output, r.arrival) for r in some], vocab, seed, body))

    about = {"over": "http", "stream": args.stream, "rate": args.rate}
    run([Request(r.prompt, min(r.output, 16), 0.0) for r in requests[: args.warmup]], args.seed)
    rows = []
    for repeat in range(args.repeats):
        answers, seconds = run(requests, args.seed + 1 + repeat)  # prompts of their own: no prefix is known
        tokens = sum(r.output for r in requests)
        row: Row = {"requests": len(answers), "seconds": seconds, "qps": len(answers) / seconds}
        row["output_tokens_s"] = tokens / seconds
        gaps = [gap for answer in answers for gap in answer.gaps]
        for p in PERCENTILES:
            row[f"ttft_ms_p{p}"] = 1e3 * percentile([a.first for a in answers], p) if args.stream else None
            row[f"itl_ms_p{p}"] = 1e3 * percentile(gaps, p) if gaps else None
            row[f"e2e_ms_p{p}"] = 1e3 * percentile([a.total for a in answers], p)
        rows.append(row)
        yield {**about, "repeat": repeat, **rounded(row)}
    means = {name: [row[name] for row in rows] for name in rows[0]}
    total = {name: None if None in values else statistics.fmean(values) for name, values in means.items()}
    yield {**about, "repeat": "mean", "repeats": len(rows), "qps_ci": half_interval(means["qps"]), **rounded(total)}


def bars(rows: Sequence[Row]) -> Iterator[Row]:
    """Bars of the mean, or the last repeat so far, of the whole workload on an H200, or of its schedule alone: of the
    device's own kernels, beside vLLM where that served in the same job, and of Triton's beside them."""
    last = {row.get("backend", OWN[0]): row for row in rows if "peer" not in row}
    row = next((row for row in last.values() if of_own_kernels(row)), None)
    if row is None or "over" in row:
        return
    whole = row["requests"] == 1024 * row.get("replicas", 1) and row["rate"] is None and row["slots"] == 512
    merged = all(row.get(name, choices[0]) == choices[0] for name, choices in BASELINES.items())
    if not (whole and merged) or any(row.get(name) for name in SETTINGS) or "guided" in row:
        return
    if "replicas" in row:
        yield from replica_bars(row, rows)
        return
    where = f"QPS workload, {row['model']} {row['scheme']} KV {row['kv']}"
    if "host_us" in row:
        yield bar(f"{where}, host work a running request a step", row["host_us"], "us", 5.0, most=True)
    elif found := BARS.get((row["scheme"], row["kv"].replace("bfloat16", "bf16"))):
        yield bar(f"{where}, requests a second", row["qps"], "1/s", found[0], of=H200)
        if vllm := [each["qps"] for each in rows if each.get("peer") == "vLLM" and "qps" in each]:
            yield bar(f"{where}, times as many as vLLM", round(row["qps"] / max(vllm), 3), "1", found[1])
    if "triton" in last:
        yield bar(f"{where}, triton over the default", round(last["triton"]["qps"] / row["qps"], 3), "1", TRITON)
    yield bar(f"{where}, ladder slack", row["slack"], "1", 0.03, most=True)


def replica_bars(row: Row, rows: Sequence[Row]) -> Iterator[Row]:
    """Of the means of several replicas over that of one."""
    means = {each["replicas"]: each["qps"] for each in rows if "replicas" in each and each["repeat"] == "mean"}
    for count, qps in means.items():
        if count > 1 and 1 in means:
            name = f"QPS workload, {row['model']} {row['scheme']} KV {row['kv']}, {count} replicas over one"
            yield bar(name, round(qps / means[1], 3), "1", REPLICA * count)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--config", default="configs/llama-2-7b.json", help="model shape (a config.json), random weights"
    )
    parser.add_argument("--model", help="a model's directory or id, instead of random weights")
    parser.add_argument("--dtype", default="bfloat16", help="of random weights")
    parser.add_argument("--quantize", help="scheme of the weights")
    parser.add_argument("--workload", type=Path, default=WORKLOAD, help="JSON with requests [prompt, output] in tokens")
    parser.add_argument("--requests", type=positive, help="only this many, the first")
    parser.add_argument("--rate", type=float, help="requests a second, Poisson (default: all at once)")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and prompts")
    parser.add_argument(
        "--warmup", type=int, default=32, help="requests served before the clock starts, 16 tokens each"
    )
    parser.add_argument("--cut", type=int, default=0, help="first arrivals left out of percentiles and goodput")
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--slots", type=positive, default=512, help="sequences that run at once")
    each = "an engine on each of so many devices, one number after another; --slots and --requests are of each"
    parser.add_argument("--replicas", type=positive, nargs="+", help=each)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--pages", dest="num_pages", type=positive, help="in the pool (default: what memory holds)")
    parser.add_argument("--pool-gib", type=float, help="size of the pool, in place of --pages")
    parser.add_argument("--kv-policy", choices=KV_POLICIES, help="who gets pages when (default: paged)")
    parser.add_argument("--length-predictor", help="what admission counts on: a name, or learned:FILE")
    parser.add_argument("--admission-quantile", type=float, help="of predicted lengths")
    parser.add_argument("--trace", help="file that the schedule goes to, for experiments.simulate --replay")
    parser.add_argument("--allow", type=positive, default=0, help="tokens that each request allows, at least its own")
    parser.add_argument("--step-tokens", dest="max_step_tokens", type=positive, default=2048, help="most in a step")
    parser.add_argument("--kv-cache", help="KV format (default: the weights' dtype)")
    parser.add_argument(
        "--backend",
        nargs="+",
        default=OWN[:1],
        help="xla, mosaic, triton, deterministic, or default: one after another",
    )
    share = "of the requests has a guide; 0: none, but texts are made as with one, to compare with"
    parser.add_argument("--guided", type=float, metavar="SHARE", help=share)
    for name, choices in BASELINES.items():
        parser.add_argument(f"--{name}", choices=choices, default=choices[0])
    parser.add_argument("--host-only", action="store_true", help="no device: slack and the host's work")
    add_bandwidth(parser)
    parser.add_argument(
        "--url", metavar="http://HOST:PORT/v1", help="send the workload to a server, in place of a model"
    )
    parser.add_argument("--stream", action="store_true", help="with --url: every request streams")
    peers.add_options(parser, peers.SERVERS, 110)
    add_result_options(parser)
    args = parser.parse_args(argv)
    peers.check_options(parser, args)
    if args.stream and args.url is None:
        parser.error("--stream needs --url")
    for name, value in vars(args).items():
        if args.url is not None and name not in OVER_HTTP and value != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} has no meaning with --url: the server decides it")
    if args.guided is not None and (not 0 <= args.guided <= 1 or args.host_only or args.model):
        parser.error("--guided must be from 0 to 1, and --host-only and --model left out beside it")
    if args.replicas is not None and args.host_only:
        parser.error("--replicas are of devices, and --host-only does without")
    if args.peers and args.host_only:
        parser.error("--peers measures a device, and --host-only does without")
    if args.rate is not None and not args.rate > 0:
        parser.error(f"--rate must be > 0, not {args.rate}")
    if args.pool_gib is not None and (args.num_pages or not args.pool_gib > 0):
        parser.error("--pool-gib must be > 0, and --pages left out beside it")
    return args


def serve_peers(requests: list[Request], args: argparse.Namespace) -> list[dict[str, Any]]:
    lengths = [(r.prompt, r.output, r.arrival) for r in requests]
    quantized = args.quantize is not None
    return peers.serving(args.peers, lengths, quantized, args.repeats, args.peer_seconds, args.peer_names)


def name_of(args: argparse.Namespace) -> str:
    """Name of the result: what the run was about, policies that are not the default included."""
    if args.url is not None:
        return "_".join(["qps_http", *(["stream"] if args.stream else [])])
    parts = ["qps_host" if args.host_only else "qps", Path(args.model or args.config).stem]
    parts += [scheme_name(args.quantize or args.dtype), f"kv-{args.kv_cache}" if args.kv_cache else ""]
    parts += [getattr(args, name) for name, choices in BASELINES.items() if getattr(args, name) != choices[0]]
    parts += [(getattr(args, name) or "").partition(":")[0] for name in MEMORY[:2]]
    parts += ["" if args.replicas is None else f"replicas{'-'.join(map(str, args.replicas))}"]
    parts += ["" if args.pool_gib is None else f"{args.pool_gib:g}gib"]
    parts += ["" if args.guided is None else f"guided{args.guided:g}"]
    parts += ["" if args.rate is None else f"rate{args.rate:g}"]
    return "_".join(part.replace(",", "-").replace("=", "-") for part in parts if part)


@refusing
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    claim_memory()
    requests = read_workload(args.workload, args.requests, args.rate, args.seed)
    if not 0 <= args.cut < len(requests):
        raise ConfigError(f"--cut must leave some of {len(requests)} requests, not cut {args.cut}")
    beside = serve_peers(requests, args) if args.peers else []
    rows = measure(make_model(args), requests, args) if args.url is None else measure_url(requests, args)
    command = command_line("qps", argv)
    about = {} if args.rate is not None or args.url is not None else {"ceilings": ceilings_here(args).document}
    found = chain(rows, beside)
    return record(args, name_of(args), command, found, bars=bars, shown=lambda row: "peer" not in row, **about)


if __name__ == "__main__":
    sys.exit(main())
