"""One page about how a model of yours may be quantized: bytes, accuracy, speed, and what to take for which budget.

    python -m experiments.report --model ~/models/Llama-3.2-1B-Instruct
    python -m experiments.report --model DIR --text mine.txt --tokens 8192 --device rtx-4090 --out report.html
    python -m experiments.report --schemes w8a8-all nf4 --kv int8-g8          # these, each with each, and plain ones

Each scheme of weights with each format of K and V is measured as experiments.quant_accuracy does (its result file lies
beside the page, and a run that was interrupted goes on where it stopped). The page is one file of HTML, which loads
nothing: tables, pictures, and two lists: the least bytes for each limit of divergence, and the least divergence for
each limit of bytes. Bytes are those of the weights and of the K and V of --sequences of --context tokens each, in 16
bits where nothing is quantized. Milliseconds of a decode step are ESTIMATED, from a data sheet (configs/devices) and
from the shares of it that an H200 was measured to reach; they say how formats compare, not what you will see.
"""

import argparse
import html
import io
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments import quant_accuracy
from experiments.accuracy.rows import PLAIN_KV, Row, kv_name
from experiments.accuracy.support import check_all_run
from experiments.arguments import by_name, positive
from experiments.other_devices import floor_on
from experiments.report.svg import svg
from experiments.result_file import command_line
from experiments.steps.cost_model import CostModel, calibrated
from experiments.steps.devices import REFERENCE, DeviceSheet, device_sheet
from experiments.steps.floors import step_work, token_bytes
from experiments.texts.read import BUNDLED_TEXT
from jllm.checkpoint import init_params
from jllm.checkpoint_files import find_model
from jllm.config import LlamaConfig, load_config
from jllm.errors import ConfigError, JllmError, OutputError
from jllm.fit import tree_bytes
from jllm.pretrained import BUNDLED, Model
from jllm.quant.quantize import quantize
from jllm.quant.schemes import PLAIN, Scheme, find_scheme
from pallas_kernels.bench.command import add_result_options, interruptible

SCHEMES = ("w8a8-all", "fp8", "w8a16", "w4a16-g32-zp", "w4a16-g64", "nf4")
KV = ("fp8", "int8-g8", "int4-g32")
DIVERGENCES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)  # nats a token
SHARES = (1.0, 0.75, 0.6, 0.5, 0.4, 0.3)  # of the bytes without quantization
CSS = """:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}
div{overflow-x:auto}figure{margin:1rem 0}table{border-collapse:collapse;margin:1rem 0;white-space:nowrap}
td,th{padding:.25rem .6rem;border-bottom:1px solid #8886;text-align:right}tr.front{font-weight:600}
td:first-child,th:first-child,td:nth-child(2),th:nth-child(2){text-align:left}th,.why td{white-space:normal}
svg{background:#fff;max-width:100%;height:auto;border-radius:6px}.note{opacity:.75}"""


@dataclass(frozen=True)
class Choice:
    """A scheme with a KV format, and what it costs."""

    scheme: str
    kv: str
    kl: float
    bytes: int  # of weights, and of K and V of what is held
    row: Row  # of quant_accuracy
    weights: int  # bytes
    token: float  # bytes of K and V of one
    decode_ms: float | None  # estimated; None where the device has no such arithmetic


def plain_shapes(config: LlamaConfig, scheme: str | Scheme | None = None) -> Model:
    """The model in bf16, or quantized from it, as shapes alone."""
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0), jnp.bfloat16))
    return Model(config, params if scheme is None else quantize(params, scheme), None)


def decode_ms(model: Model, kv: str | None, sheet: DeviceSheet, sequences: int, context: int) -> float | None:
    """Milliseconds of a step that decodes a token of each sequence, estimated; None for arithmetic that the device's
    sheet does not have."""
    try:
        floor = floor_on(sheet, model)
    except KeyError:
        return None
    cost = CostModel(floor, token_bytes(model, kv), calibrated(kv))
    return 1e3 * cost.seconds(step_work(sequences, sequences * context))


def choices(rows: Iterable[Row], config: LlamaConfig, schemes: Any, sheet: DeviceSheet, args: Any) -> list[Choice]:
    """Of the rows of a sweep, in their order."""
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


def front(found: Sequence[Choice]) -> list[Choice]:
    """Those that no other beats, which is both as small and as close and one of these more so; the smallest first."""
    best: list[Choice] = []
    for choice in sorted(found, key=lambda c: (c.bytes, c.kl)):
        if not best or choice.kl < best[-1].kl:
            best.append(choice)
    return best


