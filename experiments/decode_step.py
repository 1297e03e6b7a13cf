"""Measures the time of one decode step, and its share of the memory floor.

    python -m experiments.decode_step --config configs/llama-2-7b.json --batch 1 32 128 --backend xla

Weights are random, every slot starts at --context tokens of KV, and sampling is greedy. Steps are dispatched one after
the other: each takes the tokens that the previous one left on the device. They are timed together by the host's clock.
The best of --repeats counts; all start at --context. The floor is floors.py's on this device, with each slot's mean KV
length over the steps. With --devices the model is sharded over several, whose limits add up. Of a mixture, the floor
reads the experts that tokens chose, counted in the same steps with taps.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.arguments import add_model_options, add_timing_options, ceilings_here, claim_memory, config_of
from experiments.result_file import bar, command_line, record, refusing
from experiments.steps.bars import decode_bars, of_own_kernels
from experiments.steps.floors import make_floors, step_work, with_read
from experiments.steps.timer import StepTimer, compile_ahead, page_bytes, pool_for, random_params, step_of, stopwatch
from jllm.config import LlamaConfig
from jllm.model.params import Params
from jllm.parallel.mesh import make_mesh, spread
from jllm.parallel.ranks import REPLICATED, place
from pallas_kernels.backends import OF_MODELS
from pallas_kernels.bench.bars import H200
from pallas_kernels.bench.command import Parser, add_result_options
from pallas_kernels.bench.numbers import positive

TRITON = 1.25  # times the device's own step: limit of backend triton
ON_TWO = {("llama-2-7b", 1): 2.6, ("llama-2-7b", 64): 3.7}  # ms of a bf16 step on two devices, at most
SHARE_ON_TWO = {("llama-2-70b", 1): 0.75, ("llama-2-70b", 16): 0.75}  # share of its floor, at least


@dataclass(frozen=True)
class Case:
    """One compiled step."""

    devices: int
    batch: int
    backend: str | None

    def timer[T: StepTimer](self, kind: type[T], params: Params, config: LlamaConfig, args: argparse.Namespace) -> T:
        pool = pool_for(self.batch, args.context + args.steps, args.page_size, args.kv_cache)
        return kind(params, config, pool, self.backend)


class RoutesTimer(StepTimer):
    """Steps that return the experts which tokens chose."""

    def __init__(self, params: Params, config: LlamaConfig, *more: Any):
        super().__init__(params, config, *more)
        self.taps = tuple(f"layers.{i}.routes" for i in range(config.num_layers) if config.has_experts(i))

    def experts_read(self, step: Callable[..., Any], batch: int, context: int, steps: int) -> float:
        """Returns how many experts a layer reads in decode steps from `context` on, in the mean of layers and steps."""
        self.renew()
        self.place(context)
        buffer = place(jax.device_put(step_of("decode", batch)[1]), self.config, REPLICATED)
        counts = []
        for _ in range(steps):
            self.state, outputs = step(self.params, self.state, buffer)
            counts += [np.unique(each[each >= 0]).size for each in jax.device_get(outputs.taps).values()]
        self.state = None
        return float(np.mean(counts))


def measure(
    case: Case, timer: StepTimer, step: Callable[..., Any], experts: float | None, args: argparse.Namespace
) -> dict[str, Any]:
    """Returns the milliseconds of a decode step, and its floor. Of a mixture a layer reads so many `experts`."""
    params, config, batch = timer.params, timer.config, case.batch
    timer.renew()
    timer.place(args.context)
    ms = 1e3 * timer.one(step, step_of("decode", batch)[1], batch, args.steps, args.repeats)
    timer.state = None
    token_bytes = page_bytes(config, params.dtype, args.page_size, args.kv_cache) / args.page_size
    work = step_work(batch, batch * mean_length(args))
    floors = make_floors(params, config, ceilings_here(args))
    if experts is not None:
        floors = {name: with_read(floor, experts) for name, floor in floors.items()}
    least = {name: 1e3 * floor.of(work, token_bytes) for name, floor in floors.items()}
    return {
        **({} if args.devices == [1] else {"devices": case.devices}),
        **({} if args.scheme == "bf16" else {"scheme": args.scheme}),
        "batch": batch,
        "backend": case.backend or "default",
        "kv": args.kv_cache or str(params.dtype),
        "context": args.context,
        **({} if experts is None else {"experts": round(experts, 1)}),
        "decode_ms": round(ms, 3),
        "tokens_s": round(batch / ms * 1e3, 1),
        **{f"{name}_ms": round(each, 3) for name, each in least.items()},
        **{f"{name}_fraction": round(each / ms, 3) for name, each in least.items()},
    }


def mean_length(args: argparse.Namespace) -> float:
    """Returns the mean KV tokens of a slot over the timed steps."""
    return args.context + (args.steps + 1) / 2


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add_model_options(parser)
    parser.add_argument(
        "--devices",
        type=positive,
        nargs="+",
        default=[1],
        help="numbers of devices to shard the model over, one case each",
    )
    parser.add_argument("--threads", type=positive, default=8, help="number of threads that compile")
    parser.add_argument(
        "--batch", type=positive, nargs="+", default=[1, 32, 128], help="numbers of decoding slots, one case each"
    )
    parser.add_argument("--context", type=positive, default=256, help="KV tokens of each slot at the start")
    parser.add_argument(
        "--backend",
        nargs="+",
        choices=("default", *OF_MODELS),
        default=["default"],
        help="backends (default: chosen for the device)",
    )
    add_timing_options(parser, steps=20, repeats=3)
    add_result_options(parser)
    return parser.parse_args(argv)


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    note, config = stopwatch(), config_of(args, args.context + args.steps + 1)
    configs = {n: config if n == 1 else spread(config, make_mesh(n)) for n in args.devices}
    params = {n: jax.block_until_ready(random_params(c, args.dtype, args.scheme)) for n, c in configs.items()}
    note("weights made")
    backends = [None if name == "default" else name for name in args.backend]
    cases = [Case(n, batch, backend) for n in configs for batch in args.batch for backend in backends]

    def timers[T: StepTimer](kind: type[T], cases: list[Case]) -> dict[Case, tuple[T, Future[jax.stages.Compiled]]]:
        made = {case: case.timer(kind, params[case.devices], configs[case.devices], args) for case in cases}
        recipes = {case: timer.recipe(step_of("decode", case.batch)[0]) for case, timer in made.items()}
        steps = compile_ahead(recipes, args.threads)
        return {case: (timer, steps[case]) for case, timer in made.items()}

    timed = timers(StepTimer, cases)
    counted = timers(RoutesTimer, [] if config.experts is None else cases)
    note("compiled")
    for case, (timer, step) in timed.items():
        experts = None
        if case in counted:
            counter, tapped = counted[case]
            experts = counter.experts_read(tapped.result(), case.batch, args.context, args.steps)
        yield measure(case, timer, step.result(), experts, args)


def bars(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the rows against their bars, and Triton's against the device's own. Runs on several devices have only bars
    of two that share a model."""
    own = {row["batch"]: row.get("decode_ms") for row in rows if of_own_kernels(row)}
    for row in rows:
        case = row["model"], row["batch"]
        if row["backend"] == "triton" and row["batch"] in own:
            name = f"{row['model']} batch {row['batch']} {row['kv']}, triton over the default"
            yield bar(name, round(row["decode_ms"] / own[row["batch"]], 3), "times", TRITON, most=True)
        elif of_own_kernels(row):
            name = " ".join([row["model"], *([row["scheme"]] if "scheme" in row else []), f"batch {row['batch']}"])
            name += f" {row['kv']}" + (f" on {row['devices']} devices" if "devices" in row else "")
            if "devices" not in row:
                yield from decode_bars(name, row)
            elif row["devices"] == 2 and "scheme" not in row and case in ON_TWO:
                yield bar(name, row["decode_ms"], "ms", ON_TWO[case], most=True, of=H200)
            elif row["devices"] == 2 and "scheme" not in row and case in SHARE_ON_TWO:
                yield bar(f"{name}, share of the floor", row["floor_fraction"], "1", SHARE_ON_TWO[case])


@refusing
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    claim_memory()  # weights for each number of devices are there at once
    command = command_line("decode_step", argv)
    found = ({"model": Path(args.config).stem, **row} for row in rows(args))
    return record(args, "decode_step", command, found, bars=bars, ceilings=ceilings_here(args).document)


if __name__ == "__main__":
    sys.exit(main())
