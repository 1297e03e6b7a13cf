"""Compares calibrated quantization with plain rounding at equal bits: GPTQ, AWQ, SmoothQuant and others. Models are as
they are, or have outliers like large models (experiments/accuracy/planted.py).

    python -m experiments.ptq_methods  # the bundled model on the text that it wrote itself
    python -m experiments.ptq_methods --text valid.txt --models plain --methods round gptq awq
    python -m experiments.ptq_methods --schemes mxfp4 nvfp4 --methods h gptq gptq-h mr-gptq  # of 4-bit floats
    python -m experiments.ptq_methods --models planted:4 planted:64 --schemes w8a8-tensor llm-int8
    python -m experiments.ptq_methods --models norms norms+rotate-all --schemes w4a16-g64    # also of a rotated model
    python -m experiments.ptq_methods --models kv:8 --schemes bf16 --methods smooth-attention --kv int4-g64
    python -m experiments.ptq_methods --models plain --schemes nf4 --scheme experiments.gguf_types:q4_k

The model generates its calibration tokens by `--seeds`; they are not those of the bundled text. A row is of one seed.
kl is the divergence from the unquantized model in nats per token. `kl_95` is its bootstrap interval over documents (or
windows, if a text is one document). `ratio` is kl over plain rounding's in the same model and scheme, and `ratio_95`
its interval over the same draws. An interval below 1 means better. Seconds are of this machine. An interrupted run
resumes, if nothing that decides its rows has changed. Methods `h`, `gptq-h` and `mr-gptq` (arXiv 2509.23202) store a
scheme's block floats rotated (`mxfp4-h` instead of `mxfp4`). Their ratios are over rounding without rotation. Method
`smooth-attention` scales channels of K and V (arXiv 2405.04532), which --kv quantizes. --scheme adds a scheme or a
quantizer of your own, as in experiments.quant_accuracy. A quantizer only rounds.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

import jllm
from experiments.accuracy.own import Quantizer, own_scheme, source_of
from experiments.accuracy.planted import ABOUT, parse_planted
from experiments.accuracy.rows import PAGE, bytes_per_weight, rounded, rounded_by
from experiments.arguments import add_subject_options, by_name, checked
from experiments.result_file import ResumedFile, command_line, refusing, told
from experiments.texts.read import read_documents, usual_protocol
from jllm.analysis.evaluate import Evaluation, Recorded, evaluate, record
from jllm.analysis.own_tokens import own_tokens
from jllm.analysis.protocols import encode, find_protocol
from jllm.errors import ConfigError, EvaluationError
from jllm.files.run_identity import digest, of_machine, of_model, of_scheme
from jllm.model.cache import least_page
from jllm.model.model import Model
from jllm.model.params import Params
from jllm.quant import calibration as ptq
from jllm.quant.quantize import quantize, weight_formats
from jllm.quant.schemes import PRESETS, Scheme, find_scheme, parse_formats
from pallas_kernels.bench.command import Parser, add_result_options
from pallas_kernels.bench.numbers import positive, seed_number

Row = dict[str, Any]
Method = Callable[[Model, Any, np.ndarray, int], Params]
METHODS: dict[str, Method] = {
    "round": lambda model, scheme, tokens, seed: rounded_by(scheme, model).params,
    "smoothquant": lambda model, scheme, tokens, seed: ptq.smoothquant(model, scheme, tokens),
    "awq": lambda model, scheme, tokens, seed: ptq.awq(model, scheme, tokens),
    "gptq": lambda model, scheme, tokens, seed: ptq.gptq(model, scheme, tokens),
    "gptq-act-order": lambda model, scheme, tokens, seed: ptq.gptq(model, scheme, tokens, act_order=True),
    "h": lambda model, scheme, tokens, seed: quantize(model.params, rotated_blocks(scheme)),
    "gptq-h": lambda model, scheme, tokens, seed: ptq.gptq(model, rotated_blocks(scheme), tokens),
    "mr-gptq": lambda model, scheme, tokens, seed: ptq.mr_gptq(model, rotated_blocks(scheme), tokens),
    "smooth-attention": lambda model, scheme, tokens, seed: quantize(ptq.smooth_attention(model, tokens), scheme),
}
MODELS = ("plain", "planted", "stream")
ROUNDING = ("round", "h")  # need no tokens
FOUR, EIGHT = ("round", "awq", "gptq"), ("round", "smoothquant")


def rotated_blocks(scheme: Scheme) -> Scheme:
    """Returns the scheme with block floats times a Hadamard matrix of the block's size. Other formats stay."""

    def one(name: str) -> str:
        found = parse_formats(name)
        wanted = (fmt if fmt.block_kind is None else replace(fmt, rotated=True) for fmt in found)
        return "|".join(fmt.name for fmt in wanted) if found else name

    return replace(scheme, rules=tuple((pattern, one(name)) for pattern, name in scheme.rules))


