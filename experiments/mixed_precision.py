"""Chooses the format of each layer by its sensitivity, under a budget of bytes.

    python -m experiments.mixed_precision [--formats w4a16-g64-zp w8a16] [--budgets 0.6 0.75] [--seeds 0 1 2]
    python -m experiments.mixed_precision --budgets 0.65 --write mixed.toml     # a scheme that --quantize takes

A layer's sensitivity to a format is the divergence if only it has that format (jllm.analysis.layer_divergence), on the
model's own tokens. The choice has the least sum of sensitivities within the budget. A budget is in bytes per weight of
all linear layers, scales included. It is a knapsack with one choice per layer, solved exactly.

Part "uniform" has each format for all layers. Part "mixed" has the choice for a budget by the tokens of a seed. Part
"shuffled" gives the same formats to layers at random: as many bytes without sensitivity. kl is the divergence of the
whole model from the model as loaded, with its bootstrap interval over documents in `kl_95`. `over` is the best uniform
format within the budget. `ratio` is kl over that format's, with its interval in `ratio_95`. An interrupted run resumes.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from tqdm import tqdm

import jllm
from experiments.accuracy.rows import bytes_per_weight
from experiments.arguments import add_subject_options, by_name
from experiments.ptq_methods import as_row, read_tokens, run_of, score
from experiments.result_file import ResumedFile, command_line, refusing, told
from jllm.analysis.evaluate import Evaluation, record
from jllm.analysis.layer_divergence import divergence_by_layer
from jllm.analysis.own_tokens import own_tokens
from jllm.errors import ConfigError, OutputError
from jllm.model.model import Model
from jllm.model.params import matrices
from jllm.quant.quantize import quantize
from jllm.quant.schemes import Scheme, find_scheme
from pallas_kernels.bench.command import Parser, add_result_options
from pallas_kernels.bench.numbers import positive, positive_number, seed_number

Row = dict[str, Any]
FORMATS = ("w4a16-g128-zp", "w4a16-g64-zp", "w4a16-g32-zp", "w8a16")
BUDGETS = (0.5625, 0.594, 0.65, 0.75)


def check_formats(schemes: Mapping[str, Scheme]) -> None:
    """Raises ConfigError for a scheme that does more than give all linear layers one format."""
    for name, scheme in schemes.items():
        if len(scheme.rules) != 1 or scheme.rules[0][0] != "*_proj" or scheme.rotate is not None:
            raise ConfigError(f"--formats: {name} is not one format for all linear layers, as w8a16 is")


def mixed_scheme(name: str, chosen: Sequence[str], schemes: Mapping[str, Scheme]) -> Scheme:
    """Returns the scheme of each layer's format, by the names in `schemes`."""
    return Scheme(name, tuple((f"layers.{i}.*_proj", schemes[fmt].rules[0][1]) for i, fmt in enumerate(chosen)))


def layer_bytes(model: Model, schemes: Mapping[str, Scheme]) -> tuple[np.ndarray, np.ndarray]:
    """Returns bytes i64[L, formats] of the linear layers, and their numbers of weights i64[L]. Nothing is quantized."""
    plain = jax.eval_shape(lambda: model.params)
    found = [quantize(plain, scheme).layers for scheme in schemes.values()]

    def stored(layer: Any) -> int:
        leaves = jax.tree.leaves(matrices(layer))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    weights = [sum(leaf.size for leaf in jax.tree.leaves(matrices(layer))) for layer in plain.layers]
    return np.array([[stored(layer) for layer in layers] for layers in found], np.int64).T, np.array(weights, np.int64)


def sensitivities(model: Model, schemes: Mapping[str, Scheme], tokens: np.ndarray) -> np.ndarray:
    """Returns f64[L, formats]: the divergence if one layer alone has the format, as a mean over rows of tokens i32[W,
    T]."""
    quantized = [replace(model, params=quantize(model.params, scheme)) for scheme in schemes.values()]
    return np.array([np.mean([divergence_by_layer(q, model, row) for row in tokens], axis=0) for q in quantized]).T


def choose(costs: np.ndarray, sizes: np.ndarray, budget: float) -> list[int]:
    """Returns the format of each layer with the least sum of costs f64[L, formats]. The sum of sizes, of the same
    shape, must be at most the budget. Some choice must fit."""
    layers, formats = costs.shape
    one_each = LinearConstraint(np.kron(np.eye(layers), np.ones(formats)), 1, 1)
    fits = LinearConstraint(sizes.reshape(1, -1) / budget, -np.inf, 1)
    scale = max(float(costs.max()), np.finfo(float).tiny)  # makes the solver's tolerances negligible
    found = milp(costs.ravel() / scale, constraints=[one_each, fits], integrality=1, bounds=Bounds(0, 1))
    assert found.x is not None, found.message
    return np.argmax(found.x.reshape(layers, formats), axis=1).tolist()


