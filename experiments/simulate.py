"""Compares KV policies and length predictors on a workload, without a GPU: the engine's scheduler plans steps with
computed costs.

    python -m experiments.simulate --policy paged reserve extent --predictor none quantile oracle --pool-gib 16 32 64
    python -m experiments.simulate --config llama-3-8b --kv-cache bf16 int8-g8 --slots 128 512 --rate 25
    python -m experiments.simulate --requests 100000 --rate 27.8     # an hour of traffic
    python -m experiments.simulate --replay run.jsonl    # a trace that an engine recorded, Engine(trace="run.jsonl")

Every combination is one row. The pool has as many pages as fit --pool-gib; weights only affect time. A request allows
--max-new-tokens, and makes the workload's number, which only the oracle knows. Step times come from a cost model fitted
to measured steps (cost_model.py; --floor uses floors alone), the same for every policy. The file names the results
behind it, and its distance from them. Only `host_us` is measured: this machine's microseconds in the scheduler per
running sequence and step. reserve uses no predictor, and is simulated once.

A workload is the name of one in workloads/, or a file: {"requests": [[prompt, output], ..]}, or JSON lines {"prompt":
[ids] or their number, "output": tokens, "stop": [strings]}. --requests draws that many from it, with replacement and a
fixed seed. A predictor learned:FILE must be made for --predictor-model (train_length_predictor.py).

--replay simulates nothing. It takes each recorded step's work, and compares the cost model's seconds with the step's.
One model is as calibrated. The other is fitted to the first half of the trace and judged by the second. --config,
--quantize and one --kv-cache must be the engine's.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from tqdm import tqdm

from experiments.arguments import known_scheme
from experiments.policies import LEARNED, NAMES, learned_by, policy_with
from experiments.result_file import bar, command_line, record, refusing, rounded
from experiments.simulation.replay import replay
from experiments.simulation.requests import Workload, arrivals, read_workload
from experiments.simulation.run import Simulation, Truth
from experiments.simulation.trace import load_trace
from experiments.steps.cost_model import CONFIGS, CostModel, Shares, calibrated, make_cost_model, model_shapes
from experiments.steps.floors import token_bytes
from experiments.training.learned_length import Learned
from jllm.engine.kv_policy import KV_POLICIES
from jllm.engine.options import PAGE_SIZES, EngineOptions
from jllm.errors import ConfigError
from jllm.files.load import BUNDLED, load
from jllm.kv_policies.extent import OVERFLOWS
from jllm.model.model import Model
from pallas_kernels.bench.command import Parser, add_result_options
from pallas_kernels.bench.numbers import gibibytes, positive, positive_number, seed_number

Row = dict[str, Any]
GIB = 1 << 30
HOST_BAR = 5.0  # microseconds per running sequence and step
HOUR = 3600.0


@dataclass(frozen=True)
class Case:
    """One simulation, by the names in its row."""

    config: str
    scheme: str | None
    kv_cache: str | None
    policy: str
    predictor: str | None  # a name, "oracle", or None: the policy's own default
    slots: int
    pool_gib: float
    quantile: float | None = None
    overflow: str | None = None
    page_size: int = 16
    step_tokens: int = 2048

    def about(self) -> Row:
        return {
            "model": self.config, "scheme": self.scheme or "bf16", "kv": self.kv_cache or "bf16",
            "kv_policy": self.policy, "predictor": (self.predictor or "none").partition(":")[0],
            "quantile": self.quantile, "slots": self.slots, "pool_gib": self.pool_gib,
        }  # fmt: skip


@dataclass(frozen=True)
class Costs:
    """A model's shapes and the costs of its steps, for one KV format."""

    model: Model
    cost: CostModel


def make_costs(config: str, scheme: str | None, kv_cache: str | None, floor: bool = False) -> Costs:
    """Returns the costs. Raises ConfigError for an unknown configuration."""
    if not ((CONFIGS / f"{config}.json").exists() or Path(config).exists()):
        known = ", ".join(sorted(path.stem for path in CONFIGS.glob("*.json")))
        raise ConfigError(f"no configuration is called {config!r}; known are {known}")
    model = model_shapes(config, scheme)
    return Costs(model, make_cost_model(model, kv_cache, Shares() if floor else calibrated(kv_cache)))


def options_of(case: Case, costs: Costs, truth: Truth, learned: Any = None) -> EngineOptions:
    """Returns the engine's options, after its checks. Raises ConfigError."""
    page_bytes = case.page_size * token_bytes(costs.model, case.kv_cache)
    predictor: Any = truth.oracle() if case.predictor == "oracle" else learned or case.predictor
    return EngineOptions(
        max_slots=case.slots,
        page_size=case.page_size,
        num_pages=int(case.pool_gib * GIB / page_bytes),
        max_step_tokens=case.step_tokens,
        kv_cache=case.kv_cache,
        kv_policy=policy_with(
            case.policy, predictor, case.quantile, case.overflow if case.policy == "extent" else None
        ),
    )


def simulate(
    case: Case,
    costs: Costs,
    workload: Workload,
    *,
    max_new_tokens: int | None = None,
    context: int | None = None,
    requests: int | None = None,
    rate: float | None = None,
    seed: int = 0,
    learned: Any = None,
) -> Row:
    """Returns one row. Raises ConfigError or RequestError as the engine would."""
    truth = Truth()
    options = options_of(case, costs, truth, learned)
    longest = max_new_tokens or workload.longest_output
    simulation = Simulation(costs.model.config, options, costs.cost, longest, truth=truth, context=context)
    simulation.run(arrivals(workload.samples, requests, rate, seed))
    about = {"workload": workload.name, "rate": rate, "max_new_tokens": longest}
    return case.about() | about | rounded(simulation.row())


