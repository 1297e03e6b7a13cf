"""Measures how quantization changes generated texts, beside teacher forcing. It also compares serving with the forward
pass.

    python -m experiments.continuations [--schemes w8a8-all nf4] [--kv model int8-g8] [--new-tokens 64]

Documents' beginnings are continued greedily, and compared with the model as loaded. Each scheme has K and V in the
model's dtype, and each KV format has weights as loaded. `agreed` is the mean number of tokens before a continuation
differs (all of them if it never does), with a bootstrap interval over prompts. `same_N` is the share of continuations
that agree for N tokens. `forced_top1` and `forced_kl` come from teacher forcing along the model's own continuations, by
forward passes without a cache. `expected_N` is forced_top1 to the power of N: the share that would agree if tokens
differed independently.

`gap` compares a token's log-probability as served (engine, pages, batch) and by training's forward pass. It is the
largest difference over the scheme's own continuations, in nats. `gap_mean` is the mean. Only schemes have them, since
that pass has no K and V in a cache. The two passes sum in different orders. With rounded activations some then move to
the next code, and change later ones. So the bound depends on their bits (`activations`: 16, 8 or 4). bfloat16 values
have at most 8. `--backend` selects the serving kernels; the forward pass is XLA's. An interrupted run resumes.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import jllm
from experiments.accuracy.rows import PLAIN_KV, kv_name, rounded
from experiments.accuracy.support import check_all_run
from experiments.arguments import add_subject_options, by_name
from experiments.ptq_methods import run_of
from experiments.result_file import ResumedFile, command_line, refusing, told
from experiments.texts.read import read_documents
from jllm.analysis.protocols import encode, find_protocol
from jllm.engine.request import Completion
from jllm.errors import ConfigError
from jllm.model.backbone import Packed, packed_logits
from jllm.model.model import Model
from jllm.model.params import linears
from jllm.quant.rotation import quantize_model
from jllm.quant.schemes import PLAIN, PRESETS
from pallas_kernels.bench.bars import bar
from pallas_kernels.bench.command import Parser, add_result_options
from pallas_kernels.bench.numbers import positive
from pallas_kernels.formats.quantized_weights import QuantizedWeight

Row = dict[str, Any]
SCHEMES = (*(name for name in PRESETS if name not in (PLAIN, "w8a8")), "mxfp8", "nvfp4", "mxfp4")
KV = ("int8-g8", "fp8", "int4-g8")
LENGTHS = (8, 32, 64)
GAPS = {16: 1e-4, 8: 0.25, 4: 1.0}  # bounds of `gap` in nats, by the bits of activations
logits_of = jax.jit(packed_logits, static_argnums=1)


def beginnings(model: Model, args: argparse.Namespace) -> list[list[int]]:
    """Returns the token ids of each document's beginning, if it is long enough. Raises ConfigError for fewer than
    two."""
    protocol = find_protocol("document")
    found = [encode(model.tokenizer, text, protocol)[: args.prompt_tokens] for text in read_documents(args.text)]
    found = [list(ids) for ids in found if len(ids) == args.prompt_tokens][: args.prompts]
    if len(found) < 2:
        raise ConfigError(f"--text: fewer than two documents have {args.prompt_tokens} tokens")
    return found


def continuations(
    model: Model, prompts: Sequence[Sequence[int]], count: int, kv: str, backend: str | None = None
) -> list[Completion]:
    greedy = jllm.SamplingParams(temperature=0, max_new_tokens=count, ignore_eos=True, logprobs=0)
    options: Any = {"kv_cache": kv_name(kv, model.params.dtype), "backend": backend}
    return jllm.generate(model, [list(ids) for ids in prompts], greedy, **options)


def forward_logprobs(model: Model, ids: Sequence[int], count: int) -> np.ndarray:
    """Returns f64[count, V]: log-probabilities before each of the last `count` tokens, by the forward pass without a
    cache."""
    tokens = jnp.asarray(ids, jnp.int32)
    batch = Packed(tokens, jnp.arange(len(ids), dtype=jnp.int32), jnp.zeros_like(tokens))
    logits = logits_of(model.params, model.config, batch)[-count - 1 : -1]
    return np.asarray(jax.nn.log_softmax(logits), np.float64)


def gaps(model: Model, prompts: Sequence[Sequence[int]], found: Sequence[Completion]) -> np.ndarray:
    """Returns f64: the distance of each generated token's log-probability from the forward pass's."""
    each = []
    for prompt, completion in zip(prompts, found, strict=True):
        ids = completion.token_ids
        wanted = forward_logprobs(model, [*prompt, *ids], len(ids))[np.arange(len(ids)), list(ids)]
        each.append(np.abs(wanted - [token.logprob for token in completion.logprobs or ()]))
    return np.concatenate(each)


def agreed(ours: Sequence[int], plain: Sequence[int]) -> int:
    """Returns the number of equal tokens before the first difference."""
    differs = np.flatnonzero(np.asarray(ours) != np.asarray(plain))
    return int(differs[0]) if differs.size else len(plain)


def agreement(found: Sequence[Completion], plain: Sequence[Completion], *, samples: int = 1000, seed: int = 0) -> Row:
    lengths = np.array([agreed(ours.token_ids, want.token_ids) for ours, want in zip(found, plain, strict=True)])
    drawn = np.random.default_rng(seed).integers(len(lengths), size=(samples, len(lengths)))
    interval = np.quantile(lengths[drawn].mean(axis=1), [0.025, 0.975])
    total = len(plain[0].token_ids)
    row: Row = {"prompts": len(lengths), "agreed": rounded(lengths.mean()), "agreed_95": [rounded(x) for x in interval]}
    return row | {f"same_{n}": rounded((lengths >= n).mean()) for n in LENGTHS if n <= total}


def forced(model: Model, prompts: Sequence[Sequence[int]], plain: Sequence[Completion], wide: list[np.ndarray]) -> Row:
    """Returns teacher forcing along the continuations of the model as loaded, whose log-probabilities are `wide`."""
    kl, top1 = [], []
    for prompt, completion, want in zip(prompts, plain, wide, strict=True):
        ids = completion.token_ids
        got = forward_logprobs(model, [*prompt, *ids], len(ids))
        kl.append((np.exp(want) * (want - got)).sum(axis=1))
        top1.append(got.argmax(axis=1) == want.argmax(axis=1))
    same = float(np.mean(top1))
    expected = {f"expected_{n}": rounded(same**n) for n in LENGTHS if n <= len(plain[0].token_ids)}
    return {"forced_kl": rounded(float(np.mean(kl))), "forced_top1": rounded(same), **expected}


def activation_bits(model: Model) -> int:
    """Returns the fewest bits of a linear layer's inputs; 16 stands for float32 without rounding."""
    leaves = linears(model.params).values()
    formats = [leaf.format.activations for leaf in leaves if isinstance(leaf, QuantizedWeight)]
    own = 8 if model.params.dtype == jnp.bfloat16 else 16
    return min((own, *(4 if "fp4" in name else 8 for name in formats if name is not None)))


