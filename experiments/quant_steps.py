"""Measures the time of whole steps by weight format: LLaMA-7B, decoding and prefilling, by batch, in one run.

    python -m experiments.quant_steps --stages decode:bf16:1,16,64,128,256,512 prefill:bf16:128,512
    python -m experiments.quant_steps --stages decode:int8-g8:1,64,512:bf16,w8a8

Random weights are made and quantized on the device one by one, and all schemes stay there. A stage (kind of step, KV
format, batches, schemes if not all) is compiled as a whole before its first step is timed. Decoding starts every slot
at --context tokens of KV, greedily. Steps are dispatched one after the other and timed together by the host's clock.
Schemes of a batch are timed in turn, --repeats times. A row has all of its times (`_ms_runs`) and the best. Prefill is
a step with a prompt of --input tokens for each slot. Floors are those of floors.py on this device.

Claims decide by these rows: C7 (W8A8) reads this experiment's files, and C8 (INT4 weights) times these steps itself.

A measured row has scheme, batch, kv, T (tokens of the step), tokens_s, floor_ms, floor_fraction and weights_gib.
over_bf16 is its speed over bf16 in the same stage, if that was measured. It also has decode_ms and context, or
prefill_ms and input. A row with an "error" was not measured.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.arguments import (
    add_timing_options,
    ceilings_here,
    config_of,
    known_scheme,
    scheme_name,
)
from experiments.result_file import bar, command_line, record, refusing
from experiments.steps.bars import LEAST_TOKENS, decode_bars, of_own_kernels, prefill_bars, weights_of
from experiments.steps.floors import Work, make_floors, step_work
from experiments.steps.timer import (
    KINDS,
    StepTimer,
    compile_ahead,
    page_bytes,
    pool_for,
    random_params,
    step_of,
    stopwatch,
)
from jllm.config import LlamaConfig
from jllm.model.cache import parse_kv_cache
from jllm.model.params import Params, tree_bytes
from jllm.quant.quantize import quantize
from pallas_kernels.backends import OF_MODELS, on_hopper
from pallas_kernels.bench.bars import H200
from pallas_kernels.bench.command import Parser, add_result_options
from pallas_kernels.bench.numbers import positive, positive_number

Row = dict[str, Any]

SCHEMES = ("bf16", "w8a8", "w8a8-all", "w4a16-g128", "nf4", "fp8")
BATCHES = (1, 16, 64, 128, 256, 512)
PAGE = 16
W4A16_MS = 1.75  # most ms of a decode step of one sequence


def slot_tokens(kind: str, args: argparse.Namespace) -> int:
    """Returns the most tokens of a slot in steps of that kind."""
    return (args.context + args.steps if kind == "decode" else args.input) + 1


@dataclass(frozen=True)
class Case:
    """One compiled step."""

    scheme: str
    kind: str  # "decode" or "prefill"
    batch: int
    kv: str

    def work(self, context: int, prompt: int) -> Work:
        if self.kind == "decode":
            return step_work(self.batch, self.batch * context)
        return step_work(0, 0, [(0, prompt, True)] * self.batch)

    def timer(self, params: Params, config: LlamaConfig, args: argparse.Namespace) -> StepTimer:
        """Returns a timer whose slots have pages for a prompt, or for --context tokens and all --steps."""
        pool = pool_for(self.batch, slot_tokens(self.kind, args), PAGE, self.kv)
        return StepTimer(params, config, pool, args.backend)


@dataclass(frozen=True)
class Stage:
    """Steps that are compiled together, by every scheme if it names none."""

    kind: str
    kv: str
    batches: tuple[int, ...]
    schemes: tuple[str, ...] = ()

    def cases(self, schemes: list[str]) -> list[Case]:
        """Returns plain weights first, since others are compared with them."""
        names = sorted(dict.fromkeys(self.schemes or schemes), key=lambda name: name != "bf16")
        return [Case(name, self.kind, batch, self.kv) for name in names for batch in self.batches]


def seconds(case: Case, timer: StepTimer, step: Callable[..., Any], args: argparse.Namespace) -> float:
    """Returns the seconds of one step. Its pages are released with it."""
    timer.renew()
    timer.place(args.context if case.kind == "decode" else 0)
    try:
        _, buffer = step_of(case.kind, case.batch, args.input)
        return timer.one(step, buffer, case.batch, args.steps, 1)
    finally:
        timer.state = None


def rows(config: LlamaConfig, args: argparse.Namespace) -> Iterator[Row]:
    """Yields a row per case, with an "error" if it could not be measured."""
    start, note = time.perf_counter(), stopwatch()
    params = random_params(config, "bfloat16")
    schemes = list(dict.fromkeys(case.scheme for stage in args.stages for case in stage.cases(args.schemes)))
    with ThreadPoolExecutor(len(schemes)) as pool:  # compiling takes most of the time
        models = dict(zip(schemes, pool.map(lambda scheme: quantize(params, scheme), schemes)))
    jax.block_until_ready(models)
    note("quantized")
    for stage in args.stages:
        if args.seconds is not None and time.perf_counter() - start > args.seconds:
            yield {"kind": stage.kind, "kv": stage.kv, "error": f"no time left after {args.seconds} s"}
            continue
        cases = stage.cases(args.schemes)
        timers = {case: case.timer(models[case.scheme], config, args) for case in cases}
        layouts = {case: step_of(case.kind, case.batch, args.input)[0] for case in cases}
        steps = compile_ahead({case: timer.recipe(layouts[case]) for case, timer in timers.items()}, args.threads)
        note(f"compiled {stage.kind} {stage.kv}")
        for batch in stage.batches:
            of_batch = {case: timer for case, timer in timers.items() if case.batch == batch}
            base = None
            for case, found in in_turn(of_batch, steps, args).items():
                if isinstance(found, Exception):
                    text = str(found).partition("\n")[0][:200]
                    yield {**vars(case), "error": f"{type(found).__name__}: {text}"}
                    continue
                base = min(found) if case.scheme == "bf16" else base
                yield row(case, models[case.scheme], config, found, base, args)
        note(f"measured {stage.kind} {stage.kv}")


def in_turn(
    timers: dict[Case, StepTimer], steps: dict[Case, Future[Any]], args: argparse.Namespace
) -> dict[Case, list[float] | Exception]:
    """Returns the seconds of a step of each case, as many as --repeats, or its error."""
    found: dict[Case, list[float] | Exception] = {case: [] for case in timers}
    for _ in range(args.repeats):
        for case, timer in timers.items():
            times = found[case]
            if isinstance(times, Exception):
                continue
            try:
                times.append(seconds(case, timer, steps[case].result(), args))
            except Exception as error:  # a compiler or kernel may raise anything; other cases go on
                found[case] = error
    return found


def row(
    case: Case, params: Params, config: LlamaConfig, times: list[float], base: float | None, args: argparse.Namespace
) -> Row:
    """Returns a case's row. times: seconds of a step, by round; base: the best of bf16's."""
    seconds = min(times)
    work = case.work(args.context, args.input)
    tokens = work.decodes + work.tokens
    token_bytes = page_bytes(config, params.dtype, PAGE, case.kv) / PAGE
    floors = make_floors(params, config, ceilings_here(args))
    least = {name: floor.of(work, token_bytes) for name, floor in floors.items()}
    found: Row = {"scheme": scheme_name(case.scheme), "batch": case.batch, "kv": case.kv, "T": tokens}
    found |= {"backend": args.backend} if args.backend else {}
    found |= {"context": args.context} if case.kind == "decode" else {"input": args.input}
    found[f"{case.kind}_ms"] = round(1e3 * seconds, 3)
    found[f"{case.kind}_ms_runs"] = [round(1e3 * each, 3) for each in times]
    found["tokens_s"] = round(tokens / seconds, 1)
    found |= {f"{name}_ms": float(f"{1e3 * each:.4g}") for name, each in least.items()}
    found |= {f"{name}_fraction": round(each / seconds, 3) for name, each in least.items()}
    if base is not None:
        found["over_bf16"] = round(base / seconds, 3)
    return found | {"weights_gib": round(tree_bytes(params) / (1 << 30), 2)}


def bars(rows: list[Row]) -> Iterator[Row]:
    for r in rows:
        where = f"{r.get('scheme')} batch {r.get('batch')} KV {r.get('kv')}"
        if "decode_ms" in r:
            yield from decode_bars(f"decode, {where}", r)
            if (r["scheme"], r["kv"], r["batch"]) == ("w4a16-g128", "bf16", 1) and of_own_kernels(r):
                yield bar(f"decode, {where}", r["decode_ms"], "ms", W4A16_MS, most=True, of=H200)
        if "prefill_ms" in r:
            yield from prefill_bars(f"prefill, {where}", r, r["T"], r["floor_fraction"])
            if weights_of(r) == "w8a8" and r["T"] >= LEAST_TOKENS and "over_bf16" in r and of_own_kernels(r):
                yield bar(f"prefill, {where}, times as fast as bf16", r["over_bf16"], "1", 1.5)


def parse_stage(text: str) -> Stage:
    """Returns the stage of decode:bf16:1,16 or decode:bf16:1,16:w8a8-all,nf4. Raises argparse's error for another
    form."""
    kind, kv, batches, *schemes = text.split(":") + [""] * (2 - text.count(":"))
    names = tuple(schemes[0].split(",")) if schemes else ()
    known = kind in KINDS and kv and len(schemes) < 2 and all(names)
    if not known or not all(batch.isdecimal() and int(batch) for batch in batches.split(",")):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a stage such as decode:bf16:1,16,64 or prefill:bf16:128:bf16,nf4"
        )
    for name in names:
        known_scheme(name)
    return Stage(kind, kv, tuple(int(batch) for batch in batches.split(",")), names)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument(
        "--config", default="configs/llama-2-7b.json", help="file with the model's shape (a config.json)"
    )
    parser.add_argument("--layers", type=positive, help="use only this many layers, for a trial")
    parser.add_argument(
        "--schemes", type=known_scheme, nargs="+", default=list(SCHEMES), help="schemes of stages that name none"
    )
    stages = [f"{kind}:{kv}:{','.join(map(str, BATCHES))}" for kv in ("bf16", "int8-g8") for kind in KINDS]
    parser.add_argument(
        "--stages",
        type=parse_stage,
        nargs="+",
        metavar="KIND:KV:BATCHES[:SCHEMES]",
        default=[parse_stage(s) for s in stages],
        help=f"steps to compile together: decode or prefill, a KV format, batches (default: {' '.join(stages)})",
    )
    parser.add_argument("--seconds", type=positive_number, help="begin no stage after this time")
    parser.add_argument("--context", type=positive, default=136, help="KV tokens of each slot when decoding starts")
    parser.add_argument("--input", type=positive, default=8, help="tokens of each prompt")
    parser.add_argument("--backend", choices=OF_MODELS, help="backend (default: chosen for the device)")
    add_timing_options(parser, steps=20, repeats=3)
    parser.add_argument("--threads", type=positive, default=12, help="number of threads that compile")
    add_result_options(parser)
    return parser.parse_args(argv)


@refusing
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    config = config_of(args, max(slot_tokens(stage.kind, args) for stage in args.stages))
    for stage in args.stages:
        parse_kv_cache(stage.kv, config, jnp.bfloat16)
    command = command_line("quant_steps", argv)
    toy = args.layers is not None or not on_hopper()  # too small to decide anything
    options: dict[str, Any] = {} if toy else {"bars": bars}
    about = {"model": Path(args.config).stem, "ceilings": ceilings_here(args).document}
    return record(args, "quant_steps", command, rows(config, args), **about, **options)


if __name__ == "__main__":
    sys.exit(main())
