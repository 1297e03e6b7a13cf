"""Trains a small LLaMA: the recipe, the loss, steps of AdamW, and the loop that validates and stops.

Training runs the library's own forward pass (jllm.model.backbone, no cache) over rows packed with passages. The text is
small, and a model could memorize it. So every epoch cuts it into other passages, and units are dropped out. Training
stops when the validation loss no longer falls, and keeps the weights with the lowest one. A mixture also descends a
loss that is least if its experts have equally many tokens (Switch Transformer, arXiv 2101.03961).
"""

import contextlib
import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.training.data import Book, Rows, batches, cut_passages, encode, pack
from experiments.training.later import optax
from experiments.training.resume import Kept
from jllm.config import LlamaConfig
from jllm.model.backbone import Packed, head, tapped_backbone
from jllm.model.param_specs import init_params
from jllm.model.params import Params, Weight, with_matrices
from pallas_kernels.backends import TRAINING

BLOCK = 10  # training steps per dispatch
STORED = jnp.bfloat16


@dataclass(frozen=True)
class Recipe:
    """Settings of training, except the model's shape and the text."""

    steps: int
    rows: int  # per step
    lr: float  # peak of a cosine after a linear warm-up
    warmup: int
    weight_decay: float
    dropout: float
    subword_dropout: float
    eval_every: int
    patience: int  # evaluations without a better validation loss
    seed: int
    compute: str  # dtype of the forward and backward pass; weights and optimizer are float32
    balance: float = 0.0  # weight of a mixture's loss of balance


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    params: Params  # float32
    optimizer: Any
    key: jax.Array


def make_optimizer(recipe: Recipe) -> "optax.GradientTransformation":
    """Returns AdamW on matrices (norms do not decay), with gradients clipped to norm 1."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, recipe.lr, recipe.warmup, recipe.steps, 0.02 * recipe.lr)
    adamw = optax.adamw(
        schedule,
        b2=0.98,
        weight_decay=recipe.weight_decay,
        mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
    )
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def drop_units(params: Params, key: jax.Array, rate: float) -> Params:
    """Returns weights of a network with dropout: each attention output and each hidden unit of the MLPs is zero with
    probability `rate`. A text has one mask (Gal and Ghahramani, arXiv 1512.05287), so the model needs no change."""

    def keep(key: jax.Array, w: Weight) -> jax.Array:
        assert isinstance(w, jax.Array), "quantized weights are not trained"
        mask = jax.random.bernoulli(key, 1 - rate, (1, w.shape[1]))
        return w * jnp.where(mask, 1 / (1 - rate), 0.0).astype(w.dtype)

    keys = jax.random.split(key, (len(params.layers), 2))
    layers = [
        with_matrices(layer, {"o": keep(k[0], layer.attention.o), "down": keep(k[1], layer.mlp.down)})
        for layer, k in zip(params.layers, keys)
    ]
    return replace(params, layers=tuple(layers))


def row_nats(params: Params, row: Rows, config: LlamaConfig) -> jax.Array:
    """Returns the sum of -log p of a row's targets (a row: leaves i32[L])."""
    return row_losses(params, row, config)[0]


def row_losses(params: Params, row: Rows, config: LlamaConfig) -> tuple[jax.Array, jax.Array]:
    """Returns row_nats, and the loss of balance of a mixture: 1 if experts have equally many tokens of the row."""
    mixed = [i for i in range(config.num_layers) if config.has_experts(i)]
    names = tuple(f"layers.{i}.{name}" for i in mixed for name in ("router", "routes"))
    batch = Packed(row.tokens, row.positions, row.segments)
    hidden, _, found = tapped_backbone(params, config, batch, None, names, backend=TRAINING)
    logits = head(params, config, hidden, backend=TRAINING)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(row.targets, 0))
    used = row.targets >= 0
    each = [imbalance(found[f"layers.{i}.router"], found[f"layers.{i}.routes"], used) for i in mixed]
    return jnp.sum(jnp.where(used, nats, 0)), jnp.mean(jnp.stack(each)) if each else jnp.zeros((), nats.dtype)


def imbalance(scores: jax.Array, routes: jax.Array, used: jax.Array) -> jax.Array:
    """Returns X times the sum over experts of their share of tokens times their mean probability. scores [T, X], routes
    i32[T, k]; `used` bool[T] are the tokens that count."""
    X, k = scores.shape[1], routes.shape[1]
    wide = jax.nn.softmax(scores.astype(jnp.float32), axis=1)
    count = jnp.maximum(jnp.sum(used), 1).astype(wide.dtype)
    chosen = jnp.sum(jax.nn.one_hot(routes, X, dtype=wide.dtype), axis=1)
    shares, means = (jnp.sum(jnp.where(used[:, None], each, 0), axis=0) / count for each in (chosen / k, wide))
    return X * jnp.sum(shares * means)


