"""What each quantization scheme costs in accuracy: perplexity, divergence from the wide model, agreement of top tokens.

    python -m experiments.quant_accuracy --text valid.txt --tokens 8192
    python -m experiments.quant_accuracy --text valid.txt --schemes w8a8-all nf4 --kv int8-g8 int4-g8 --grid

Schemes with KV in the model's dtype, KV formats with weights as loaded, or with --grid each with each; on the first
tokens of a text, by a protocol of jllm.protocols, through the paged cache and the kernels that serve. `added` is the
growth of perplexity, kl Kullback-Leibler's divergence in nats a token, top1 how often the same token is most likely;
each against the model as loaded (float32 on a CPU), and its `_95` the interval by bootstrap over windows with a fixed
seed. Bytes are those of a linear layer's weight and of a value of K or V, scales included; what is not quantized counts
with two. Rows are written as they come, and a run that was interrupted goes on where it stopped.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

import jllm
from experiments.result_file import ResultFile
from jllm.cache import cache_bytes, make_cache, parse_kv_cache
from jllm.errors import InputFileError, JllmError
from jllm.evaluate import Evaluation, evaluate
from jllm.params import Params, map_linears
from jllm.pretrained import BUNDLED, Model
from jllm.protocols import encode, find_protocol
from jllm.quant.quantize import quantize
from jllm.quant.schemes import PLAIN, PRESETS
from pallas_kernels.quantized_weights import QuantizedWeight
from pallas_kernels.result_file import portable

Row = dict[str, Any]
PLAIN_KV = "model"  # K and V in the model's own dtype
KV = ("fp8", "int8-g8", "int8-g32", "int8-g64", "int4-g8", "k=int8-g8,v=int4-g8", "k=int4-g8,v=int8-g8")


def read_text(args: argparse.Namespace) -> str:
    try:
        return args.text.read_text(encoding="utf-8")
    except OSError as error:
        raise InputFileError(f"{args.text}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputFileError(f"{args.text}: is not UTF-8: byte {error.start}") from None


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


def bytes_per_kv(model: Model, kv: str | None) -> float:
    """Of a value of K or V, 16 bits where they are not quantized."""
    c, tokens = model.config, 16
    formats = parse_kv_cache(kv or "bf16", c, model.params.norm.dtype)
    page = jax.eval_shape(lambda: make_cache(c, 1, tokens, formats))
    return cache_bytes(page) / (2 * c.num_layers * c.num_kv_heads * c.head_dim * tokens)


def rounded(value: float) -> float:
    return float(f"{value:.4g}")


def as_row(scheme: str, kv: str, found: Evaluation) -> Row:
    row: Row = {"scheme": scheme, "kv": kv} | found.as_row()
    row |= {"perplexity": round(found.perplexity, 4), "top1": round(found.top1, 4)}
    row |= {name: rounded(row[name]) for name in ("added", "kl")}
    if len(found.parts) > 1:
        row |= {f"{name}_95": [rounded(x) for x in found.interval(name)] for name in ("added", "kl")}
    return row


def pairs(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Scheme and KV format of each row."""
    if args.grid:
        return list(product(args.schemes, args.kv))
    return [(scheme, PLAIN_KV) for scheme in args.schemes] + [(PLAIN, kv) for kv in args.kv]


def rows(model: Model, text: str, args: argparse.Namespace, done: list[Row]) -> Iterator[Row]:
    """Those that are not done yet. What doesn't fit the model raises before the first one."""
    protocol = find_protocol(args.protocol)
    ids = encode(model.tokenizer, text, protocol)[: args.tokens]
    formats = {kv: None if kv == PLAIN_KV else kv for _, kv in pairs(args)}
    for kv in formats.values():
        parse_kv_cache(kv, model.config, model.params.norm.dtype)
    shapes = jax.eval_shape(lambda params: params, model.params)
    for scheme in dict.fromkeys(scheme for scheme, _ in pairs(args)):
        quantize(shapes, scheme)
    have = {(row["scheme"], row["kv"]) for row in done}
    left = [pair for pair in pairs(args) if pair not in have]
    for scheme, kv in tqdm(left, delay=2, disable=None):
        quantized = replace(model, params=quantize(model.params, scheme))
        found = evaluate(quantized, ids, protocol, reference=model, kv_cache=formats[kv])
        sizes = {
            "bytes_per_weight": round(bytes_per_weight(quantized.params), 4),
            "bytes_per_kv": round(bytes_per_kv(model, formats[kv]), 4),
        }
        yield as_row(scheme, kv, found) | sizes


def rows_before(args: argparse.Namespace, setup: Row) -> list[Row]:
    """Of a run with the same setup that was interrupted."""
    for file in sorted(args.results.glob("quant_accuracy-*.json"), reverse=True):
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
            if not document["complete"] and all(document.get(key) == value for key, value in setup.items()):
                return document["rows"]
        except (OSError, ValueError, KeyError):
            continue  # no result of ours, or one that nobody can go on with
    return []


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text that the model was not trained on")
    parser.add_argument("--model", default=BUNDLED, help="directory or Hub id (default: the bundled model)")
    parser.add_argument("--dtype", help="of weights and arithmetic (default: as stored; on a CPU at least f32)")
    parser.add_argument("--schemes", nargs="+", default=[name for name in PRESETS if name != "w8a8"])
    parser.add_argument("--kv", nargs="*", default=KV, help=f'KV formats ("{PLAIN_KV}": the model\'s dtype)')
    parser.add_argument("--grid", action="store_true", help="every scheme with every KV format")
    parser.add_argument("--protocol", default="windows-512", help="of jllm.protocols (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--results", type=Path, default=Path("experiments/results"))
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object on the last line")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    command = ["python", "-m", "experiments.quant_accuracy", *(sys.argv[1:] if argv is None else argv)]
    try:
        text = read_text(args)
        setup = {"command": " ".join(portable(command)), "sha256": hashlib.sha256(text.encode()).hexdigest()}
        setup["device"] = jax.devices()[0].device_kind
        done = rows_before(args, setup)
        fresh = rows(jllm.load(args.model, dtype=args.dtype), text, args, done)
        first = [row for row in [next(fresh, None)] if row]  # before it replaces a file, it has proved to run
        result = ResultFile(args.results, "quant_accuracy", command, sha256=setup["sha256"])
        for row in chain(done, first, fresh):
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