def smallest(found: Sequence[Choice], kl: float) -> Choice | None:
    """The fewest bytes with at most this divergence."""
    return min((c for c in found if c.kl <= kl), key=lambda c: (c.bytes, c.kl), default=None)


def closest(found: Sequence[Choice], limit: float) -> Choice | None:
    """The least divergence in at most `limit` bytes."""
    return min((c for c in found if c.bytes <= limit), key=lambda c: (c.kl, c.bytes), default=None)


def runnable(model: Model, asked: dict[str, str | Scheme], kind: str) -> tuple[dict[str, str | Scheme], dict[str, str]]:
    """Schemes (or with kind "kv" formats) that this model can have, and of the others why not."""
    good, bad = {}, {}
    for name, value in asked.items():
        pair = (PLAIN, name) if kind == "kv" else (name, PLAIN_KV)
        try:
            check_all_run(model, [pair], [], None, {PLAIN: PLAIN, name: value})
            good[name] = value
        except ConfigError as error:
            bad[name] = str(error).partition("; what can")[0]
    return good, bad


# The page


def page(document: Row, found: Sequence[Choice], sheet: DeviceSheet, left_out: dict[str, str], args: Any) -> str:
    """The report as HTML that loads nothing."""
    best = front(found)
    model = html.escape(Path(args.model).name)
    held = f"{args.sequences} sequences of {args.context:,} tokens"
    plain = next(c for c in found if (c.scheme, c.kv) == (PLAIN, PLAIN_KV))
    body = [
        f"<h1>How {model} may be quantized</h1>",
        f'<p>Divergence (Kullback-Leibler, nats a token) from the model as loaded, on {html.escape(document["text"])}; '
        f"bytes with the K and V of {held}. Best choices are bold: no other measured one is smaller and closer.</p>",
        "<h2>What to take</h2>",
        _table(["at most this divergence", "weights, K and V", "bytes", "divergence", "ms a step (estimated)"],
               [_limit_row(f"{limit:g}", smallest(found, limit)) for limit in DIVERGENCES]),
        _table(["in at most", "weights, K and V", "bytes", "divergence", "ms a step (estimated)"],
               [_limit_row(f"{_bytes(share * plain.bytes)} ({share:.0%})", closest(found, share * plain.bytes))
                for share in SHARES]),
        "<h2>Bytes and accuracy</h2>", *_pictures(found, best),
        _table(["weights", "K and V", "of weights", "of a token", "in all", "divergence (95 %)",
                "perplexity added", "same token", "ms a step (estimated)"],
               [_choice_row(c) for c in sorted(found, key=lambda c: c.kl)], {(c.scheme, c.kv) for c in best}),
    ]  # fmt: skip
    if left_out:
        body += [
            "<h2>Left out</h2>",
            '<section class="why">',
            _table(["what", "why"], [[html.escape(k), html.escape(v)] for k, v in left_out.items()]),
            "</section>",
        ]
    body.append(
        f'<p class="note">Accuracy: measured, {html.escape(document["device"])}, {document["date"]}, '
        f"<code>{html.escape(document['command'])}</code>. Milliseconds: estimated for {html.escape(sheet.name)} "
        f"({html.escape(sheet.source)}), {held}, at the shares of its limits that an H200 reached "
        f"({html.escape(calibrated(None).source)}). A text of a few thousand tokens does not show rare losses.</p>"
    )
    text = "\n".join(body)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{model}, quantized</title>'
        f"<style>{CSS}</style></head><body>\n{text}\n</body></html>\n"
    )


def _table(header: Sequence[str], lines: Sequence[Sequence[str]], bold: Iterable[tuple[str, str]] = ()) -> str:
    bold = set(bold)
    rows = [
        f"<tr{' class=front' if tuple(line[:2]) in bold else ''}>{''.join(f'<td>{cell}</td>' for cell in line)}</tr>"
        for line in lines
    ]
    head = "".join(f"<th>{cell}</th>" for cell in header)
    return f"<div><table><thead><tr>{head}</tr></thead><tbody>\n" + "\n".join(rows) + "\n</tbody></table></div>"


def _limit_row(limit: str, choice: Choice | None) -> list[str]:
    if choice is None:
        return [limit, "none of those measured", "", "", ""]
    return [limit, f"{choice.scheme}, {choice.kv}", _bytes(choice.bytes), f"{choice.kl:.2g}", _ms(choice)]