def ratio_interval(found: Evaluation, plain: Evaluation, *, samples: int = 1000, seed: int = 0) -> list[float]:
    """Returns the 95 % interval of the divergence over plain rounding's, from the same draws of documents."""
    kl = np.asarray([[part.kl for part in e.parts] for e in (found, plain)], np.float64)
    drawn = np.random.default_rng(seed).integers(kl.shape[1], size=(samples, kl.shape[1]))
    sums = kl[:, drawn].sum(axis=2)
    return [rounded(x) for x in np.quantile(sums[0] / sums[1], [0.025, 0.975])]


def read_tokens(model: Model, args: argparse.Namespace) -> tuple[list[list[int]], str]:
    """Returns documents as token ids, at most `tokens` of them, and the protocol."""
    documents = read_documents(args.text)
    name = args.protocol or usual_protocol(args.text, documents, model.config.context)
    if find_protocol(name).joined:
        documents = ["\n\n".join(documents)]
    ids, left = [], args.tokens
    for text in documents:
        tokens = encode(model.tokenizer, text, find_protocol(name))[:left]
        if len(tokens) > 1:
            ids.append(tokens)
            left -= len(tokens)
    return ids, name


def jobs(args: argparse.Namespace, schemes: Mapping[str, Scheme | Quantizer]) -> list[tuple[str, str, int, str]]:
    """Returns model, scheme, seed and method of each row. Rounding comes before the methods that are compared with
    it."""
    found = []
    for model, scheme, seed in product(args.models, schemes, args.seeds):
        formats = PRESETS[scheme].rules if scheme in PRESETS else ()
        activations = any(fmt.activations for _, names in formats for fmt in parse_formats(names))
        methods = args.methods or (EIGHT if activations else FOUR)
        if isinstance(schemes[scheme], Quantizer):
            methods = ()
        for method in dict.fromkeys(("round", *methods)):
            if method not in ROUNDING or seed == args.seeds[0]:
                found.append((model, scheme, seed, method))
    return found


def run_of(args: argparse.Namespace) -> Row:
    """Returns what decides the rows, besides the command and versions."""
    text = digest(text.encode() for text in read_documents(args.text))
    return {"text": text} | of_machine() | of_model(args.model)


def rows(
    model: Model, args: argparse.Namespace, schemes: Mapping[str, Scheme | Quantizer], before: Sequence[Row] = ()
) -> Iterator[Row]:
    """Yields a row per job. Rows that exist are not computed again. Jobs that do not fit the model raise before the
    first."""
    planned = jobs(args, schemes)
    done = {(row["model"], row["scheme"], row["seed"], row["method"]): row for row in before}
    for name, scheme in schemes.items():
        if isinstance(scheme, Quantizer) or args.kv is not None:
            continue
        if not weight_formats(quantize(jax.eval_shape(lambda: model.params), scheme)):
            raise ConfigError(f"--schemes: {name} quantizes nothing, and rounding's divergence is what others are over")
    ids, protocol = read_tokens(model, args)
    recorded = record(model, ids, protocol)
    calibration = {seed: own_tokens(model, rows=args.rows, length=args.length, seed=seed) for seed in args.seeds}
    subjects = {name: parse_planted(name).of(model) for name in args.models}
    plain: dict[tuple[str, str], Evaluation] = {}

    def run(name: str, scheme: str, seed: int, method: str) -> tuple[Evaluation, Row]:
        start = time.monotonic()
        params = METHODS[method](subjects[name], schemes[scheme], calibration[seed], seed)
        more: Row = {"seconds": round(time.monotonic() - start, 1)}
        if (size := size_of(schemes[scheme], subjects[name])) is not None:
            more["bytes_per_weight"] = size
        return score(replace(subjects[name], params=params), ids, protocol, recorded, args.kv), more

    for job in tqdm(planned, delay=2, disable=None):
        if job in done:
            yield done[job]
            continue
        name, scheme, seed, method = job
        found, more = run(*job)
        if method == "round":
            plain[name, scheme] = found
        elif (name, scheme) not in plain:  # its row existed
            plain[name, scheme], _ = run(name, scheme, seed, "round")
        of = {"model": name, "scheme": scheme, "method": method, "seed": seed}
        of |= {} if args.kv is None else {"kv": args.kv}
        yield as_row(found, plain[name, scheme], **of) | more


