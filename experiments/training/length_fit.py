"""Fits the network of a length predictor (learned_length.py) to requests with known outputs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from experiments.length_data import Request
from experiments.training.later import optax
from experiments.training.learned_length import BAG, DENSE, LAST, PLACES, STOPS, Learned, features

Weights = dict[str, jax.Array]
RATIO = 1.15  # of bins' edges
LEVELS = 50  # values kept for the correction
PATIENCE = 8  # evaluations without a better one
EVERY = 50  # steps


@jax.tree_util.register_dataclass
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
    """Settings of training."""

    width: int
    steps: int
    rows: int  # per step
    lr: float
    weight_decay: float
    dropout: float
    table_rate: float  # the tables' learning rate over the rest's
    seed: int


def make_edges(longest: int) -> np.ndarray:
    """Returns i64[B], the longest output of each bin. Edges grow by RATIO, once that is a whole token; the last bin is
    open."""
    edges = [1]
    while edges[-1] < longest:
        edges.append(max(edges[-1] + 1, int(edges[-1] * RATIO)))
    return np.array([*edges, edges[-1] * 2])


def bins_of(outputs: Sequence[int] | np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Returns i32[N], the bin of each output."""
    return np.minimum(np.searchsorted(edges, outputs), len(edges) - 1).astype(np.int32)


def examples(requests: Sequence[Request], edges: np.ndarray) -> Examples:
    """Returns requests as arrays for the network."""
    found = [features(request.prompt, request.stop) for request in requests]
    bag, stops = np.zeros((len(found), BAG), np.float32), np.zeros((len(found), STOPS), np.float32)
    for i, x in enumerate(found):
        bag[i, x.bag] = x.counts
        stops[i, x.stops] = 1
    outputs = [request.output for request in requests]
    return Examples(
        bag,
        np.array([x.last for x in found], np.int32),
        stops,
        np.array([x.dense for x in found], np.float32),
        bins_of(outputs, edges),
        np.array([request.ended for request in requests]),
    )


def init(recipe: Recipe, bins: int, shares: np.ndarray) -> Weights:
    """Returns small random weights with tables of zeros. The output's bias begins at the overall shares."""
    keys = jax.random.split(jax.random.key(recipe.seed), 3)
    weights = {"bag": jnp.zeros((BAG, recipe.width)), "last": jnp.zeros((PLACES * LAST + 1, recipe.width))}
    weights["stops"] = 0.3 * jax.random.normal(keys[0], (STOPS, recipe.width))
    weights["dense"] = 0.3 * jax.random.normal(keys[1], (DENSE, recipe.width))
    weights["out"] = 0.1 * jax.random.normal(keys[2], (recipe.width, bins))
    return weights | {"bias": jnp.zeros(recipe.width), "out_bias": jnp.log(jnp.asarray(shares))}


def logits(weights: Weights, x: Examples, keep: jax.Array | float = 1.0) -> jax.Array:
    """Returns logits [N, B]."""
    hidden = x.dense @ weights["dense"] + x.bag @ weights["bag"] + x.stops @ weights["stops"] + weights["bias"][None]
    hidden = jnp.maximum(hidden + weights["last"][x.last].sum(1), 0)
    return (hidden * keep) @ weights["out"] + weights["out_bias"][None]


def nats(weights: Weights, x: Examples, keep: jax.Array | float = 1.0) -> jax.Array:
    """Returns nats [N]: minus the log of the share of the true bin. For a cut output it is the share of all bins from
    there on."""
    logs = jax.nn.log_softmax(logits(weights, x, keep))
    later = jnp.arange(logs.shape[1])[None] > x.bins[:, None]
    here = jnp.take_along_axis(logs, x.bins[:, None], 1)[:, 0]
    return -jnp.where(x.ended, here, jax.nn.logsumexp(jnp.where(later, logs, -jnp.inf).at[:, -1].set(logs[:, -1]), 1))


def make_optimizer(recipe: Recipe) -> "optax.GradientTransformation":
    """Returns AdamW. The tables of hashed tokens decay and learn slowly, since they could memorize each text."""
    schedule = optax.cosine_decay_schedule(recipe.lr, recipe.steps, 0.05)

    def tables(weights: Weights) -> dict[str, bool]:
        return {name: name in ("bag", "last") for name in weights}

    adamw = optax.adamw(schedule, weight_decay=recipe.weight_decay, mask=tables)
    return optax.chain(adamw, optax.masked(optax.scale(recipe.table_rate), tables))


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
    """Returns the weights of the least loss on `deciding`, and their step. Without it they are of the last step."""
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
    """Returns a predictor's arrays from requests in parts that share no text, and the steps of its training."""
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
    """Returns the distribution function at each true output. Cut outputs are left out: they are few, and only have a
    lower bound."""
    edges = np.concatenate([[0], learned.edges])
    return [
        float(np.interp(r.output, edges, np.concatenate([[0], learned.distribution(r.prompt, r.stop)])))
        for r in requests
        if r.ended
    ]
