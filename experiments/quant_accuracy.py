"""Measures the loss of accuracy and the bytes of quantization: schemes of weights, formats of K and V, and layers.

    python -m experiments.quant_accuracy                                       # the bundled model and text
    python -m experiments.quant_accuracy --model DIR --text wikitext   # WikiText-2's test set, with the extra eval
    python -m experiments.quant_accuracy --schemes w8a8-all nf4 --kv int8-g8 "k=int8-g8,v=int4-g8" --grid
    python -m experiments.quant_accuracy --schemes nf4 --scheme mine:int3 --between mine:int3 nf4
    python -m experiments.quant_accuracy --outliers stream --schemes mxfp4 mxfp4+rotate-all --kv
    python -m experiments.quant_accuracy --model MIXTURE --schemes bf16 --kv --layers --mixture 8 4 3 2
    python -m experiments.quant_accuracy --outliers kv:8 --schemes bf16 --kv int4-g64 int4-g64-h kivi2-g32 int2-g32-zp

Rows have schemes with KV in the model's dtype, KV formats with weights as loaded, and some pairs; --grid has all pairs.
They follow a protocol of jllm.analysis.protocols, through the paged cache and the serving kernels. `added` is the
growth of perplexity. kl is the Kullback-Leibler divergence in nats per token. top1 is how often the most likely token
is the same. Each is against the model as loaded (float32 on a CPU) or --reference. `_95` is its bootstrap interval with
a fixed seed, over documents, or over windows if the protocol joins texts. Bytes are per weight of linear layers and per
value of K or V, scales included. Unquantized values count as 2 bytes.

--scheme package.module:NAME adds your own, also from the current directory. It may be a Scheme, a function that rounds
a weight [outputs, inputs] of each linear layer (with bits per weight in its attribute `bits`), or a KVFormat. --between
A B shows how much more A costs than B on the same documents, with its interval.

--mixture rounds experts, attention and routers of a mixture in turn to each number of bits, and counts other routes
(experiments/accuracy/mixture.py).

--outliers plants outliers like those of large models (experiments/accuracy/planted.py); the reference has none.

A .jsonl of {"text": ..} has documents; any other file is one document. `--text wikitext` takes WikiText-2 from the
Hub, in windows of 2,048 tokens as in GPTQ's tables. The default text is the bundled model's own
(experiments/texts). Rows are written as they come. An interrupted run resumes, if nothing that decides its rows has
changed: command, text, weights, tokenizer, rules of schemes, device, versions.
"""

import argparse
import itertools
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

import jllm
from experiments.accuracy.mixture import PARTS, mixture_rows
from experiments.accuracy.own import Quantizer, is_own, own, own_scheme, source_of
from experiments.accuracy.planted import ABOUT, parse_planted
from experiments.accuracy.report import part, text_report
from experiments.accuracy.rows import (
    PLAIN_KV,
    AnyScheme,
    Row,
    by_part,
    default_kv,
    difference,
    layer_rows,
    scheme_found,
)
from experiments.accuracy.support import check_all_run
from experiments.arguments import add_subject_options, by_name, checked
from experiments.result_file import ResumedFile, command_line
from experiments.texts.read import BUNDLED_TEXT, read_documents, usual_protocol
from jllm.analysis.evaluate import record
from jllm.analysis.protocols import encode, find_protocol
from jllm.errors import ConfigError, JllmError
from jllm.files.load import BUNDLED
from jllm.files.run_identity import digest, of_machine, of_model, of_scheme
from jllm.model.model import Model
from jllm.quant.quantize import weight_formats
from jllm.quant.schemes import PLAIN, Scheme, wide_rules
from pallas_kernels.bench.command import Parser, add_result_options, interruptible
from pallas_kernels.bench.numbers import positive

