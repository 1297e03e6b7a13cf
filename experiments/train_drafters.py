"""Trains drafters of speculative decoding for a model: a one-layer draft model, Medusa heads and an EAGLE head.

    python -m experiments.train_drafters --corpus tales.txt --valid oz.txt --out drafters
    python -m experiments.train_drafters --drafters medusa --steps 2000

The draft model first learns the next token of the documents, then is distilled. Like the heads, it learns the target's
whole distribution after each token. Half of these texts are the target's own, after prompts cut from documents,
greedily and at temperature 1. The others are documents. Documents are passages of --corpus, or without one the model's
text at temperature 1 from its begin token. Figures use prompts from --valid, or from the last tenth of the documents.
They are how often each draft in a chain is what the target draws, at temperatures 0 and 1, with the target's own noise.

Weights are plain pytrees that jllm serves, trained by plain functions like train_small's: no flax.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.result_file import ResultFile, make_folder, refusing
from experiments.training.data import Rows, pack
from experiments.training.drafters import (
    Known,
    Passes,
    accepted,
    by_depth,
    draft_passes,
    eagle_passes,
    medusa_passes,
    teach,
)
from experiments.training.drafters_fit import Loss, Recipe, fit
from experiments.training.drafters_texts import STORED, Continuation, Texts, know_rows, make_texts
from experiments.training.fit import row_nats
from jllm.config import LlamaConfig
from jllm.engine.options import MOST_DRAFTS
from jllm.errors import ConfigError, OutputError
from jllm.files.drafters import DRAFTS, save_heads
from jllm.files.load import BUNDLED, load
from jllm.files.save import save
from jllm.model.model import Model
from jllm.model.param_specs import init_params
from jllm.model.params import Params
from jllm.model.sampling import Sampling, neutral_sampling
from jllm.speculative.eagle import init_eagle
from jllm.speculative.medusa import init_medusa
from jllm.speculative.tree import chain
from pallas_kernels.bench.command import Parser, add_result_options
from pallas_kernels.bench.numbers import non_negative_number, positive, positive_number, seed_number

FILES = {"draft": "draft", "medusa": "medusa.safetensors", "eagle": "eagle.safetensors"}  # names in --out


def text_nats(weights: Params, params: Params, rows: Rows, *, config: LlamaConfig) -> jax.Array:
    """Returns a draft model's loss on documents [B, L], in nats per token."""
    nats = jax.vmap(partial(row_nats, config=config), in_axes=(None, 0))(weights, rows)
    return jnp.sum(nats) / jnp.sum(rows.targets >= 0).astype(nats.dtype)


class Measure:
    """Acceptance of drafters on held-out texts, by temperature."""

    def __init__(self, model: Model, held: Sequence[Continuation], drafts: int):
        self.model, self.drafts, self.parts = model, drafts, {}
        length = max(len(text.tokens) for text in held) - 1
        for temperature in sorted({text.temperature for text in held}):
            some = [text for text in held if text.temperature == temperature]
            rows = one_a_row([text.tokens for text in some], length)
            hidden = know_rows(model.params, rows, config=model.config)
            first = np.array([text.prompt for text in some], np.int32)
            self.parts[temperature] = (Known(rows, hidden), sampling_of(some), first)

    def rows(self, weights: Any, passes: Passes, **named: Any) -> Iterator[dict[str, Any]]:
        """Yields a row for each temperature and depth, of weights as they will be stored."""
        weights = jax.tree.map(lambda leaf: leaf.astype(STORED).astype(jnp.float32), weights)
        options: dict[str, Any] = {"passes": passes, "config": self.model.config, "drafts": self.drafts}
        for temperature, part in self.parts.items():
            for row in by_depth(np.asarray(accepted(weights, self.model.params, *part, **options))):
                yield {**named, "temperature": temperature, **row}


def one_a_row(texts: Sequence[np.ndarray], length: int) -> Rows:
    """Returns rows [B, length] of one text each, in order."""
    parts = [pack([text], length, np.random.default_rng(0)) for text in texts]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def sampling_of(texts: Sequence[Continuation]) -> Sampling:
    """Returns the sampling parameters of texts [B]."""
    temperature, seed = np.array([t.temperature for t in texts], np.float32), np.array([t.seed for t in texts])
    return replace(neutral_sampling(len(texts)), temperature=temperature, seed=seed.astype(np.uint32))


