"""Makes the page of experiments.report: the best choices, in tables and pictures. Its HTML loads nothing."""

import html
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from experiments.accuracy.rows import PLAIN_KV, Row
from experiments.report.svg import svg
from experiments.steps.cost_model import calibrated
from experiments.steps.devices import DeviceSheet
from jllm.quant.schemes import PLAIN

DIVERGENCES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)  # nats per token
SHARES = (1.0, 0.75, 0.6, 0.5, 0.4, 0.3)  # of the bytes without quantization
CSS = """:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}
div{overflow-x:auto}figure{margin:1rem 0}table{border-collapse:collapse;margin:1rem 0;white-space:nowrap}
td,th{padding:.25rem .6rem;border-bottom:1px solid #8886;text-align:right}tr.front{font-weight:600}
td:first-child,th:first-child,td:nth-child(2),th:nth-child(2){text-align:left}th,.why td{white-space:normal}
svg{background:#fff;max-width:100%;height:auto;border-radius:6px}.note{opacity:.75}"""


@dataclass(frozen=True)
class Choice:
    """A scheme with a KV format, and its cost."""

    scheme: str
    kv: str
    kl: float
    bytes: int  # of weights, and of K and V of all held tokens
    row: Row  # from quant_accuracy
    weights: int  # bytes
    token: float  # bytes of one token's K and V
    decode_ms: float | None  # estimated; None: the device lacks the arithmetic


def front(found: Sequence[Choice]) -> list[Choice]:
    """Returns the choices that no other beats, the smallest first. One beats another if it is as small and as close,
    and better in one."""
    best: list[Choice] = []
    for choice in sorted(found, key=lambda c: (c.bytes, c.kl)):
        if not best or choice.kl < best[-1].kl:
            best.append(choice)
    return best


def smallest(found: Sequence[Choice], kl: float) -> Choice | None:
    """Returns the smallest choice with at most this divergence."""
    return min((c for c in found if c.kl <= kl), key=lambda c: (c.bytes, c.kl), default=None)


def closest(found: Sequence[Choice], limit: float) -> Choice | None:
    """Returns the closest choice within `limit` bytes."""
    return min((c for c in found if c.bytes <= limit), key=lambda c: (c.kl, c.bytes), default=None)


def page(document: Row, found: Sequence[Choice], sheet: DeviceSheet, left_out: dict[str, str], args: Any) -> str:
    """Returns the report as HTML that loads nothing."""
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
    """Returns the largest unit that is at most `count` bytes, and its bytes."""
    return next((u, s) for u, s in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0)) if count >= s or u == "B")


def _bytes(count: float) -> str:
    unit, size = _unit(count)
    return f"{count / size:.3g} {unit}"


def _ms(choice: Choice) -> str:
    return "not on this device" if choice.decode_ms is None else f"{choice.decode_ms:.3g}"


def _pictures(found: Sequence[Choice], best: Sequence[Choice]) -> list[str]:
    """Returns pictures of divergence by bytes and by milliseconds, as inline SVG. Without matplotlib it returns a
    note."""
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
            ax.margins(x=0.1, y=0.1)  # keeps names of the outermost choices inside
            ax.legend(loc="best", fontsize=8)
        text = drawn.getvalue()
        made.append(f"<figure>{text[text.index('<svg') :]}</figure>")
    return made
