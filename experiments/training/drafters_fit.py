"""Trains a drafter: AdamW on random rows of texts, in float32."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from experiments.training.later import optax
from jllm.errors import ConfigError
from jllm.model.params import Params

Loss = Callable[[Any, Params, Any], jax.Array]  # of a drafter's weights, the target's, and a batch of texts


@dataclass(frozen=True)
class Recipe:
    """Settings of a drafter's training. Weights and optimizer are float32."""

    steps: int
    rows: int  # per step
    length: int  # of a row
    lr: float  # peak of a cosine after a linear warm-up
    weight_decay: float
    decay: float  # of the loss by depth
    regression: float  # weight of EAGLE's loss of hidden states
    seed: int


def make_optimizer(recipe: Recipe) -> "optax.GradientTransformation":
    """Returns AdamW on matrices (norms and biases do not decay), with gradients clipped to norm 1."""
    warmup = min(50, recipe.steps // 4)
    schedule = optax.warmup_cosine_decay_schedule(0.0, recipe.lr, warmup, recipe.steps, 0.02 * recipe.lr)

    def matrices(weights: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.ndim > 1, weights)

    adamw = optax.adamw(schedule, b2=0.98, weight_decay=recipe.weight_decay, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def fit(weights: Any, params: Params, data: Any, loss: Loss, recipe: Recipe, name: str) -> tuple[Any, list[float]]:
    """Returns weights after recipe.steps steps, and the loss of each step. A step has random rows of the data (leaves
    [N, ...] on the host). Every row is used once before any repeats."""
    optimizer = make_optimizer(recipe)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(weights: Any, state: Any, params: Params, batch: Any) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(weights, params, batch)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
            updates, state = optimizer.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state, value

    weights = jax.tree.map(jnp.copy, weights)  # the first step donates them
    state, losses = optimizer.init(weights), []
    picked = pick_rows(len(jax.tree.leaves(data)[0]), recipe)
    with tqdm(total=recipe.steps, desc=name, unit="step", mininterval=1) as bar:
        for _ in range(recipe.steps):
            rows = next(picked)
            weights, state, value = step(weights, state, params, jax.tree.map(lambda leaf: leaf[rows], data))  # noqa: B023
            losses.append(float(value))
            bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
            bar.update()
    if not math.isfinite(losses[-1]):
        raise ConfigError(f"{name}: the loss is {losses[-1]}: lower --lr")
    return weights, losses


def pick_rows(count: int, recipe: Recipe) -> Iterator[np.ndarray]:
    """Yields row numbers i64[rows] without end: one permutation of all rows after the other."""
    rng, left = np.random.default_rng(recipe.seed), np.zeros(0, np.int64)
    while True:
        while len(left) < recipe.rows:
            left = np.concatenate([left, rng.permutation(count)])
        yield left[: recipe.rows]
        left = left[recipe.rows :]