def train_draft(
    model: Model, texts: Texts, args: argparse.Namespace, recipe: Recipe, measure: Measure
) -> Iterator[dict[str, Any]]:
    """Yields figures of a draft model, before and after distillation. It is saved as a model's directory."""
    config = draft_config(model.config, args.width, args.ffn)
    passes = partial(draft_passes, config=config)
    measured = partial(draft_passes, config=config, depth=args.drafts)
    weights = init_draft(model.params, config, recipe.seed)
    loss: Loss = partial(text_nats, config=config)
    weights, losses = fit(weights, model.params, texts.documents, loss, recipe, "draft")
    yield from measure.rows(weights, measured, drafter="draft", learned="documents", loss=last(losses))
    weights, losses = fit(
        weights, model.params, texts.known, teaching(passes, model.config, recipe), recipe, "distilled"
    )
    yield from measure.rows(weights, measured, drafter="draft", learned="distilled", loss=last(losses))
    save(args.out / "draft", jax.tree.map(lambda leaf: leaf.astype(STORED), weights), config)


def init_draft(target: Params, config: LlamaConfig, seed: int) -> Params:
    """Returns random weights with an embedding as near to the target's as its width allows: the main directions of the
    target's head, by their singular values."""
    params = init_params(config, jax.random.key(seed), jnp.float32)
    head = target.embed if target.head is None else target.head
    assert isinstance(head, jax.Array), "a target is loaded as it is stored, not quantized"
    normed = np.asarray(head * target.norm[None], np.float32)
    main = np.linalg.eigh(normed.T @ normed)[1][:, ::-1][:, : config.hidden_size]
    more = ((0, 0), (0, config.hidden_size - main.shape[1]))
    return replace(params, embed=jnp.asarray(np.pad(normed @ main, more)))


def train_medusa(
    model: Model, texts: Texts, args: argparse.Namespace, recipe: Recipe, measure: Measure
) -> Iterator[dict[str, Any]]:
    """Yields figures of Medusa heads that share the target's projection."""
    passes = partial(medusa_passes, config=model.config)
    medusa = init_medusa(model.config, jax.random.key(recipe.seed), chain(args.medusa_heads), jnp.float32)
    loss = teaching(passes, model.config, recipe)
    heads, losses = fit(medusa.heads, model.params, texts.known, loss, recipe, "medusa")
    yield from measure.rows(heads, passes, drafter="medusa", learned="distilled", loss=last(losses))
    save_heads(args.out / FILES["medusa"], replace(medusa, heads=heads), model.params, dtype=STORED)


def train_eagle(
    model: Model, texts: Texts, args: argparse.Namespace, recipe: Recipe, measure: Measure
) -> Iterator[dict[str, Any]]:
    """Yields figures of an EAGLE head, which learns from `--passes` drafts in a row. At first it leaves the hidden
    state nearly unchanged."""
    passes = partial(eagle_passes, config=model.config, depth=args.passes)
    measured = partial(eagle_passes, config=model.config, depth=args.drafts)
    eagle = init_eagle(model.config, jax.random.key(recipe.seed), chain(DRAFTS), jnp.float32)
    E = model.config.hidden_size
    weights = replace(eagle.head, fc=eagle.head.fc.at[:, E:].set(jnp.eye(E)))
    loss = teaching(passes, model.config, recipe)
    weights, losses = fit(weights, model.params, texts.known, loss, recipe, "eagle")
    yield from measure.rows(weights, measured, drafter="eagle", learned="distilled", loss=last(losses))
    save_heads(args.out / FILES["eagle"], replace(eagle, head=weights), model.params, dtype=STORED)


def draft_config(config: LlamaConfig, width: int, ffn: int) -> LlamaConfig:
    """Returns one layer of a LLaMA with the target's vocabulary and head dim. Raises ConfigError for a width that heads
    do not divide."""
    heads, rest = divmod(width, config.head_dim)
    if rest or not heads:
        raise ConfigError(f"--width {width} must be a multiple of {config.head_dim}, the target's head dim")
    return replace(
        config,
        hidden_size=width,
        intermediate_size=ffn,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=1 if heads % 2 else heads // 2,
        windows=(),
        tie_embeddings=True,
    )


def teaching(passes: Passes, config: LlamaConfig, recipe: Recipe) -> Loss:
    return partial(teach, passes=passes, config=config, decay=recipe.decay, regression=recipe.regression)


