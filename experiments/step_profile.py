"""Profiles one step on the device, kernel by kernel.

    python -m experiments.step_profile --config configs/llama-2-7b.json --batch 1 64 256
    python -m experiments.step_profile --kind prefill --batch 128 512 --input 8
    python -m experiments.step_profile --kind serve --batch 1 512 --context 136 --steps 16

Weights are random. decode: every slot is at --context tokens of KV. prefill: each slot has a prompt of --input tokens,
from the beginning. serve: all slots of an engine decode, some tokens after --context, with all host work between steps.
Its first steps do not count, as the profiler starts slowly.

Kernels of one name are summed and sorted into kinds: matmul, attention, cache (rotary embedding and the write), norm
and activation, sampling, and the rest. XLA's names hide some matmuls in the rest. The gap is the time without a kernel
or copy, from the first step to the last. With many short kernels the profiler itself leaves gaps. So an engine's gap is
also measured by the clock: a step's time without a profiler, less its kernels and copies. Rows with the kernel "(all)"
are totals of a kind. Those with "(limit)" are the floors of a decode or prefill step, and their shares of it: at the
device's best rates, and at those that it holds for seconds.
"""

import argparse
import collections
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from experiments.arguments import add_model_options, claim_memory, config_of, scheme_name
from experiments.result_file import bar, command_line, record, refusing
from experiments.steps.devices import ceilings_of
from experiments.steps.floors import make_floors, step_work
from experiments.steps.timer import KINDS as STEP_KINDS
from experiments.steps.timer import StepTimer, page_bytes, pool_for, random_params, step_of
from jllm.config import LlamaConfig
from jllm.engine.engine import Engine
from jllm.engine.request import SamplingParams
from jllm.engine.scheduler import Scheduler
from jllm.model.model import Model
from jllm.model.params import Params
from jllm.step.buckets import Bucket
from pallas_kernels.backends import OF_MODELS
from pallas_kernels.bench.command import Parser, add_result_options
from pallas_kernels.bench.gpus import device_kind
from pallas_kernels.bench.measure import Event, timeline
from pallas_kernels.bench.numbers import positive

PROMPT_TOKENS = 4096  # most prompt tokens of a step before an engine is profiled
MOST_GAP = 0.03  # share of a step
GAP, CLOCK_GAP = "gap", "gap by the clock"
SKIPPED = 3  # steps of an engine's profile
LENGTHS = {"context": 256, "input": 8}  # tokens
KINDS = (  # a kernel's kind is the first pattern in its name
    ("attention", r"attention|merge"),
    ("cache", r"cache_update|move_tokens"),
    ("matmul", r"matmul|swiglu|weight_only|gemm|gemv|cutlass|cublas|nvjet|dot"),
    ("norm, activation", r"norm_quant|silu"),
    ("sampling", r"sample"),
)


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "rest")


def steps_of(params: Params, config: LlamaConfig, batch: int, args: argparse.Namespace) -> Callable[[], jax.Array]:
    """Returns a function that runs --steps steps. Decode steps feed each other; prefill steps repeat the same
    prompts."""
    tokens = args.context + 16 * args.steps if args.kind == "decode" else args.input + 1  # it is called a few times
    timer = StepTimer(params, config, pool_for(batch, tokens, args.page_size, args.kv_cache), args.backend)
    layout, buffer = step_of(args.kind, batch, args.input)
    context = args.context if args.kind == "decode" else 0
    return timer.repeated(timer.lower(layout).compile(), buffer, context, args.steps)


