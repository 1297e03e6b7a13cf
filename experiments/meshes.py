"""What decode steps should take on meshes of H200s, and what 8 and 64 GPUs would give: estimates, and labelled as such.

    python -m experiments.meshes --models llama-2-7b llama-2-70b --ranks 1 2 4 8 --batch 1 16 64 512
    python -m experiments.meshes --gpus 8 64 --step-ms 25 50

A rank's step is costed like a step of one device with the rank's share of heads, MLP columns and vocabulary
(steps/cost_model.py, fitted to measured steps of one GPU), and to it come two exchanges a layer, one for the embedding
and one for the draw, each of batch x hidden size in 16 bits (configs/links: measured between two GPUs, extrapolated to
more). Nothing overlaps. That smaller shares run at the same part of their limits as whole weights is an assumption, and
the likeliest error: kernels' ramps stay, and weights shrink.

--gpus: replicas of meshes of --ranks share these GPUs, each with the largest batch whose step takes at most --step-ms
and whose weights, K and V fit nine tenths of a GPU's memory; the mesh that makes the most tokens a second is marked
`best`. Hosts have eight GPUs, and no mesh is larger, so that 64 GPUs are eight times 8.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from experiments.accuracy.measured_speed import source_of
from experiments.other_devices import MEMORY_SHARE, floor_on
from experiments.report.commands import arguments_of
from experiments.result_file import command_line, record, rounded
from experiments.steps.bars import of_own_kernels
from experiments.steps.cost_model import CONFIGS, RESULTS, CostModel, Row, calibrated, each_once, shapes_of
from experiments.steps.devices import device_sheet
from experiments.steps.floors import Work, step_work, token_bytes
from experiments.steps.links import Link, Table, read_link
from jllm.config import LlamaConfig, load_config
from jllm.fit import tree_bytes
from jllm.parallel.mesh import fitting
from pallas_kernels.bench.command import Parser, add_result_options, interruptible
from pallas_kernels.bench.numbers import positive, positive_number

DEVICE, LINK = "h200-sxm", "h200-nvlink"
EXCHANGE = "peer"  # of the steps that estimates are held against
SHEET_OF = {"h100-80gb-hbm3": "h100-sxm", "h200": "h200-sxm"}  # their devices, as names of files have them
HOST = 8  # GPUs that exchange by NVLink
BATCHES = (1, *range(8, 1025, 8))  # that --gpus tries


def rank_of(config: LlamaConfig, ranks: int) -> LlamaConfig:
    """The shapes of one rank's share, its part of the vocabulary too."""
    return replace(
        config,
        num_heads=config.num_heads // ranks,
        num_kv_heads=max(1, config.num_kv_heads // ranks),
        intermediate_size=config.intermediate_size // ranks,
        vocab_size=-(-config.vocab_size // ranks),
    )


def exchanges(config: LlamaConfig, ranks: int) -> int:
    """Those of a step: two a layer, that of the embedding, and that of the draw."""
    return 0 if ranks == 1 else 2 * config.num_layers + 2


@dataclass(frozen=True)
class MeshCost(CostModel):
    """The cost of steps of a rank's share and of their exchanges, which every row that is computed takes part in."""

    exchanges: int = 0
    row_bytes: int = 0  # of an exchange
    ranks: int = 1
    table: Table | None = None

    def seconds(self, work: Work, computed: int | None = None) -> float:
        rows = work.decodes + work.tokens if computed is None else computed
        return super().seconds(work, computed) + self.exchange(rows)

    def exchange(self, rows: int) -> float:
        """Seconds of the exchanges of a step."""
        return self.exchanges * self.table.seconds(rows * self.row_bytes, self.ranks) if self.table else 0.0


class Mesh:
    """The costs of a model on `ranks` GPUs of one host, H200s or others whose limits are by their data sheet."""

    def __init__(
        self,
        config: LlamaConfig,
        ranks: int,
        scheme: str | None,
        kv_cache: str | None,
        link: Link,
        backend: str,
        device: str = DEVICE,
    ):
        self.config, self.ranks = config, ranks
        self.sheet = device_sheet(device)
        share = shapes_of(rank_of(config, ranks), scheme)
        self.kv_bytes = token_bytes(share, kv_cache)
        of_rank = (floor_on(self.sheet, share), self.kv_bytes, calibrated(kv_cache))
        count, row_bytes = exchanges(config, ranks), 2 * config.hidden_size
        self.cost = MeshCost(*of_rank, count, row_bytes, ranks, link.all_reduce[backend])
        self.weights = tree_bytes(share.params)

    def exchange(self, batch: int) -> float:
        """Seconds of a decode step's exchanges."""
        return self.cost.exchange(batch)

    def seconds(self, batch: int, context: int) -> float:
        """Seconds of a decode step."""
        return self.cost.seconds(step_work(batch, batch * (context + 1)))

    def fits(self, batch: int, context: int) -> bool:
        return self.weights + batch * (context + 1) * self.kv_bytes <= MEMORY_SHARE * self.sheet.memory


def checks(results: Path = RESULTS) -> list[Row]:
    """Decode steps measured on several H100s or H200s (experiments.decode_step --devices), and on one of them in the
    same job, and the estimate of each; each case once, by the newest file that has it."""
    link = read_link(LINK)
    found: list[tuple[str, Row]] = []
    named = [(path, device) for device in SHEET_OF for path in sorted(results.glob(f"decode_step-*-{device}.json"))]
    for path, device in named:
        document = json.loads(path.read_text(encoding="utf-8"))
        asked = arguments_of(document["command"])
        for row in document["rows"]:
            if asked is None or "devices" not in row:
                continue
            config = load_config(CONFIGS / f"{row['model']}.json")
            config = replace(config, num_layers=asked.layers or config.num_layers)
            mesh = Mesh(config, row["devices"], row.get("scheme"), asked.kv_cache, link, EXCHANGE, SHEET_OF[device])
            ms = 1e3 * mesh.seconds(row["batch"], row["context"])
            check = rounded({
                "part": "check", "source": "measured", "device": mesh.sheet.name, "ranks": row["devices"],
                "model": row["model"], "scheme": row.get("scheme", "bf16"), "layers": config.num_layers,
                "kv": row["kv"].replace("bfloat16", "bf16"),
                "backend": "mosaic" if of_own_kernels(row) else row["backend"], "batch": row["batch"],
                "context": row["context"], "measured_ms": row["decode_ms"], "estimated_ms": ms,
                "off_by": ms / row["decode_ms"] - 1, **source_of(document, path.name),
            })  # fmt: skip
            found.append((document["date"], check))
    return each_once(found)


def meshes(args: argparse.Namespace) -> Iterator[tuple[Row, Mesh]]:
    """Those that each model fits, with what names them."""
    link = read_link(LINK)
    for name, scheme, ranks in product(args.models, args.schemes, args.ranks):
        config = load_config(CONFIGS / f"{name}.json")
        if ranks not in fitting(config) or ranks > HOST:
            continue
        for backend in args.exchange[: 1 if ranks == 1 else None]:
            plain = None if scheme == "bf16" else scheme
            about: Row = {"model": name, "scheme": scheme, "kv": args.kv_cache or "bf16", "ranks": ranks}
            about |= {"exchange": None if ranks == 1 else backend, "context": args.context, "kind": "estimated"}
            yield about, Mesh(config, ranks, plain, args.kv_cache, link, backend)


def rows(args: argparse.Namespace) -> Iterator[Row]:
    found = list(meshes(args))
    for about, mesh in found:
        for batch in args.batch:
            row: Row = {"part": "step", **about, "batch": batch, "fits": mesh.fits(batch, args.context)}
            if row["fits"]:
                seconds = mesh.seconds(batch, args.context)
                row |= {"decode_ms": 1e3 * seconds, "exchange_ms": 1e3 * mesh.exchange(batch)}
                row |= {"tokens_s": batch / seconds, "tokens_s_gpu": batch / seconds / mesh.ranks}
            yield rounded(row)
    for gpus, most in product(args.gpus, args.step_ms):
        some = [(about, best_row(mesh, gpus, most, args)) for about, mesh in found if gpus % mesh.ranks == 0]
        for name, scheme in dict.fromkeys((about["model"], about["scheme"]) for about, _ in some):
            of = [(a, row) for a, row in some if row and (a["model"], a["scheme"]) == (name, scheme)]
            top = max((row["tokens_s"] for _, row in of), default=None)
            for about, row in of:
                yield rounded(
                    {"part": "gpus", **about, "gpus": gpus, "step_ms": most, **row, "best": row["tokens_s"] == top}
                )


def best_row(mesh: Mesh, gpus: int, most: float, args: argparse.Namespace) -> Row:
    """The largest batch a mesh that is quick enough, and what all of them make; nothing where none is."""
    fit = [b for b in BATCHES if mesh.fits(b, args.context) and 1e3 * mesh.seconds(b, args.context) <= most]
    if not fit:
        return {}
    replicas, seconds = gpus // mesh.ranks, mesh.seconds(fit[-1], args.context)
    return {
        "replicas": replicas,
        "batch": fit[-1],
        "decode_ms": 1e3 * seconds,
        "tokens_s": replicas * fit[-1] / seconds,
    }


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    names = sorted(path.stem for path in CONFIGS.glob("*.json"))
    parser.add_argument(
        "--models", nargs="+", choices=names, default=["llama-2-7b", "llama-2-70b"], metavar="NAME", help="of configs/"
    )
    parser.add_argument("--schemes", nargs="+", default=["bf16"], help="of the weights")
    parser.add_argument("--kv-cache", help="KV format (default: bf16)")
    parser.add_argument("--ranks", type=positive, nargs="+", default=[1, 2, 4, 8], help="GPUs of a mesh")
    parser.add_argument("--exchange", nargs="+", default=["peer", "xla"], help="backends of all_reduce")
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 16, 64, 512], help="sequences that decode")
    parser.add_argument("--context", type=positive, default=1024, help="tokens of each")
    parser.add_argument("--gpus", type=positive, nargs="*", default=[8, 64], help="in all")
    parser.add_argument("--step-ms", type=positive_number, nargs="+", default=[25.0], help="most that a step may take")
    add_result_options(parser)
    args = parser.parse_args(argv)
    known = read_link(LINK).all_reduce
    if unknown := [name for name in args.exchange if name not in known]:
        parser.error(f"--exchange {unknown[0]} is not known; known are {', '.join(known)}")
    fits = {ranks for name in args.models for ranks in fitting(load_config(CONFIGS / f"{name}.json")) if ranks <= HOST}
    if unfit := [ranks for ranks in args.ranks if ranks not in fits]:
        parser.error(f"--ranks {unfit[0]} fits none of --models on one host; {', '.join(map(str, sorted(fits)))} do")
    return args


@interruptible
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    command = command_line("meshes", argv)
    link = read_link(LINK)
    return record(args, "meshes", command, rows(args), link=link.name, link_source=link.source)


if __name__ == "__main__":
    sys.exit(main())
