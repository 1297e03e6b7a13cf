"""Trains a length predictor for one model on what it said: jllm/kv_policies/learned_length.py in a file.

    python -m experiments.train_length_predictor --out length.safetensors
    python -m experiments.train_length_predictor --model DIR --texts-file texts.jsonl --texts 500

The model makes --texts texts at temperature 1 from the begin token to its own end token; --texts-file keeps them, and
an interrupted run goes on from there. Each text gives requests wherever it is cut (length_data.py): stories to their
end, and paragraphs that stop at the first line break. Texts, not requests, are divided: a fifth is held out, and all
figures are of these; --workload writes one request of each kind from each, for the simulator. The others make FOLDS
parts: each in turn is what a network trained on the rest is tested on, which says how long to train and what corrects
the shares that it gives; the last network learns from all of them.

The engine takes the file as length_predictor="learned:length.safetensors".

Figures, by kind: `nats`, the negative log-likelihood of the bin that came out, beside that of a predictor that knows no
prompt (`blind_nats`) and one that knows the kind alone (`kind_nats`); `coverage_q`, the share of outputs no longer than
the quantile q; `over_90`, the mean of the quantile 0.9 over the mean output, beside `blind_over_90`.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from experiments.length_data import Request, cut_requests, generate_texts, line_tokens
from experiments.result_file import ResultFile, command_line, refusing, told
from jllm.engine.request import SamplingParams
from jllm.errors import ConfigError, OutputError
from jllm.kv_policies.learned_length import (
    BAG,
    DENSE,
    LAST,
    PLACES,
    STOPS,
    Learned,
    features,
    fingerprint,
    save_learned,
)
from jllm.pretrained import BUNDLED, Model, load
from pallas_kernels.bench.command import add_result_options

Row = dict[str, Any]
Weights = dict[str, jax.Array]
QUANTILES = (0.5, 0.75, 0.9, 0.95)
RATIO = 1.15  # of bins' edges
LEVELS = 50  # values kept for the correction
PATIENCE = 8  # evaluations without a better one
EVERY = 50  # steps
FOLDS = 4


@dataclass(frozen=True)
class Examples:
    """Requests as arrays, N of them."""

    bag: np.ndarray  # f32[N, BAG]
    last: np.ndarray  # i32[N, PLACES]
    stops: np.ndarray  # f32[N, STOPS]
    dense: np.ndarray  # f32[N, DENSE]
    bins: np.ndarray  # i32[N] of the output
    ended: np.ndarray  # bool[N]


@dataclass(frozen=True)
class Recipe:
    """How to train."""

    width: int
    steps: int
    rows: int  # a step
    lr: float
    weight_decay: float
    dropout: float
    table_rate: float  # of the tables' learning rate, to that of the rest
    seed: int


def make_edges(longest: int) -> np.ndarray:
    """i64[B]: longest output of each bin, ratios of RATIO from where they are whole tokens; the last bin is open."""
    edges = [1]
    while edges[-1] < longest:
        edges.append(max(edges[-1] + 1, int(edges[-1] * RATIO)))
    return np.array([*edges, edges[-1] * 2])


def examples(requests: Sequence[Request], edges: np.ndarray) -> Examples:
    found = [features(request.prompt, request.stop) for request in requests]
    bag, stops = np.zeros((len(found), BAG), np.float32), np.zeros((len(found), STOPS), np.float32)
    for i, x in enumerate(found):
        bag[i, x.bag] = x.counts
        stops[i, x.stops] = 1
    outputs = np.array([request.output for request in requests])
    bins = np.minimum(np.searchsorted(edges, outputs), len(edges) - 1)
    return Examples(
        bag,
        np.array([x.last for x in found], np.int32),
        stops,
        np.array([x.dense for x in found], np.float32),
        bins.astype(np.int32),
        np.array([request.ended for request in requests]),
    )


def init(recipe: Recipe, bins: int, shares: np.ndarray) -> Weights:
    """Small random weights, tables of zeros; the output's bias begins at the shares of all."""
    keys = jax.random.split(jax.random.key(recipe.seed), 3)
    weights = {"bag": jnp.zeros((BAG, recipe.width)), "last": jnp.zeros((PLACES * LAST + 1, recipe.width))}
    weights["stops"] = 0.3 * jax.random.normal(keys[0], (STOPS, recipe.width))
    weights["dense"] = 0.3 * jax.random.normal(keys[1], (DENSE, recipe.width))
    weights["out"] = 0.1 * jax.random.normal(keys[2], (recipe.width, bins))
    return weights | {"bias": jnp.zeros(recipe.width), "out_bias": jnp.log(jnp.asarray(shares))}


