"""Measures what adapters (LoRA) add to whole steps.

    python -m experiments.adapter_steps --layers 8

Weights and adapters are random, on all linear layers. `adapters` is what the rows of a step take: "no places" is the
step of an engine without places, or of one in which no row uses an adapter. "none" computes addends that no row uses,
as deterministic engines do. "one" is one adapter for all rows, and "each" a different one for each request. `added` is
the time beside "no places", as a share of that step. `bytes` is the same time over that of reading the used adapters
once. Decode steps have --batch slots at --context tokens, prompts 8 of --prompt tokens.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.arguments import add_model_options, add_timing_options, ceilings_here, claim_memory, config_of
from experiments.result_file import bar, command_line, record, refusing
from experiments.steps.timer import StepTimer, compile_ahead, pool_for, random_params, step_of, stopwatch
from jllm.config import LlamaConfig
from jllm.model.adapted import Slots
from jllm.model.adapters import all_targets, empty_slots
from jllm.model.params import Params
from pallas_kernels.bench.command import Parser, add_result_options
from pallas_kernels.bench.numbers import positive

PROMPTS = 8
USES = ("no places", "none", "one", "each")
# Of LLaMA-2-7B with 64 decoding slots or 8 prompts of 1,024 tokens: most added, and most times the adapters' bytes.
ADDED = {("decode", "one"): 0.04, ("prefill", "each"): 0.08}
TIMES_BYTES = {("decode", "each"): 1.5}


@dataclass(frozen=True)
class Case:
    """Describes one compiled step, and the adapter that each request takes."""

    kind: str
    requests: int
    rank: int
    use: str
    backend: str | None

    @property
    def adapters(self) -> tuple[int, ...] | None:
        """Returns the place of each request's adapter; None: the params have none."""
        each = {"none": (-1,) * self.requests, "one": (0,) * self.requests, "each": tuple(range(self.requests))}
        return each.get(self.use)

    def timer(self, params: Params, config: LlamaConfig, args: argparse.Namespace) -> StepTimer:
        tokens = args.context + args.steps if self.kind == "decode" else args.prompt + 1
        pool = replace(pool_for(self.requests, tokens, args.page_size, args.kv_cache), adapters=self.adapters)
        return StepTimer(params, config, pool, self.backend)


def random_adapters(config: LlamaConfig, count: int, rank: int, dtype: Any) -> dict[str, Slots]:
    """Returns places full of adapters whose addends are small."""
    filled = jax.jit(lambda slots: jax.tree.map(lambda leaf: jnp.full_like(leaf, 1e-3), slots))
    return filled(empty_slots(all_targets(config), count, rank, jnp.dtype(dtype), config))


def cases_of(args: argparse.Namespace) -> list[Case]:
    backends = [None if name == "default" else name for name in args.backend]
    shapes = (("decode", args.batch, args.rank), ("prefill", PROMPTS, args.prompt_rank))
    return [
        Case(kind, requests, rank, use, backend)
        for backend in backends
        for kind, requests, rank in shapes
        for use in USES
    ]


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    note, config = stopwatch(), config_of(args, max(args.context + args.steps, args.prompt) + 1)
    params = jax.block_until_ready(random_params(config, args.dtype, args.scheme))
    shapes = {(case.requests, case.rank) for case in cases_of(args)}
    places = {shape: random_adapters(config, *shape, params.dtype) for shape in shapes}
    note("weights made")
    timers = {}
    for case in cases_of(args):
        timers[case] = case.timer(params, config, args)
        if case.adapters is not None:
            timers[case].params = replace(timers[case].params, adapters=places[case.requests, case.rank])
    steps = {case: step_of(case.kind, case.requests, args.prompt, case.adapters) for case in timers}
    compiled = compile_ahead({case: timers[case].recipe(steps[case][0]) for case in timers}, args.threads)
    note("compiled")
    plain: dict[tuple[str, str | None], float] = {}
    for case, timer in timers.items():
        timer.renew()
        timer.place(args.context if case.kind == "decode" else 0)
        count = args.steps if case.kind == "decode" else max(1, args.steps // 4)
        ms = 1e3 * timer.one(compiled[case].result(), steps[case][1], case.requests, count, args.repeats)
        timer.state = None
        base = plain.setdefault((case.kind, case.backend), ms)  # the first of them has no places
        used = {"one": 1, "each": case.requests}.get(case.use, 0)
        tree = jax.tree.leaves(places[case.requests, case.rank])
        read = 1e3 * sum(leaf.nbytes for leaf in tree) / case.requests * used / ceilings_here(args).bandwidth
        yield {
            "step": case.kind,
            "backend": case.backend or "default",
            "requests": case.requests,
            "rank": case.rank,
            "adapters": case.use,
            "ms": round(ms, 3),
            "added": round(ms / base - 1, 4),
            **({"bytes": round((ms - base) / read, 3)} if used else {}),
        }


def bars(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        case, name = (row["step"], row["adapters"]), f"{row['step']} {row['backend']}, {row['adapters']}"
        if case in ADDED:
            yield bar(f"{name}: added", row["added"], "1", ADDED[case], most=True)
        if case in TIMES_BYTES:
            yield bar(f"{name}: times the bytes", row["bytes"], "times", TIMES_BYTES[case], most=True)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add_model_options(parser)
    parser.add_argument("--batch", type=positive, default=64, help="number of decoding slots")
    parser.add_argument("--context", type=positive, default=1024, help="KV tokens of each slot at the start")
    parser.add_argument("--prompt", type=positive, default=1024, help="tokens of each prompt")
    parser.add_argument("--rank", type=positive, default=16, help="rank of adapters in decode steps")
    parser.add_argument("--prompt-rank", type=positive, default=64, help="rank of adapters of prompts")
    names = ("default", "mosaic", "xla", "deterministic")
    parser.add_argument("--backend", nargs="+", choices=names, default=names[:2], help="backends")
    parser.add_argument("--threads", type=positive, default=8, help="number of threads that compile")
    add_timing_options(parser, steps=20, repeats=3)
    add_result_options(parser)
    return parser.parse_args(argv)


@refusing
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    claim_memory()
    found = ({"model": Path(args.config).stem, **row} for row in rows(args))
    command = command_line("adapter_steps", argv)
    return record(args, "adapter_steps", command, found, bars=bars, ceilings=ceilings_here(args).document)


if __name__ == "__main__":
    sys.exit(main())
