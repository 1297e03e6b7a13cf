"""Makes bars: figures and what they had to reach."""

from collections.abc import Iterable
from typing import Any

H200 = "NVIDIA H200"  # whose bars those in microseconds, milliseconds or requests a second are
Row = dict[str, Any]


def bar(name: str, value: float, unit: str, bar: float, *, most: bool = False, of: str | None = None) -> Row:
    """Returns a figure with what it had to reach: at least, or at `most`. `of`: on this device alone, by JAX's name."""
    asked = {"name": name, "value": value, "unit": unit, "bar": bar, "met": value <= bar if most else value >= bar}
    return asked if of is None else asked | {"of": of}


def asked_of(device: str, bars: Iterable[Row]) -> list[Row]:
    """Returns the bars that a device has to reach."""
    return [{key: bar[key] for key in bar if key != "of"} for bar in bars if bar.get("of", device) == device]
