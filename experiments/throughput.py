"""Measures PPL.LLM's table on this device: prefill and decode of a whole batch, by batch, input and output tokens.

    python -m experiments.throughput --scheme bf16 --kv-cache bf16
    python -m experiments.throughput --scheme w8a8 --kv-cache int8-g8 --config configs/llama-3-8b.json

Weights are random. Prefill computes the batch's prompts in as many steps as the engine would, of at most --step-tokens.
Decode has every slot at input + output / 2 tokens of KV on average, and is greedy. Steps are dispatched one after the
other: each takes the state that the previous one left. They are timed together by the host's clock for --seconds, since
the time includes the first dispatch. Decoding takes at most as many steps as the output. The best of --repeats counts,
with their median and the longest beside it. Tokens per second are those of the output over the time of prefill and all
decode steps. Memory is weights, the KV of all tokens of the batch at their end, and the temporaries of the larger step.

With --engine, rows of 8 tokens in and 256 out also have the step of a whole engine: a batch is served twice, with 16
and with 256 tokens a request, and the step is the slope between them. peer_vllm.py measures vLLM's like that.

All rows share one page pool, as large as the largest needs, so all rows with one step share its compiled form. All
steps compile, in threads, before the first is timed. Floors are those of floors.py; prefill's adds up its steps. The
published values, `h800_*`, come from workloads/ppl_llm_h800.json, which names their source.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import jax

import jllm
from experiments.arguments import (
    add_model_options,
    add_timing_options,
    ceilings_here,
    claim_memory,
    config_of,
    scheme_name,
)
from experiments.result_file import command_line, record, refusing, rounded
from experiments.steps import peers
from experiments.steps.bars import decode_bars, prefill_bars
from experiments.steps.batches import STEP_TOKENS, WholeBatch, floor_columns
from experiments.steps.floors import make_floors
from experiments.steps.timer import (
    Pool,
    StepTimer,
    chunk_of,
    compile_ahead,
    layout_of,
    page_bytes,
    random_params,
    step_of,
    stopwatch,
)
from jllm.config import LlamaConfig
from jllm.errors import ConfigError
from jllm.model.model import Model
from jllm.model.params import Params, tree_bytes
from jllm.parallel.memory import free_memory, is_host
from jllm.programs.packed_step import pack_chunks
from jllm.step.buckets import Bucket
from pallas_kernels.backends import OF_MODELS, on_hopper
from pallas_kernels.bench.command import Parser, add_result_options
from pallas_kernels.bench.numbers import positive, positive_number

Table = dict[str, Any]
H800 = Path(__file__).parent / "workloads" / "ppl_llm_h800.json"
GIB = 1 << 30
SLOPE = 8, 16, 256  # tokens of a prompt, and of the shorter and the longer outputs, that engines' steps are found by
STEP_BYTES = 2 * GIB  # room for a step's memory beside weights and pages


class Bench:
    """One model with a page pool and slots for the largest row."""

    def __init__(self, params: Params, config: LlamaConfig, cases: Sequence[WholeBatch], args: argparse.Namespace):
        self.params, self.args = params, args
        each = [pages_each(case, args) for case in cases]
        pages = max(case.batch * n for case, n in zip(cases, each))
        pool = Pool(max(case.batch for case in cases), max(each), args.page_size, args.kv_cache, pages)
        self.timer = StepTimer(params, config, pool, args.backend)
        self.timer.renew()
        self.token_bytes = page_bytes(config, params.dtype, args.page_size, args.kv_cache) / args.page_size
        self.floors = make_floors(params, config, ceilings_here(args))
        layouts = {layout_of(case.batch) for case in cases}
        layouts |= {case.prefill(args.step_tokens).layout for case in cases}
        ordered = sorted(layouts, key=lambda layout: layout.bucket)
        jobs = compile_ahead({layout: self.timer.recipe(layout) for layout in ordered}, args.threads)
        self.steps = {layout: job.result() for layout, job in jobs.items()}

    def row(self, case: WholeBatch) -> Table:
        size = case.prefill(self.args.step_tokens)
        prefills, decodes = self.prefill(case), self.decode(case)
        prefill_s, decode_s = min(prefills), min(decodes)
        steps = (self.steps[size.layout], self.steps[layout_of(case.batch)])
        kv = case.batch * (case.input + case.output) * self.token_bytes
        memory = tree_bytes(self.params) + kv + max(temporary(step) for step in steps)
        return {
            **vars(case),
            **milliseconds("prefill_ms", prefills),
            **milliseconds("decode_ms", decodes),
            "tokens_s": case.batch * case.output / (prefill_s + case.output * decode_s),
            "memory_gib": memory / GIB,
            **floor_columns(self.floors, case, self.token_bytes, prefill_s, decode_s, self.args.step_tokens),
            "prefill_steps": len(size.spans(case)),
        }

    def prefill(self, case: WholeBatch) -> list[float]:
        """Returns the seconds to compute all prompts of a row, in each repeat."""
        size = case.prefill(self.args.step_tokens)
        spans = size.spans(case)
        chunks = [[chunk_of(*span, case.input) for span in step] for step in spans]
        buffers = [jax.device_put(pack_chunks(size.layout, step)) for step in chunks]
        step, tokens = self.steps[size.layout], len(spans[-1])
        self._place(case, 0)
        self.timer.seconds(step, buffers, tokens)  # the first time takes longer
        times = self._times(self.timer.seconds(step, buffers, tokens), len(buffers))
        return [each / times for each in self.timer.runs(step, buffers * times, tokens, self.args.repeats)]

    def decode(self, case: WholeBatch) -> list[float]:
        """Returns the seconds of one decode step of a row, from the middle of its output, in each repeat."""
        layout, packed = step_of("decode", case.batch)
        buffer, step = jax.device_put(packed), self.steps[layout]
        self._place(case, case.context)
        self.timer.seconds(step, [buffer], case.batch)  # the first time takes longer
        estimate = self.timer.seconds(step, [buffer] * self.args.steps, case.batch) / self.args.steps
        steps = max(self.args.steps, min(self._times(estimate, 1), case.output))
        self._place(case, max(1, case.context - steps // 2))
        return [each / steps for each in self.timer.runs(step, [buffer] * steps, case.batch, self.args.repeats)]

    def _times(self, seconds: float, steps: int) -> int:
        """Returns how many runs of these seconds and steps are timed together."""
        return max(1, self.args.steps // steps, math.ceil(self.args.seconds / seconds))

    def _place(self, case: WholeBatch, context: int) -> None:
        self.timer.place(context, case.batch, pages_each(case, self.args))


def engine_steps(
    params: Params, config: LlamaConfig, cases: Sequence[WholeBatch], args: argparse.Namespace
) -> dict[int, float]:
    """Returns the seconds of an engine's decode step, by the batches of rows of 8 tokens in and 256 out."""
    prompt, few, many = SLOPE
    batches = sorted({case.batch for case in cases if (case.input, case.output) == (prompt, many)})
    if not batches:
        return {}
    slots = batches[-1]
    sizes = (*(Bucket(batch, 0, 0) for batch in batches), Bucket(slots, prompt * slots, slots))
    limits = {"max_slots": slots, "max_step_tokens": (prompt + 1) * slots, "page_size": args.page_size}
    pages = slots * -(-(prompt + many) // args.page_size)
    engine = jllm.Engine(
        Model(config, params, None), buckets=sizes, num_pages=pages, kv_cache=args.kv_cache, backend=args.backend,
        prefix_cache=False, executables=None, **limits,
    )  # fmt: skip

    engine.compile_ahead()

    def seconds(batch: int, tokens: int) -> float:
        sampling = jllm.SamplingParams(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)
        for i in range(batch):
            engine.submit([3 + (i + j) % 89 for j in range(prompt)], sampling)
        begin = time.perf_counter()
        while engine.has_work:
            engine.step()
        return time.perf_counter() - begin

    found = {}
    for batch in batches:
        seconds(batch, few)  # the first time takes longer
        short, long = (min(seconds(batch, tokens) for _ in range(args.repeats)) for tokens in (few, many))
        found[batch] = (long - short) / (many - few)
    engine.close()
    return found


def milliseconds(name: str, seconds: Sequence[float]) -> Table:
    """Returns the best of the repeats, and their spread."""
    times = {name: min(seconds), f"{name}_median": statistics.median(seconds), f"{name}_most": max(seconds)}
    return {key: 1e3 * value for key, value in times.items()}


def pages_each(case: WholeBatch, args: argparse.Namespace) -> int:
    """Returns the pages of a slot: for the whole row, or for --steps decode steps from the middle of the output."""
    return -(-max(case.input + case.output, case.context + args.steps + 1) // args.page_size)


def temporary(step: jax.stages.Compiled) -> int:
    """Returns the bytes that a step needs beyond its arguments, without outputs that reuse these."""
    memory = step.memory_analysis()
    return 0 if memory is None else memory.temp_size_in_bytes


def read_table(path: Path = H800) -> list[Table]:
    return json.loads(path.read_text(encoding="utf-8"))["rows"]


def rows(args: argparse.Namespace) -> Iterator[Table]:
    config = config_of(args)
    published = {(r["batch"], r["input"], r["output"]): r for r in read_table()}
    cases = list(args.rows or (WholeBatch(*key) for key in published))
    long = next((case for case in cases if case.input + case.output > config.context), None)
    if long is not None:
        total = long.input + long.output
        raise ConfigError(f"{long.input} + {long.output} tokens are {total}: the model's context is {config.context}")
    note = stopwatch()
    params = random_params(config, args.dtype, args.scheme)
    jax.block_until_ready(params)
    note(f"weights of {tree_bytes(params) / GIB:.2f} GiB")
    about = {"model": Path(args.config).stem, "scheme": scheme_name(args.scheme), "kv": args.kv_cache or args.dtype}
    about |= {"backend": args.backend} if args.backend else {}
    room = room_for_pages(config, params, args)
    for case in [case for case in cases if case.batch * pages_each(case, args) > room]:
        need = case.batch * pages_each(case, args)
        yield {**about, **vars(case), "error": f"needs {need} pages of KV, and there is room for {room}"}
        cases.remove(case)
    if not cases:
        return
    of_engine = engine_steps(params, config, cases, args) if args.engine else {}
    if of_engine:
        note("timed the engine")
    bench = Bench(params, config, cases, args)
    note(f"compiled {len(bench.steps)} steps")
    for case in cases:
        try:
            row = bench.row(case)
            if case.batch in of_engine and (case.input, case.output) == (SLOPE[0], SLOPE[-1]):
                ms = 1e3 * of_engine[case.batch]
                row |= {"engine_ms": ms, "engine_fraction": row["decode_floor_ms"] / ms}
            row = rounded(row)
        except jax.errors.JaxRuntimeError as error:  # of a kernel or of memory: other rows go on
            yield {**about, **vars(case), "error": str(error).partition("\n")[0][:200]}
            bench.timer.renew()
            continue
        beside = published.get((case.batch, case.input, case.output), {})
        for name in ("prefill_ms", "decode_ms", "tokens_s", "memory_gib"):
            if name in beside:
                row[f"h800_{name}"] = beside[name]
        yield {**about, **row}
    note("measured")


def room_for_pages(config: LlamaConfig, params: Params, args: argparse.Namespace) -> float:
    """Returns the pages that the device's memory holds beside the weights and a step's temporaries. Without a known
    memory size, it is infinite."""
    free = None if is_host() else free_memory()
    return (
        math.inf
        if free is None
        else (free - STEP_BYTES) // page_bytes(config, params.dtype, args.page_size, args.kv_cache)
    )


def peers_rows(args: argparse.Namespace) -> list[Table]:
    """Returns peers' steps of the same rows, as far as their scripts can run them."""
    cases = [(c["batch"], c["input"], c["output"]) for c in (map(vars, args.rows) if args.rows else read_table())]
    quantized = not scheme_name(args.scheme).startswith("bf16")
    by_vllm = partial(peers.vllm_steps, more=peers.of_vllm(args))
    runs: dict[str, Callable[..., list[Table]]] = {"torch": peers.compiled_steps, "vllm": by_vllm}
    return [
        row
        for name, run in runs.items()
        if name in args.peer_names
        for row in run(args.peers, cases, quantized, args.peer_seconds)
    ]


def bars(found: list[Table]) -> Iterator[Table]:
    for row in found:
        if "error" in row or "peer" in row:
            continue
        batch, prompt = row["batch"], row["input"]
        where = f"{row['model']} {row['scheme']} KV {row['kv']}, batch {batch}, {prompt} -> {row['output']}"
        yield from decode_bars(f"decode, {where}", row)
        yield from prefill_bars(f"prefill, {where}", row, batch * prompt, row["prefill_floor_fraction"])


def parse_case(text: str) -> WholeBatch:
    """Returns batch 32, 8 tokens in, 256 out for 32x8x256."""
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not BATCHxINPUTxOUTPUT, such as 32x8x256")
    return WholeBatch(*map(int, parts))


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add_model_options(parser)
    parser.add_argument(
        "--rows", type=parse_case, nargs="+", metavar="BxINxOUT", help="rows (default: the published table's)"
    )
    parser.add_argument("--step-tokens", type=positive, default=STEP_TOKENS, help="most prompt tokens of a step")
    parser.add_argument("--backend", choices=OF_MODELS, help="backend (default: chosen for the device)")
    add_timing_options(parser, steps=10, repeats=2)
    parser.add_argument(
        "--seconds",
        type=positive_number,
        default=0.6,
        help="least seconds of steps timed together; at least --steps run",
    )
    parser.add_argument("--engine", action="store_true", help="also time whole engines' decode steps, as vLLM's are")
    parser.add_argument("--threads", type=positive, default=12, help="number of threads that compile")
    peers.add_options(parser, ("torch", "vllm"), 120)
    add_result_options(parser)
    args = parser.parse_args(argv)
    peers.check_options(parser, args)
    return args


def name_of(args: argparse.Namespace) -> str:
    parts = ["throughput", Path(args.config).stem, scheme_name(args.scheme), f"kv-{args.kv_cache or args.dtype}"]
    return "_".join(part.replace(",", "-").replace("=", "-") for part in parts)


@refusing
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    command = command_line("throughput", argv)
    source = json.loads(H800.read_text(encoding="utf-8"))["source"]
    beside = peers_rows(args) if args.peers else []
    claim_memory()

    def decided(found: list[Table]) -> Iterator[Table]:
        """Yields the bars of a run that is large enough to decide."""
        return bars(found) if on_hopper() and args.layers is None else iter(())

    about = {"h800": source, "ceilings": ceilings_here(args).document}
    return record(args, name_of(args), command, chain(beside, rows(args)), bars=decided, **about)


if __name__ == "__main__":
    sys.exit(main())
