"""Trains a length predictor on one model's texts, and writes it to a file (training/learned_length.py).

    python -m experiments.train_length_predictor --out length.safetensors
    python -m experiments.train_length_predictor --model DIR --texts-file texts.jsonl --texts 500

The model makes --texts texts at temperature 1, from the begin token to its own end token. --texts-file keeps them, and
an interrupted run resumes. Each text gives requests at every cut (length_data.py): stories to their end, and paragraphs
that stop at the first line break. Texts, not requests, are divided. A fifth is held out for all figures. --workload
writes one request of each kind from each of these, for the simulator. The rest forms FOLDS parts. Each part in turn
tests a network trained on the others. That decides how long to train, and corrects the network's shares. The last
network learns from all parts.

Experiments read the file as learned:length.safetensors. training/learned_length.py shows how an engine does.

Figures are by kind. `nats` is the negative log-likelihood of the true bin. `blind_nats` is that of a predictor without
the prompt, and `kind_nats` that of one that only has the kind. `coverage_q` is the share of outputs no longer than the
quantile q. `over_90` is the mean of the quantile 0.9 over the mean output, with `blind_over_90` beside it.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from experiments.length_data import Request, cut_requests, generate_texts, line_tokens
from experiments.result_file import ResultFile, check_output, command_line, refusing, told
from experiments.training.learned_length import Learned, fingerprint, save_learned
from experiments.training.length_fit import Recipe, bins_of, fit, make_edges
from jllm.engine.request import SamplingParams
from jllm.errors import ConfigError, OutputError
from jllm.files.load import BUNDLED, load
from jllm.model.model import Model
from pallas_kernels.bench.command import Parser, add_result_options
from pallas_kernels.bench.numbers import non_negative_number, portion, positive, positive_number, seed_number

Row = dict[str, Any]
QUANTILES = (0.5, 0.75, 0.9, 0.95)
FOLDS = 4


def figures(learned: Learned, requests: Sequence[Request], known: Mapping[str, Sequence[Request]]) -> Iterator[Row]:
    """Yields a row for each kind of held-out requests and one for all. `known` are the training requests, by kind."""
    edges = learned.edges
    training = [r for some in known.values() for r in some]
    blind, by_kind = _shares(training, edges), {kind: _shares(some, edges) for kind, some in known.items()}
    for name, some in {"all": requests, **kinds(requests)}.items():
        row: Row = {"part": "figures", "kind": name, "requests": len(some)}
        ended = [r for r in some if r.ended]
        if not ended:
            continue
        outputs = np.array([r.output for r in ended])
        bins = bins_of(outputs, edges)
        below = np.array([learned.distribution(r.prompt, r.stop) for r in ended])
        shares = np.maximum(np.diff(below, axis=1, prepend=0.0), 1e-6)
        row["nats"] = -float(np.log(shares[np.arange(len(bins)), bins]).mean())
        row["blind_nats"] = -float(np.log(blind[bins]).mean())
        row["kind_nats"] = -float(np.mean([np.log(by_kind[kind_of(r)][b]) for r, b in zip(ended, bins)]))
        for q in QUANTILES:
            told = [learned.predict(r.prompt, SamplingParams(max_new_tokens=1 << 20, stop=r.stop), q) for r in ended]
            row[f"coverage_{round(100 * q)}"] = float(np.mean(outputs <= np.array(told)))
            if q == 0.9:
                row["over_90"] = float(np.mean(np.minimum(told, edges[-2])) / outputs.mean())
        row["blind_over_90"] = float(np.quantile([r.output for r in training], 0.9) / outputs.mean())
        row["output_mean"] = float(outputs.mean())
        yield {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()}


def _shares(requests: Sequence[Request], edges: np.ndarray) -> np.ndarray:
    counts = np.bincount(bins_of([r.output for r in requests if r.ended], edges), minlength=len(edges)) + 0.5
    return counts / counts.sum()


def ranges(seeds: Sequence[int]) -> str:
    """Returns ascending seeds as "0-399, 500"."""
    runs: list[list[int]] = []
    for seed in seeds:
        if runs and seed == runs[-1][1] + 1:
            runs[-1][1] = seed
        else:
            runs.append([seed, seed])
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in runs)


def kind_of(request: Request) -> str:
    return "paragraph" if request.stop else "story"


def kinds(requests: Sequence[Request]) -> dict[str, list[Request]]:
    return {kind: [r for r in requests if kind_of(r) == kind] for kind in ("story", "paragraph")}


def write_workload(requests: Sequence[Request], path: Path) -> None:
    """Writes one line per request. Requests with an unknown end are left out. Raises OutputError."""
    lines = [
        json.dumps({"prompt": r.prompt, "stop": r.stop, "output": r.output}, separators=(",", ":"))
        for r in requests
        if r.ended
    ]
    try:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error}") from None


def run(model: Model, args: argparse.Namespace, result: ResultFile) -> None:
    if model.tokenizer is None:
        raise ConfigError("the model needs its tokenizer: a paragraph ends where a token has a line break")
    if args.texts <= FOLDS:
        raise ConfigError(f"--texts {args.texts}: must be at least {FOLDS + 1}: {FOLDS} parts and held-out ones")
    start = time.monotonic()
    texts = generate_texts(model, args.texts, args.longest, Path(args.texts_file or f"{args.out}.texts.jsonl"))
    made = time.monotonic() - start
    begin, lines, rng = model.config.bos_id or 0, line_tokens(model.tokenizer), np.random.default_rng(args.seed)
    order = np.random.default_rng(args.seed).permutation(len(texts))
    held = len(texts) // 5
    heldout = cut_requests([texts[i] for i in order[:held]], begin, lines, 2, rng)
    parts = [
        cut_requests([texts[i] for i in some], begin, lines, args.cuts, rng)
        for some in np.array_split(order[held:], FOLDS)
    ]
    if min(map(len, (heldout, *parts))) < 4:
        raise ConfigError(f"{len(texts)} texts give too few requests to learn from: raise --texts or --cuts")
    edges = make_edges(args.longest)
    recipe = Recipe(**{field.name: getattr(args, field.name) for field in fields(Recipe)})
    arrays, step = fit(parts, edges, recipe)
    training = [r for part in parts for r in part]
    about = {
        "texts": len(texts),
        "seeds": ranges([text.seed for text in texts]),
        "requests": len(training),
        "trained_steps": step,
        "recipe": vars(recipe),
    }
    save_learned(args.out, arrays, model, about)
    learned = Learned(arrays)
    for row in figures(learned, heldout, kinds(training)):
        result.add(row)
        print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    if args.workload:
        write_workload(heldout, Path(args.workload))
    size = Path(args.out).stat().st_size
    coverage = result.document["rows"][0]["coverage_90"]
    met = [
        {"name": "share of held-out outputs within the quantile 0.9", "value": coverage, "unit": "1",
         "bar": "0.85 to 0.95", "met": 0.85 <= coverage <= 0.95},
        {"name": "size of the file", "value": size / 1e3, "unit": "kB", "bar": "<= 200", "met": size <= 200_000},
    ]  # fmt: skip
    ended = sum(text.ended for text in texts) / len(texts)
    result.finish(
        bars=met, complete=True, **about, model=fingerprint(model), ended_by_itself=round(ended, 4),
        generation_s=round(made, 1), seconds=round(time.monotonic() - start, 1),
    )  # fmt: skip


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--model", default=BUNDLED, help="directory or id (default: the bundled model)")
    parser.add_argument(
        "--out", default="length_predictor.safetensors", help="file of the predictor (default: %(default)s)"
    )
    parser.add_argument(
        "--texts", type=positive, default=720, help="number of texts to generate (default: %(default)s)"
    )
    parser.add_argument("--texts-file", help="file that keeps the texts (default: beside --out)")
    parser.add_argument("--longest", type=positive, default=1000, help="most tokens of a text (default: %(default)s)")
    parser.add_argument(
        "--cuts", type=positive, default=24, help="number of requests from each text (default: %(default)s)"
    )
    parser.add_argument("--workload", help="write held-out requests for the simulator to this .jsonl")
    parser.add_argument("--width", type=positive, default=32, help="width of the hidden layer (default: %(default)s)")
    parser.add_argument("--steps", type=positive, default=1500, help="most training steps (default: %(default)s)")
    parser.add_argument("--rows", type=positive, default=256, help="requests per step (default: %(default)s)")
    parser.add_argument("--lr", type=positive_number, default=1e-3, help="peak learning rate")
    parser.add_argument(
        "--weight-decay", type=non_negative_number, default=1.0, help="weight decay of AdamW, times the learning rate"
    )
    parser.add_argument("--dropout", type=portion, default=0.2, help="dropout probability of a hidden unit")
    parser.add_argument(
        "--table-rate",
        type=positive_number,
        default=0.1,
        help="learning rate of the tables of tokens, relative to the rest",
    )
    parser.add_argument("--seed", type=seed_number, default=0, help="seed of cuts, folds, weights and dropout")
    add_result_options(parser)
    return parser.parse_args(argv)


@refusing
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    for file in filter(None, (args.out, args.workload)):
        check_output(file)
    command = command_line("train_length_predictor", argv)
    with ResultFile(args.results, "train_length_predictor", command, args.label) as result:
        run(load(args.model), args, result)
    return told(args, result)


if __name__ == "__main__":
    sys.exit(main())
