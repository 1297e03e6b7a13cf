"""Measures KV policies on a device, beside the simulator's results. The QPS workload runs in a pool that is too small.

    python -m experiments.kv_measured --pool-gib 16 --cases reserve paged extent:longest extent:oracle
    python -m experiments.kv_measured --pool-gib 16 32 --requests 256 --kv-cache int8-g8

Weights of --config are random. Every request allows --allow tokens, and is aborted at the workload's length, which only
the oracle knows. A case is a policy, or policy:predictor. Predictors that learn from ended requests are left out, as
aborted ones teach nothing. One process serves all cases once each, so steps compile once. `sim_qps` and `sim_held_mean`
are experiments.simulate's for the same requests, pool and options, with the calibrated cost model. `sim_error` is the
distance of its requests per second from the measured ones.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.arguments import claim_memory
from experiments.qps import measure
from experiments.qps import parse_args as qps_args
from experiments.result_file import command_line, record, refusing, rounded
from experiments.serving.engines import make_model
from experiments.serving.workload import Request, read_workload
from experiments.simulate import Case, Costs, make_costs, simulate
from experiments.simulation.requests import Sample, Workload
from jllm.engine.kv_policy import KV_POLICIES
from jllm.errors import ConfigError
from jllm.kv_policies.length import Oracle
from jllm.model.model import Model
from pallas_kernels.bench.command import Parser, add_result_options
from pallas_kernels.bench.numbers import gibibytes, natural, positive

Row = dict[str, Any]
PREDICTORS: dict[str, tuple[str | None, ...]] = {
    "reserve": (None,), "paged": (None, "longest", "oracle"), "extent": ("longest", "oracle")
}  # fmt: skip
KEPT = (
    "requests", "seconds", "qps", "output_tokens_s", "ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99",
    "goodput", "steps", "slack", "running_mean", "running_peak", "preemptions", "recomputed_tokens", "wasted_share",
    "fragmentation_mean", "pages_peak", "pages_total",
)  # fmt: skip


def measured(
    model: Model, requests: list[Request], policy: str, predictor: str | None, gib: float, args: argparse.Namespace
) -> Row:
    """Returns the measures of one engine."""
    outputs = [request.output for request in requests]
    oracle = Oracle(lambda prompt, params: outputs[params.seed or 0])  # seeds identify the requests
    settings = qps_args(["--repeats", "1", "--config", args.config, "--slots", str(args.slots)])
    changes = {
        "pool_gib": gib, "kv_policy": policy, "length_predictor": oracle if predictor == "oracle" else predictor,
        "allow": args.allow, "kv_cache": args.kv_cache, "max_step_tokens": args.step_tokens, "warmup": args.warmup,
    }  # fmt: skip
    *_, mean = measure(model, requests, argparse.Namespace(**{**vars(settings), **changes}))
    return {key: mean[key] for key in KEPT}


def simulated(
    costs: Costs, requests: list[Request], policy: str, predictor: str | None, gib: float, args: argparse.Namespace
) -> Row:
    """Returns the simulator's result for the same."""
    samples = tuple(Sample((1,) * request.prompt, request.output) for request in requests)
    case = Case(args.config, None, args.kv_cache, policy, predictor, args.slots, gib, step_tokens=args.step_tokens)
    row = simulate(case, costs, Workload("requests", samples, False), max_new_tokens=args.allow)
    return {f"sim_{key}": row[key] for key in ("qps", "held_mean", "preemption_rate")}


def rows(args: argparse.Namespace) -> Iterator[Row]:
    requests = read_workload(args.workload, args.requests, None, 0)
    longest = max(request.output for request in requests)
    args = argparse.Namespace(**{**vars(args), "allow": args.allow or longest})
    if args.allow < longest:
        raise ConfigError(f"--allow must be at least the longest output, {longest}, not {args.allow}")
    model = make_model(qps_args(["--config", args.config]))
    costs = make_costs(args.config, None, args.kv_cache)
    for gib in args.pool_gib:
        for policy, predictor in args.cases:
            about = {
                "model": Path(args.config).stem, "kv": args.kv_cache or "bf16", "kv_policy": policy,
                "predictor": predictor or "none", "pool_gib": gib, "slots": args.slots, "allow": args.allow,
                "step_tokens": args.step_tokens,
            }  # fmt: skip
            row = about | measured(model, requests, policy, predictor, gib, args)
            row |= simulated(costs, requests, policy, predictor, gib, args)
            row["sim_error"] = row["sim_qps"] / row["qps"] - 1
            yield rounded(row) | {"sim_costs": costs.cost.shares.source}


def parse_case(text: str) -> tuple[str, str | None]:
    """Returns ("extent", "oracle") for extent:oracle. Raises argparse's error for a policy that cannot be served."""
    policy, _, predictor = text.partition(":")
    if policy not in KV_POLICIES:
        raise argparse.ArgumentTypeError(f"{policy!r} is no policy; policies: {', '.join(KV_POLICIES)}")
    known = PREDICTORS[policy]
    if (predictor or None) not in known:
        names = ", ".join(f"{policy}:{name}" if name else policy for name in known)
        raise argparse.ArgumentTypeError(f"{text!r} is no case; of {policy} there are {names}")
    return policy, predictor or None


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    names = ("reserve", "paged", "extent:longest", "extent:oracle")
    cases = [parse_case(name) for name in names]
    who = f"KV policies, with their predictors (default: {' '.join(names)})"
    parser.add_argument("--cases", type=parse_case, nargs="+", default=cases, metavar="POLICY[:PREDICTOR]", help=who)
    parser.add_argument("--pool-gib", type=gibibytes, nargs="+", default=[16.0], help="sizes of the page pool in GiB")
    parser.add_argument("--requests", type=positive, help="number of requests, from the first on (default: all)")
    parser.add_argument("--allow", type=positive, help="tokens that every request allows (default: the longest output)")
    parser.add_argument(
        "--config", default="configs/llama-2-7b.json", help="file with the model's shape (a config.json)"
    )
    parser.add_argument("--kv-cache", help="KV format (default: bf16)")
    parser.add_argument("--slots", type=positive, default=512, help="most sequences that run at once")
    parser.add_argument("--step-tokens", type=positive, default=2048, help="most prompt tokens in a step")
    parser.add_argument("--warmup", type=natural, default=32, help="requests served before the clock starts")
    parser.add_argument("--workload", type=Path, default=qps_args([]).workload, help="JSON file of requests")
    add_result_options(parser)
    return parser.parse_args(argv)


@refusing
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    command = command_line("kv_measured", argv)
    claim_memory()
    return record(args, "kv_measured", command, rows(args))


if __name__ == "__main__":
    sys.exit(main())
