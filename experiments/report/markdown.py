"""Markdown of tables and values."""

import re
from collections.abc import Sequence
from typing import Any

LONG = 16  # rows; a longer table is folded away


def markdown(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *cells]
    return "\n".join(f"| {' | '.join(escape(cell) for cell in line)} |" for line in lines)


def folded(table: str, caption: str, rows: int) -> str:
    """A table under its caption, and closed if it is long."""
    if rows <= LONG:
        return f"{caption}\n\n{table}" if caption else table
    return f"<details><summary>{caption or 'rows'} ({rows})</summary>\n\n{table}\n\n</details>"


def show(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    if isinstance(value, list):
        if len(value) > 1 and len(set(map(str, value))) == 1:
            return f"{len(value)} x {show(value[0])}"
        return ", ".join(map(show, value))
    return str(value)


def shown_bar(bar: dict[str, Any]) -> list[str]:
    """Name, value with its unit, and what was asked for."""
    unit = "" if bar["unit"] in ("1", "fraction") else f" {bar['unit']}"
    return [bar["name"], f"{show(bar['value'])}{unit}", show(bar["bar"])]


def escape(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")


def slug(title: str) -> str:
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