def logits(weights: Weights, x: Examples, keep: jax.Array | float = 1.0) -> jax.Array:
    """[N, B]."""
    hidden = x.dense @ weights["dense"] + x.bag @ weights["bag"] + x.stops @ weights["stops"] + weights["bias"][None]
    hidden = jnp.maximum(hidden + weights["last"][x.last].sum(1), 0)
    return (hidden * keep) @ weights["out"] + weights["out_bias"][None]


def nats(weights: Weights, x: Examples, keep: jax.Array | float = 1.0) -> jax.Array:
    """[N]: minus the log of the share of what came out: a bin, or for what was cut off all bins from there on."""
    logs = jax.nn.log_softmax(logits(weights, x, keep))
    later = jnp.arange(logs.shape[1])[None] > x.bins[:, None]
    here = jnp.take_along_axis(logs, x.bins[:, None], 1)[:, 0]
    return -jnp.where(x.ended, here, jax.nn.logsumexp(jnp.where(later, logs, -jnp.inf).at[:, -1].set(logs[:, -1]), 1))


def make_optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """AdamW; the tables of hashed tokens are decayed and learn slowly, since they could know each text by heart."""
    schedule = optax.cosine_decay_schedule(recipe.lr, recipe.steps, 0.05)

    def tables(weights: Weights) -> dict[str, bool]:
        return {name: name in ("bag", "last") for name in weights}

    adamw = optax.adamw(schedule, weight_decay=recipe.weight_decay, mask=tables)
    return optax.chain(adamw, optax.masked(optax.scale(recipe.table_rate), tables))


jax.tree_util.register_dataclass(Examples)


@partial(jax.jit, static_argnames="recipe", donate_argnames=("weights", "state"))
def train_step(weights: Weights, state: Any, x: Examples, key: jax.Array, *, recipe: Recipe) -> tuple[Weights, Any]:
    keep = jax.random.bernoulli(key, 1 - recipe.dropout, (x.bag.shape[0], recipe.width)).astype(jnp.float32)
    keep = keep / (1 - recipe.dropout)

    def loss(weights: Weights) -> jax.Array:
        return nats(weights, x, keep).mean()

    grads = jax.grad(loss)(weights)
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
        updates, state = make_optimizer(recipe).update(grads, state, weights)
    return optax.apply_updates(weights, updates), state


mean_nats = jax.jit(lambda weights, x: nats(weights, x).mean())


def train(
    training: Examples, bins: int, recipe: Recipe, deciding: Examples | None = None
) -> tuple[dict[str, np.ndarray], int]:
    """The weights of the least loss on `deciding`, and the step that had it; without it, of the last step."""
    shares = np.bincount(training.bins, minlength=bins) + 1.0
    weights = init(recipe, bins, shares / shares.sum())
    state = make_optimizer(recipe).init(weights)
    rng, key = np.random.default_rng(recipe.seed), jax.random.key(recipe.seed + 1)
    best, best_step, least = jax.device_get(weights), 0, np.inf
    with tqdm(total=recipe.steps, unit="step", delay=2) as bar:
        for step in range(1, recipe.steps + 1):
            rows = rng.integers(len(training.bins), size=recipe.rows)
            batch = jax.tree.map(lambda leaf: leaf[rows], training)  # noqa: B023
            weights, state = train_step(weights, state, batch, jax.random.fold_in(key, step), recipe=recipe)
            bar.update()
            if deciding is not None and step % EVERY == 0:
                loss = float(mean_nats(weights, deciding))
                if loss < least:
                    least, best, best_step = loss, jax.device_get(weights), step
                elif step - best_step >= PATIENCE * EVERY:
                    break
    if deciding is None:
        best, best_step = jax.device_get(weights), recipe.steps
    return {name: np.asarray(array) for name, array in best.items()}, best_step


def fit(parts: Sequence[Sequence[Request]], edges: np.ndarray, recipe: Recipe) -> tuple[dict[str, np.ndarray], int]:
    """The arrays of a predictor from requests in parts that share no text, and the steps of its training."""
    whole = {"edges": edges, "levels": np.zeros(0)}
    values: list[float] = []
    steps = []
    for i, part in enumerate(parts):
        rest = examples([r for other in (*parts[:i], *parts[i + 1 :]) for r in other], edges)
        weights, step = train(rest, len(edges), recipe, examples(part, edges))
        values += true_values(Learned({**weights, **whole}), part)
        steps.append(step)
    enough = max(EVERY, round(float(np.mean(steps))))
    weights, _ = train(examples([r for part in parts for r in part], edges), len(edges), replace(recipe, steps=enough))
    levels = np.quantile(values, np.linspace(0, 1, LEVELS + 2)[1:-1]) if values else np.zeros(0)
    return {**weights, "edges": edges, "levels": levels}, enough