def serving_sizes(batch: int, args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Returns an engine's options in which all slots decode four profiles' steps, and the tokens that each makes."""
    prompts = 1 << (min(PROMPT_TOKENS, batch * args.context) - 1).bit_length()  # tokens per step, until all are in
    chunks = min(batch, 64)
    filling = max(-(-batch * args.context // prompts), -(-batch // chunks))
    waiting = 2 * Scheduler.PATIENCE  # the last prompts may wait, and tokens are read late
    output = 4 * (args.steps + SKIPPED) + filling + waiting
    options = {
        "max_slots": batch, "num_pages": batch * -(-(args.context + output) // args.page_size),
        "page_size": args.page_size, "kv_cache": args.kv_cache, "max_step_tokens": batch + prompts,
        "buckets": (Bucket(batch, 0, 0), Bucket(batch, prompts, chunks)), "prefix_cache": False,
        "backend": args.backend,
    }  # fmt: skip
    return options, output


@contextmanager
def serving(params: Params, config: LlamaConfig, batch: int, args: argparse.Namespace) -> Iterator[Engine]:
    """Yields an engine whose slots all decode."""
    options, output = serving_sizes(batch, args)
    engine = Engine(Model(config, params, None), **options)
    sampling = [SamplingParams(max_new_tokens=output, ignore_eos=True, seed=seed) for seed in range(batch)]
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, config.vocab_size, (batch, args.context)).tolist()
    try:
        engine.compile_ahead(sampling[:1])
        waiting = {engine.submit(prompt, its) for prompt, its in zip(prompts, sampling)}
        while waiting:
            waiting -= {event.id for event in engine.step()}
        yield engine
    finally:
        engine.close()


def serve_steps(engine: Engine, steps: int) -> list[jax.Array]:
    """Runs steps. Returns arrays that are ready once the last step has ended; its tokens are still unread."""
    for _ in range(steps):
        engine.step()
    return jax.live_arrays()


def by_the_clock(engine: Engine, steps: int) -> float:
    """Returns the microseconds of a step without a profiler. A step is in flight before the first and after the
    last."""
    serve_steps(engine, SKIPPED)
    begin = time.perf_counter()
    serve_steps(engine, steps)
    return 1e6 * (time.perf_counter() - begin) / steps


def steady(events: list[Event], steps: int) -> list[Event]:
    """Returns the events of whole steps after the first few. Steps are separated by a kernel that runs once in each:
    the latest such one, and no copy. Raises RuntimeError if there is none."""
    counts = collections.Counter(event.name for event in events)
    once = [event for event in events if counts[event.name] == steps and not event.name.startswith("Mem")]
    if not once:
        raise RuntimeError(f"no kernel ran once in each of {steps} steps")
    last = max(once, key=lambda event: event.start_us)
    marks = sorted(event.start_us for event in once if event.name == last.name)
    return [event for event in events if marks[SKIPPED - 1] <= event.start_us < marks[-1]]


def busy_us(events: list[Event]) -> float:
    """Returns the time in which something ran. Copies may overlap kernels."""
    busy, end = 0.0, -math.inf
    for event in sorted(events, key=lambda event: event.start_us):
        busy += max(0.0, event.start_us + event.us - max(end, event.start_us))
        end = max(end, event.start_us + event.us)
    return busy


def table(events: list[Event], steps: int) -> Iterator[dict[str, Any]]:
    """Yields one row per kernel name, the longest first, and one for the gaps."""
    times: dict[str, list[float]] = collections.defaultdict(list)
    for event in events:
        times[re.sub(r"[_.]?\d+", "", event.name)[:60]].append(event.us)
    first = min(event.start_us for event in events)
    span = max(event.start_us + event.us for event in events) - first
    for name, all_us in sorted(times.items(), key=lambda item: -sum(item[1])):
        us = sum(all_us) / steps
        yield {
            "kernel": name, "kind": kind_of(name), "calls": round(len(all_us) / steps, 1), "us": round(us, 2),
            "share": round(us * steps / span, 4),
        }  # fmt: skip
    yield gap_row(GAP, (span - busy_us(events)) / steps, span / steps)


def gap_row(kind: str, idle_us: float, step_us: float) -> dict[str, Any]:
    return {"kernel": "(none)", "kind": kind, "us": round(idle_us, 2), "share": round(idle_us / step_us, 4)}


def totals(found: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields one row per kind of kernel, the longest first. Gaps already have their rows in the table."""
    sums: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for row in found:
        if row["kernel"] != "(none)":
            sums[row["kind"]].update({key: row[key] for key in ("calls", "us", "share")})
    for kind, total in sorted(sums.items(), key=lambda item: -item[1]["us"]):
        yield {
            "kernel": "(all)", "kind": kind, "calls": round(total["calls"], 1), "us": round(total["us"], 2),
            "share": round(total["share"], 4),
        }  # fmt: skip


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add_model_options(parser)
    parser.add_argument("--kind", choices=(*STEP_KINDS, "serve"), default="decode", help="kind of the step")
    parser.add_argument(
        "--batch", type=positive, nargs="+", default=[1, 64, 256], help="numbers of slots, or of prompts"
    )
    context = f"decode, serve: KV tokens of each slot at the start (default: {LENGTHS['context']})"
    parser.add_argument("--context", type=positive, help=context)
    parser.add_argument("--input", type=positive, help=f"prefill: tokens of each prompt (default: {LENGTHS['input']})")
    parser.add_argument("--steps", type=positive, default=4, help="number of steps in one profile")
    parser.add_argument("--backend", choices=OF_MODELS, help="backend (default: chosen for the device)")
    add_result_options(parser)
    args = parser.parse_args(argv)
    taken = length_of(args.kind)
    (other,) = LENGTHS.keys() - {taken}
    if getattr(args, other) is not None:
        parser.error(f"--{other} has no meaning with --kind {args.kind}, which takes --{taken}")
    setattr(args, taken, getattr(args, taken) or LENGTHS[taken])
    return args


def length_of(kind: str) -> str:
    """Returns the option with the length of slots, or of prompts, for this kind."""
    return "input" if kind == "prefill" else "context"


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    tokens = args.input if args.kind == "prefill" else args.context + args.steps + 1
    config = config_of(args, tokens)
    params = random_params(config, args.dtype, args.scheme)
    for batch in tqdm(args.batch, delay=2):
        yield from of_batch(params, config, batch, args)


def of_batch(params: Params, config: LlamaConfig, batch: int, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the rows of one number of slots or prompts, then releases their pages."""
    length = length_of(args.kind)
    step = {
        "model": Path(args.config).stem, "scheme": scheme_name(args.scheme), "batch": batch,
        "kv": args.kv_cache or args.dtype, "step": args.kind, length: getattr(args, length),
        **({} if args.backend is None else {"backend": args.backend}),
    }  # fmt: skip
    if args.kind == "serve":
        with serving(params, config, batch, args) as engine:
            found = list(served_table(engine, args.steps))
    else:
        run = steps_of(params, config, batch, args)
        jax.block_until_ready(run())
        found = list(table(timeline(run, python=False), args.steps))
    for row in (*found, *totals(found), *limits(params, config, batch, found, args)):
        yield step | row


def limits(
    params: Params, config: LlamaConfig, batch: int, found: list[dict[str, Any]], args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yields the floors of a step, whose kernels and gaps `found` has. An engine's contexts are not known."""
    if args.kind == "serve":
        return
    if args.kind == "decode":
        work = step_work(batch, batch * (args.context + 1.5 * args.steps))  # a run of as many steps came before
    else:
        work = step_work(0, 0, [(0, args.input, True)] * batch)
    step_us = sum(row["us"] for row in found) / sum(row["share"] for row in found)
    token_bytes = page_bytes(config, params.dtype, args.page_size, args.kv_cache) / args.page_size
    for name, floor in make_floors(params, config, ceilings_of(device_kind())).items():
        us = 1e6 * floor.of(work, token_bytes)
        yield {"kernel": "(limit)", "kind": name, "us": round(us, 2), "share": round(us / step_us, 4)}


def served_table(engine: Engine, steps: int) -> Iterator[dict[str, Any]]:
    """Yields the rows of an engine's steps, with its gap by the clock. As many steps are timed before the profile as
    after it. So contexts, which grow by a token per step, have the same mean length."""
    before = by_the_clock(engine, steps)
    run = partial(serve_steps, engine, steps + SKIPPED)
    events = steady(timeline(run, python=False), steps + SKIPPED)
    yield from table(events, steps)
    step_us = (before + by_the_clock(engine, steps)) / 2
    yield gap_row(CLOCK_GAP, max(0.0, step_us - busy_us(events) / steps), step_us)


def bars(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the device's idle time in an engine's decode steps, by the clock."""
    for row in rows:
        if row.get("step") == "serve" and row["kind"] == CLOCK_GAP:
            where = f"{row['model']} {row['scheme']} KV {row['kv']}, batch {row['batch']}, context {row['context']}"
            yield bar(f"gap between an engine's decode steps, {where}", row["share"], "1", MOST_GAP, most=True)


def name_of(args: argparse.Namespace) -> str:
    name = "step_profile_serve" if args.kind == "serve" else "step_profile"
    return name if args.scheme == "bf16" else f"{name}-{scheme_name(args.scheme)}"


@refusing
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    command = command_line("step_profile", argv)
    claim_memory()
    options: dict[str, Any] = {"shown": lambda row: row["share"] >= 0.002}
    if args.layers is None:  # fewer layers are too small to decide
        options["bars"] = bars
    return record(args, name_of(args), command, rows(args), **options)


if __name__ == "__main__":
    sys.exit(main())
