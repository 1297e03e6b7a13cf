"""Measures long contexts by position: needles found and perplexity, by KV format, and with a cache that evicts.

    python -m experiments.long_context

Part "needle" asks the model of experiments.train_needle for the value of a key. `accuracy` is the share of correct
answers by the depth of the pair in the context (0 is the beginning), with its 95 % Wilson interval. Each context asks
one question at each depth, so a row's answers are independent. `nats` is the mean -log p of the answers. Part "rope"
has needles in a context twice as long as the longest of --sizes, by scaling of the rotary embedding ("default" has
none).

Part "position" has nats per token of a text by the bundled model. `upto` ends a bin of positions. `nats_95` is its
bootstrap interval over windows. Positions beyond the model's context show the purpose of eviction.

`policy` "all" keeps every token. "4+252" evicts as StreamingLLM does (arXiv 2309.17453): after every 64 tokens it keeps
the first 4 and the last 252, at their positions in the cache. An evicted needle cannot be found. Its rows must be at
chance, or the measure sees something else.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jllm
from experiments.eviction import Policy, read
from experiments.needles import KEYS, VOCAB, draw, questions
from experiments.result_file import ResultFile, command_line, refusing, rounded, told
from experiments.texts.read import BUNDLED_TEXT, read_documents
from jllm.errors import ConfigError, between
from jllm.files.hf_rope import read_rope
from jllm.files.load import BUNDLED
from jllm.model.backbone import head
from jllm.model.model import Model
from pallas_kernels.bench.bars import bar
from pallas_kernels.bench.command import Parser, add_result_options
from pallas_kernels.bench.numbers import positive, seed_number

Row = dict[str, Any]
NEEDLE = Path(__file__).parent / "needle"
DEPTHS = 8  # questions of a context, one in each part of it
BIN = 128  # positions
FLOOR, FOUND = 0.05, 0.95  # of the questions: most by chance, and least if the answer can be found
ALL = "all"
ROPES = ("default", "linear", "dynamic", "yarn")  # LongRoPE's factors are a model's own
LEFT_OUT = ("fp8", "int4-g32", "int4-g32-h")  # left out of perplexity by position, as in quant_accuracy


def kv_formats(head_dim: int) -> tuple[str, ...]:
    """Returns KV formats from 16 bits to four. A group is a whole head, or 32 values."""
    whole = f"int4-g{head_dim}"
    return "bf16", "fp8", "int8-g8", "int4-g32", "int4-g32-h", whole, f"{whole}-zp", f"{whole}-h", f"{whole}-zp-h"


def score(model: Model, states: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns -log p of the targets i32[B, Q] by hidden states [B, Q, E]. Returns also which targets are the likeliest
    token."""
    bare = replace(model.params, layers=())

    @jax.jit
    def one(x: jax.Array, right: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = head(bare, model.config, x)
        nats = -jnp.take_along_axis(jax.nn.log_softmax(logits), right[:, None], axis=1)[:, 0]
        return nats, logits.argmax(axis=1) == right

    found = [one(jnp.asarray(x), jnp.asarray(right)) for x, right in zip(states, targets)]
    nats, hits = (np.stack([np.asarray(pair[i]) for pair in found]) for i in (0, 1))
    return nats, hits


def contexts(count: int, tokens: int, seed: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns rows of at most `tokens` tokens i32[count, L], each with a question per depth in random order. It also
    returns the depths in the order asked i32[count, DEPTHS], and the number of pairs in a context."""
    pairs = (tokens - 1) // 2 - DEPTHS
    rng = np.random.default_rng(seed)
    order = np.stack([rng.permutation(DEPTHS) for _ in range(count)])
    edges = np.arange(DEPTHS + 1) * pairs // DEPTHS
    asked = rng.integers(edges[order], edges[order + 1])
    keys = jax.random.split(jax.random.key(seed), count)
    rows = jax.jit(jax.vmap(draw, in_axes=(0, None, 0)), static_argnums=1)(keys, pairs, jnp.asarray(asked, jnp.int32))
    return np.asarray(rows), order, pairs


def ask(model: Model, kv: str, args: argparse.Namespace, tokens: int, policy: Policy | None = None) -> Row:
    """Returns nats and hits [contexts, DEPTHS] by depth, and the token range of each depth."""
    ids, order, pairs = contexts(args.contexts, tokens, args.seed)
    at = questions(pairs, DEPTHS)
    states = read(model, ids, kv, policy, last=2 * DEPTHS - 1)[:, at]
    nats, hits = (
        np.take_along_axis(x, np.argsort(order), axis=1) for x in score(model, states, ids[:, at.start + 1 :: 2])
    )
    return {"nats": nats, "hits": hits, "edges": 1 + 2 * (np.arange(DEPTHS + 1) * pairs // DEPTHS)}


def wilson(hits: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Returns the 95 % interval of a share (Wilson, 1927)."""
    share, of = hits / count, 1 + z * z / count
    middle, half = share + z * z / (2 * count), z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    return max(0.0, (middle - half) / of), min(1.0, (middle + half) / of)


def shares(nats: np.ndarray, hits: np.ndarray) -> Row:
    found, count = int(hits.sum()), hits.size
    interval = [round(x, 4) for x in wilson(found, count)]
    return {
        "questions": count,
        "accuracy": round(found / count, 4),
        "accuracy_95": interval,
        "nats": float(nats.mean()),
    }


def needle_rows(model: Model, args: argparse.Namespace, policy: Policy) -> Iterator[Row]:
    longest = max(args.sizes)
    plan = [(size, kv, None) for size in args.sizes for kv in kv_formats(model.config.head_dim)]
    for size, kv, kept in [*plan, (longest, "bf16", policy)]:
        found = ask(model, kv, args, size, kept)
        for i in range(DEPTHS):
            start, end = map(int, found["edges"][i : i + 2])
            row: Row = {"part": "needle", "tokens": size, "kv": kv if kept is None else "model"}
            row |= {"policy": kept.name if kept else ALL, "depth": (i + 0.5) / DEPTHS}
            if kept:
                first = int(found["edges"][-1]) - kept.recent  # of the context, not evicted
                row["kept"] = "all" if start >= first else "none" if end <= first else "some"
            yield rounded(row | shares(found["nats"][:, i], found["hits"][:, i]))


def rope_rows(model: Model, args: argparse.Namespace) -> Iterator[Row]:
    size = max(args.sizes)
    tokens = min(2 * size, 2 * (KEYS + DEPTHS) + 1)
    for kind in ROPES:
        _, scaling = read_rope({"rope_scaling": {"type": kind, "factor": 2.0}}, size, kind)
        config = replace(model.config, rope_scaling=scaling, context=2 * size)
        found = ask(replace(model, config=config), "bf16", args, tokens)
        row = {"part": "rope", "tokens": tokens, "kv": "bf16", "rope": kind}
        yield rounded(row | shares(found["nats"], found["hits"]))


def windows_of(model: Model, args: argparse.Namespace) -> np.ndarray:
    """Returns i32[B, 1 + L]: BOS and L tokens of the text, from every multiple of L / 2. Raises ConfigError for too
    few."""
    assert model.tokenizer is not None
    ids = np.asarray(model.tokenizer.encode("\n\n".join(read_documents(args.text)))[1:], np.int32)
    starts = range(0, len(ids) - args.positions + 1, max(1, args.positions // 2))[: args.windows]
    if len(starts) < 2:
        raise ConfigError(f"{args.text}: {len(ids)} tokens; two windows of --positions {args.positions} take more")
    return np.stack([np.r_[model.config.bos_id or 0, ids[i : i + args.positions]] for i in starts]).astype(np.int32)


def position_rows(model: Model, ids: np.ndarray, args: argparse.Namespace, policy: Policy) -> Iterator[Row]:
    rng = np.random.default_rng(args.seed)
    drawn = rng.integers(len(ids), size=(1000, len(ids)))
    names = [kv for kv in kv_formats(model.config.head_dim) if kv not in LEFT_OUT]
    for kv, kept in [*((kv, None) for kv in names), ("model", policy)]:
        nats, _ = score(model, read(model, ids, kv, kept), ids[:, 1:])
        for end in range(BIN, args.positions + 1, BIN):
            means = nats[:, end - BIN : end].mean(axis=1)
            low, high = np.quantile(means[drawn].mean(axis=1), [0.025, 0.975])
            row = {"part": "position", "kv": kv, "policy": kept.name if kept else ALL, "upto": end}
            row |= {"windows": len(ids), "nats": float(means.mean())}
            yield rounded(row) | {"nats_95": [float(f"{x:.5g}") for x in (low, high)]}


def rows(needle: Model, model: Model, args: argparse.Namespace, policy: Policy) -> Iterator[Row]:
    ids = windows_of(model, args)  # a bad text fails before the long measurements
    yield from needle_rows(needle, args, policy)
    yield from rope_rows(needle, args)
    yield from position_rows(model, ids, args, policy)


def bars(found: list[Row]) -> Iterator[Row]:
    """Yields bars for cases in which every answer can be found, and in which none can. So the measure can pass and
    fail."""
    of = [row for row in found if row["part"] == "needle"]
    longest = [row for row in of if row["tokens"] == max(row["tokens"] for row in of)]
    plain = [row["accuracy"] for row in longest if (row["kv"], row["policy"]) == ("bf16", ALL)]
    yield bar("needles found with all of K and V in 16 bits, worst depth", min(plain), "of all", FOUND)
    for kept, text, most in (("all", "kept", False), ("none", "forgotten", True)):
        shares = [row["accuracy"] for row in longest if row.get("kept") == kept]
        if shares:
            value = max(shares) if most else min(shares)
            yield bar(
                f"needles found that were {text}, worst depth", value, "of all", FLOOR if most else FOUND, most=most
            )


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--needle", type=Path, default=NEEDLE, metavar="DIR", help="model of train_needle")
    parser.add_argument("--contexts", type=positive, default=48, help="contexts of each size")
    parser.add_argument("--sizes", nargs="+", type=positive, default=[256, 1024], help="numbers of tokens of a context")
    parser.add_argument("--sinks", type=positive, default=4, help="number of first tokens to keep")
    parser.add_argument("--recent", type=positive, default=252, help="number of last tokens to keep")
    parser.add_argument("--text", type=Path, default=BUNDLED_TEXT, help="UTF-8 text, or .jsonl of documents")
    parser.add_argument(
        "--model", default=BUNDLED, help="model of perplexity, by directory or Hub id (default: the bundled model)"
    )
    parser.add_argument("--positions", type=positive, default=2048, help="tokens per window")
    parser.add_argument("--windows", type=positive, default=6, help="most windows of the text; 2 or more")
    parser.add_argument("--seed", type=seed_number, default=0, help="seed of contexts and intervals")
    add_result_options(parser)
    args = parser.parse_args(argv)
    if args.windows < 2:
        parser.error(f"--windows {args.windows}: an interval over windows takes at least 2")
    return args


def check(model: Model, args: argparse.Namespace) -> None:
    """Raises ConfigError for sizes that no context has."""
    if model.config.vocab_size != VOCAB:
        raise ConfigError(f"--needle {args.needle}: {model.config.vocab_size} tokens, a model of needles has {VOCAB}")
    least, most = 2 * (2 * DEPTHS) + 1, min(model.config.context, 2 * (KEYS + DEPTHS) + 1)
    for size in args.sizes:
        if not least <= size <= most:
            raise ConfigError(f"--sizes {size}: a context has {between(least, most)} tokens")
    if args.positions < BIN:
        raise ConfigError(f"--positions {args.positions}: a window has at least {BIN} tokens")


@refusing
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    needle, model = jllm.load(args.needle), jllm.load(args.model)
    check(needle, args)
    with ResultFile(args.results, "long_context", command_line("long_context", argv), args.label) as result:
        result.fill(rows(needle, model, args, Policy(args.sinks, args.recent)), bars)
    return told(args, result)


if __name__ == "__main__":
    sys.exit(main())
