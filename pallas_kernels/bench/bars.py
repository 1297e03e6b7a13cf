"""Makes bars: measured figures, each with the value that it has to reach."""

from collections.abc import Iterable
from typing import Any

H200 = "NVIDIA H200"  # bars in microseconds, milliseconds or requests a second are for this device
Row = dict[str, Any]


def bar(name: str, value: float, unit: str, bar: float, *, most: bool = False, of: str | None = None) -> Row:
    """Returns a figure with its least allowed value or, with `most`, its largest. `of` names the only device (JAX)."""
    asked = {"name": name, "value": value, "unit": unit, "bar": bar, "met": value <= bar if most else value >= bar}
    return asked if of is None else asked | {"of": of}


def asked_of(device: str, bars: Iterable[Row]) -> list[Row]:
    """Returns the bars that are for a device."""
    return [{key: bar[key] for key in bar if key != "of"} for bar in bars if bar.get("of", device) == device]
