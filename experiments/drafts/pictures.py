"""Draws experiments.speculation as SVG. The same result gives the same bytes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.report.svg import svg
from jllm.errors import ConfigError

Row = dict[str, Any]


def draw(document: Row, path: Path) -> None:
    """Draws the picture of a part's result. Raises ImportError without matplotlib, and ConfigError for a file without a
    part."""
    kind = next((kind for kind in PICTURES if document.get("experiment", "").startswith(f"speculation-{kind}")), None)
    rows = [row for row in document.get("rows", ()) if "error" not in row]
    if kind is None or not rows:
        raise ConfigError(f"{path.stem}.json has nothing to draw: it is no result of experiments.speculation")
    title = f"Speculation: {kind} ({document['device']}, {document['date']})"
    with svg(path, (9, 3.6), "speculation", title=title) as figure:
        PICTURES[kind](figure, rows)


def draw_acceptance(figure: Any, rows: list[Row]) -> None:
    """Draws tokens per step by drafter, with a panel for each workload and a bar for each temperature."""
    fixed = [row for row in rows if row.get("choice") == "fixed" and "tokens_a_step" in row]
    workloads, drafters = (list(dict.fromkeys(row[key] for row in fixed)) for key in ("workload", "drafter"))
    temperatures = sorted({row["temperature"] for row in fixed})
    panels = figure.subplots(1, len(workloads), sharey=True, squeeze=False)[0]
    for axes, workload in zip(panels, workloads):
        for i, temperature in enumerate(temperatures):
            some = [row for row in fixed if (row["workload"], row["temperature"]) == (workload, temperature)]
            x = [drafters.index(row["drafter"]) + 0.25 * i for row in some]
            y = [row["tokens_a_step"] for row in some]
            low = [row["tokens_a_step"] - row["tokens_a_step_95"][0] for row in some]
            high = [row["tokens_a_step_95"][1] - row["tokens_a_step"] for row in some]
            axes.bar(x, y, 0.23, yerr=[low, high], capsize=2, label=f"temperature {temperature:g}")
        axes.set_xticks([i + 0.25 for i in range(len(drafters))], drafters)
        axes.set_title(workload, fontsize=9)
    panels[0].set_ylabel("tokens a step with drafts")
    panels[-1].legend()


def draw_steps(figure: Any, rows: list[Row]) -> None:
    """Draws the cost of a step of Q rows over a plain one, by batch. Each context has a panel."""
    checked = [row for row in rows if "over_plain" in row]
    contexts = sorted({row["context"] for row in checked})
    panels = figure.subplots(1, len(contexts), sharey=True, squeeze=False)[0]
    for axes, context in zip(panels, contexts):
        for q in sorted({row["Q"] for row in checked}):
            some = [row for row in checked if (row["context"], row["Q"]) == (context, q)]
            axes.plot([row["batch"] for row in some], [row["over_plain"] for row in some], "o-", label=f"{q} rows")
        axes.set_xscale("log", base=2)
        axes.set_xlabel("batch")
        axes.set_title(f"context {context}", fontsize=9)
    panels[0].set_ylabel("time over a plain step")
    panels[-1].legend()


PICTURES: dict[str, Callable[[Any, list[Row]], None]] = {"acceptance": draw_acceptance, "steps": draw_steps}