def mean_nats(params: Params, rows: Rows, key: jax.Array, config: LlamaConfig, recipe: Recipe) -> jax.Array:
    """Returns the training loss over rows [B, L]: nats per token, and the loss of balance. Each row has its own dropout
    mask."""
    params = jax.tree.map(lambda leaf: leaf.astype(recipe.compute), params)

    def one(row: Rows, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        return row_losses(drop_units(params, key, recipe.dropout) if recipe.dropout else params, row, config)

    nats, balance = jax.vmap(one)(rows, jax.random.split(key, recipe.rows))
    mean = jnp.sum(nats) / jnp.sum(rows.targets >= 0).astype(nats.dtype)
    return mean if config.experts is None else mean + recipe.balance * jnp.mean(balance).astype(mean.dtype)


def train_step(state: TrainState, rows: Rows, config: LlamaConfig, recipe: Recipe) -> tuple[TrainState, jax.Array]:
    """Returns one step on rows [B, L], and its loss. It is pure, and fits vmap."""
    key, drop = jax.random.split(state.key)
    loss, grads = jax.value_and_grad(mean_nats)(state.params, rows, drop, config, recipe)
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
        updates, optimizer = make_optimizer(recipe).update(grads, state.optimizer, state.params)
    return TrainState(optax.apply_updates(state.params, updates), optimizer, key), loss


@partial(jax.jit, static_argnames=("config", "recipe"), donate_argnames="state")
def train_steps(state: TrainState, rows: Rows, *, config: LlamaConfig, recipe: Recipe) -> tuple[TrainState, jax.Array]:
    """Returns one step for each leading index of rows [steps, B, L], and losses [steps]."""
    return jax.lax.scan(lambda state, rows: train_step(state, rows, config, recipe), state, rows)


def begin(config: LlamaConfig, recipe: Recipe, seed: int | jax.Array) -> TrainState:
    """Returns the state before the first step."""
    init_key, key = jax.random.split(jax.random.key(seed))
    params = init_params(config, init_key, jnp.float32)
    return TrainState(params, make_optimizer(recipe).init(params), key)


@partial(jax.jit, static_argnames=("config", "dtype"))
def sum_nats(params: Params, rows: Rows, *, config: LlamaConfig, dtype: str) -> jax.Array:
    """Returns the sum of -log p of all targets of rows [B, L], computed in `dtype`. Weights are rounded as they will be
    stored."""
    params = jax.tree.map(lambda leaf: leaf.astype(STORED).astype(dtype), params)
    return jnp.sum(jax.lax.map(lambda row: row_nats(params, row, config), rows, batch_size=8))


@dataclass(frozen=True)
class Validation:
    """Held-out text as rows, and its size."""

    rows: Rows
    tokens: int  # targets, end tokens included
    bytes: int  # of UTF-8 text

    def loss(self, params: Params, config: LlamaConfig, dtype: str) -> float:
        """Returns nats per token."""
        return float(sum_nats(params, self.rows, config=config, dtype=dtype)) / self.tokens

    def bits_per_byte(self, loss: float) -> float:
        return loss * self.tokens / self.bytes / math.log(2)


def make_validation(books: Sequence[Book], model: bytes, length: int) -> Validation:
    """Returns the same rows for the same text, tokenizer and length."""
    import sentencepiece

    rng = np.random.default_rng(0)
    passages = encode(model, cut_passages(books, rng, longest=3 * length), length, dropout=0.0, seed=0)
    texts = sentencepiece.SentencePieceProcessor(model_proto=model).decode([ids.tolist() for ids in passages])
    rows = pack(passages, length, rng)
    return Validation(rows, int(np.sum(rows.targets >= 0)), sum(len(text.encode()) for text in texts))


def train(
    config: LlamaConfig,
    recipe: Recipe,
    books: Sequence[Book],
    model: bytes,
    valid: Validation,
    resumed: Kept | None = None,
    keep: Callable[[Kept], None] = lambda kept: None,
) -> Generator[tuple[dict[str, Any], Params | None], None, None]:
    """Yields a flat dict of figures for each evaluation. If its validation loss is the lowest yet, the params come too
    (float32, on the host). Ends after recipe.steps, or early once the loss no longer falls. `keep` receives the state
    after each evaluation. A run with that as `resumed` gets the same weights as an uninterrupted one, on the same
    machine."""
    from tqdm import tqdm

    state, done = (resumed.state, list(resumed.rows)) if resumed else (begin(config, recipe, recipe.seed), [])
    first, spent = (done[-1]["step"], done[-1]["seconds"]) if done else (0, 0.0)
    best, since, losses, start = math.inf, 0, [], time.monotonic() - spent
    for row in done:
        since, best = 0 if row["valid_loss"] < best else since + 1, min(best, row["valid_loss"])
    if done and since == recipe.patience:
        return
    blocks = batches(books, model, (BLOCK, recipe.rows, config.context), recipe.subword_dropout, recipe.seed)
    with contextlib.closing(blocks), tqdm(total=recipe.steps, unit="step", mininterval=1) as bar:
        for step in range(BLOCK, recipe.steps + 1, BLOCK):
            epoch, rows = next(blocks)
            if step <= first:
                bar.update(BLOCK)
                continue
            state, block = train_steps(state, rows, config=config, recipe=recipe)
            losses += np.asarray(block).tolist()
            bar.update(BLOCK)
            if step % recipe.eval_every and step != recipe.steps:
                continue
            loss, train_loss, losses = valid.loss(state.params, config, recipe.compute), float(np.mean(losses)), []
            loss = round(loss, 4)  # as it is written, so that a resumed run compares the same values
            bar.set_postfix(train=f"{train_loss:.3f}", valid=f"{loss:.3f}")
            since = 0 if loss < best else since + 1
            best = min(best, loss)
            row = {"step": step, "epoch": epoch, "train_loss": round(train_loss, 4), "valid_loss": loss}
            row["seconds"] = round(time.monotonic() - start, 1)
            done.append(row)
            yield row, jax.device_get(state.params) if since == 0 else None
            keep(Kept(state, done))
            if since == recipe.patience:
                return
