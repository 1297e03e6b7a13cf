"""Draws a run of experiments.quant_accuracy as SVG. The same rows give the same bytes."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.accuracy.measured_speed import Speed
from experiments.accuracy.rows import PLAIN_KV, Row
from experiments.report.svg import heading, svg, without_matplotlib_said
from jllm.quant.schemes import PLAIN

Speeds = dict[tuple[str, str], Speed]  # by scheme and KV format
FAMILIES = {"fp8": "C1", "nf4": "C2", "w4": "C3", "int4": "C3", "k=": "C4"}  # by what a name begins with; the rest C0
GAP, LINES = 0.2, 26  # gap between points whose names share a column; names per picture height


def draw_all(document: Row, speeds: Speeds, file: Path) -> list[Path]:
    """Draws the pictures of a result beside its file, as far as it has rows. Without matplotlib it prints a note and
    draws none."""
    made = []
    with without_matplotlib_said(file):
        for name, draw, rows in pictures(document["rows"], speeds):
            if rows:
                path = file.with_name(f"{file.stem}-{name}.svg")
                with svg(path, (10, 4.2), name, title=heading(document)) as figure:
                    draw(figure, rows)
                made.append(path)
    return made


def pictures(rows: list[Row], speeds: Speeds) -> list[tuple[str, Callable[[Any, list[Row]], None], list[Row]]]:
    """Returns each picture's name, function and rows."""
    schemes = [row for row in rows if row.get("part", "scheme") == "scheme" and row["kl"] > 0]
    timed = [row | {"times": speeds[speed_key(row)].times} for row in schemes if speed_key(row) in speeds]
    alone = [row for row in schemes if row["kv"] == PLAIN_KV or row["scheme"] == PLAIN]
    return [
        ("bytes", draw_bytes, alone),
        ("speed", draw_speed, timed),
        ("layers", draw_layers, [row for row in rows if row.get("part", "scheme") == "layer"]),
        ("groups", draw_groups, [row for row in rows if row.get("part", "scheme") == "group"]),
    ]


def speed_key(row: Row) -> tuple[str, str]:
    """Returns the key of the row's scheme and KV format among measured speeds."""
    return row["scheme"], "bf16" if row["kv"] == PLAIN_KV else row["kv"]


def draw_bytes(figure: Any, rows: list[Row]) -> None:
    """Draws KL by bytes: of weights on the left, of K and V on the right. Only one is drawn if only that has rows."""
    weights = [row for row in rows if row["kv"] == PLAIN_KV]
    kv = [row for row in rows if row["scheme"] == PLAIN]
    panels = [
        (1, weights, "bytes_per_weight", "scheme", "bytes a weight, scales included"),
        (1.15, kv, "bytes_per_kv", "kv", "bytes a value of K or V, scales included"),
    ]
    panels = [panel for panel in panels if panel[1]]
    every = figure.subplots(1, len(panels), width_ratios=[width for width, *_ in panels], squeeze=False)[0]
    for axes, (_, found, x, label, title) in zip(every, panels):
        _scatter(axes, found, x, label)
        axes.set_xlabel(title)
    every[0].set_ylabel(f"KL from the model as loaded, nats a token\n({rows[0]['protocol']})")


def draw_speed(figure: Any, rows: list[Row]) -> None:
    axes = figure.subplots()
    named = [row | {"name": row["scheme"] + ("" if row["kv"] == PLAIN_KV else f", KV {row['kv']}")} for row in rows]
    _scatter(axes, named, "times", "name")
    axes.axvline(1, color="gray", linewidth=1)
    axes.set_xlabel("times as fast as 16-bit weights, measured")
    axes.set_ylabel(f"KL from the model as loaded, nats a token\n({rows[0]['protocol']})")


