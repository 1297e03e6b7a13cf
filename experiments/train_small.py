"""Trains the small model that jllm bundles: a LLaMA of a few million parameters that tells fairy tales.

experiments/training/fit.py describes the training. It keeps the weights with the lowest validation loss. With --experts
it is a Mixtral, whose layers have so many MLPs instead of one.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from experiments.result_file import ResultFile
from experiments.training.data import Book, read_books, train_tokenizer
from experiments.training.fit import BLOCK, STORED, Recipe, Validation, begin, make_validation, train
from experiments.training.resume import FILE, forget, keep, kept
from jllm.config import Experts, LlamaConfig
from jllm.errors import ConfigError, InputFileError, JllmError, OutputError
from jllm.files.load_params import load_params
from jllm.files.run_identity import digest
from jllm.files.save import save
from pallas_kernels.bench.command import INTERRUPTED, Parser, add_result_options, interruptible
from pallas_kernels.bench.numbers import seed_number

BOS, EOS = 1, 2  # SentencePiece's own ids


@interruptible
def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return 0 if run(parse_arguments(argv), argv) else INTERRUPTED
    except JllmError as error:
        print(f"train_small: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace, argv: list[str]) -> bool:
    """Reads, trains and saves. Results and the best model are written at every evaluation, so a broken run leaves them.
    Returns whether it finished."""
    out, config, recipe = Path(args.out), make_config(args), make_recipe(args)
    if (out / "model.safetensors").exists() and not (out / FILE).exists():
        raise OutputError(f"{out}: already holds a model; name another folder with --out, or remove it")
    books = read_books(args.corpus)
    books, held = (books, read_books(args.valid)) if args.valid else hold_out(books)
    model = train_tokenizer(books, config.vocab_size)
    valid = make_validation(held, model, config.context)
    command = ["python", "-m", "experiments.train_small", *argv]
    about = {"model": asdict(config), "recipe": asdict(recipe)}
    most = SIZES[args.size].most
    with ResultFile(args.results, "train_small", command, args.label, **about) as results:
        complete = train_and_save(out, config, recipe, books, model, valid, results, most)
    found = results.document
    print(f"{out}: {found['parameters']:,} parameters, {found['bars'][0]['value']:.1f} MB;", end=" ")
    print(f"validation loss {found['valid_loss']:.4f} nats/token,", end=" ")
    print(f"{found['valid_bits_per_byte']:.4f} bits/byte; figures in {results.path}")
    if args.json:
        print(json.dumps(found))
    return complete


def train_and_save(
    out: Path,
    config: LlamaConfig,
    recipe: Recipe,
    books: list[Book],
    model: bytes,
    valid: Validation,
    results: ResultFile,
    most: float,
) -> bool:
    """Trains, and saves the best model so far, even after an interruption. Returns whether it finished. A run resumes
    from what an earlier one left in `out`. The folder may take at most `most` MB."""
    best, complete = None, False
    text = digest([model, *("\n".join(book).encode() for book in books)])
    about = {"model": asdict(config), "recipe": asdict(recipe), "text": text}
    left = kept(out, about, jax.eval_shape(lambda: begin(config, recipe, recipe.seed)))
    for row in left.rows if left else ():
        results.add(row)
    if left and (out / "model.safetensors").exists():
        best = load_params(out, config, jnp.float32)
    try:
        for row, params in train(config, recipe, books, model, valid, left, partial(keep, out, about)):
            results.add(row)
            if params is not None:
                best = params
                save(out, jax.tree.map(lambda leaf: jnp.asarray(leaf, STORED), best), config)
                save_tokenizer(out, model, config)
        complete = True
    except KeyboardInterrupt:
        if best is None:
            raise
        print("train_small: interrupted; the best model so far is kept; the same command goes on", file=sys.stderr)
    if best is None:
        raise ConfigError("the loss was never a number: lower --lr")
    loss = valid.loss(best, config, "float32")
    size = sum(file.stat().st_size for file in out.iterdir() if file.name != FILE) / 1e6
    count = sum(leaf.size for leaf in jax.tree.leaves(best))
    figures = {"parameters": count, "valid_loss": round(loss, 4), "valid_tokens": valid.tokens}
    figures |= {"valid_bits_per_byte": round(valid.bits_per_byte(loss), 4), "valid_bytes": valid.bytes}
    bar = {
        "name": "size of the model's folder",
        "value": round(size, 3),
        "unit": "MB",
        "bar": f"<= {most:g}",
        "met": size <= most,
    }
    if complete:
        forget(out)
    results.finish(bars=[bar], complete=complete, **figures)
    return complete


def hold_out(books: list[Book], fraction: float = 0.02) -> tuple[list[Book], list[Book]]:
    """Splits off the last paragraphs of the longest book, to validate without a file."""
    count = math.ceil(fraction * sum(map(len, books)))
    longest = max(range(len(books)), key=lambda i: len(books[i]))
    book = books[longest]
    if count >= len(book):
        raise InputFileError("the corpus is too short to hold out a part of it; name a text with --valid")
    return [*books[:longest], book[:-count], *books[longest + 1 :]], [book[-count:]]


def save_tokenizer(out: Path, model: bytes, config: LlamaConfig) -> None:
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": True,
        "add_eos_token": False,
        "legacy": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.context,
    }
    (out / "tokenizer.model").write_bytes(model)
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def make_config(args: argparse.Namespace) -> LlamaConfig:
    mixture = Experts(args.experts, args.chosen, args.ffn) if args.experts else None
    return LlamaConfig(
        architecture="LlamaForCausalLM" if mixture is None else "MixtralForCausalLM",
        vocab_size=args.vocab,
        hidden_size=args.width,
        intermediate_size=args.ffn,
        num_layers=args.layers,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        context=args.context,
        tie_embeddings=True,
        experts=mixture,
        bos_id=BOS,
        eos_ids=(EOS,),
    )


def make_recipe(args: argparse.Namespace) -> Recipe:
    rounded: dict[str, Any] = {name: BLOCK * math.ceil(getattr(args, name) / BLOCK) for name in ("steps", "eval_every")}
    positive = ("steps", "rows", "lr", "eval_every", "patience")
    for name in (*positive, "warmup", "weight_decay", "balance"):
        value = getattr(args, name)
        if not (0 < value < math.inf if name in positive else 0 <= value < math.inf):
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} {value} must be {'positive' if name in positive else 'zero or more'}")
    for name in ("dropout", "subword_dropout"):
        if not 0 <= getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)} must be in [0, 1)")
    if args.warmup >= rounded["steps"]:
        raise ConfigError(f"--warmup {args.warmup} must be less than --steps {rounded['steps']}")
    compute = args.compute or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    names = Recipe.__dataclass_fields__
    return Recipe(**{name: getattr(args, name) for name in names} | rounded | {"compute": compute})


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        __doc__,
        prog="python -m experiments.train_small",
        epilog="example: python -m experiments.train_small --corpus tales.txt --valid oz.txt --out my_model; "
        'then: python -m jllm.generate --model my_model "Once upon a time"',
    )
    text = parser.add_argument_group("text and output")
    text.add_argument(
        "--corpus", required=True, metavar="FILE", help="UTF-8 text, one paragraph per line, a blank line between books"
    )
    text.add_argument("--valid", metavar="FILE", help="held-out text (default: the last 2%% of the corpus)")
    text.add_argument(
        "--out", default="trained_model", metavar="DIR", help="folder of the new model (default: %(default)s)"
    )
    sizes = "; ".join(f"{name}: {size.about}" for name, size in SIZES.items())
    parser.add_argument("--size", choices=SIZES, default="bundled", help=f"size that sets the defaults: {sizes}")
    shape = parser.add_argument_group("shape of the model (defaults: the bundled one's)")
    for name, value, meaning in SHAPE:
        shape.add_argument(f"--{name}", type=int, metavar="N", help=f"{meaning} (default: {value})")
    recipe = parser.add_argument_group("recipe (defaults: the bundled model's)")
    for name, default, meaning in RECIPE:
        kind = seed_number if name == "seed" else type(default)
        recipe.add_argument(f"--{name}", type=kind, metavar="X", help=f"{meaning} (default: {default})")
    compute = "dtype of the forward and backward pass (default: float32 on a CPU, else bfloat16)"
    recipe.add_argument("--compute", choices=("float32", "bfloat16"), help=compute)
    add_result_options(parser)
    args = parser.parse_args(argv)
    of_mixtures = [name for name in ("chosen", "balance") if getattr(args, name) is not None]
    for name, default, _ in (*SHAPE, *RECIPE):
        if getattr(args, name.replace("-", "_")) is None:
            setattr(args, name.replace("-", "_"), SIZES[args.size].options.get(name, default))
    if of_mixtures and not args.experts:
        parser.error(f"--{of_mixtures[0]} needs --experts, or --size mixture")
    return args


SHAPE = (
    ("vocab", 4096, "tokens of the new vocabulary"),
    ("width", 256, "model dim E"),
    ("ffn", 704, "MLP dim F"),
    ("layers", 8, "decoder layers"),
    ("heads", 4, "query heads H"),
    ("kv-heads", 2, "KV heads K"),
    ("head-dim", 64, "head dim D"),
    ("context", 1024, "tokens of a row, and of the longest passage"),
    ("experts", 0, "experts of each layer, each an MLP; 0: one MLP"),
    ("chosen", 2, "experts that compute a token"),
)
RECIPE: tuple[tuple[str, int | float, str], ...] = (
    ("steps", 2000, "most steps, rounded up to tens"),
    ("rows", 16, "rows per step"),
    ("lr", 3e-3, "peak learning rate"),
    ("warmup", 100, "steps to the peak"),
    ("weight-decay", 0.3, "weight decay of AdamW, times the learning rate"),
    ("dropout", 0.1, "dropout probability of a unit in a row"),
    ("subword-dropout", 0.0, "probability of leaving out a merge of subwords; it made the model worse"),
    ("balance", 0.01, "weight of the loss that gives experts equally many tokens"),
    ("eval-every", 100, "steps between validations, rounded up to tens"),
    ("patience", 8, "stop after this many validations without gain"),
    ("seed", 0, "seed of the weights, the order and all dropout"),
)


@dataclass(frozen=True)
class Size:
    """Changed defaults, and the limit of the model's folder."""

    about: str
    most: float  # MB
    options: Mapping[str, int | float] = MappingProxyType({})


SIZES = {
    "bundled": Size("the 7 M parameters that come with jllm", 16),
    "subject": Size(
        "34 M, for accuracy experiments; every kernel takes its widths",
        71,
        MappingProxyType(
            {"vocab": 8192, "width": 512, "ffn": 1536, "layers": 10, "heads": 8, "rows": 32, "lr": 2e-3, "steps": 1500}
        ),
    ),
    "mixture": Size(
        "a mixture of 3.6 M, for experiments with experts",
        8,
        MappingProxyType(
            {"vocab": 2048, "width": 128, "ffn": 256, "layers": 4, "head-dim": 32, "context": 256}
            | {"experts": 8, "rows": 8, "steps": 1000, "weight-decay": 0.1, "dropout": 0.0}
        ),
    ),
}


if __name__ == "__main__":
    sys.exit(main())
