"""Draws the pictures of RESULTS.md that no experiment draws, as SVG. The same results give the same bytes."""

import statistics
from pathlib import Path
from typing import Any

from experiments.report.documents import short
from experiments.report.figures import Results, Series, decode_series, requests_rows
from experiments.report.strips import Strip, strips
from experiments.report.svg import svg

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
RANGE = 1.6  # cells are fully coloured from this ratio on, and below its inverse


def draw_all(results: Results, directory: Path) -> list[Path]:
    """Writes each picture that has data. Raises ImportError without matplotlib."""
    drawn = [
        ("decode", draw_decode, (8.6, 4.1), any(decode_series(results).values())),
        ("requests", draw_requests, (8.6, 3.4), requests_rows(results)),
        ("kernels", draw_kernels, (11, 0.48 * len(strips(results)) + 1.1), strips(results)),
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
    panels = figure.subplots(1, len(TITLES))
    for axes, (formats, series) in zip(panels, decode_series(results).items()):
        _step_panel(axes, series)
        axes.set_title(TITLES[formats], fontsize=9)
    figure.suptitle(f"LLaMA-2-7B on one {short(results.device)}", fontsize=10)
    panels[0].set_ylabel("ms a decode step")
    for axes in panels[1:]:
        axes.set_yticklabels([])


def _step_panel(axes: Any, series: list[Series]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ours = next((each.ms for each in series if each.kind == "jllm"), {})
    floor = next((each.ms for each in series if each.kind == "floor"), {})
    axes.fill_between(list(floor), 1, list(floor.values()), color="#eeeeee", linewidth=0)
    for each in series:
        color, style = KINDS.get(each.kind) or (_peer_color(each.name), "s--")
        width, label = 2.2 if each.kind == "jllm" else 1.2, "floor" if each.kind == "floor" else each.name
        axes.plot(list(each.ms), list(each.ms.values()), style, color=color, markersize=3, lw=width, label=label)
        for batch in [batch for batch in each.ms if each.kind == "peer" and batch in BATCHES and batch in ours]:
            below = each.name == "PyTorch" and batch > 1  # vLLM's are above it
            note = axes.annotate(
                f"{each.ms[batch] / ours[batch]:.2f}x",
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
    axes, rows = figure.subplots(), requests_rows(results)[::-1]
    colors = [OURS if row["name"].startswith("jllm") else _peer_color(row["name"]) for row in rows]
    axes.barh(range(len(rows)), [row["qps"] for row in rows], 0.62, color=colors)
    for i, row in enumerate(rows):
        if row.get("ci"):
            axes.errorbar(row["qps"], i, xerr=row["ci"], color="black", capsize=3, linewidth=1)
        axes.text(1, i, f"{row['qps']:.1f}", va="center", fontsize=8, color="white", fontweight="bold")
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("requests a second")
    axes.set_title(f"1,024 conversations at once, LLaMA-2-7B on one {short(results.device)} each", fontsize=9)


def draw_kernels(figure: Any, results: Results) -> None:
    """Draws a row of cells for each kernel and peer."""
    axes, found = figure.subplots(), strips(results)
    most = max((len(strip.cells) for strip in found), default=1)
    for y, strip in enumerate(found):
        _strip(axes, y, strip)
    names = [f"{strip.kernel}\nover {strip.peer}" for strip in found]
    axes.set_yticks([y + 0.5 for y in range(len(found))], names, fontsize=8)
    axes.set_xlim(0, most)
    axes.set_ylim(len(found), 0)
    axes.set_xticks([])
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    figure.suptitle(f"Kernels on one {short(results.device)}", fontsize=10)


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
    from math import log

    share = max(-1.0, min(1.0, log(times) / log(RANGE)))
    full = (0.30, 0.69, 0.42) if share > 0 else (0.86, 0.33, 0.31)
    red, green, blue = (1 - abs(share) * (1 - part) for part in full)
    return red, green, blue
