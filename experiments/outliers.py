"""Measures the effect of large models' activation outliers on quantization, in a small model with planted outliers.

    python -m experiments.outliers [--text FILE] [--strengths 1 4 16 64]
    python -m experiments.outliers --draw results/outliers-20261123-cpu.json

Planted outliers keep the model's function (jllm.analysis.outliers), so quantization causes all of the loss. kl is the
divergence from the unquantized model in nats per token, with its bootstrap interval over documents in `kl_95`. Part
"strength" has int8 activations by the strength of the outlier channels. There is one scale for all tokens, one per
token, or one per token beside 16-bit outliers (LLM.int8), each with and without SmoothQuant. `massive` is the first
token's massive activation alone. Part "group" has int4 weights alone, by the number that share a scale. Part "channel"
has the largest activation of each input channel of one layer's QKV projection, sorted. A picture of all three is beside
the JSON. An interrupted run resumes at its strength.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

import jllm
from experiments.arguments import check_draws_only, outlier_strength
from experiments.ptq_methods import read_tokens, rounded, run_of
from experiments.report.documents import result_of
from experiments.report.svg import heading, svg, without_matplotlib_said
from experiments.result_file import ResumedFile, command_line, refusing, told
from experiments.texts.read import BUNDLED_TEXT
from jllm.analysis.evaluate import evaluate, record
from jllm.analysis.outliers import plant
from jllm.analysis.own_tokens import own_tokens
from jllm.errors import InputFileError, between
from jllm.files.load import BUNDLED
from jllm.model.model import Model
from jllm.model.params import Params
from jllm.quant import calibration as ptq
from jllm.quant.quantize import quantize
from jllm.quant.schemes import Scheme
from pallas_kernels.bench.command import Parser, add_result_options
from pallas_kernels.bench.numbers import fraction, natural, positive, seed_number

Row = dict[str, Any]
FORMATS = {"tensor": "w8a8-tensor", "token": "w8a8", "outliers": "llm-int8"}
SCALES = {name: Scheme(name, (("*_proj", fmt),)) for name, fmt in FORMATS.items()}
LABELS = {"tensor": "one scale for all tokens", "token": "one scale a token", "outliers": "LLM.int8"}
GROUPS = (8, 16, 32, 64)
MASSIVE = "massive"  # replaces a strength
LAYER = 4  # of part "channel", in the middle of the bundled model


def planted(model: Model, strength: float | str, seed: int) -> Model:
    if strength == MASSIVE:
        return plant(model, channels=0, gated=0, seed=seed)
    return plant(model, strength=float(strength), massive=False, seed=seed)


def rows(model: Model, args: argparse.Namespace, before: Sequence[Row] = ()) -> Iterator[Row]:
    """Yields the rows of each strength. A strength with all rows present is not computed again."""
    for group in args.groups:
        quantize(jax.eval_shape(lambda: model.params), f"w4a16-g{group}")
    ids, protocol = read_tokens(model, args)
    recorded = record(model, ids, protocol)
    tokens = own_tokens(model, rows=args.rows, length=args.length, seed=args.seed)

    def score(subject: Model, params: Params) -> Row:
        found = evaluate(replace(subject, params=params), ids, protocol, reference=recorded)
        row: Row = {"protocol": protocol, "tokens": found.tokens, "kl": rounded(found.kl)}
        return row | {"kl_95": [rounded(x) for x in found.interval("kl")]}

    for strength in tqdm([*args.strengths, MASSIVE], delay=2, disable=None):
        done = [row for row in before if row["strength"] == strength]
        if len(done) == 2 * len(SCALES) + len(args.groups) + 2:
            yield from done
            continue
        subject = planted(model, strength, args.seed)
        smoothed = ptq.smooth(subject, tokens, alpha=args.alpha)
        for scale, smooth in ((scale, smooth) for scale in SCALES for smooth in (False, True)):
            params = quantize(smoothed if smooth else subject.params, SCALES[scale])
            yield {"part": "strength", "strength": strength, "scale": scale, "smooth": smooth, **score(subject, params)}
        for group in args.groups:
            scored = score(subject, quantize(subject.params, f"w4a16-g{group}"))
            yield {"part": "group", "strength": strength, "group": group, **scored}
        for name, params in (("planted", subject.params), ("smoothed", smoothed)):
            largest = channel_maxima(replace(subject, params=params), tokens, args.layer)
            values = [rounded(float(x)) for x in np.sort(largest)[::-1]]
            yield {"part": "channel", "strength": strength, "model": name, "layer": args.layer, "absmax": values}


def channel_maxima(model: Model, tokens: np.ndarray, layer: int) -> np.ndarray:
    """Returns [E]: the largest activation of each input channel of a layer's QKV projection."""
    stats = ptq.layer_statistics(model, tokens, ("qkv",), gram=False)
    return np.asarray([found["qkv"].absmax for _, found in zip(range(layer + 1), stats)][-1])


