"""Bars: figures and what they had to reach."""

from typing import Any


def bar(name: str, value: float, unit: str, bar: float, *, most: bool = False) -> dict[str, Any]:
    """A figure and what it had to reach: at least, or at `most`."""
    return {"name": name, "value": value, "unit": unit, "bar": bar, "met": value <= bar if most else value >= bar}
