"""Compares the simulator with measured serving on one GPU and on two, value by value.

    python -m experiments.simulation_error

It simulates three kinds of runs that were measured on H100s:

serving   the QPS workload through one engine, all at once and by Poisson arrivals (claim C23's file)
replicas  the same all at once, through an engine on each of one and two GPUs
level     a few layers, with prompts in steps with decodes, in separate steps, and on a separate GPU
          (experiments.disaggregation)

Each run is the newest file of its label. `off_by` is the simulated value over the measured one, less 1. Simulated
engines do not share a host; real engines of one process do.
"""

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from experiments import disaggregation, qps
from experiments.baselines import SeparateSteps
from experiments.claims.loads import MODEL, from_settled, simulated
from experiments.report.documents import label_of
from experiments.result_file import command_line, record, rounded
from experiments.serving.workload import Request, read_workload
from experiments.simulate import Costs
from experiments.simulation.apart import Make, Prompts, apart, merged
from experiments.simulation.requests import Arrival, Sample
from experiments.simulation.run import Simulation
from experiments.steps.cost_model import RESULTS, CostModel, calibrated, model_shapes, newest, shapes_of
from experiments.steps.devices import device_sheet
from experiments.steps.floors import token_bytes
from experiments.steps.links import Link, read_link
from experiments.steps.sheets import floor_on
from experiments.steps.timer import model_config
from jllm.config import LlamaConfig
from jllm.engine.options import EngineOptions
from pallas_kernels.bench.command import Parser, add_result_options, interruptible

Row = dict[str, Any]
H100 = "h100-80gb-hbm3"  # in a file's name
COMPARED = ("qps", "ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99")


def figures(results: Path = RESULTS) -> Iterator[Row]:
    """Yields a row for each measured value."""
    yield from of_one_engine(results)
    for path in sorted(results.glob(f"qps_{MODEL}_bfloat16_replicas*-{H100}.json"))[-1:]:
        yield from of_replicas(path)
    levels = sorted(results.glob(f"disaggregation-*-{H100}.json"))
    for path in {label_of(path): path for path in levels}.values():  # the newest of each label
        yield from of_levels(path, read_link(disaggregation.LINK))


def cost_on_h100(config: LlamaConfig, scheme: str | None, kv_cache: str | None) -> CostModel:
    """Returns the cost of steps on an H100, by its data sheet and the shares that an H200 reached."""
    model = shapes_of(config, scheme)
    return CostModel(floor_on(device_sheet("h100-sxm"), model), token_bytes(model, kv_cache), calibrated(kv_cache))


def of_one_engine(results: Path) -> Iterator[Row]:
    """Yields rows of the QPS workload through an engine on an H100, all at once and by Poisson arrivals. They are claim
    C23's, with the pages of experiments.qps under the same options."""
    found, sizes = newest(results, "claims-C23", H100), newest(results, f"qps_{MODEL}_bfloat16", H100)
    if found is None or sizes is None:
        return
    (name, served), (_, sized) = found, sizes
    pages = int(next(row["pages_total"] for row in sized["rows"] if "pages_total" in row))  # peers' rows have none
    config = model_config(qps.parse_args([]).config, None)
    serve = partial(simulated, Costs(model_shapes(MODEL), cost_on_h100(config, None, None)), num_pages=pages)
    for row in served["rows"]:
        if "load" in row:
            ours = serve() if row["load"] is None else from_settled(serve, False, row["rate"], row["arrivals_s"])
            about = {"model": MODEL, "layers": config.num_layers, "load": row["load"]}
            yield from _compared(name, "serving", 1, about, row, ours)


def of_replicas(path: Path) -> Iterator[Row]:
    """Yields rows of the QPS workload once for each of several H100s, all at once, through an engine on each."""
    document = json.loads(path.read_text(encoding="utf-8"))
    args = qps.parse_args(shlex.split(document["command"])[3:])
    config = model_config(args.config, None)
    cost = cost_on_h100(config, args.quantize, args.kv_cache)
    requests = read_workload(args.workload, args.requests, args.rate, args.seed)
    for row in document["rows"]:
        if row["repeat"] == "mean":
            each = row.get("replicas", 1)
            options: Row = {
                "max_slots": args.slots, "page_size": args.page_size, "max_step_tokens": args.max_step_tokens,
                "num_pages": int(row["pages_total"]) // each, "kv_cache": args.kv_cache,
            }  # fmt: skip
            make = engines(config, cost, options, max(request.output for request in requests))
            ours = merged(make, _arrivals(requests * each), each).figures()
            about = {"model": row["model"], "layers": config.num_layers, "load": None}
            yield from _compared(path.name, "replicas", each, about, row, ours)


def of_levels(path: Path, link: Link) -> Iterator[Row]:
    """Yields rows of prompts in steps with decodes, in separate steps, and on a separate GPU, on H100s."""
    document = json.loads(path.read_text(encoding="utf-8"))
    args = disaggregation.parse_args(shlex.split(document["command"])[3:])
    config = model_config(args.config, args.layers)
    cost = cost_on_h100(config, None, None)
    runs = {
        "replicas": partial(merged, engines=2),
        "apart": partial(apart, prefill=1, decode=1, copy=lambda tokens: link.copy.seconds(tokens * cost.token_bytes)),
    }
    for row in document["rows"]:
        if row["part"] == "measured":
            usual, prompts = disaggregation.options_of(row["how"], args, "")
            more: Row = {"scheduler": SeparateSteps} if row["how"] == "separate" else {}
            make = engines(config, cost, usual, 3 * args.output // 2 + 1, prompts, **more)
            run = runs.get(row["how"], partial(merged, engines=1))
            ours = run(make, _arrivals(disaggregation.workload(args, row["rate"]))).figures()
            about = {name: row[name] for name in ("model", "layers", "level", "load")}
            yield from _compared(path.name, "level", row["gpus"], about, row, ours)


def engines(
    config: LlamaConfig, cost: CostModel, usual: Row, longest: int, prompts: Row | None = None, **more: Any
) -> Make:
    """Returns a function that makes an engine, of the kind that the caller names. For prompts alone, `prompts`
    overrides the default options."""

    def make(kind: Callable[..., Simulation]) -> Simulation:
        options = EngineOptions(**(usual | (prompts or {}) if kind is Prompts else usual))
        return kind(config, options, cost, longest, **more)

    return make


def _arrivals(requests: list[Request]) -> list[Arrival]:
    return [Arrival(Sample((1,) * r.prompt, r.output), r.arrival) for r in requests]


def _compared(file: str, of: str, gpus: int, about: Row, measured: Row, simulated: Row) -> Iterator[Row]:
    """Yields a row for each value that both have."""
    for figure in COMPARED:
        if figure in measured:
            found = {"measured": measured[figure], "simulated": simulated[figure]}
            found["off_by"] = simulated[figure] / measured[figure] - 1
            yield rounded({"of": of, "gpus": gpus, **about, "figure": figure, **found, "file": file})


@interruptible
def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    add_result_options(parser)
    args = parser.parse_args(argv)
    command = command_line("simulation_error", argv)
    return record(args, "simulation_error", command, figures())


if __name__ == "__main__":
    sys.exit(main())