def size_of(scheme: Scheme | Quantizer, model: Model) -> float | None:
    """Returns the bytes of a weight of linear layers, scales included, or None where nobody says."""
    if isinstance(scheme, Quantizer):
        return scheme.bytes_per_weight
    return round(bytes_per_weight(quantize(jax.eval_shape(lambda: model.params), scheme)), 4)


def score(
    model: Model, ids: list[list[int]], protocol: str, recorded: Recorded, kv_cache: str | None = None
) -> Evaluation:
    page = max(PAGE, least_page(kv_cache, model.config))
    found = evaluate(model, ids, protocol, reference=recorded, kv_cache=kv_cache, page_size=page)
    if len(found.parts) < 2:
        raise EvaluationError("an interval takes at least 2 documents or windows: give more text or --tokens")
    return found


def as_row(found: Evaluation, plain: Evaluation, **names: Any) -> Row:
    row = names | found.as_row()
    row |= {key: rounded(row[key]) for key in ("perplexity", "added", "kl", "top1")}
    row |= {f"{key}_95": [rounded(x) for x in found.interval(key)] for key in ("kl", "added")}
    return row | {"ratio": rounded(found.kl / plain.kl), "ratio_95": ratio_interval(found, plain)}


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add_subject_options(parser, tokens=8192)
    planted = checked(parse_planted)
    parser.add_argument(
        "--models", nargs="+", type=planted, default=list(MODELS), metavar="KIND[:STRENGTH[:SEED]][+rotate-WHICH]",
        help=f"outliers of the models ({ABOUT})",
    )  # fmt: skip
    parser.add_argument("--schemes", nargs="+", default=["w4a16-g64", "w8a8-all"], help="schemes of weights")
    parser.add_argument(
        "--scheme", action="append", default=[], type=checked(own_scheme), metavar="MODULE:NAME", help="one of your own"
    )
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), help="methods (default: by scheme)")
    parser.add_argument("--kv", metavar="FORMAT", help="KV format of all rows (default: the model's dtype)")
    parser.add_argument("--seeds", nargs="+", type=seed_number, default=[0], help="seeds of calibration tokens")
    parser.add_argument(
        "--rows", type=positive, default=16, help="number of calibration rows, which the model generates"
    )
    parser.add_argument("--length", type=positive, default=256, help="tokens per calibration row")
    add_result_options(parser)
    return parser.parse_args(argv)


@refusing
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    model = jllm.load(args.model, dtype=args.dtype)
    schemes: dict[str, Scheme | Quantizer] = {
        name: find_scheme(scheme) for name, scheme in by_name(args.schemes).items()
    }
    schemes |= {name: own_scheme(name) for name in args.scheme}
    said = {
        f"scheme {name}": source_of(name) if isinstance(scheme, Quantizer) else of_scheme(scheme)
        for name, scheme in schemes.items()
    }
    how: Row = {
        "run": run_of(args) | said,
        "calibration": f"{args.rows} x {args.length} own tokens",
    }
    result = ResumedFile(args.results, "ptq_methods", command_line("ptq_methods", argv), args.label, **how)
    result.go_on(partial(rows, model, args, schemes))
    return told(args, result)


if __name__ == "__main__":
    sys.exit(main())