def bars(found: list[Row]) -> Iterator[Row]:
    """Yields bars at the greatest strength. One scale per token must beat one for all, and SmoothQuant and LLM.int8
    must beat neither."""
    of = [row for row in found if row["part"] == "strength" and row["strength"] != MASSIVE]
    greatest = max((row["strength"] for row in of), default=0)
    kl = {(row["scale"], row["smooth"]): row["kl"] for row in of if row["strength"] == greatest}
    for name, better, worse in (
        ("one scale a token, over one for all", ("token", False), ("tensor", False)),
        ("one scale a token, SmoothQuant over rounding", ("token", True), ("token", False)),
        ("one scale for all, SmoothQuant over rounding", ("tensor", True), ("tensor", False)),
        ("LLM.int8 over one scale a token", ("outliers", False), ("token", False)),
    ):
        if {better, worse} <= kl.keys():
            value, bar = kl[better], kl[worse]
            name += f", strength {greatest:g}"
            yield {"name": name, "value": value, "unit": "kl", "bar": bar, "met": value < bar}


# The picture


def draw(document: Row, file: Path) -> Path | None:
    """Draws a picture beside a result's file, and returns its path. Without matplotlib it prints a note and returns
    None."""
    path = file.with_suffix(".svg")
    with (
        without_matplotlib_said(file),
        svg(path, (11, 3.8), "outliers", {"axes.grid": True}, heading(document)) as figure,
    ):
        left, middle, right = figure.subplots(1, 3)
        draw_channels(left, [row for row in document["rows"] if row["part"] == "channel"])
        draw_strengths(middle, [row for row in document["rows"] if row["part"] == "strength"])
        draw_groups(right, [row for row in document["rows"] if row["part"] == "group"])
        return path
    return None


def draw_channels(axes: Any, rows: list[Row]) -> None:
    """Draws the largest activations by rank, at the greatest strength and without outliers."""
    greatest = max(row["strength"] for row in rows if row["strength"] != MASSIVE)
    least = min(row["strength"] for row in rows if row["strength"] != MASSIVE)
    for row in rows:
        if row["strength"] not in (greatest, least) or (row["strength"] == least and row["model"] == "smoothed"):
            continue
        name = {"planted": f"strength {row['strength']:g}", "smoothed": f"strength {row['strength']:g}, smoothed"}
        axes.loglog(range(1, len(row["absmax"]) + 1), row["absmax"], label=name[row["model"]])
    axes.set(xlabel="channel, by rank", ylabel="largest activation", title=f"inputs of QKV, layer {rows[0]['layer']}")
    axes.legend(fontsize=7)