def _scatter(axes: Any, rows: list[Row], x: str, label: str) -> None:
    """Draws points with intervals. The names of close points stand in a column beside them."""
    axes.set_yscale("log")
    axes.set_autoscale_on(False)  # limits follow from the rows
    for row in rows:
        low, high = row.get("kl_95", (row["kl"], row["kl"]))
        spread = [[max(row["kl"] - low, 0)], [max(high - row["kl"], 0)]]
        color = _color(row[label])
        axes.errorbar(row[x], row["kl"], yerr=spread, fmt="o", markersize=3, color=color, capsize=2, linewidth=1)
    decades = 1 + math.log10(max(row["kl"] for row in rows) / min(row["kl"] for row in rows))
    top = 0.0
    for cluster in _clusters(rows, x):
        right, last = max(row[x] for row in cluster), 0.0
        for row in sorted(cluster, key=lambda row: row["kl"]):
            last = max(row["kl"], last * 10 ** (decades / LINES))
            line = {"arrowstyle": "-", "color": _color(row[label]), "linewidth": 0.4, "shrinkB": 2}
            name = axes.annotate(row[label], (row[x], row["kl"]), (right + 0.06, last), arrowprops=line)
            name.set(fontsize=7, color=_color(row[label]), va="center")
        top = max(top, last)
    axes.set_ylim(min(row["kl"] for row in rows) / 2, 1.5 * top)
    axes.set_xlim(min(row[x] for row in rows) - 0.1, max(row[x] for row in rows) + 0.7)


def _clusters(rows: list[Row], x: str) -> list[list[Row]]:
    """Returns rows grouped by x, wherever the names of two rows would collide."""
    found: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: row[x]):
        if not found or row[x] - found[-1][-1][x] > GAP:
            found.append([])
        found[-1].append(row)
    return found


def _color(name: str) -> str:
    return next((color for start, color in FAMILIES.items() if name.startswith(start)), "C0")


def draw_layers(figure: Any, rows: list[Row]) -> None:
    """Draws the KL of one quantized layer alone, and the noise in the stream if all are quantized."""
    left, right = figure.subplots(1, 2)
    for scheme in dict.fromkeys(row["scheme"] for row in rows):
        found = [row for row in rows if row["scheme"] == scheme]
        layers = [row["layer"] for row in found]
        left.semilogy(layers, [row["kl"] for row in found], "o-", markersize=3, label=scheme)
        right.plot(layers, [row["snr_db"] for row in found], "o-", markersize=3, label=scheme)
    left.set_ylabel("KL of the result, nats a token,\nwith this layer alone quantized")
    right.set_ylabel("signal-to-noise of the stream after it, dB,\nwith all layers quantized")
    for axes in (left, right):
        axes.set_xlabel("layer")
        axes.set_xticks(layers)
    left.legend(fontsize=7)


def draw_groups(figure: Any, rows: list[Row]) -> None:
    """Draws the rounding error by group size. A format without groups is a dotted line."""
    names = {"weights": "weights of linear layers", "k": "K, rotated", "v": "V"}
    every = figure.subplots(1, len(names), sharey=True)
    ticks = sorted({row["group"] for row in rows if row["group"]})
    for axes, (what, title) in zip(every, names.items()):
        of_what = [row for row in rows if row["what"] == what]
        for codes, color in (("int8", "C0"), ("int4", "C3"), ("nf4", "C2"), ("fp8", "C1")):
            found = [row for row in of_what if row["codes"] == codes]
            grouped = [row for row in found if row["group"]]
            if grouped:
                xs, ys = [row["group"] for row in grouped], [row["relative_error"] for row in grouped]
                axes.loglog(xs, ys, "o-", markersize=3, color=color, label=codes)
            for row in found[len(grouped) :]:
                label = f"{codes}, a scale a row" if what == "weights" else codes
                axes.axhline(row["relative_error"], color=color, linestyle=":", label=label)
        axes.set_xticks(ticks, [str(group) for group in ticks], minor=False)
        axes.set_xticks([], minor=True)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("values that share a scale")
        axes.legend(fontsize=7)
    every[0].set_ylabel("norm of the rounding error over that of the values")
