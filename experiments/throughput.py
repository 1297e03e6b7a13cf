"""PPL.LLM's table on this device: prefill and decode of a whole batch, by batch, input and output tokens.

    python -m experiments.throughput --scheme bf16 --kv-cache bf16
    python -m experiments.throughput --scheme w8a8 --kv-cache int8-g8 --config configs/llama-3-8b.json

Random weights. Prefill: the prompts of the batch in as many steps as the engine takes, at most --step-tokens each.
Decode: every slot at input + output / 2 tokens of KV on average, greedy. Both as steps dispatched one after the other,
each fed by the state that the one before left, and timed together on the host's clock: for --seconds, as the first
one's dispatch is in it, but decoding no longer than the output is; the best of --repeats. Tokens a second are those of
the output over the time of prefill and all decode steps. Memory: weights, the KV of all tokens of the batch at their
end, and what the larger of the two steps needs besides.

All rows share one page pool, as large as the largest needs, so that a step is compiled once for all that use it, and
all are compiled, in threads, before the first is timed. Floors are those of floors.py: prefill's adds up its steps. The
figures beside, `h800_*`, are workloads/ppl_llm_h800.json's, which names their source.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import peers
from experiments.arguments import claim_memory, positive, positive_seconds, scheme_name
from experiments.decode_step import HBM, filled_slots
from experiments.floors import Work, make_floor, step_work
from experiments.result_file import ResultFile, bar, rounded
from jllm.batch import Layout, Rung, pack_decode
from jllm.cache import cache_bytes, make_cache, parse_kv_cache
from jllm.checkpoint import init_params
from jllm.config import LlamaConfig, load_config
from jllm.errors import ConfigError, JllmError
from jllm.fit import tree_bytes
from jllm.memory import free_memory, is_host
from jllm.params import Params
from jllm.quant.quantize import quantize
from jllm.step import State, jit_step
from pallas_kernels.backends import on_hopper
from pallas_kernels.bench.command import add_result_options, interruptible

Table = dict[str, Any]
H800 = Path(__file__).parent / "workloads" / "ppl_llm_h800.json"
GIB = 1 << 30
STEP_BYTES = 2 * GIB  # for what a step needs beside weights and pages
DECODE_BARS = {
    "bf16": ((128, 0.75), (256, 0.80), (math.inf, 0.85)),
    "w8a8": ((128, 0.68), (256, 0.75), (math.inf, 0.80)),
}
PREFILL_BAR, PREFILL_LEAST = 0.75, 1024  # share of the floor in bf16, for rows of at least so many prompt tokens


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    batch: int
    input: int
    output: int

    @property
    def context(self) -> int:
        """Tokens in each slot's pages in the middle of its output."""
        return self.input + self.output // 2

    @property
    def decode_work(self) -> Work:
        """Of one step in the middle of the output."""
        return step_work(self.batch, self.batch * self.context, ())

    def prefill(self, step_tokens: int) -> "Prefill":
        """The steps that compute all prompts: whole prompts in equal shares, or one prompt in equal chunks."""
        if self.input > step_tokens:
            return Prefill(1, -(-self.input // -(-self.input // step_tokens)))
        steps = -(-self.batch // (step_tokens // self.input))
        return Prefill(-(-self.batch // steps), self.input)


@dataclass(frozen=True)
class Prefill:
    """Steps of one size: so many prompts with so many tokens each."""

    prompts: int
    tokens: int

    @property
    def rung(self) -> Rung:
        return Rung(0, self.prompts * self.tokens, self.prompts)

    def spans(self, case: Case) -> list[list[tuple[int, int, int]]]:
        """For each step the (slot, start, tokens) of its chunks."""
        steps = []
        for first in range(0, case.batch, self.prompts):
            for start in range(0, case.input, self.tokens):
                n = min(self.tokens, case.input - start)
                steps.append([(slot, start, n) for slot in range(first, min(first + self.prompts, case.batch))])
        return steps

    def work(self, case: Case) -> list[Work]:
        """Of each step."""
        return [step_work(0, 0, ((at, n, at + n == case.input) for _, at, n in step)) for step in self.spans(case)]


class Bench:
    """One model with a page pool and slots for the largest row."""

    def __init__(self, params: Params, config: LlamaConfig, cases: Sequence[Case], args: argparse.Namespace):
        self.params, self.config, self.args = params, config, args
        self.slots = max(case.batch for case in cases)
        self.table = max(pages_each(case, args) for case in cases)
        self.formats = parse_kv_cache(args.kv_cache, config, params.dtype)
        self.pages = max(case.batch * pages_each(case, args) for case in cases)
        self.token_bytes = page_bytes(config, params, args) / args.page_size
        self.renew()
        self.floor = make_floor(params, config, args.bandwidth)
        rungs = {Rung(case.batch, 0, 0) for case in cases} | {case.prefill(args.step_tokens).rung for case in cases}
        # Traced here, compiled in threads: JAX's settings belong to the thread that traces.
        lowered = {rung: self._lower(rung) for rung in sorted(rungs)}
        with ThreadPoolExecutor(args.threads) as pool:
            self.steps = dict(zip(lowered, pool.map(lambda step: step.compile(), lowered.values())))

    def renew(self) -> None:
        """A fresh state; the old one, which a failed step may have lost, goes first."""
        self.state: State | None = None
        cache = make_cache(self.config, self.pages, self.args.page_size, self.formats)
        self.state = State(cache, filled_slots(self.slots, self.table, 0))

    def _lower(self, rung: Rung) -> jax.stages.Lowered:
        layout = Layout(rung, deltas=8)
        buffer = jax.ShapeDtypeStruct((layout.size,), np.int32)
        state = jax.eval_shape(lambda state: state, self.state)
        return jit_step.lower(self.params, state, buffer, config=self.config, layout=layout, backend=self.args.backend)

    def row(self, case: Case) -> Table:
        size = case.prefill(self.args.step_tokens)
        prefill_s, decode_s = self.prefill(case), self.decode(case)
        prefill_floor = sum(self.floor.of(work, self.token_bytes) for work in size.work(case))
        decode_floor = self.floor.of(case.decode_work, self.token_bytes)
        steps = (self.steps[size.rung], self.steps[Rung(case.batch, 0, 0)])
        kv = case.batch * (case.input + case.output) * self.token_bytes
        memory = tree_bytes(self.params) + kv + max(temporary(step) for step in steps)
        return {
            **vars(case),
            "prefill_ms": 1e3 * prefill_s,
            "decode_ms": 1e3 * decode_s,
            "tokens_s": case.batch * case.output / (prefill_s + case.output * decode_s),
            "memory_gib": memory / GIB,
            "prefill_floor_ms": 1e3 * prefill_floor,
            "decode_floor_ms": 1e3 * decode_floor,
            "prefill_floor_fraction": prefill_floor / prefill_s,
            "floor_fraction": decode_floor / decode_s,
            "prefill_steps": len(size.spans(case)),
        }

    def prefill(self, case: Case) -> float:
        """Seconds that all prompts of a row take."""
        size = case.prefill(self.args.step_tokens)
        spans = size.spans(case)
        buffers = [jax.device_put(pack_prefill(size.rung, chunks, case.input)) for chunks in spans]
        run, tokens = self.steps[size.rung], len(spans[-1])
        self._place(case, 0)
        self._time(run, buffers, tokens)  # the first time takes longer
        times = self._times(self._time(run, buffers, tokens), len(buffers))
        return self._best(run, buffers * times, tokens) / times

    def decode(self, case: Case) -> float:
        """Seconds of one decode step of a row: of so many in the middle of its output."""
        layout = Layout(Rung(case.batch, 0, 0), deltas=8)
        buffer, run = jax.device_put(pack_decode(layout, range(case.batch))), self.steps[layout.rung]
        self._place(case, case.context)
        self._time(run, [buffer], case.batch)  # the first time takes longer
        estimate = self._time(run, [buffer] * self.args.steps, case.batch) / self.args.steps
        steps = max(self.args.steps, min(self._times(estimate, 1), case.output))
        self._place(case, max(1, case.context - steps // 2))
        return self._best(run, [buffer] * steps, case.batch) / steps

    def _times(self, seconds: float, steps: int) -> int:
        """How often what takes so many seconds and steps is timed together."""
        return max(1, self.args.steps // steps, math.ceil(self.args.seconds / seconds))

    def _place(self, case: Case, context: int) -> None:
        """A row's slots with pages of their own and `context` tokens in them; the others are empty."""
        each = pages_each(case, self.args)
        slot = jnp.arange(self.slots, dtype=jnp.int32)[:, None]
        page = jnp.arange(self.table, dtype=jnp.int32)[None, :]
        slots = filled_slots(self.slots, self.table, context)
        pages = jnp.where((slot < case.batch) & (page < each), slot * each + page, 0)
        assert self.state is not None
        self.state = replace(self.state, slots=replace(slots, pages=pages, done=slot[:, 0] >= case.batch))

    def _best(self, step: Callable[..., Any], buffers: list[jax.Array], tokens: int) -> float:
        return min(self._time(step, buffers, tokens) for _ in range(self.args.repeats))

    def _time(self, step: Callable[..., Any], buffers: list[jax.Array], tokens: int) -> float:
        """Seconds for a step on each buffer, of which the last makes so many tokens; the slots are as before then."""
        assert self.state is not None
        slots = self.state.slots
        self.state = replace(self.state, slots=jax.tree.map(jnp.copy, slots))  # they are donated
        jax.block_until_ready(self.state)
        start = time.perf_counter()
        for buffer in buffers:
            self.state, outputs = step(self.params, self.state, buffer)
        jax.block_until_ready(outputs.tokens)
        seconds = time.perf_counter() - start
        self.state = replace(self.state, slots=slots)
        if (made := int((np.asarray(outputs.tokens) >= 0).sum())) != tokens:
            raise AssertionError(f"a step made {made} tokens instead of {tokens}")
        return seconds


def pages_each(case: Case, args: argparse.Namespace) -> int:
    """Pages of a slot: for the whole row, or for --steps decode steps from the middle of the output on."""
    return -(-max(case.input + case.output, case.context + args.steps + 1) // args.page_size)


def pack_prefill(rung: Rung, chunks: list[tuple[int, int, int]], length: int) -> np.ndarray:
    """A step on chunks (slot, start, tokens) of prompts of `length` tokens; each samples after its last."""
    buffer, batch = Layout(rung, deltas=8).pack()
    n = len(chunks)
    batch.tokens[:] = np.arange(rung.tokens) % 97
    batch.chunk_slot[:n], batch.chunk_start[:n], batch.chunk_len[:n] = zip(*chunks)
    batch.chunk_final[:n] = [start + tokens == length for _, start, tokens in chunks]
    batch.prompt_len[:n], batch.max_length[:n] = length, np.iinfo(np.int32).max
    return buffer


def temporary(step: jax.stages.Compiled) -> int:
    """Bytes that a step needs beyond its arguments; outputs that reuse these not counted."""
    memory = step.memory_analysis()
    return 0 if memory is None else memory.temp_size_in_bytes


def read_table(path: Path = H800) -> list[Table]:
    return json.loads(path.read_text(encoding="utf-8"))["rows"]


def rows(args: argparse.Namespace) -> Iterator[Table]:
    config = load_config(args.config)
    if args.layers is not None:
        config = replace(config, num_layers=args.layers, windows=config.windows[: args.layers])
    published = {(r["batch"], r["input"], r["output"]): r for r in read_table()}
    cases = list(args.rows or (Case(*key) for key in published))
    long = next((case for case in cases if case.input + case.output > config.context), None)
    if long is not None:
        total = long.input + long.output
        raise ConfigError(f"{long.input} + {long.output} tokens are {total}: the model's context is {config.context}")
    start = time.perf_counter()

    def note(text: str) -> None:
        print(f"{time.perf_counter() - start:.0f} s: {text}", file=sys.stderr, flush=True)

    params = init_params(config, jax.random.key(0), jnp.dtype(args.dtype))
    if args.scheme != "bf16":
        params = quantize(params, args.scheme)
    jax.block_until_ready(params)
    note(f"weights of {tree_bytes(params) / GIB:.2f} GiB")
    about = {"model": Path(args.config).stem, "scheme": scheme_name(args.scheme), "kv": args.kv_cache or args.dtype}
    room = room_for_pages(config, params, args)
    for case in [case for case in cases if case.batch * pages_each(case, args) > room]:
        need = case.batch * pages_each(case, args)
        yield {**about, **vars(case), "error": f"needs {need} pages of KV, and there is room for {room}"}
        cases.remove(case)
    if not cases:
        return
    bench = Bench(params, config, cases, args)
    note(f"compiled {len(bench.steps)} steps")
    for case in cases:
        try:
            row = rounded(bench.row(case))
        except jax.errors.JaxRuntimeError as error:  # of a kernel or of memory: the other rows go on
            yield {**about, **vars(case), "error": str(error).partition("\n")[0][:200]}
            bench.renew()
            continue
        beside = published.get((case.batch, case.input, case.output), {})
        for name in ("prefill_ms", "decode_ms", "tokens_s", "memory_gib"):
            if name in beside:
                row[f"h800_{name}"] = beside[name]
        yield {**about, **row}
    note("measured")


def room_for_pages(config: LlamaConfig, params: Params, args: argparse.Namespace) -> float:
    """Pages that the device's memory holds beside the weights and a step's temporaries, if it says how much it has."""
    free = None if is_host() else free_memory()
    return math.inf if free is None else (free - STEP_BYTES) // page_bytes(config, params, args)


def page_bytes(config: LlamaConfig, params: Params, args: argparse.Namespace) -> int:
    """Of one page in all layers, scales included."""
    formats = parse_kv_cache(args.kv_cache, config, params.dtype)
    return cache_bytes(jax.eval_shape(lambda: make_cache(config, 1, args.page_size, formats)))


def bars(found: list[Table]) -> Iterator[Table]:
    """Of decoding for the schemes that have one, of prefill in 16 bits."""
    for row in found:
        if "error" in row or "peer" in row:
            continue
        scheme, kv = row["scheme"].removesuffix("-talk"), row["kv"]
        where = f"{row['model']} {row['scheme']} KV {kv}, batch {row['batch']}, {row['input']} -> {row['output']}"
        if (scheme == "bf16" and kv in ("bf16", "bfloat16", "int8-g8")) or (scheme, kv) == ("w8a8", "int8-g8"):
            least = next(share for batch, share in DECODE_BARS[scheme] if row["batch"] <= batch)
            yield share_bar(f"decode, {where}", row["floor_fraction"], least)
        if scheme == "bf16" and row["batch"] * row["input"] >= PREFILL_LEAST:
            yield share_bar(f"prefill, {where}", row["prefill_floor_fraction"], PREFILL_BAR)


def share_bar(name: str, value: float, least: float) -> Table:
    return bar(f"{name}, share of the floor", value, "1", least)


def parse_case(text: str) -> Case:
    """32x8x256 -> batch 32, 8 tokens in, 256 out."""
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdigit() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not BATCHxINPUTxOUTPUT, such as 32x8x256")
    return Case(*map(int, parts))


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/llama-2-7b.json", help="model shape (a config.json)")
    parser.add_argument("--layers", type=positive, help="only so many layers, for a try")
    parser.add_argument("--scheme", default="bf16", help="of the weights")
    parser.add_argument("--kv-cache", help="KV format (default: the weights' dtype)")
    parser.add_argument("--dtype", default="bfloat16", help="of the weights before they are quantized")
    parser.add_argument("--rows", type=parse_case, nargs="+", metavar="BxINxOUT", help="default: the published table's")
    parser.add_argument("--page-size", type=positive, default=16)
    parser.add_argument("--step-tokens", type=positive, default=4096, help="most prompt tokens in a step")
    parser.add_argument("--backend", help="xla or mosaic (default: the best for the device)")
    parser.add_argument("--steps", type=positive, default=10, help="timed together, at least")
    parser.add_argument(
        "--seconds", type=positive_seconds, default=0.6, help="of steps timed together: what --steps takes, at least"
    )
    parser.add_argument("--repeats", type=positive, default=2)
    parser.add_argument("--threads", type=positive, default=12, help="that compile at once")
    parser.add_argument("--bandwidth", type=float, default=HBM, help="bytes a second (default: an H200's, measured)")
    peers.add_options(parser, 120)
    add_result_options(parser)
    args = parser.parse_args(argv)
    peers.check_options(parser, args)
    return args


def name_of(args: argparse.Namespace) -> str:
    parts = ["throughput", Path(args.config).stem, scheme_name(args.scheme), f"kv-{args.kv_cache or args.dtype}"]
    return "_".join(part.replace(",", "-").replace("=", "-") for part in parts)


@interruptible
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    command = ["python", "-m", "experiments.throughput", *(sys.argv[1:] if argv is None else argv)]
    source = json.loads(H800.read_text(encoding="utf-8"))["source"]
    beside = peers.compiled_steps(args.peers, args.peer_seconds) if args.peers else []
    claim_memory()
    try:
        with ResultFile(args.results, name_of(args), command, args.label, h800=source) as result:
            for row in rows(args):
                result.add(row)
                print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
            decides = on_hopper() and args.layers is None  # anything else is too small to decide
            found = list(result.document["rows"])
            complete = bool(found) and not any("error" in row for row in found)
            for row in beside:
                result.add(row)
            result.finish(bars=list(bars(found)) if decides else [], complete=complete)
    except JllmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(result.document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
