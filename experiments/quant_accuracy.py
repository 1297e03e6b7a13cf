"""What each quantization scheme costs in accuracy: perplexity, divergence from the wide model, agreement of top tokens.

    python -m experiments.quant_accuracy --text valid.txt --tokens 8192

The first tokens of a text, in windows of --window tokens that start without context; all positions of a window but
the first are scored. Divergence is Kullback-Leibler's, from the model as loaded (float32 on a CPU) to the quantized
one, in nats a token; top1 is how often both find the same token most likely. Bytes are those of linear layers, scales
included; what is not quantized counts with two.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import jllm
from experiments.result_file import ResultFile
from jllm.config import LlamaConfig
from jllm.errors import InputFileError, JllmError
from jllm.model import Packed, forward
from jllm.params import Params, map_linears
from jllm.pretrained import BUNDLED
from jllm.quant.quantize import quantize
from jllm.quant.schemes import PRESETS
from pallas_kernels.quantized_weights import QuantizedWeight

Row = dict[str, Any]


@partial(jax.jit, static_argnames="config")
def logprobs(params: Params, config: LlamaConfig, tokens: jax.Array) -> jax.Array:
    """Of every next token [W, V] in a window i32[W]."""
    batch = Packed(tokens, jnp.arange(tokens.shape[0], dtype=jnp.int32), jnp.zeros_like(tokens))
    return jax.nn.log_softmax(forward(params, config, batch, None)[0])


@jax.jit
def compare(plain: jax.Array, other: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sums over a window's scored positions: nats of the text, divergence, and equal top tokens."""
    nats = -jnp.take_along_axis(other[:-1], tokens[1:, None], axis=1).sum()
    divergence = (jnp.exp(plain[:-1]) * (plain[:-1] - other[:-1])).sum()
    same = (plain[:-1].argmax(axis=1) == other[:-1].argmax(axis=1)).sum()
    return nats, divergence, same


def read_windows(model: jllm.Model, args: argparse.Namespace) -> np.ndarray:
    try:
        text = args.text.read_text(encoding="utf-8")
    except OSError as error:
        raise InputFileError(f"{args.text}: cannot be read: {error.strerror}") from None
    if model.tokenizer is None:
        raise JllmError("the model has no tokenizer to read a text with")
    ids = model.tokenizer.encode(text)
    window = min(args.window, model.config.context)
    count = min(len(ids), args.tokens) // window
    if count < 1:
        raise InputFileError(f"{args.text}: {len(ids)} tokens, but a window takes {window}")
    return np.asarray(ids[: count * window], np.int32).reshape(count, window)


def bytes_per_weight(params: Params) -> float:
    """Of the linear layers, 16 bits where they are not quantized."""
    stored = weights = 0

    def count(name: str, leaf: Any) -> Any:
        nonlocal stored, weights
        size = leaf.shape[0] * leaf.shape[1]
        quantized = isinstance(leaf, QuantizedWeight)
        stored += sum(array.nbytes for array in jax.tree.leaves(leaf)) if quantized else 2 * size
        weights += size
        return leaf

    map_linears(count, params)
    return stored / weights


def rows(args: argparse.Namespace) -> Iterator[Row]:
    model = jllm.load(args.model, dtype=args.dtype)
    windows = read_windows(model, args)
    protocol = f"{windows.size} tokens of {args.text.name} in windows of {windows.shape[1]}"
    scored = windows.size - len(windows)
    for scheme in tqdm(args.schemes, delay=2, disable=None):
        params = quantize(model.params, scheme)
        totals = np.zeros(3)
        for tokens in map(jnp.asarray, windows):
            plain, other = (logprobs(p, model.config, tokens) for p in (model.params, params))
            totals += [float(x) for x in compare(plain, other, tokens)]
        nats, divergence, same = totals / scored
        yield {
            "scheme": scheme,
            "protocol": protocol,
            "perplexity": round(float(np.exp(nats)), 4),
            "kl": float(f"{divergence:.4g}"),
            "top1": round(float(same), 4),
            "bytes_per_weight": round(bytes_per_weight(params), 4),
        }


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text that the model was not trained on")
    parser.add_argument("--model", default=BUNDLED, help="directory or Hub id (default: the bundled model)")
    parser.add_argument("--dtype", help="of weights and arithmetic (default: as stored; on a CPU at least f32)")
    parser.add_argument("--schemes", nargs="+", default=[name for name in PRESETS if name != "w8a8"])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--results", type=Path, default=Path("experiments/results"))
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object on the last line")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    command = ["python", "-m", "experiments.quant_accuracy", *(sys.argv[1:] if argv is None else argv)]
    try:
        result = ResultFile(args.results, "quant_accuracy", command)
        for row in rows(args):
            result.add(row)
            print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    except JllmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    result.finish(bars=[], complete=True)
    if args.json:
        print(json.dumps(result.document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
