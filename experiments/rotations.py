"""Measures rotations (QuaRot, arXiv 2404.00456) of K and V and of linear layers' inputs, in models with outliers. It
also measures scales of K's and V's channels.

    python -m experiments.rotations
    python -m experiments.rotations --strengths 1 8 --seeds 0
    python -m experiments.rotations --label stream --parts stream

Planted outliers keep the model's function (jllm.analysis.outliers). A seed draws their channels; strength 1 has none.
kl is the divergence from the unquantized model in nats per token, through the paged cache. `kl_95` is its bootstrap
interval over documents.

Part "kv": 4-bit K and V, plain, rotated (-h) and with zero points (-zp). Outliers are in two channels of each head's K
and V.

Part "weights": a scheme by rounding, or a method of jllm.quant.calibration, of the model as it is and rotated. Outliers
are in four channels of the norms' outputs. There a rotation's first step, which moves norm weights into the matrices
that read them, removes the outliers by itself.

Part "stream": that step is done everywhere, and outliers are in the residual stream. It is turned so that its main
directions are four channels (`channels` 4), or left as it is (0).

Part "smooth": 4-bit K and V of part "kv" with calibrated scales of channels (SmoothAttention of QServe, arXiv
2405.04532), by `alpha`; 0 is without.

Part "channel": the model of part "kv", with zero points. K has 4 and 2 bits, per token and per channel (KIVI, arXiv
2402.02750). V is per token. Each is beside the other in the model's dtype, then both are quantized.

An interrupted run resumes.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from tqdm import tqdm

import jllm
from experiments.accuracy.rows import PLAIN_KV, kv_name
from experiments.arguments import outlier_strength
from experiments.ptq_methods import read_tokens, rounded, run_of
from experiments.result_file import ResumedFile, command_line, refusing, told
from experiments.texts.read import BUNDLED_TEXT
from jllm.analysis.evaluate import Recorded, evaluate, record
from jllm.analysis.outliers import plant, plant_in_stream
from jllm.analysis.own_tokens import own_tokens
from jllm.files.load import BUNDLED
from jllm.model.cache import least_page
from jllm.model.model import Model
from jllm.model.params import Params
from jllm.quant import calibration as ptq
from jllm.quant.quantize import quantize
from jllm.quant.rotation import quantize_model, rotate
from jllm.quant.schemes import ROTATIONS
from pallas_kernels.bench.command import Parser, add_result_options
from pallas_kernels.bench.numbers import positive, seed_number

Row = dict[str, Any]
METHODS: dict[str, Callable[[Model, str, Any], Params]] = {
    "round": lambda model, scheme, tokens: quantize(model.params, scheme),
    "awq": ptq.awq,
    "gptq": ptq.gptq,
}
WEIGHTS = (("w8a8-all", "round"), ("fp8", "round"), *(("w4a16-g64", method) for method in METHODS))
STREAM = ("w8a8-all", "fp8", "w4a16-g64", "mxfp4", "mxfp4-h", "nvfp4", "nvfp4-h")  # by rounding
PARTS = ("kv", "weights", "stream", "smooth", "channel")
STREAM_PART = "stream"  # its rows come with functions that make their models
ALPHAS = (0.0, 0.5, 1.0)
NONE = "none"  # replaces a rotation
CHANNELS = 4  # number of channels with outliers
PAGE = 16  # tokens, unless the KV format needs more
HALF = 0.5  # most that rotation may leave of 4-bit K and V's divergence at the greatest strength


def kv_formats(head_dim: int) -> tuple[str, ...]:
    base = f"int4-g{head_dim}"
    return base, f"{base}-h", f"{base}-zp", f"{base}-zp-h", "int4-g32", "int4-g32-h"


# K by what shares a scale (channels of a token, or tokens of a channel) beside 16-bit V; V beside 16-bit K; and both.
CHANNEL = (
    *(f"k={fmt},v={PLAIN_KV}" for fmt in ("int4-g32-zp", "kivi4-g32-r32", "int2-g32-zp", "kivi2-g32-r32", "kivi2-g32")),
    *(f"k={PLAIN_KV},v={fmt}" for fmt in ("int4-g32-zp", "int2-g32-zp")),
    *("int4-g32-zp", "kivi4-g32-r32", "int2-g32-zp", "kivi2-g32-r32", "kivi2-g32"),
)


def rows(model: Model, args: argparse.Namespace, before: Sequence[Row] = ()) -> Iterator[Row]:
    """Yields rows strength by strength and seed by seed. Rows that exist are not computed again."""
    ids, protocol = read_tokens(model, args)
    recorded = record(model, ids, protocol)
    tokens = own_tokens(model, rows=args.rows, length=args.length, seed=0)
    done = {json.dumps(_key(row)): row for row in before}
    key: Row
    if STREAM_PART in args.parts:
        for key, make in tqdm(of_stream(model, args.seeds, tokens), delay=2, disable=None):
            yield done.get(json.dumps(key)) or key | score(make(), ids, protocol, recorded)
    todo = product(args.strengths, args.seeds) if set(args.parts) - {STREAM_PART} else ()
    for strength, seed in tqdm(list(todo), delay=2, disable=None):
        if strength == 1 and seed != args.seeds[0]:  # plants nothing, so seeds do not matter
            continue
        of_kv = plant(model, channels=0, gated=0, kv=2, massive=False, strength=strength, seed=seed)
        of_norms = plant(model, gated=0, massive=False, strength=strength, seed=seed)
        turned = {NONE: of_norms} | {which: rotate(of_norms, which) for which in ROTATIONS}
        for name in kv_formats(model.config.head_dim) if "kv" in args.parts else ():
            key = {"part": "kv", "strength": strength, "seed": seed, "kv": name}
            yield done.get(json.dumps(key)) or key | score(of_kv, ids, protocol, recorded, kv_cache=name)
        for name in CHANNEL if "channel" in args.parts else ():
            key = {"part": "channel", "strength": strength, "seed": seed, "kv": name}
            kv = kv_name(name, model.params.dtype)
            options = {"kv_cache": kv, "page_size": max(PAGE, least_page(kv, model.config))}
            yield done.get(json.dumps(key)) or key | score(of_kv, ids, protocol, recorded, **options)
        for alpha in ALPHAS if "smooth" in args.parts else ():
            smoothed = replace(of_kv, params=ptq.smooth_attention(of_kv, tokens, alpha=alpha)) if alpha else of_kv
            for name in kv_formats(model.config.head_dim)[:4]:
                key = {"part": "smooth", "strength": strength, "seed": seed, "kv": name, "alpha": alpha}
                yield done.get(json.dumps(key)) or key | score(smoothed, ids, protocol, recorded, kv_cache=name)
        for (scheme, method), which in product(WEIGHTS if "weights" in args.parts else (), turned):
            key = {"part": "weights", "strength": strength, "seed": seed, "scheme": scheme, "method": method}
            key |= {"rotate": which}
            if (row := done.get(json.dumps(key))) is None:
                subject = turned[which]
                params = METHODS[method](subject, scheme, tokens)
                row = key | score(replace(subject, params=params), ids, protocol, recorded)
            yield row


def of_stream(model: Model, seeds: Sequence[int], tokens: np.ndarray) -> Iterator[tuple[Row, Callable[[], Model]]]:
    """Yields the rows of part "stream" without scores, each with a function that makes its model."""
    for channels, seed in product((0, CHANNELS), seeds):
        planted = plant_in_stream(model, tokens[:4], channels=channels, seed=seed)
        for which in (NONE, "all"):
            if (channels, which) == (0, NONE) and seed != seeds[0]:  # nothing is drawn, so seeds do not matter
                continue
            turned = planted if which == NONE else rotate(planted, which, seed=seed)
            for scheme in STREAM:
                key: Row = {"part": "stream", "channels": channels, "seed": seed, "scheme": scheme, "rotate": which}
                yield key, partial(quantize_model, turned, scheme)


def _key(row: Row) -> Row:
    return {name: value for name, value in row.items() if name not in ("protocol", "tokens", "kl", "kl_95")}


def score(subject: Model, ids: list[list[int]], protocol: str, recorded: Recorded, **options: Any) -> Row:
    found = evaluate(subject, ids, protocol, reference=recorded, **options)
    row: Row = {"protocol": protocol, "tokens": found.tokens, "kl": rounded(found.kl)}
    return row | {"kl_95": [rounded(x) for x in found.interval("kl")]}


def halved(kl: Mapping[Any, float], pairs: Iterable[tuple[Any, Any]], text: str, strength: float) -> Iterator[Row]:
    """Yields how much of the second's divergence the first of a pair leaves. The worst measured pair counts."""
    if ratios := [kl[one] / kl[other] for one, other in pairs if one in kl and other in kl]:
        name = f"{text}, strength {strength:g}, worst seed"
        yield {
            "name": name, "value": rounded(max(ratios)), "unit": "of kl", "bar": HALF, "met": max(ratios) <= HALF
        }  # fmt: skip