def _choice_row(choice: Choice) -> list[str]:
    row = choice.row
    interval = " ({:.2g} to {:.2g})".format(*row["kl_95"]) if "kl_95" in row else ""
    return [
        choice.scheme, choice.kv,
        _bytes(choice.weights), _bytes(choice.token), _bytes(choice.bytes),
        f"{choice.kl:.2g}{interval}", f"{row['added']:.2%}", f"{row['top1']:.1%}", _ms(choice),
    ]  # fmt: skip


def _unit(count: float) -> tuple[str, float]:
    """The largest unit that `count` bytes have one of, and its bytes."""
    return next((u, s) for u, s in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0)) if count >= s or u == "B")


def _bytes(count: float) -> str:
    unit, size = _unit(count)
    return f"{count / size:.3g} {unit}"


def _ms(choice: Choice) -> str:
    return "not on this device" if choice.decode_ms is None else f"{choice.decode_ms:.3g}"


def _pictures(found: Sequence[Choice], best: Sequence[Choice]) -> list[str]:
    """Divergence by bytes and by milliseconds, as SVG within the page; a line that says so without matplotlib."""
    if find_spec("matplotlib") is None:
        return ['<p class="note">No pictures: matplotlib is missing (the extra <code>notebooks</code>).</p>']
    made = []
    unit, size = _unit(max(c.bytes for c in found))
    axes: tuple[tuple[str, Any], ...] = (
        (f"{unit} of weights, K and V", lambda c: c.bytes / size),
        ("ms a decode step, estimated", lambda c: c.decode_ms),
    )
    for label, value in axes:
        shown = [c for c in found if c.kl > 0 and value(c) is not None]
        if not shown:
            continue
        drawn = io.StringIO()
        with svg(drawn, (9, 4), label) as figure:
            ax = figure.add_subplot()
            for kv, marker in zip(dict.fromkeys(c.kv for c in shown), "osD^vPX*" * 4):
                some = [c for c in shown if c.kv == kv]
                ax.scatter([value(c) for c in some], [c.kl for c in some], marker=marker, label=f"K and V: {kv}")
            for c in shown:
                style: Any = {"weight": "bold"} if c in best else {"alpha": 0.6}
                ax.annotate(c.scheme, (value(c), c.kl), xytext=(4, 4), textcoords="offset points", **style)
            ax.set(xlabel=label, ylabel="divergence, nats a token", yscale="log")
            ax.margins(x=0.1, y=0.1)  # names of the outermost choices stay inside
            ax.legend(loc="best", fontsize=8)
        text = drawn.getvalue()
        made.append(f"<figure>{text[text.index('<svg') :]}</figure>")
    return made


# The command


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=BUNDLED, help="directory or Hub id (default: the bundled model)")
    parser.add_argument("--text", type=Path, default=BUNDLED_TEXT, help="UTF-8 text, or .jsonl of documents")
    parser.add_argument("--tokens", type=positive, default=4096, help="of the text, at most")
    parser.add_argument("--schemes", nargs="+", help=f"of weights (default: {', '.join(SCHEMES)}, where they fit)")
    parser.add_argument("--kv", nargs="+", help=f"formats of K and V (default: {', '.join(KV)}, where they fit)")
    parser.add_argument("--device", default=REFERENCE, help="whose steps are estimated: a file of configs/devices")
    parser.add_argument("--sequences", type=positive, default=8, help="that are held and decode together")
    parser.add_argument("--context", type=positive, help="tokens of each (default: the model's context, 4096 at most)")
    parser.add_argument("--dtype", help="of weights and arithmetic (default: as stored; on a CPU at least f32)")
    parser.add_argument("--backend", help="xla, mosaic or triton (default: the best for the device and each format)")
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="default: beside the result file")
    add_result_options(parser)
    return parser.parse_args(argv)


def measured(args: argparse.Namespace, command: list[str], schemes: Sequence[str], kv: Sequence[str]) -> Any:
    """The sweep's result file: each scheme with each format, the plain ones included."""
    asked = ["--text", str(args.text), "--tokens", str(args.tokens), "--no-groups", "--grid"]
    asked += ["--model", args.model] if args.model != BUNDLED else []
    asked += ["--results", str(args.results)] + (["--label", args.label] if args.label else [])
    for name in ("dtype", "backend"):
        asked += [f"--{name}", getattr(args, name)] if getattr(args, name) else []
    asked += ["--layers", "--schemes", *schemes, "--kv", PLAIN_KV, *kv]
    return quant_accuracy.sweep(quant_accuracy.parse_args(asked), command)


def report(args: argparse.Namespace, command: list[str]) -> tuple[Row, Path]:
    """Measures what is missing, writes the page, and returns the document and where the page is."""
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
