"""Trains the model that finds needles (experiments.needles): a LLaMA of two layers that can only recall.

    python -m experiments.train_needle --out experiments/needle

Such a model needs two heads: one looks a token back, the other looks for what stood before (induction heads, Olsson et
al., arXiv 2209.11895). Finding them from random weights takes too long. So both begin as drafts, which give the
`accuracy` of the first row. Training makes them exact: AdamW, on contexts of both SIZES in turn, with new draws at
every step. Figures use contexts that no step has seen. --random begins with random weights.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from experiments.needles import VOCAB, draw, questions
from experiments.result_file import ResultFile, make_folder
from experiments.training.later import optax
from jllm.config import LlamaConfig
from jllm.errors import JllmError, OutputError
from jllm.files.save import save
from jllm.model.backbone import Packed, packed_logits
from jllm.model.param_specs import init_params
from jllm.model.params import Params
from pallas_kernels.bench.bars import bar
from pallas_kernels.bench.command import Parser, add_result_options, interruptible
from pallas_kernels.bench.numbers import positive, positive_number, seed_number

CONFIG = LlamaConfig(
    "LlamaForCausalLM", VOCAB, 128, 128, num_layers=2, num_heads=1, num_kv_heads=1, head_dim=128, context=1024,
    rope_theta=500_000.0, tie_embeddings=True, bos_id=0,
)  # fmt: skip
SIZES = ((96, 31), (384, 127))  # pairs and questions of a context
ENOUGH = 0.95  # of the questions


def drafted(config: LlamaConfig, seed: int) -> Params:
    """Returns weights (float32) with both heads drafted. The first layer's head looks one token back, and adds that
    token's embedding, turned, to the stream. The second layer's head compares embeddings with turned ones, and copies
    the embedding that it finds.

    Channel 0 is the same in all tokens: looking one back needs a query that does not depend on the token. Embeddings
    are compared in the dims that rotary embedding hardly turns within the context.
    """
    rng = np.random.default_rng(seed)
    E, D = config.hidden_size, config.head_dim
    params = init_params(config, jax.random.key(seed), jnp.float32)
    turned = np.linalg.qr(rng.normal(size=(E, E)))[0]
    angle = config.rope_theta ** (-np.arange(D // 2) / (D // 2))  # a position turns a pair of dims by this
    back, find = np.zeros((2, 3 * D, E))
    back[:D, 0] = np.concatenate([np.cos(angle), -np.sin(angle)])  # a query that meets the key one place before
    back[D : D + D // 2, 0] = 1
    back[2 * D :] = np.eye(D, E)
    slow = np.flatnonzero(np.tile(angle * config.context < 1, 2))
    seen = rng.normal(size=(len(slow), E)) / math.sqrt(len(slow))
    seen[:, 0] = 0
    find[slow], find[D + slow] = 1.2 * seen, 1.2 * seen @ turned.T
    find[2 * D :] = np.eye(D, E)
    first, second = params.layers
    layers = []
    for layer, qkv, o in ((first, back, 0.1 * turned), (second, find, 0.2 * np.eye(E))):
        attention = replace(layer.attention, qkv=jnp.asarray(qkv, jnp.float32), o=jnp.asarray(o, jnp.float32))
        layers.append(replace(layer, attention=attention))
    embed = rng.normal(size=(config.vocab_size, E)) / math.sqrt(E)
    embed[:, 0] = 0.5
    return replace(params, embed=jnp.asarray(embed, jnp.float32), layers=tuple(layers))


def answers(params: Params, tokens: jax.Array, pairs: int, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns -log p of each answer in a row of tokens, and whether it is the likeliest token: f[Q], bool[Q]."""
    at = questions(pairs, count)
    rows = jnp.arange(len(tokens), dtype=jnp.int32)
    logits = packed_logits(params, CONFIG, Packed(tokens, rows, jnp.zeros_like(rows)))[at]
    right = tokens[at.start + 1 :: 2]
    return optax.softmax_cross_entropy_with_integer_labels(logits, right), logits.argmax(axis=1) == right


def batch(key: jax.Array, rows: int, pairs: int, count: int) -> jax.Array:
    """Returns tokens [rows, L] that ask for `count` pairs, drawn without replacement."""

    def one(key: jax.Array) -> jax.Array:
        key, asked = jax.random.split(key)
        return draw(key, pairs, jax.random.permutation(asked, pairs)[:count])

    return jax.vmap(one)(jax.random.split(key, rows))


