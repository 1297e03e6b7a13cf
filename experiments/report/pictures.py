"""Draws the pictures of RESULTS.md as SVG. The same results give the same bytes."""

import math
import statistics
from pathlib import Path
from typing import Any

from experiments.accuracy.rows import PLAIN_KV
from experiments.report.documents import Row, short
from experiments.report.figures import Results, Series, accuracy_rows, decode_series, of_steps, requests_rows
from experiments.report.strips import Strip, strips
from experiments.report.svg import svg
from jllm.quant.schemes import PLAIN

STYLE = {"axes.spines.top": False, "axes.spines.right": False}
OURS = "#0b62c4"
KINDS = {"jllm": (OURS, "o-"), "floor": ("#555555", ":")}
PEERS = {"PyTorch": "#d1495b", "PPL.LLM": "#8d6a9f", "vLLM": "#e08e1b", "transformers": "#999999"}
TITLES = {
    "bf16": "bf16 weights and KV",
    "bf16, int8-g8 KV": "16-bit weights, int8-g8 KV",
    "w8a8, int8-g8 KV": "8-bit weights and KV",
}
BATCHES = (1, 8, 32, 128, 512)
FAMILIES = {"fp8": "C1", "nf4": "C2", "w4": "C3", "int4": "C3", "k=": "C4"}  # by what a name begins with; the rest C0
GAP, LINES = 0.2, 26  # gap between points whose names share a column; names per picture height
RANGE = 1.6  # cells are fully coloured from this ratio on, and below its inverse


def draw_all(results: Results, directory: Path) -> list[Path]:
    """Writes each picture that has data. Raises ImportError without matplotlib."""
    drawn = [
        ("decode", draw_decode, (8.6, 4.1), any(decode_series(of_steps(results)).values())),
        ("requests", draw_requests, (8.6, 3.4), requests_rows(of_steps(results))),
        ("kernels", draw_kernels, (11, 0.48 * len(strips(results)) + 1.1), strips(results)),
        ("accuracy", draw_accuracy, (10, 4.2), accuracy_rows(results)),
    ]
    made = []
    for name, draw, size, shown in drawn:
        if shown:
            made.append(directory / f"summary-{name}.svg")
            with svg(made[-1], size, "summary", STYLE) as figure:
                draw(figure, results)
    return made


def draw_decode(figure: Any, results: Results) -> None:
    """Draws decode steps by batch, with a panel for each pair of formats."""
    panels, on = figure.subplots(1, len(TITLES)), of_steps(results)
    for axes, (formats, series) in zip(panels, decode_series(on).items()):
        _step_panel(axes, series)
        axes.set_title(TITLES[formats], fontsize=9)
    figure.suptitle(f"LLaMA-2-7B on one {short(on.device)}", fontsize=10)
    panels[0].set_ylabel("ms a decode step")
    for axes in panels[1:]:
        axes.set_yticklabels([])


def _step_panel(axes: Any, series: list[Series]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    floor = next((each.ms for each in series if each.kind == "floor"), {})
    axes.fill_between(list(floor), 1, list(floor.values()), color="#eeeeee", linewidth=0)
    for each in series:
        color, style = KINDS.get(each.kind) or (_peer_color(each.name), "s--")
        width, label = 2.2 if each.kind == "jllm" else 1.2, "floor" if each.kind == "floor" else each.name
        axes.plot(list(each.ms), list(each.ms.values()), style, color=color, markersize=3, lw=width, label=label)
        for batch in [batch for batch in each.ms if batch in BATCHES and batch in each.ours]:
            below = each.name == "PyTorch" and batch > 1  # vLLM's are above it
            note = axes.annotate(
                f"{each.ms[batch] / each.ours[batch]:.2f}x",
                (batch, each.ms[batch]),
                (2, -3 if below else 3),
                textcoords="offset points",
                va="top" if below else "bottom",
                ha="left" if below or batch == 1 else "right",
            )
            note.set(fontsize=7, color=color)
    axes.set_xticks(BATCHES, [str(batch) for batch in BATCHES], minor=False)
    axes.set_xticks([], minor=True)
    axes.set_yticks([2, 3, 4, 6, 10, 20, 30], ["2", "3", "4", "6", "10", "20", "30"])
    axes.set_yticks([], minor=True)
    axes.set_ylim(1.4, 40)
    axes.set_xlabel("batch")
    axes.grid(alpha=0.25)
    if series:
        axes.legend(fontsize=7, loc="upper left", frameon=False)


def _peer_color(name: str) -> str:
    return next((color for start, color in PEERS.items() if name.startswith(start)), "#999999")


def draw_requests(figure: Any, results: Results) -> None:
    """Draws a bar for each system, the fastest on top. Repeated runs have 95 % intervals."""
    on = of_steps(results)
    axes, rows = figure.subplots(), [row for row in requests_rows(on)[::-1] if "replicas" not in row["name"]]
    colors = [OURS if row["name"].startswith("jllm") else _peer_color(row["name"]) for row in rows]
    axes.barh(range(len(rows)), [row["qps"] for row in rows], 0.62, color=colors)
    for i, row in enumerate(rows):
        if row.get("ci"):
            axes.errorbar(row["qps"], i, xerr=row["ci"], color="black", capsize=3, linewidth=1)
        axes.text(1, i, f"{row['qps']:.1f}", va="center", fontsize=8, color="white", fontweight="bold")
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("requests a second")
    axes.set_title(f"1,024 conversations at once, LLaMA-2-7B on one {short(on.device)} each", fontsize=9)


def draw_kernels(figure: Any, results: Results) -> None:
    """Draws a row of cells for each kernel and peer."""
    axes, found = figure.subplots(), strips(results)
    most = max((len(strip.cells) for strip in found), default=1)
    for y, strip in enumerate(found):
        _strip(axes, y, strip)
    names = [f"{strip.kernel}\nover {strip.peer}, {short(strip.device).split()[0]}" for strip in found]
    axes.set_yticks([y + 0.5 for y in range(len(found))], names, fontsize=8)
    axes.set_xlim(0, most)
    axes.set_ylim(len(found), 0)
    axes.set_xticks([])
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    figure.suptitle("Kernels, each on one GPU", fontsize=10)


def _strip(axes: Any, y: int, strip: Strip) -> None:
    from matplotlib.patches import Rectangle

    for x, (case, times) in enumerate(strip.cells.items()):
        axes.add_patch(
            Rectangle((x + 0.02, y + 0.05), 0.96, 0.9, fc=cell_color(statistics.geometric_mean(times)), ec="#dddddd")
        )
        low, high = f"{min(times):.2f}", f"{max(times):.2f}"
        text = low if low == high else f"{low} to {high}"
        axes.text(x + 0.5, y + 0.38, text, ha="center", va="center", fontsize=8)
        axes.text(x + 0.5, y + 0.74, case, ha="center", va="center", fontsize=6, color="#333333")


def cell_color(times: float) -> tuple[float, float, float]:
    """Returns white for equal times, green if ours is faster, red if it is slower."""
    share = max(-1.0, min(1.0, math.log(times) / math.log(RANGE)))
    full = (0.30, 0.69, 0.42) if share > 0 else (0.86, 0.33, 0.31)
    red, green, blue = (1 - abs(share) * (1 - part) for part in full)
    return red, green, blue


def draw_accuracy(figure: Any, results: Results) -> None:
    """Draws KL by bytes: of weights on the left, of K and V on the right. Only one is drawn if only that has rows."""
    rows = accuracy_rows(results)
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