def rows(
    model: Model, args: argparse.Namespace, pairs: Sequence[tuple[Any, str]], before: Sequence[Row]
) -> Iterator[Row]:
    """Yields a row per pair of scheme and KV format. Rows that exist are not computed again."""
    prompts = beginnings(model, args)
    plain = continuations(model, prompts, args.new_tokens, PLAIN_KV, args.backend)
    wide = [forward_logprobs(model, [*ids, *c.token_ids], len(c.token_ids)) for ids, c in zip(prompts, plain)]
    done = {(row["scheme"], row["kv"]): row for row in before}
    for (name, scheme), kv in tqdm(pairs, delay=2, disable=None):
        if (name, kv) in done:
            yield done[name, kv]
            continue
        quantized = quantize_model(model, scheme)
        found = continuations(quantized, prompts, args.new_tokens, kv, args.backend)
        row = {"scheme": name, "kv": kv, **agreement(found, plain)}
        if kv == PLAIN_KV:
            apart = gaps(quantized, prompts, found)
            row |= forced(quantized, prompts, plain, wide)
            row |= {"activations": activation_bits(quantized)}
            row |= {"gap": rounded(float(apart.max())), "gap_mean": rounded(float(apart.mean()))}
        yield row


def bars(found: list[Row]) -> Iterator[Row]:
    for row in found:
        if "gap" in row:
            name = f"largest difference of log-probabilities, served and by the forward pass, {row['scheme']}"
            yield bar(name, row["gap"], "nats", GAPS[row["activations"]], most=True)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add_subject_options(parser, backend=True)
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), help="schemes of weights, with plain K and V")
    parser.add_argument("--kv", nargs="*", default=list(KV), help="KV formats, with weights as loaded")
    parser.add_argument("--prompts", type=positive, default=24, help="most documents")
    parser.add_argument("--prompt-tokens", type=positive, default=32, help="tokens of each prompt")
    parser.add_argument("--new-tokens", type=positive, default=64, help="tokens of each continuation")
    add_result_options(parser)
    return parser.parse_args(argv)


@refusing
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    schemes = by_name([PLAIN, *args.schemes])
    model = jllm.load(args.model, dtype=args.dtype)
    names = [(name, PLAIN_KV) for name in schemes] + [(PLAIN, kv) for kv in args.kv]
    check_all_run(model, names, (), args.backend, schemes)
    pairs = [((name, schemes[name]), kv) for name, kv in dict.fromkeys(names)]
    command = command_line("continuations", argv)
    result = ResumedFile(args.results, "continuations", command, args.label, run=run_of(args))
    result.go_on(partial(rows, model, args, pairs), bars)
    return told(args, result)


if __name__ == "__main__":
    sys.exit(main())