def true_values(learned: Learned, requests: Sequence[Request]) -> list[float]:
    """What the distribution function gives for each output that came out. Of those cut off nothing is known but where
    they are not, and they are few: left out."""
    edges = np.concatenate([[0], learned.edges])
    return [
        float(np.interp(r.output, edges, np.concatenate([[0], learned.distribution(r.prompt, r.stop)])))
        for r in requests
        if r.ended
    ]


def figures(learned: Learned, requests: Sequence[Request], known: Mapping[str, Sequence[Request]]) -> Iterator[Row]:
    """A row for each kind of held-out requests and one for all. `known` are those trained on, by kind."""
    edges = learned.edges
    blind = _shares([r for kind in known.values() for r in kind], edges)
    for name, some in {"all": requests, **kinds(requests)}.items():
        row: Row = {"part": "figures", "kind": name, "requests": len(some)}
        ended = [r for r in some if r.ended]
        if not ended:
            continue
        outputs = np.array([r.output for r in ended])
        bins = np.minimum(np.searchsorted(edges, outputs), len(edges) - 1)
        below = np.array([learned.distribution(r.prompt, r.stop) for r in ended])
        shares = np.maximum(np.diff(below, axis=1, prepend=0.0), 1e-6)
        row["nats"] = -float(np.log(shares[np.arange(len(bins)), bins]).mean())
        row["blind_nats"] = -float(np.log(blind[bins]).mean())
        by_kind = {kind: _shares(of_kind, edges) for kind, of_kind in known.items()}
        row["kind_nats"] = -float(np.mean([np.log(by_kind[kind_of(r)][b]) for r, b in zip(ended, bins)]))
        for q in QUANTILES:
            told = [learned.predict(r.prompt, SamplingParams(max_new_tokens=1 << 20, stop=r.stop), q) for r in ended]
            row[f"coverage_{round(100 * q)}"] = float(np.mean(outputs <= np.array(told)))
            if q == 0.9:
                row["over_90"] = float(np.mean(np.minimum(told, edges[-2])) / outputs.mean())
        everything = [r.output for kind in known.values() for r in kind]
        row["blind_over_90"] = float(np.quantile(everything, 0.9) / outputs.mean())
        row["output_mean"] = float(outputs.mean())
        yield {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()}


def _shares(requests: Sequence[Request], edges: np.ndarray) -> np.ndarray:
    bins = np.minimum(np.searchsorted(edges, [r.output for r in requests if r.ended]), len(edges) - 1)
    counts = np.bincount(bins, minlength=len(edges)) + 0.5
    return counts / counts.sum()


def ranges(seeds: Sequence[int]) -> str:
    """Ascending seeds as "0-399, 500"."""
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
    """One line a request, those left out whose end is not known. Raises OutputError."""
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
    recipe = Recipe(
        args.width, args.steps, args.rows, args.lr, args.weight_decay, args.dropout, args.table_rate, args.seed
    )
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=BUNDLED, help="directory or id (default: the bundled model)")
    parser.add_argument("--out", default="length_predictor.safetensors", help="the predictor (default: %(default)s)")
    parser.add_argument("--texts", type=int, default=720, help="texts to generate (default: %(default)s)")
    parser.add_argument("--texts-file", help="where they are kept (default: beside --out)")
    parser.add_argument("--longest", type=int, default=1000, help="tokens of a text (default: %(default)s)")
    parser.add_argument("--cuts", type=int, default=24, help="requests from each text (default: %(default)s)")
    parser.add_argument("--workload", help="write held-out requests for the simulator to this .jsonl")
    parser.add_argument("--width", type=int, default=32, help="of the hidden layer (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1500, help="most training steps (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=256, help="requests a step (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=1.0)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--table-rate", type=float, default=0.1, help="of what the tables of tokens learn")
    parser.add_argument("--seed", type=int, default=0)
    add_result_options(parser)
    args = parser.parse_args(argv)
    for name in ("texts", "longest", "cuts", "width", "steps", "rows", "lr"):
        if not getattr(args, name) > 0:
            parser.error(f"--{name} must be > 0, not {getattr(args, name)}")
    if not 0 <= args.dropout < 1:
        parser.error(f"--dropout must be in [0, 1), not {args.dropout}")
    return args


@refusing
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    command = command_line("train_length_predictor", argv)
    with ResultFile(args.results, "train_length_predictor", command, args.label) as result:
        run(load(args.model), args, result)
    return told(args, result)


if __name__ == "__main__":
    sys.exit(main())