SCHEMES = (
    PLAIN, "w8a16", "uint8-zp", "w8a8", "w8a8-all", "w8a8-head", "w8a8-groups", "w8a8-tensor", "llm-int8",
    "fp8-weight", "fp8", "w4a16-g32", "w4a16-g64", "w4a16-g128", "w4a16-g32-zp", "w4a16-g64-zp", "w4a16-g128-zp",
    "nf4", "nf4-dq",
)  # fmt: skip
BOTH = (("w8a8", "int8-g8"), ("w8a8-all", "int8-g8"), ("w4a16-g64", "int4-g8"), ("fp8", "fp8"))
LAYERS = ("w8a8-all", "fp8", "w4a16-g64", "nf4")  # layers of these are tried one by one
WINDOW, WINDOWS = 512, 2  # tokens of a window, and windows, of the parts without a cache
SHORT, MANY = 256, 64  # likewise, of the parts of a mixture
TOKENS = 8192


@dataclass(frozen=True)
class Job:
    """Some rows of one part. Each has the fields that name the job."""

    key: Row
    count: int
    make: Callable[[], Iterable[Row]]

    def done(self, rows: list[Row]) -> list[Row]:
        """Returns the existing rows of the job, or none if some are missing."""
        found = [row for row in rows if self.key.items() <= row.items()]
        return found if len(found) == self.count else []