def draw_strengths(axes: Any, rows: list[Row]) -> None:
    """Draws divergence by strength. The massive token alone has crosses on the left."""
    for color, scale in enumerate(dict.fromkeys(row["scale"] for row in rows)):
        for smooth in (False, True):
            some = [row for row in rows if (row["scale"], row["smooth"]) == (scale, smooth)]
            line = [row for row in some if row["strength"] != MASSIVE]
            x, y = [row["strength"] for row in line], np.asarray([row["kl"] for row in line])
            spread = np.abs(np.asarray([row["kl_95"] for row in line]).T - y)
            style: Any = {"color": f"C{color}", "linestyle": ":" if smooth else "-", "marker": "o", "markersize": 3}
            name = LABELS[scale] + ", SmoothQuant" * smooth
            axes.errorbar(x, y, yerr=spread, label=name, **style)
            alone = [row["kl"] for row in some if row["strength"] == MASSIVE]
            fill = "none" if smooth else f"C{color}"
            axes.scatter([min(x) / 2] * len(alone), alone, marker="D", color=f"C{color}", facecolor=fill, s=20)
    axes.set(xscale="log", yscale="log", xlabel="strength of outliers (diamonds: massive token alone)")
    axes.set(ylabel="KL, nats a token", title="int8 weights and activations")
    axes.set_xscale("log", base=2)
    axes.margins(y=0.4)  # room for the names
    axes.legend(fontsize=7, loc="upper left")


def draw_groups(axes: Any, rows: list[Row]) -> None:
    for strength in dict.fromkeys(row["strength"] for row in rows):
        line = [row for row in rows if row["strength"] == strength]
        x, y = [row["group"] for row in line], np.asarray([row["kl"] for row in line])
        spread = np.abs(np.asarray([row["kl_95"] for row in line]).T - y)
        name = "massive token alone" if strength == MASSIVE else f"strength {strength:g}"
        axes.errorbar(x, y, yerr=spread, label=name, marker="o", markersize=3)
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlabel="weights that share a scale", title="int4 weights alone, rounded")
    axes.margins(y=0.4)
    axes.legend(fontsize=7, loc="upper left", ncols=2)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--text", type=Path, default=BUNDLED_TEXT, help="file of UTF-8 text, or .jsonl of documents")
    parser.add_argument("--tokens", type=positive, default=4096, help="most tokens of the text")
    parser.add_argument(
        "--protocol", help="protocol of jllm.analysis.protocols (default: document, or windows-512 of one text)"
    )
    parser.add_argument("--model", default=BUNDLED, help="directory or Hub id (default: the bundled model)")
    parser.add_argument("--dtype", help="dtype of weights and arithmetic (default: as stored; on a CPU at least f32)")
    parser.add_argument(
        "--strengths",
        nargs="+",
        type=outlier_strength,
        default=[1, 4, 16, 64],
        help="strengths of outliers, powers of two",
    )
    parser.add_argument(
        "--groups", nargs="+", type=positive, default=list(GROUPS), help="numbers of weights that share a scale"
    )
    parser.add_argument("--alpha", type=fraction, default=0.5, help="migration strength of SmoothQuant, from 0 to 1")
    parser.add_argument("--layer", type=natural, default=LAYER, help="layer of part channel (default: %(default)s)")
    parser.add_argument(
        "--rows", type=positive, default=16, help="number of calibration rows, which the model generates"
    )
    parser.add_argument("--length", type=positive, default=256, help="tokens per calibration row")
    parser.add_argument("--seed", type=seed_number, default=0, help="seed of the channels and of calibration tokens")
    add_result_options(parser)
    parser.add_argument("--draw", type=Path, metavar="FILE", help="only draw a result's picture again")
    args = parser.parse_args(argv)
    check_draws_only(parser, args)
    return args


@refusing
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if args.draw:
        draw(result_of(args.draw, "outliers"), args.draw)
        return 0
    model = jllm.load(args.model, dtype=args.dtype)
    if not 0 <= args.layer < model.config.num_layers:
        there = between(0, model.config.num_layers - 1, "in {} .. {}")
        raise InputFileError(f"--layer must be {there}, not {args.layer}")
    how: Row = {"run": run_of(args), "calibration": f"{args.rows} x {args.length} own tokens"}
    result = ResumedFile(args.results, "outliers", command_line("outliers", argv), args.label, **how)
    result.go_on(partial(rows, model, args), bars, hidden=["absmax"])
    draw(result.document, result.path)
    return told(args, result)


if __name__ == "__main__":
    sys.exit(main())