def cases(args: argparse.Namespace) -> list[Case]:
    """Returns the product of all options. Raises ConfigError if nothing is left of it."""
    found = []
    for kv, slots, gib, policy in product(args.kv_cache, args.slots, args.pool_gib, args.policy):
        for predictor in predictors_of(policy, args.predictor):
            quantile = args.quantile if predictor not in (None, "oracle", "longest") else None
            found.append(
                Case(
                    args.config, args.quantize, None if kv == "bf16" else kv, policy, predictor, slots, gib, quantile,
                    args.overflow, args.page_size, args.step_tokens,
                )
            )  # fmt: skip
    if args.quantile is not None and all(case.quantile is None for case in found):
        raise ConfigError("--quantile has no meaning without a predictor that has quantiles: --predictor quantile, say")
    if args.overflow is not None and "extent" not in args.policy:
        raise ConfigError("--overflow has no meaning without --policy extent")
    return found


def predictors_of(policy: str, names: list[str]) -> list[str | None]:
    """Returns the predictors that a policy can use; None is its default."""
    if policy == "reserve":
        return [None]
    fit: list[str | None] = [name for name in names if policy != "extent" or name != "none"]
    if not fit:
        raise ConfigError("extent needs a predictor: --predictor longest, quantile or oracle")
    return [None if name == "none" else name for name in fit]


def simulate_all(args: argparse.Namespace) -> Iterator[Row]:
    workload = read_workload(args.workload)
    todo = cases(args)
    costs = {kv: make_costs(args.config, args.quantize, kv, args.floor) for kv in {case.kv_cache for case in todo}}
    learned = learned_of(args)
    for case in tqdm(todo, delay=2):
        yield simulate(
            case, costs[case.kv_cache], workload, max_new_tokens=args.max_new_tokens, requests=args.requests,
            rate=args.rate, seed=args.seed, learned=learned.get(case.predictor or ""),
        )  # fmt: skip


def learned_of(args: argparse.Namespace) -> dict[str, Learned]:
    """Returns the learned predictors among the options, by name. Raises LengthPredictorError."""
    names = [name for name in args.predictor if name.startswith(LEARNED)]
    model = load(args.predictor_model) if names else None
    return {name: learned_by(name, model) for name in names if model is not None}


def replay_all(args: argparse.Namespace) -> Iterator[Row]:
    kv = None if args.kv_cache[0] == "bf16" else args.kv_cache[0]
    costs = make_costs(args.config, args.quantize, kv, args.floor)
    for row in replay(load_trace(args.replay), costs.cost):
        yield {"config": Path(args.config).stem, "kv": args.kv_cache[0], "trace": Path(args.replay).name} | row


def bars(rows: list[Row]) -> list[Row]:
    """Returns the bar of the scheduler's own cost, of the longest run if one is an hour's traffic."""
    hours = [row for row in rows if row.get("requests", 0) >= 100_000 and row["seconds"] >= 0.98 * HOUR]
    return [
        bar(f"host work a running request a step, {row['kv_policy']}, {row['requests']} requests in "
            f"{row['seconds']:.0f} s", row["host_us"], "us", HOST_BAR, most=True)
        for row in hours
    ]  # fmt: skip


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--policy", nargs="+", choices=KV_POLICIES, default=["paged"], help="KV policies")
    parser.add_argument("--predictor", nargs="+", default=["none"], help=f"{', '.join(NAMES)}, oracle, learned:FILE")
    parser.add_argument("--predictor-model", default=BUNDLED, help="directory or id (default: the bundled model)")
    parser.add_argument("--quantile", type=float, help="quantiles of predicted lengths for admission")
    parser.add_argument("--overflow", choices=OVERFLOWS, help="extent: where outgrown requests continue")
    parser.add_argument("--kv-cache", nargs="+", default=["bf16"], help="KV formats")
    parser.add_argument(
        "--pool-gib", nargs="+", type=gibibytes, default=[16.0, 32.0, 64.0], help="sizes of the page pool in GiB"
    )
    parser.add_argument("--slots", nargs="+", type=positive, default=[512], help="most sequences that run at once")
    parser.add_argument("--config", default="llama-2-7b", help="the model's shape: a name in configs/, or a path")
    parser.add_argument("--quantize", type=known_scheme, help="scheme of the weights (default: bf16)")
    parser.add_argument("--page-size", type=int, choices=PAGE_SIZES, default=16, help="tokens per KV page")
    parser.add_argument("--step-tokens", type=positive, default=2048, help="most tokens of a step")
    parser.add_argument("--workload", default="ppl_samples_1024", help="workload: a name in workloads/, or a file")
    parser.add_argument(
        "--requests", type=positive, help="number of draws from the workload (default: the whole workload once)"
    )
    parser.add_argument(
        "--max-new-tokens", type=positive, help="tokens that every request allows (default: the longest output)"
    )
    parser.add_argument(
        "--rate", type=positive_number, help="requests per second of Poisson arrivals (default: all at once)"
    )
    parser.add_argument("--seed", type=seed_number, default=0, help="seed of draws and arrivals")
    parser.add_argument("--replay", help="compare with a trace, instead of simulating")
    parser.add_argument("--floor", action="store_true", help="use steps at their floor, without measured shares of it")
    add_result_options(parser)
    return parser.parse_args(argv)


def name_of(args: argparse.Namespace) -> str:
    return f"{'replay' if args.replay else 'simulate'}_{Path(args.config).stem}"


@refusing
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    shares = Shares() if args.floor else calibrated(None)
    rows = replay_all(args) if args.replay else simulate_all(args)
    command = command_line("simulate", argv)
    return record(args, name_of(args), command, rows, bars=bars, cost_model=vars(shares))


if __name__ == "__main__":
    sys.exit(main())