def bars(found: list[Row]) -> Iterator[Row]:
    """Yields the divergence that rotation leaves of outliers in the stream, as a mean of seeds. At the greatest
    strength it also yields what rotation leaves of each 4-bit format's divergence, for the worst seed. For 8-bit
    activations it yields means over seeds, which must fall."""
    streams = [row for row in found if row["part"] == STREAM_PART and row["channels"]]
    for scheme in dict.fromkeys(row["scheme"] for row in streams):
        of = [row for row in streams if row["scheme"] == scheme]
        plain, turned = ([row["kl"] for row in of if row["rotate"] == which] for which in (NONE, "all"))
        if plain and turned:
            name = f"{scheme} rotated all over as it is, outliers in the stream, mean of seeds"
            ratio = fmean(turned) / fmean(plain)
            yield {"name": name, "value": rounded(ratio), "unit": "of kl", "bar": 1.0, "met": ratio < 1}
    found = [row for row in found if row["part"] != STREAM_PART]
    greatest = max((row["strength"] for row in found), default=1)
    found = [row for row in found if row["strength"] == greatest > 1]
    smooth = {(row["kv"], row["alpha"], row["seed"]): row["kl"] for row in found if row["part"] == "smooth"}
    for name in dict.fromkeys(name for name, *_ in smooth):
        pairs = [((name, 1.0, seed), (name, 0.0, seed)) for other, _, seed in smooth if other == name]
        yield from halved(smooth, pairs, f"{name} with scales of channels found ahead over without", greatest)
    by_k = {(row["kv"], row["seed"]): row["kl"] for row in found if row["part"] == "channel"}
    for bits in (4, 2):
        ours, theirs = (f"k={name},v={PLAIN_KV}" for name in (f"kivi{bits}-g32-r32", f"int{bits}-g32-zp"))
        seeds = [((ours, seed), (theirs, seed)) for name, seed in by_k if name == ours]
        yield from halved(by_k, seeds, f"K per channel over per token, {bits} bits", greatest)
    plain_kv = {(row["kv"], row["seed"]): row["kl"] for row in found if row["part"] == "kv"}
    for name in dict.fromkeys(name for name, _ in plain_kv if f"{name}-h" in {other for other, _ in plain_kv}):
        seeds = [((f"{name}-h", seed), (name, seed)) for other, seed in plain_kv if other == name]
        yield from halved(plain_kv, seeds, f"{name}-h over {name}", greatest)
    for scheme, method in WEIGHTS[:2]:
        plain, turned = (
            [row["kl"] for row in found if (row.get("scheme"), row.get("rotate")) == (scheme, which)]
            for which in (NONE, "all")
        )
        if plain and turned:
            text = f"{scheme} ({method}) rotated all over as it is, strength {greatest:g}, mean of seeds"
            ratio = fmean(turned) / fmean(plain)
            yield {"name": text, "value": rounded(ratio), "unit": "of kl", "bar": 1.0, "met": ratio < 1}


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
        "--strengths", nargs="+", type=outlier_strength, default=[1, 8, 32], help="strengths of outliers, powers of two"
    )
    parser.add_argument(
        "--seeds", nargs="+", type=seed_number, default=[0, 1, 2], help="seeds of the channels with outliers"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="parts to measure (default: all)")
    parser.add_argument(
        "--rows", type=positive, default=16, help="number of calibration rows, which the model generates"
    )
    parser.add_argument("--length", type=positive, default=256, help="tokens per calibration row")
    add_result_options(parser)
    return parser.parse_args(argv)


@refusing
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    model = jllm.load(args.model, dtype=args.dtype)
    how: Row = {"run": run_of(args), "calibration": f"{args.rows} x {args.length} own tokens"}
    result = ResumedFile(args.results, "rotations", command_line("rotations", argv), args.label, **how)
    result.go_on(partial(rows, model, args), bars)
    return told(args, result)


if __name__ == "__main__":
    sys.exit(main())
