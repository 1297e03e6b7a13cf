"""Writes one page on how your model may be quantized: bytes, accuracy, speed, and a choice for each budget.

    python -m experiments.report --model ~/models/Llama-3.2-1B-Instruct
    python -m experiments.report --model DIR --text mine.txt --tokens 8192 --device rtx-4090 --out report.html
    python -m experiments.report --schemes w8a8-all nf4 --kv int8-g8          # these, each with each, and plain ones

Each scheme of weights is measured with each format of K and V, as experiments.quant_accuracy does. Its result file is
beside the page, and an interrupted run resumes. The page is one HTML file that loads nothing, with tables and pictures.
Two lists show the least bytes for each limit of divergence, and the least divergence for each limit of bytes. Bytes are
those of the weights, and of the K and V of --sequences of --context tokens each. Unquantized values have 16 bits.
Milliseconds of a decode step are ESTIMATED from a data sheet (configs/devices), with the shares of it that an H200
reached. They compare formats, and do not predict your times.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments import quant_accuracy
from experiments.accuracy.rows import PLAIN_KV, Row, kv_name
from experiments.accuracy.support import check_all_run
from experiments.arguments import add_subject_options, by_name
from experiments.report.model_page import Choice, page
from experiments.result_file import command_line
from experiments.steps.cost_model import CostModel, calibrated
from experiments.steps.devices import REFERENCE, DeviceSheet, device_sheet
from experiments.steps.floors import step_work, token_bytes
from experiments.steps.sheets import floor_on
from jllm.config import LlamaConfig
from jllm.errors import ConfigError, JllmError, OutputError
from jllm.files.find import find_model
from jllm.files.hf_config import load_config
from jllm.files.load import BUNDLED
from jllm.model.model import Model
from jllm.model.param_specs import init_params
from jllm.model.params import tree_bytes
from jllm.quant.quantize import quantize
from jllm.quant.schemes import PLAIN, Scheme, find_scheme
from pallas_kernels.bench.command import Parser, add_result_options, interruptible
from pallas_kernels.bench.numbers import positive

SCHEMES = ("w8a8-all", "fp8", "w8a16", "w4a16-g32-zp", "w4a16-g64", "nf4")
KV = ("fp8", "int8-g8", "int4-g32")


def plain_shapes(config: LlamaConfig, scheme: str | Scheme | None = None) -> Model:
    """Returns the model in bf16, or quantized from it, as shapes alone."""
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0), jnp.bfloat16))
    return Model(config, params if scheme is None else quantize(params, scheme), None)


def decode_ms(model: Model, kv: str | None, sheet: DeviceSheet, sequences: int, context: int) -> float | None:
    """Returns the estimated milliseconds of a step that decodes a token per sequence. Returns None if the device's
    sheet lacks its arithmetic."""
    try:
        floor = floor_on(sheet, model)
    except KeyError:
        return None
    cost = CostModel(floor, token_bytes(model, kv), calibrated(kv))
    return 1e3 * cost.seconds(step_work(sequences, sequences * context))


def choices(rows: Iterable[Row], config: LlamaConfig, schemes: Any, sheet: DeviceSheet, args: Any) -> list[Choice]:
    """Returns the choices of a sweep's rows, in their order."""
    found = []
    for row in rows:
        scheme = find_scheme(schemes[row["scheme"]])
        model = plain_shapes(config, None if row["scheme"] == PLAIN else scheme)
        kv = kv_name(row["kv"], jnp.bfloat16)
        token, weights = token_bytes(model, kv), tree_bytes(model.params)
        ms = decode_ms(model, kv, sheet, args.sequences, args.context)
        held = round(weights + args.sequences * args.context * token)
        found.append(Choice(row["scheme"], row["kv"], row["kl"], held, row, weights, token, ms))
    return found


def runnable(model: Model, asked: dict[str, str | Scheme], kind: str) -> tuple[dict[str, str | Scheme], dict[str, str]]:
    """Returns the schemes (or with kind "kv" the formats) that this model can have, and the reasons against the
    others."""
    good, bad = {}, {}
    for name, value in asked.items():
        pair = (PLAIN, name) if kind == "kv" else (name, PLAIN_KV)
        try:
            check_all_run(model, [pair], [], None, {PLAIN: PLAIN, name: value})
            good[name] = value
        except ConfigError as error:
            bad[name] = str(error).partition("; what can")[0]
    return good, bad


# The command


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__, prog="python -m experiments.report")
    add_subject_options(parser, backend=True)
    parser.add_argument("--tokens", type=positive, default=4096, help="most tokens of the text")
    parser.add_argument(
        "--schemes", nargs="+", help=f"schemes of weights (default: {', '.join(SCHEMES)}, where they fit)"
    )
    parser.add_argument("--kv", nargs="+", help=f"formats of K and V (default: {', '.join(KV)}, where they fit)")
    parser.add_argument("--device", default=REFERENCE, help="device of the estimated steps: a file of configs/devices")
    parser.add_argument("--sequences", type=positive, default=8, help="sequences that decode together")
    parser.add_argument(
        "--context", type=positive, help="tokens of each sequence (default: the model's context, 4096 at most)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE.html", help="file of the page (default: beside the result file)"
    )
    add_result_options(parser)
    return parser.parse_args(argv)


def measured(args: argparse.Namespace, command: list[str], schemes: Sequence[str], kv: Sequence[str]) -> Any:
    """Returns the sweep's result file: each scheme with each format, with the plain ones."""
    asked = ["--text", str(args.text), "--tokens", str(args.tokens), "--grid"]
    asked += ["--model", args.model] if args.model != BUNDLED else []
    asked += ["--results", str(args.results)] + (["--label", args.label] if args.label else [])
    for name in ("dtype", "backend"):
        asked += [f"--{name}", getattr(args, name)] if getattr(args, name) else []
    asked += ["--layers", "--schemes", *schemes, "--kv", PLAIN_KV, *kv]
    return quant_accuracy.sweep(quant_accuracy.parse_args(asked), command)


def report(args: argparse.Namespace, command: list[str]) -> tuple[Row, Path]:
    """Measures missing rows and writes the page. Returns the document and the page's path."""
    sheet, config = device_sheet(args.device), load_config(find_model(args.model))
    args.context = args.context or min(config.context, 4096)
    if args.out is not None and not args.out.resolve().parent.is_dir():
        raise OutputError(f"--out {args.out}: there is no folder {args.out.resolve().parent}")
    shapes = plain_shapes(config)
    left_out: dict[str, str] = {}
    schemes: dict[str, Any] = by_name(list(args.schemes or SCHEMES))
    formats: dict[str, Any] = {name: name for name in (args.kv or KV)}
    if args.schemes is None:
        schemes, bad = runnable(shapes, schemes, "scheme")
        left_out |= bad
    if args.kv is None:
        formats, bad = runnable(shapes, formats, "kv")
        left_out |= bad
    schemes = {PLAIN: PLAIN} | schemes
    result = measured(args, command, list(schemes), [name for name in formats if name != PLAIN_KV])
    rows = [row for row in result.document["rows"] if row.get("part", "scheme") == "scheme"]
    text = page(result.document, choices(rows, config, schemes, sheet, args), sheet, left_out, args)
    out = args.out or result.path.with_suffix(".html")
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{out}: cannot be written: {error.strerror}") from None
    return result.document, out


@interruptible
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    command = command_line("report", argv)
    try:
        document, out = report(args, command)
    except (JllmError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"the report is {out}")
    if args.json:
        print(json.dumps(document))
    return 0