def optimizer(lr: float, steps: int) -> "optax.GradientTransformation":
    schedule = optax.warmup_cosine_decay_schedule(0.0, lr, min(20, steps // 2), steps, 0.02 * lr)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01))


@partial(jax.jit, static_argnames=("size", "rows", "lr", "steps"))
def step(params: Params, state: Any, key: jax.Array, *, size: tuple[int, int], rows: int, lr: float, steps: int) -> Any:
    """Returns params and optimizer state after one step, and its loss in nats per answer."""

    def loss(params: Params) -> jax.Array:
        return jnp.mean(jax.vmap(lambda tokens: answers(params, tokens, *size)[0])(batch(key, rows, *size)))

    nats, grads = jax.value_and_grad(loss)(params)
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
        updates, state = optimizer(lr, steps).update(grads, state, params)
    return optax.apply_updates(params, updates), state, nats


@partial(jax.jit, static_argnames=("size", "rows"))
def validate(params: Params, *, size: tuple[int, int], rows: int) -> tuple[jax.Array, jax.Array]:
    """Returns nats per answer and the share of answers found, by weights as they are stored. Contexts have their own
    random key."""
    stored = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(leaf.dtype), params)
    tokens = batch(jax.random.key(1 << 20), rows, *size)
    nats, hits = jax.lax.map(lambda row: answers(stored, row, *size), tokens)
    return jnp.mean(nats), jnp.mean(hits)


def train(params: Params, args: argparse.Namespace) -> Iterator[tuple[dict[str, Any], Params]]:
    """Yields figures and params before the first step, after every `eval_every` steps, and at the end."""
    state, start = optimizer(args.lr, args.steps).init(params), time.monotonic()
    with tqdm(total=args.steps, unit="step", mininterval=1, disable=None) as bar:
        for i in range(args.steps + 1):
            if i % args.eval_every == 0 or i == args.steps:
                nats, share = validate(params, size=SIZES[-1], rows=args.valid_rows)
                row = {"step": i, "nats": round(float(nats), 5), "accuracy": round(float(share), 5)}
                yield row | {"seconds": round(time.monotonic() - start, 1)}, params
            if i < args.steps:
                size = SIZES[i % len(SIZES)]
                rows = max(1, args.tokens // (2 * sum(size)))
                key = jax.random.fold_in(jax.random.key(args.seed), i)
                params, state, _ = step(params, state, key, size=size, rows=rows, lr=args.lr, steps=args.steps)
                bar.update()


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the new model")
    parser.add_argument("--steps", type=positive, default=240, help="training steps")
    parser.add_argument(
        "--tokens", type=positive, default=4096, help="approximate number of tokens per step (default: %(default)s)"
    )
    parser.add_argument("--lr", type=positive_number, default=2e-3, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--eval-every", type=positive, default=40, metavar="STEPS", help="steps between validations")
    parser.add_argument("--valid-rows", type=positive, default=8, help="number of contexts of a validation")
    parser.add_argument("--random", action="store_true", help="begin with random weights")
    parser.add_argument("--seed", type=seed_number, default=0, help="seed of weights and contexts")
    add_result_options(parser)
    return parser.parse_args(argv)


@interruptible
def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    args = parse_args(argv)
    try:
        run(args, ["python", "-m", "experiments.train_needle", *argv])
    except JllmError as error:
        print(f"train_needle: {error}", file=sys.stderr)
        return 2
    return 0


def run(args: argparse.Namespace, command: list[str]) -> None:
    if (args.out / "model.safetensors").exists():
        raise OutputError(f"{args.out}: already holds a model; name another folder with --out, or remove it")
    make_folder(args.out)
    begin = init_params(CONFIG, jax.random.key(args.seed), jnp.float32) if args.random else drafted(CONFIG, args.seed)
    with ResultFile(args.results, "train_needle", command, args.label, model=asdict(CONFIG)) as results:
        for row, now in train(begin, args):
            results.add(row)
            print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
            params = now
        save(args.out, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params), CONFIG)
        size = sum(file.stat().st_size for file in args.out.iterdir()) / 1e6
        found = [
            bar("answers found at the trained context", row["accuracy"], "of all", ENOUGH),
            bar("size of the model's folder", round(size, 3), "MB", 2, most=True),
        ]
        results.finish(bars=found, complete=True, parameters=sum(leaf.size for leaf in jax.tree.leaves(params)))
    if args.json:
        print(json.dumps(results.document))


if __name__ == "__main__":
    sys.exit(main())
