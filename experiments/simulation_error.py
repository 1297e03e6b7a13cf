"""How far the simulator and its cost model are from what was measured on one GPU and two, figure by figure.

    python -m experiments.simulation_error

Steps of meshes (experiments.meshes) against experiments.decode_step on two H100s and one; the QPS workload through an
engine on an H200 (claim C23's file), all at once and by Poisson arrivals; and on an H100 eight layers whose prompts are
in steps with decodes, and in steps of their own (experiments.disaggregation). Each by the newest file. `off_by` is the
simulated figure over the measured one, less 1. Replicas, disaggregation over two GPUs, and meshes of more than two were
never measured.
"""

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments import disaggregation
from experiments.baselines import SeparateSteps
from experiments.claims import c32
from experiments.claims.loads import simulated
from experiments.meshes import LINK, Mesh
from experiments.result_file import command_line, record, rounded
from experiments.simulate import make_costs
from experiments.simulation.requests import Arrival, Sample
from experiments.simulation.run import Simulation
from experiments.steps.cost_model import RESULTS, newest
from experiments.steps.links import read_link
from experiments.steps.timer import model_config
from jllm.batch import Bucket
from jllm.engine.options import EngineOptions
from pallas_kernels.bench.command import Parser, add_result_options, interruptible

Row = dict[str, Any]
COMPARED = ("qps", "ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99")


def figures(results: Path = RESULTS) -> Iterator[Row]:
    """A row for each figure that was measured."""
    for row in c32.checks():
        about = {"model": row["model"], "layers": row["layers"], "batch": row["batch"], "context": row["context"]}
        yield _compared(row["file"], "step", row["ranks"], about, "decode_ms", row["measured_ms"], row["estimated_ms"])
    yield from of_one_engine(results)
    yield from of_levels(results)


def of_one_engine(results: Path) -> Iterator[Row]:
    """The QPS workload through an engine on an H200: all at once and by Poisson arrivals."""
    found = newest(results, "claims-C23")
    if found is None:
        return
    name, document = found
    costs = make_costs("llama-2-7b", None, None)
    for row in document["rows"]:
        if "load" in row:
            ours = simulated(costs, count=int(row["requests"]), rate=row["rate"])
            about = {"model": "llama-2-7b", "layers": 32, "load": row["load"]}
            for key in COMPARED:
                yield _compared(name, "serving", 1, about, key, row[key], ours[key])


def of_levels(results: Path) -> Iterator[Row]:
    """Steps with prompts and decodes, and with either alone, on an H100."""
    for path in sorted(results.glob("disaggregation-*-h100-80gb-hbm3.json"))[-1:]:
        document = json.loads(path.read_text(encoding="utf-8"))
        args = disaggregation.parse_args(shlex.split(document["command"])[3:])
        config = model_config(args.config, args.layers)
        mesh = Mesh(config, 1, None, None, read_link(LINK), c32.EXCHANGE, "h100-sxm")
        for row in document["rows"]:
            if row.get("how") not in ("merged", "separate"):
                continue
            sizes = disaggregation.buckets(args.slots, args.step_tokens)
            more: Row = {}
            if row["how"] == "separate":
                more["scheduler"] = SeparateSteps
                sizes = (*sizes, *(Bucket(1, b.tokens, b.chunks) for b in sizes if b.tokens))
            options = EngineOptions(**disaggregation.sizes(args, ""), buckets=sizes)
            engine = Simulation(mesh.config, options, mesh.cost, 3 * args.output // 2 + 1, **more)
            requests = disaggregation.workload(args, row["rate"])
            ours = engine.run(Arrival(Sample((1,) * r.prompt, r.output), r.arrival) for r in requests).figures()
            about = {"model": row["model"], "layers": row["layers"], "level": row["level"], "load": row["load"]}
            for key in COMPARED:
                yield _compared(path.name, "level", 1, about, key, row[key], ours[key])


def _compared(file: str, of: str, gpus: int, about: Row, figure: str, measured: float, simulated: float) -> Row:
    found = {"measured": measured, "simulated": simulated, "off_by": simulated / measured - 1}
    return rounded({"of": of, "gpus": gpus, **about, "figure": figure, **found, "file": file})


@interruptible
def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    add_result_options(parser)
    args = parser.parse_args(argv)
    command = command_line("simulation_error", argv)
    return record(args, "simulation_error", command, figures())


if __name__ == "__main__":
    sys.exit(main())