def pairs(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Returns the scheme and KV format of each row."""
    if args.grid:
        return list(dict.fromkeys(itertools.product(args.schemes, args.kv)))
    both = [pair for pair in BOTH if pair[0] in args.schemes and pair[1] in args.kv]
    found = [(scheme, PLAIN_KV) for scheme in args.schemes] + [(PLAIN, kv) for kv in args.kv] + both
    return list(dict.fromkeys(found))


def chosen(model: Model, texts: list[str], protocol: str, limit: int | None) -> list[Any]:
    """Returns the documents within the first `limit` tokens. A single or too long first document becomes its first ids.
    They are joined, and begin with BOS, as the protocol has it."""
    if find_protocol(protocol).joined:
        texts = ["\n\n".join(texts)]
    if limit is None:
        return list(texts)
    encoded = [encode(model.tokenizer, text, find_protocol(protocol)) for text in texts]
    ends = np.cumsum([len(ids) for ids in encoded])
    return texts[: int(np.searchsorted(ends, limit, side="right"))] or [encoded[0][:limit]]


def windows_of(model: Model, texts: list[Any], protocol: str, size: int = WINDOW, most: int = WINDOWS) -> np.ndarray:
    """Returns i32[W, T] from the beginning of all texts, for the parts with windows of one size: at most so many."""
    named = find_protocol(protocol)
    ids = [encode(model.tokenizer, text, named) if isinstance(text, str) else text for text in texts]
    flat = np.concatenate([np.asarray(each, np.int32) for each in ids])
    size = min(size, model.config.context, len(flat))
    count = min(most, len(flat) // size)
    return flat[: count * size].reshape(count, size)


def jobs(
    model: Model, reference: Model, texts: list[str], args: argparse.Namespace, schemes: Mapping[str, AnyScheme]
) -> list[Job]:
    """Returns all jobs of the run. Raises for a protocol or a text that does not fit the model."""
    selected = chosen(model, texts, args.protocol, args.tokens)
    windows = windows_of(model, selected, args.protocol)

    @cache
    def recorded() -> Any:
        return record(reference, selected, args.protocol, backend=args.backend)

    def of_pair(scheme: AnyScheme, kv: str) -> Iterator[Row]:
        row, found = scheme_found(model, selected, args.protocol, recorded(), scheme, kv, backend=args.backend)
        yield row | by_part(found)

    of_layers = partial(layer_rows, model, reference, windows, backend=args.backend)
    found = [
        Job({"part": "scheme", "scheme": name, "kv": kv}, 1, partial(of_pair, schemes[name], kv))
        for name, kv in pairs(args)
    ]
    layers = model.config.num_layers
    named = dict.fromkeys(args.layers)
    found += [Job({"part": "layer", "scheme": name}, layers, partial(of_layers, schemes[name])) for name in named]
    many = windows_of(model, selected, args.protocol, SHORT, MANY)
    found += [
        Job({"part": "mixture", "module": module, "bits": bits}, 1, partial(mixture_rows, model, many, module, bits))
        for module in PARTS
        for bits in args.mixture
    ]
    return found


def rows(todo: list[Job], before: list[Row]) -> Iterator[Row]:
    """Yields rows in the order of the jobs. Rows that exist are not computed again."""
    seen = sys.stderr.isatty()
    times = {"delay": 2, "mininterval": 0.1} if seen else {"delay": 10, "mininterval": 10}  # a log has fewer lines
    with tqdm(total=len(todo), desc="sweep", unit="job", maxinterval=times["mininterval"], **times) as bar:
        for job in todo:
            bar.set_postfix_str(" ".join(map(str, job.key.values())), refresh=seen)
            yield from job.done(before) or job.make()
            bar.update()


def in_run(name: str, args: argparse.Namespace) -> tuple[str, str]:
    """Returns scheme and KV format of SCHEME, KV or SCHEME/KV. Raises ConfigError if the run lacks it."""
    scheme, slash, kv = name.partition("/")
    wanted = [(scheme, kv)] if slash else [(name, PLAIN_KV), (PLAIN, name)]
    found = [pair for pair in wanted if pair in pairs(args)]
    if len(found) == 2:
        raise ConfigError(f"--between {name}: it is a scheme and a KV format: say {name}/{PLAIN_KV} or {PLAIN}/{name}")
    if found:
        return found[0]
    have = ", ".join(f"{scheme}/{kv}" for scheme, kv in pairs(args))
    raise ConfigError(f"--between {name}: this run has no such scheme or KV format; it has {have}")


def compared(rows: list[Row], args: argparse.Namespace) -> Iterator[Row]:
    """Yields the differences that --between asks for."""
    found = {(row["scheme"], row["kv"]): row for row in part(rows, "scheme")}
    for a, b in args.between:
        yield difference(found[in_run(a, args)], found[in_run(b, args)])


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add_subject_options(parser, backend=True)
    parser.add_argument("--reference", help="directory or Hub id of the reference (default: the model itself)")
    parser.add_argument(
        "--outliers", type=checked(parse_planted), metavar="KIND[:STRENGTH[:SEED]]", help=f"outliers to plant ({ABOUT})"
    )
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), help="schemes of weights")
    parser.add_argument(
        "--scheme", action="append", default=[], metavar="MODULE:NAME", help="your own scheme; may be repeated"
    )
    parser.add_argument(
        "--between",
        nargs=2,
        action="append",
        default=[],
        metavar=("A", "B"),
        help="two of SCHEME, KV or SCHEME/KV to compare; may be repeated",
    )
    parser.add_argument("--kv", nargs="*", help=f'KV formats ("{PLAIN_KV}": the model\'s dtype; also k=..,v=..)')
    parser.add_argument("--grid", action="store_true", help="combine every scheme with every KV format")
    parser.add_argument("--layers", nargs="*", default=LAYERS, help="schemes to try layer by layer")
    parser.add_argument(
        "--mixture", nargs="+", type=positive, default=[], metavar="BITS", help="bits of a mixture's parts, in turn"
    )
    parser.add_argument(
        "--protocol",
        help="protocol of analysis.protocols (default: document; windows-512 of one text; wikitext2-2048 of wikitext, "
        "if the model's context has room)",
    )
    parser.add_argument(
        "--tokens", type=positive, help=f"most tokens of the text (default: all of the bundled one, else {TOKENS})"
    )
    add_result_options(parser)
    args = parser.parse_args(argv)
    if args.tokens is None and args.text != BUNDLED_TEXT:
        args.tokens = TOKENS
    return args


def name_of(args: argparse.Namespace) -> str:
    """Returns the part of a result's name that depends on model and text."""
    parts = [Path(args.model).name] if args.model != BUNDLED else []
    parts += [args.text.stem] if args.text != BUNDLED_TEXT else []
    parts += [re.sub(r"\W", "-", args.outliers)] if args.outliers else []
    return "_".join(["quant_accuracy", *parts])


def sweep(args: argparse.Namespace, command: list[str]) -> ResumedFile:
    texts = read_documents(args.text)
    of_kv = [name for name in args.scheme if not isinstance(own(name), Scheme | Quantizer)]
    args.schemes = [*args.schemes, *(name for name in args.scheme if name not in of_kv)]
    schemes = named_schemes([PLAIN, *args.schemes, *args.layers])
    args.schemes, args.layers = (list(named_schemes(some)) for some in (args.schemes, args.layers))
    warn_of_wide_rules(schemes)
    model = jllm.load(args.model, dtype=args.dtype)
    args.protocol = args.protocol or usual_protocol(args.text, texts, model.config.context)
    reference = model if args.reference is None else jllm.load(args.reference, dtype=args.dtype)
    if args.mixture and (model.config.experts is None or weight_formats(model.params)):
        raise ConfigError("--mixture takes a model with experts whose weights are not quantized")
    if odd := [bits for bits in args.mixture if not 2 <= bits <= 16]:
        raise ConfigError(f"--mixture takes 2 to 16 bits, not {odd[0]}")
    if args.outliers:
        model = parse_planted(args.outliers).of(model)
    if args.kv is None:
        args.kv = default_kv(model.config.head_dim)
    args.kv = [*args.kv, *of_kv]
    for name in itertools.chain(*args.between):
        in_run(name, args)
    if args.grid and not args.kv:
        raise ConfigError(f'--grid takes at least one KV format after --kv ("{PLAIN_KV}": the model\'s dtype)')
    check_all_run(model, pairs(args), args.layers, args.backend, schemes)
    return written(args, command, jobs(model, reference, texts, args, schemes), run_of(args, texts, schemes))


def named_schemes(names: Iterable[str]) -> dict[str, AnyScheme]:
    """Returns schemes by their names. A user's own have their whole name."""
    names = list(names)
    known = by_name(name for name in names if not is_own(name))
    return {**known, **{name: own_scheme(name) for name in names if is_own(name)}}


def warn_of_wide_rules(schemes: Mapping[str, AnyScheme]) -> None:
    for name, scheme in schemes.items():
        for pattern, taken in wide_rules(scheme).items() if isinstance(scheme, Scheme) else ():
            both = " and ".join(taken)
            print(
                f"warning: scheme {name}: the rule {pattern!r} takes {both} beside the layers, which costs accuracy: "
                f'write "*_proj" for the linear layers alone, or first rules that leave {both} {PLAIN}',
                file=sys.stderr,
            )


def written(args: argparse.Namespace, command: list[str], todo: list[Job], run: Row) -> ResumedFile:
    start = time.perf_counter()
    with ResumedFile(args.results, name_of(args), command, args.label, run=run, text=args.text.name) as result:
        for row in rows(todo, result.before):
            result.add(row)
        for row in compared(result.document["rows"], args):
            result.add(row)
        seconds = {} if result.before else {"seconds": round(time.perf_counter() - start, 1)}
        result.finish(bars=[], complete=True, **seconds)
    return result


def run_of(args: argparse.Namespace, texts: list[str], schemes: Mapping[str, AnyScheme]) -> Row:
    """Returns what decides the rows, besides the command and versions."""
    run: Row = {"text": digest(text.encode() for text in texts)} | of_machine() | of_model(args.model)
    if args.reference is not None:
        run |= {f"reference's {key}": value for key, value in of_model(args.reference).items()}
    for name, scheme in schemes.items():
        run[f"scheme {name}"] = source_of(name) if isinstance(scheme, Quantizer) else of_scheme(scheme)
    return run | {f"KV {name}": source_of(name) for name in args.kv if is_own(name)}


@interruptible
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    command = command_line("quant_accuracy", argv)
    try:
        result = sweep(args, command)
        print(text_report(result.document))
        print(f"\nWritten: {result.path}")
    except BrokenPipeError:  # of standard output
        raise
    except (JllmError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(result.document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