def rows(model: Model, args: argparse.Namespace, schemes: Mapping[str, Scheme], before: Sequence[Row]) -> Iterator[Row]:
    """Yields formats alone, then each budget with each seed. Rows that exist are not computed again."""
    ids, protocol = read_tokens(model, args)
    recorded = record(model, ids, protocol)
    sizes, weights = layer_bytes(model, schemes)
    budgets = {budget: budget * int(weights.sum()) for budget in args.budgets}
    for budget, total in budgets.items():
        if (least := int(sizes.sum(axis=0).min())) > total:
            smallest = least / int(weights.sum())
            raise ConfigError(f"--budgets: none of the formats fits {budget:g}: the smallest takes {smallest:.4f}")
    done = {key(row): row for row in before}

    def scored(scheme: Scheme) -> tuple[Evaluation, float]:
        params = quantize(model.params, scheme)
        return score(replace(model, params=params), ids, protocol, recorded), bytes_per_weight(params)

    uniform = {name: scored(scheme) for name, scheme in schemes.items()}
    for name, (found, size) in uniform.items():
        yield row_of(found, found, part="uniform", formats=[name], bytes_per_weight=round(size, 4))
    for seed in tqdm(args.seeds, delay=2, disable=None):
        wanted = [(part, budget, seed) for budget in args.budgets for part in ("mixed", "shuffled")]
        if all(each in done for each in wanted):
            yield from (done[each] for each in wanted)
            continue
        costs = sensitivities(model, schemes, own_tokens(model, rows=args.rows, length=args.length, seed=seed))
        for budget, total in budgets.items():
            chosen = [list(schemes)[i] for i in choose(costs, sizes, total)]
            over = min((n for n, (_, size) in uniform.items() if size <= budget), key=lambda n: uniform[n][0].kl)
            shuffled = np.random.default_rng(seed).permutation(chosen).tolist()
            for part, formats in (("mixed", chosen), ("shuffled", shuffled)):
                found, size = scored(mixed_scheme(part, formats, schemes))
                names = {"part": part, "budget": budget, "seed": seed, "formats": formats, "over": over}
                yield row_of(found, uniform[over][0], **names, bytes_per_weight=round(size, 4))


def key(row: Row) -> tuple[str, float | None, int | None]:
    return row["part"], row.get("budget"), row.get("seed")


def row_of(found: Evaluation, plain: Evaluation, **names: Any) -> Row:
    """Returns a row in the form of ptq_methods, without a time."""
    return {name: value for name, value in as_row(found, plain, seconds=0, **names).items() if name != "seconds"}


def write_scheme(file: Path, found: Sequence[Row], schemes: Mapping[str, Scheme]) -> None:
    """Writes the choice of the first seed. Raises OutputError if it cannot be written."""
    row = next(row for row in found if row["part"] == "mixed")
    try:
        file.write_text(mixed_scheme(file.stem, row["formats"], schemes).to_toml(), encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{file}: cannot be written: {error.strerror}") from None


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add_subject_options(parser, tokens=4096)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), help="formats; each layer gets one")
    parser.add_argument(
        "--budgets", nargs="+", type=positive_number, default=list(BUDGETS), help="budgets in bytes per weight"
    )
    parser.add_argument(
        "--seeds", nargs="+", type=seed_number, default=[0, 1, 2], help="seeds of the tokens for sensitivity"
    )
    parser.add_argument(
        "--rows", type=positive, default=4, help="number of rows of these tokens, which the model generates"
    )
    parser.add_argument("--length", type=positive, default=256, help="tokens per row")
    parser.add_argument(
        "--write", type=Path, metavar="FILE.toml", help="file for the scheme of the only budget and the first seed"
    )
    add_result_options(parser)
    args = parser.parse_args(argv)
    if args.write is not None and (len(args.budgets) != 1 or args.write.suffix != ".toml"):
        parser.error("--write takes a .toml file and one of --budgets")
    return args


@refusing
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    schemes = {name: find_scheme(scheme) for name, scheme in by_name(args.formats).items()}
    check_formats(schemes)
    model = jllm.load(args.model, dtype=args.dtype)
    how: Row = {"run": run_of(args), "calibration": f"{args.rows} x {args.length} own tokens"}
    result = ResumedFile(args.results, "mixed_precision", command_line("mixed_precision", argv), args.label, **how)
    result.go_on(partial(rows, model, args, schemes))
    if args.write is not None:
        write_scheme(args.write, result.document["rows"], schemes)
    return told(args, result)


if __name__ == "__main__":
    sys.exit(main())
