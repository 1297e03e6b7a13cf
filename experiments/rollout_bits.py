"""Measures how many log-probabilities that an engine draws have the bits of the trainer's.

    python -m experiments.rollout_bits --config configs/llama-3.2-1b.json [--schemes bf16 w8a8] [--kv model int8-g8]

Weights are random. An engine with deterministic=True serves prompts that share beginnings, from a pool too small for
all. So its batches are mixed, and it preempts and finds prefixes. Then jllm.token_logprobs scores whole sequences.
`equal` is the share of drawn tokens with the same bits, and `gap` the largest difference in nats. With
--not-deterministic both are what other systems live with.
"""

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

import jllm
from experiments.arguments import claim_memory
from experiments.result_file import bar, command_line, record, refusing
from experiments.steps.timer import model_config, random_params
from jllm.engine.engine import Engine
from jllm.model.model import Model
from jllm.quant.quantize import quantize
from jllm.quant.schemes import PLAIN
from jllm.step.buckets import Bucket
from pallas_kernels.bench.command import Parser, add_result_options
from pallas_kernels.bench.numbers import positive

Row = dict[str, Any]
KV = ("model", "int8-g8", "fp8")
PAGE = 16  # tokens
SHARED = 40  # tokens of a beginning that several prompts have, at most
SCORED = 8  # sequences that are scored at once


def prompts_of(count: int, vocabulary: int) -> list[list[int]]:
    """Returns prompts of 2 to 3 * SHARED tokens. Each begins as the one before or anew."""
    rng = np.random.default_rng(0)
    found: list[list[int]] = []
    base: list[int] = []
    for i in range(count):
        base = rng.integers(3, vocabulary, SHARED).tolist() if i % 4 == 0 else base
        own = rng.integers(3, vocabulary, rng.integers(1, 2 * SHARED)).tolist()
        found.append(base[: rng.integers(1, SHARED + 1)] + own)
    return found


def engine_of(model: Model, kv: str, args: argparse.Namespace) -> Engine:
    """Returns an engine whose pool holds about half of what its slots want."""
    slots, chunk = args.slots, 2 * args.slots
    return Engine(
        model,
        max_slots=slots,
        max_step_tokens=slots + chunk,
        page_size=PAGE,
        num_pages=slots * (3 * SHARED + args.new_tokens) // (2 * PAGE),
        buckets=(Bucket(slots, 0, 0), Bucket(slots, chunk, 4)),
        kv_cache=None if kv == KV[0] else kv,
        deterministic=args.deterministic,
    )


def measure(model: Model, scheme: str, kv: str, args: argparse.Namespace) -> Row:
    """Returns how the drawn log-probabilities compare with the trainer's. `model` is not quantized."""
    params = model.params if scheme == PLAIN else quantize(model.params, scheme)
    served = Model(model.config, params, None)
    engine = engine_of(served, kv, args)
    sampling = partial(jllm.SamplingParams, max_new_tokens=args.new_tokens, ignore_eos=True, logprobs=0)
    prompts = prompts_of(-(-args.tokens // args.new_tokens), model.config.vocab_size)
    ids = [engine.submit(prompt, sampling(seed=i)) for i, prompt in enumerate(prompts)]
    done = {event.id: event.completion for event in engine.run() if event.completion}
    options, counts = engine.token_logprobs_options(), engine.metrics()
    engine.close()
    score = jax.jit(partial(jllm.token_logprobs, config=model.config, **options))
    length = max(map(len, prompts)) + args.new_tokens
    away: list[np.ndarray] = []
    for first in tqdm(range(0, len(ids), SCORED), desc=f"{scheme} {kv}", disable=None):
        own = range(first, min(first + SCORED, len(ids)))
        tokens, lengths = np.zeros((SCORED, length), np.int32), np.zeros(SCORED, np.int32)
        for row, i in enumerate(own):
            whole = [*prompts[i], *done[ids[i]].token_ids]
            tokens[row, : len(whole)], lengths[row] = whole, len(whole)
        found = np.asarray(score(model.params, tokens=tokens, lengths=lengths))
        for row, i in enumerate(own):
            drawn = [entry.logprob for entry in done[ids[i]].logprobs or ()]
            away.append(found[row, len(prompts[i]) - 1 :][: len(drawn)] - np.asarray(drawn, found.dtype))
    each = np.abs(np.concatenate(away))
    return {
        "scheme": scheme,
        "kv": kv,
        "deterministic": args.deterministic,
        "tokens": each.size,
        "preemptions": counts["preemptions"],
        "prefix_hits": counts["prefix_hits"],
        "equal": round(float(np.mean(each == 0)), 6),
        "gap": float(each.max()),
    }


def bars(rows: list[Row]) -> Iterator[Row]:
    """Yields the bar of every deterministic row: all bits are equal."""
    for row in rows:
        if row["deterministic"]:
            yield bar(f"{row['model']} {row['scheme']} {row['kv']}, equal", row["equal"], "1", 1.0)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--config", default="configs/llama-3.2-1b.json", help="file with the model's shape")
    parser.add_argument("--layers", type=positive, help="use only this many layers, for a trial")
    parser.add_argument("--schemes", nargs="+", default=[PLAIN], help="schemes of weights")
    parser.add_argument("--kv", nargs="+", default=list(KV), help="KV formats; model: the weights' dtype")
    parser.add_argument("--tokens", type=positive, default=16384, help="drawn tokens, at least")
    parser.add_argument("--new-tokens", type=positive, default=128, help="drawn tokens of a sequence")
    parser.add_argument("--slots", type=positive, default=32, help="sequences that run at once, at most")
    parser.add_argument("--not-deterministic", dest="deterministic", action="store_false", help="draw in any order")
    add_result_options(parser)
    return parser.parse_args(argv)


def rows(args: argparse.Namespace) -> Iterator[Row]:
    config = model_config(args.config, args.layers)
    model = Model(config, random_params(config, "bfloat16"), None)
    for scheme in args.schemes:
        for kv in args.kv:
            yield {"model": Path(args.config).stem, **measure(model, scheme, kv, args)}


@refusing
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    claim_memory()
    return record(args, "rollout_bits", command_line("rollout_bits", argv), rows(args), bars=bars)


if __name__ == "__main__":
    sys.exit(main())
