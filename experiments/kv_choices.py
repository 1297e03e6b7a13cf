"""Compares choices inside the KV policies with their alternatives, without a GPU (see simulate.py).

    python -m experiments.kv_choices --pool-gib 16 32

victim      which sequence is preempted when pages are short: the cheapest that frees enough, or the newest
overflow    where an outgrown extent continues: in another run of pages, or all of it in a longer one, by a copy
compaction  the gain of moving extents together, if that took no time: extents of pages from anywhere
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

from tqdm import tqdm

from experiments.result_file import command_line, record, rounded
from experiments.simulate import GIB, Costs, Row, make_costs
from experiments.simulation.requests import arrivals, read_workload
from experiments.simulation.run import Simulation, Truth
from experiments.steps.cost_model import calibrated
from jllm.engine.kv_policy import OnDemand, Policy
from jllm.engine.options import PAGE_SIZES, EngineOptions
from jllm.engine.sequence import Sequence
from jllm.kv_policies.extent import Extent
from pallas_kernels.bench.command import Parser, add_result_options, interruptible
from pallas_kernels.bench.numbers import gibibytes, positive, seed_number

WORKLOAD = "ppl_samples_1024"
QUANTILES = (0.5, 0.9)


class NewestVictim(OnDemand):
    def victim(self, running, pages: int) -> Sequence:
        return running[-1]


class Compacted(Extent):
    """A policy whose extents may begin with pages from anywhere, as if all others had just moved away."""

    def admit(self, seq: Sequence, running) -> bool:
        pool, run = self.pool, self.pool.allocate_run
        pool.allocate_run = pool.allocate  # type: ignore[method-assign]
        try:
            return super().admit(seq, running)
        finally:
            pool.allocate_run = run  # type: ignore[method-assign]


def choices() -> Iterator[tuple[str, str, float | None, Callable[[], Policy]]]:
    """Yields (question, answer, quantile, function that makes the policy). A predictor that learns is new for each
    run."""
    yield "victim", "cheapest", None, OnDemand
    yield "victim", "newest", None, NewestVictim
    for q in QUANTILES:
        for overflow in ("scatter", "move"):
            yield "overflow", overflow, q, partial(Extent, quantile=q, overflow=overflow)
        yield "compaction", "none", q, partial(Extent, quantile=q)
        yield "compaction", "free", q, partial(Compacted, quantile=q)


def simulate(policy: Policy, costs: Costs, gib: float, args: argparse.Namespace) -> Row:
    workload, truth = read_workload(WORKLOAD), Truth()
    pages = int(gib * GIB / (args.page_size * costs.cost.token_bytes))
    options = EngineOptions(
        max_slots=args.slots, page_size=args.page_size, num_pages=pages, max_step_tokens=2048, kv_policy=policy
    )
    simulation = Simulation(costs.model.config, options, costs.cost, workload.longest_output, truth=truth)
    simulation.run(arrivals(workload.samples, args.requests, None, args.seed))
    counts = simulation.scheduler.counts
    found = rounded(simulation.row())
    return found | {"preempted": counts.preempted, "recomputed": counts.recomputed, "moves": counts.moved}


def rows(args: argparse.Namespace) -> Iterator[Row]:
    costs = make_costs(args.config, None, None)
    for gib, (question, answer, quantile, make) in tqdm(list(product(args.pool_gib, choices())), delay=2):
        about: dict[str, Any] = {
            "question": question, "answer": answer, "quantile": quantile, "model": args.config, "slots": args.slots,
            "pool_gib": gib, "page_size": args.page_size,
        }  # fmt: skip
        yield about | simulate(make(), costs, gib, args)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--config", default="llama-2-7b", help="name of the model's shape in configs/")
    parser.add_argument(
        "--pool-gib", nargs="+", type=gibibytes, default=[16.0, 32.0], help="sizes of the page pool in GiB"
    )
    parser.add_argument("--slots", type=positive, default=512, help="most sequences that run at once")
    parser.add_argument("--page-size", type=int, choices=PAGE_SIZES, default=16, help="tokens per KV page")
    parser.add_argument("--requests", type=positive, default=2048, help=f"draws from {WORKLOAD}")
    parser.add_argument("--seed", type=seed_number, default=0, help="seed of the draws")
    add_result_options(parser)
    return parser.parse_args(argv)


def name_of(args: argparse.Namespace) -> str:
    return f"kv_choices_{args.config}"


@interruptible
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    command = command_line("kv_choices", argv)
    return record(args, name_of(args), command, rows(args), cost_model=vars(calibrated(None)))


if __name__ == "__main__":
    sys.exit(main())
