"""Serving on many GPUs, simulated: throughput and tails of replicas of meshes, and of prefill and decode apart.

    python -m experiments.clusters --model llama-2-7b --gpus 8 64 --ranks 1 2
    python -m experiments.clusters --model llama-2-70b --gpus 8 64 --ranks 2 4 8

The QPS workload as often as there are GPUs, all at once and then by Poisson arrivals at each --load, a share of the
throughput of the best mesh. --ranks GPUs of one host share a model (experiments/meshes.py has what a step costs), and
each such mesh is an engine, whose steps the engine's own scheduler plans. Requests go to engines as jllm.Replicas sends
them, by the same code. An engine has as many slots as a decode step of --step-ms has sequences of --context tokens, and
pages for nine tenths of the memory. Apart, a share of the engines of the best mesh computes prompts (--splits), and
pages arrive a copy's time after the first token (configs/links).

Nothing is measured: experiments.simulation_error holds the same code against what was, on one GPU and two.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from tqdm import tqdm

from experiments.disaggregation import PAGE
from experiments.meshes import BATCHES, HOST, LINK, Mesh
from experiments.other_devices import MEMORY_SHARE
from experiments.result_file import command_line, record, rounded
from experiments.simulation.apart import Decodes, Make, apart, merged
from experiments.simulation.requests import Workload, arrivals, read_workload
from experiments.simulation.run import Simulation, Tally
from experiments.steps.cost_model import CONFIGS, Row
from experiments.steps.links import Link, read_link
from jllm.batch import make_buckets
from jllm.config import load_config
from jllm.engine.handover import joining_buckets
from jllm.engine.options import EngineOptions
from jllm.errors import ConfigError
from jllm.parallel.mesh import fitting
from pallas_kernels.bench.command import Parser, add_result_options, interruptible
from pallas_kernels.bench.numbers import positive, positive_number, seed_number

EXCHANGE = "peer"


def slots_of(mesh: Mesh, args: argparse.Namespace) -> int | None:
    """The most sequences whose decode step is quick enough, and which fit; None where not even one does."""
    fit = [b for b in BATCHES if mesh.fits(b, args.context) and 1e3 * mesh.seconds(b, args.context) <= args.step_ms]
    return max(fit, default=None)


def maker(mesh: Mesh, slots: int, longest: int, step_tokens: int) -> Make:
    """What makes an engine on a mesh; of which kind, the caller says."""
    pages = int((MEMORY_SHARE * mesh.sheet.memory - mesh.weights) / (PAGE * mesh.kv_bytes))

    def make(kind: Callable[..., Simulation]) -> Simulation:
        sizes = joining_buckets if kind is Decodes else make_buckets
        options = EngineOptions(
            max_slots=slots, page_size=PAGE, num_pages=pages, max_step_tokens=slots + step_tokens,
            buckets=tuple(sizes(slots, slots + step_tokens)),
        )  # fmt: skip
        return kind(mesh.config, options, mesh.cost, longest)

    return make


def clusters(args: argparse.Namespace) -> Iterator[Row]:
    workload, link = read_workload(args.workload), read_link(LINK)
    config = load_config(CONFIGS / f"{args.model}.json")
    for gpus in args.gpus:
        ranks = [n for n in args.ranks if n in fitting(config) and n <= HOST and gpus % n == 0]
        meshes = [Mesh(config, n, args.quantize, args.kv_cache, link, EXCHANGE) for n in ranks]
        about: Row = {
            "model": args.model,
            "scheme": args.quantize or "bf16",
            "kv": args.kv_cache or "bf16",
            "gpus": gpus,
        }
        yield from of_model(about, [mesh for mesh in meshes if slots_of(mesh, args)], workload, link, args)


def of_model(
    about: Row, meshes: Sequence[Mesh], workload: Workload, link: Link, args: argparse.Namespace
) -> Iterator[Row]:
    """All at once by each mesh, which finds the best; then the loads, by each mesh and by the best one's splits."""
    gpus, runs = about["gpus"], []
    for mesh in meshes:
        slots = slots_of(mesh, args) or 0
        make = maker(mesh, slots, workload.longest_output, args.step_tokens)
        part = about | {"ranks": mesh.ranks, "engines": gpus // mesh.ranks, "slots": slots}
        runs.append((part, mesh, make, partial(merged, make, engines=gpus // mesh.ranks)))
    if not runs:
        raise ConfigError(f"{about['model']} fits no mesh of --ranks with steps under {args.step_ms:g} ms")
    found = [_row(part | {"how": "merged", "split": None, "load": None}, run, workload, args) for part, *_, run in runs]
    yield from found
    best = max(range(len(runs)), key=lambda i: found[i]["qps"])
    todo = [(part | {"how": "merged", "split": None}, run) for part, *_, run in runs]
    part, mesh, make, _ = runs[best]
    for share in args.splits:
        first = max(1, min(part["engines"] - 1, round(share * part["engines"])))
        if first < part["engines"]:
            copy = lambda tokens, mesh=mesh: link.copy.seconds(tokens * mesh.kv_bytes)  # noqa: E731
            run = partial(apart, make, prefill=first, decode=part["engines"] - first, copy=copy)
            todo.append((part | {"how": "apart", "split": f"{first}+{part['engines'] - first}"}, run))
    for one, run in tqdm(todo, delay=2, desc=f"{about['model']}, {gpus} GPUs"):
        for load in args.load if one["how"] == "merged" else (None, *args.load):
            yield _row(one | {"load": load}, run, workload, args, found[best]["qps"])


def _row(
    about: Row, run: Callable[..., Tally], workload: Workload, args: argparse.Namespace, capacity: float = 0.0
) -> Row:
    rate = None if about["load"] is None else about["load"] * capacity
    samples = workload.samples[: args.requests] * about["gpus"]
    tally = run(coming=list(arrivals(samples, None, rate, args.seed)))
    return rounded({"part": "serving", "kind": "simulated", **about, "rate": rate, **tally.figures()})


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    names = sorted(path.stem for path in CONFIGS.glob("*.json"))
    parser.add_argument("--model", choices=names, default="llama-2-7b", metavar="NAME", help="one of configs/")
    parser.add_argument("--quantize", help="scheme of the weights (default: bf16)")
    parser.add_argument("--kv-cache", help="KV format (default: bf16)")
    parser.add_argument("--gpus", type=positive, nargs="+", default=[8, 64], help="in all")
    parser.add_argument("--ranks", type=positive, nargs="+", default=[1, 2, 4, 8], help="GPUs of a mesh")
    parser.add_argument("--splits", type=float, nargs="*", default=[0.25], help="shares of engines for prompts")
    parser.add_argument("--load", type=float, nargs="*", default=[0.7], help="shares of the best throughput")
    parser.add_argument(
        "--step-ms", type=positive_number, default=25.0, help="most that a decode step of all slots may take"
    )
    parser.add_argument("--context", type=positive, default=275, help="tokens of a sequence that slots are counted for")
    parser.add_argument("--step-tokens", type=positive, default=1536, help="most prompt tokens in a step")
    parser.add_argument("--workload", default="ppl_samples_1024", help="by its name in workloads/, or a file")
    parser.add_argument("--requests", type=positive, help="of the workload for each GPU, the first ones")
    parser.add_argument("--seed", type=seed_number, default=0, help="of arrivals")
    add_result_options(parser)
    args = parser.parse_args(argv)
    if any(not 0 < load < 10 for load in args.load) or any(not 0 < share < 1 for share in args.splits):
        parser.error("--load must be above 0, and --splits between 0 and 1")
    return args


def name_of(args: argparse.Namespace) -> str:
    return f"clusters_{args.model}"


@interruptible
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    command = command_line("clusters", argv)
    link = read_link(LINK)
    return record(args, name_of(args), command, clusters(args), link=link.name, link_source=link.source)


if __name__ == "__main__":
    sys.exit(main())
