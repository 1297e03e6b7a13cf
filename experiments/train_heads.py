"""Trains models that differ only in their KV heads, for claim C29: all, a quarter and one, with several seeds.

    python -m experiments.train_heads --corpus tales.txt --valid oz.txt

All see the same rows in the same order. A seed decides the weights and the dropout. The seeds of one number of KV heads
train side by side (vmap). A model is scored on the held-out text after every `--eval-every` steps, with weights in
bfloat16. Models are not kept, as a run takes only minutes of a GPU. `nats` is per token, after `step` steps.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

from experiments.result_file import ResultFile
from experiments.train_small import BOS, EOS
from experiments.training.data import Book, Rows, batches, read_books, train_tokenizer
from experiments.training.fit import BLOCK, Recipe, TrainState, Validation, begin, make_validation, sum_nats, train_step
from jllm.config import LlamaConfig
from jllm.errors import ConfigError, JllmError
from pallas_kernels.bench.command import Parser, add_result_options, interruptible
from pallas_kernels.bench.numbers import positive, seed_number

CONFIG = LlamaConfig(
    "LlamaForCausalLM", 4096, 512, 1408, num_layers=6, num_heads=8, num_kv_heads=8, head_dim=64, context=512,
    tie_embeddings=True, bos_id=BOS, eos_ids=(EOS,),
)  # fmt: skip
RECIPE = Recipe(
    steps=600, rows=64, lr=2e-3, warmup=60, weight_decay=0.1, dropout=0.1, subword_dropout=0.0, eval_every=100,
    patience=0, seed=0, compute="bfloat16",
)  # fmt: skip


@partial(jax.jit, static_argnames=("config", "recipe"), donate_argnames="states")
def train_seeds(states: TrainState, rows: Rows, *, config: LlamaConfig, recipe: Recipe) -> TrainState:
    """Returns states with a leading axis of seeds, after a step on each leading index of rows [steps, B, L]."""

    def step(states: TrainState, rows: Rows) -> tuple[TrainState, None]:
        return jax.vmap(lambda state: train_step(state, rows, config, recipe)[0])(states), None

    return jax.lax.scan(step, states, rows)[0]


def family(
    config: LlamaConfig,
    recipe: Recipe,
    books: Sequence[Book],
    model: bytes,
    valid: Validation,
    kv_heads: Sequence[int],
    seeds: Sequence[int],
) -> Iterator[dict[str, Any]]:
    """Yields a row for each number of KV heads, evaluation and seed."""
    for count in kv_heads:
        c, start = replace(config, num_kv_heads=count), time.monotonic()
        states = jax.vmap(lambda seed: begin(c, recipe, seed))(jnp.asarray(seeds, jnp.uint32))  # noqa: B023
        parameters = sum(leaf.size for leaf in jax.tree.leaves(states.params)) // len(seeds)
        score = jax.vmap(partial(sum_nats, config=c, dtype=recipe.compute), in_axes=(0, None))
        blocks = batches(books, model, (BLOCK, recipe.rows, c.context), recipe.subword_dropout, recipe.seed)
        for step in tqdm(range(BLOCK, recipe.steps + 1, BLOCK), desc=f"{count} KV heads", disable=None):
            epoch, rows = next(blocks)
            states = train_seeds(states, rows, config=c, recipe=recipe)
            if step % recipe.eval_every and step != recipe.steps:
                continue
            for seed, nats in zip(seeds, jax.device_get(score(states.params, valid.rows)).tolist()):
                row = {"heads": c.num_heads, "kv_heads": count, "seed": seed, "step": step, "epoch": epoch}
                row |= {"parameters": parameters, "nats": round(nats / valid.tokens, 5)}
                bits = round(valid.bits_per_byte(nats / valid.tokens), 5)
                yield row | {"bits_per_byte": bits, "seconds": round(time.monotonic() - start, 1)}
        blocks.close()


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--corpus", required=True, metavar="FILE", help="corpus, in train_small's format")
    parser.add_argument("--valid", required=True, metavar="FILE", help="held-out text")
    parser.add_argument(
        "--kv-heads", nargs="+", type=positive, default=[8, 2, 1], help="numbers of KV heads of the models"
    )
    parser.add_argument(
        "--seeds", nargs="+", type=seed_number, default=[0, 1, 2], help="seeds of weights and dropout, at least two"
    )
    parser.add_argument(
        "--steps", type=positive, default=RECIPE.steps, help="training steps, in tens (default: %(default)s)"
    )
    parser.add_argument("--rows", type=positive, default=RECIPE.rows, help="rows per step (default: %(default)s)")
    parser.add_argument(
        "--eval-every", type=positive, default=RECIPE.eval_every, metavar="STEPS", help="steps between scores, in tens"
    )
    add_result_options(parser)
    return parser.parse_args(argv)


def recipe_of(args: argparse.Namespace) -> Recipe:
    if args.steps % BLOCK or args.eval_every % BLOCK:
        raise ConfigError(f"--steps and --eval-every are multiples of {BLOCK}, not {args.steps} and {args.eval_every}")
    if len(set(args.seeds)) < 2:
        raise ConfigError("--seeds: an interval over seeds takes at least two")
    compute = "float32" if jax.default_backend() == "cpu" else RECIPE.compute
    warmup = min(RECIPE.warmup, args.steps // 2)
    sizes = {"steps": args.steps, "rows": args.rows, "eval_every": args.eval_every}
    return replace(RECIPE, **sizes, warmup=warmup, compute=compute)


@interruptible
def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    args = parse_args(argv)
    command = ["python", "-m", "experiments.train_heads", *argv]
    try:
        recipe = recipe_of(args)
        for count in args.kv_heads:
            replace(CONFIG, num_kv_heads=count)  # refuses a number that does not divide the heads
        books, held = read_books(args.corpus), read_books(args.valid)
        model = train_tokenizer(books, CONFIG.vocab_size)
        valid = make_validation(held, model, CONFIG.context)
        about = {"model": asdict(CONFIG), "recipe": asdict(recipe), "valid_tokens": valid.tokens}
        with ResultFile(args.results, "train_heads", command, args.label, **about) as results:
            for row in family(CONFIG, recipe, books, model, valid, args.kv_heads, args.seeds):
                results.add(row)
                print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
            results.finish(bars=[], complete=True)
    except JllmError as error:
        print(f"train_heads: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(results.document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