def last(losses: Sequence[float]) -> float:
    """Returns the mean of the last tenth."""
    return round(float(np.mean(losses[-max(1, len(losses) // 10) :])), 4)


TRAINERS = {"draft": train_draft, "medusa": train_medusa, "eagle": train_eagle}


def run(args: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """Trains, measures and saves one drafter after the other. A broken run leaves the finished ones."""
    recipe, start = make_recipe(args), time.monotonic()
    for kind in args.drafters:
        if (args.out / FILES[kind]).exists():
            raise OutputError(f"{args.out / FILES[kind]}: is there already; name another folder with --out")
    model = load(args.model, dtype="float32")
    # Bad options fail before hours of work.
    draft_config(model.config, args.width, args.ffn)
    for name in ("length", "longest"):
        if getattr(args, name) > model.config.context:
            raise ConfigError(f"--{name} {getattr(args, name)}: the model's context is {model.config.context}")
    for folder in filter(None, (args.out, args.texts_folder)):
        make_folder(folder)
    command = ["python", "-m", "experiments.train_drafters", *argv]
    with ResultFile(args.results, "train_drafters", command, args.label, recipe=vars(recipe)) as results:
        texts = make_texts(model, args, recipe)
        measure = Measure(model, texts.held, args.drafts)
        for kind in args.drafters:
            for row in TRAINERS[kind](model, texts, args, recipe, measure):
                results.add(row)
                print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
        kept = [file for name in FILES.values() for file in (args.out / name, *(args.out / name).glob("*"))]
        size = sum(file.stat().st_size for file in kept if file.is_file()) / 1e6
        results.finish(
            bars=[
                {"name": "size of the drafters", "value": round(size, 3), "unit": "MB", "bar": "<= 8", "met": size <= 8}
            ],
            complete=True,
            documents=count(texts.documents),
            learned=count(texts.known.rows),
            seconds=round(time.monotonic() - start, 1),
        )
    return results.document


def count(rows: Rows) -> dict[str, int]:
    """Returns the number of rows, and of tokens in them."""
    return {"rows": len(rows.tokens), "tokens": int(np.sum(rows.segments >= 0))}


def make_recipe(args: argparse.Namespace) -> Recipe:
    for name in ("drafts", "medusa_heads", "passes"):
        if getattr(args, name) > MOST_DRAFTS:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)}: a chain has at most {MOST_DRAFTS}")
    return Recipe(**{name: getattr(args, name) for name in Recipe.__dataclass_fields__})


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(__doc__, prog="python -m experiments.train_drafters")
    parser.add_argument("--model", default=BUNDLED, help="directory or id (default: the bundled model)")
    parser.add_argument(
        "--drafters", nargs="+", choices=FILES, default=list(FILES), help="drafters to train (default: all)"
    )
    parser.add_argument("--out", type=Path, default=Path("drafters"), help="folder of drafters (default: %(default)s)")
    text = parser.add_argument_group("text")
    text.add_argument("--corpus", metavar="FILE", help="UTF-8 text, one paragraph per line, a blank line between books")
    text.add_argument("--valid", metavar="FILE", help="held-out text (default: a tenth of the documents)")
    text.add_argument(
        "--texts-folder", type=Path, metavar="DIR", help="folder that keeps the model's texts, and is read next time"
    )
    for name, value, meaning in TEXT:
        text.add_argument(f"--{name}", type=positive, default=value, metavar="N", help=meaning)
    recipe = parser.add_argument_group("recipe")
    for name, number, kind, meaning in RECIPE:
        recipe.add_argument(f"--{name}", type=kind, default=number, metavar="X", help=meaning)
    add_result_options(parser)
    return parser.parse_args(argv)


TEXT = (
    ("texts", 500, "number of prompts to continue, and of documents beside them"),
    ("longest", 200, "most new tokens of a text"),
    ("held-texts", 40, "number of held-out prompts at each temperature"),
    ("drafts", 5, "most drafts in a chain to measure"),
)
RECIPE: tuple[tuple[str, int | float, Callable[[str], float], str], ...] = (
    ("steps", 600, positive, "steps of each stage"),
    ("rows", 4, positive, "rows per step"),
    ("length", 512, positive, "tokens of a row, and most tokens of a text"),
    ("lr", 3e-3, positive_number, "peak learning rate"),
    ("weight-decay", 0.1, non_negative_number, "weight decay of AdamW, times the learning rate"),
    ("decay", 0.8, non_negative_number, "weight of a depth in the heads' loss, relative to the previous one"),
    ("regression", 0.3, non_negative_number, "weight of EAGLE's loss of hidden states"),
    ("width", 128, positive, "model dim E of the draft model"),
    ("ffn", 512, positive, "MLP dim F of the draft model"),
    ("medusa-heads", 4, positive, "number of Medusa heads"),
    ("passes", 2, positive, "drafts in a chain that EAGLE learns from"),
    ("seed", 0, seed_number, "seed of weights, texts and their order"),
)


@refusing
def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    args = parse_arguments(argv)
    document = run(args, argv)
    if args.json:
        print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
