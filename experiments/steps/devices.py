"""Data sheets of devices: configs/devices/*.json, one file a device, decimal units as their makers give them.

Arithmetic is that of dense matrices, accumulated as serving does (float32, int32); a kind that a device has no matrix
instructions for is left out. The host's link counts in one direction. A price is the lowest rent of one device, on
demand, in the lists that were read (their commits tell the day); a device that none of them names has no price.
"""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from jllm.errors import ConfigError

SHEETS = Path(__file__).parents[2] / "configs" / "devices"
KINDS = ("bf16", "f16", "fp8", "int8")


@dataclass(frozen=True)
class Price:
    """What somebody asks for a device. Raises ConfigError for what is no price, or has no date."""

    usd_hour: float
    offer: str  # whose, and what they call it
    source: str  # where it is published
    read: str  # the day, YYYY-MM-DD

    def __post_init__(self) -> None:
        if isinstance(self.usd_hour, bool) or not isinstance(self.usd_hour, int | float) or not self.usd_hour > 0:
            raise ConfigError(f"usd_hour must be a number > 0, not {self.usd_hour!r}")
        try:
            date.fromisoformat(self.read)
        except (TypeError, ValueError):
            raise ConfigError(f"read must be a day, YYYY-MM-DD, not {self.read!r}") from None


@dataclass(frozen=True)
class DeviceSheet:
    """One device. Raises ConfigError for figures that no device has."""

    name: str
    memory_gb: float
    bandwidth_gb_s: float
    dense_tflops: Mapping[str, float] = field(hash=False)  # by kind of the operands, one of KINDS
    host_link: str  # what it is
    host_gb_s: float
    source: str  # where the figures are published
    price: Price | None = None

    def __post_init__(self) -> None:
        for name in ("memory_gb", "bandwidth_gb_s", "host_gb_s"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
                raise ConfigError(f"{name} must be a number > 0, not {value!r}")
        known = isinstance(self.dense_tflops, dict) and set(self.dense_tflops) <= set(KINDS)
        if not known or not ({"bf16", "f16"} & set(self.dense_tflops)) or not min(self.dense_tflops.values()) > 0:
            raise ConfigError(f"dense_tflops needs bf16 or f16 and may have {', '.join(KINDS)}: {self.dense_tflops!r}")

    @property
    def memory(self) -> float:
        """Bytes."""
        return 1e9 * self.memory_gb

    @property
    def bandwidth(self) -> float:
        """Bytes a second."""
        return 1e9 * self.bandwidth_gb_s

    @property
    def host_rate(self) -> float:
        """Bytes a second between host and device, in one direction."""
        return 1e9 * self.host_gb_s

    @property
    def peak16(self) -> float:
        """Operations a second on 16-bit numbers."""
        return 1e12 * self.dense_tflops.get("bf16", self.dense_tflops.get("f16", 0.0))


def read_sheet(path: Path) -> DeviceSheet:
    """Raises ConfigError where the file is no data sheet."""
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        price = Price(**given.pop("price")) if "price" in given else None
        return DeviceSheet(**given, price=price)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: not a device's data sheet: {error}") from None


def device_sheet(name: str) -> DeviceSheet:
    """The sheet configs/devices/<name>.json. Raises ConfigError for an unknown name, with those near it."""
    path = SHEETS / f"{name}.json"
    if not path.exists():
        known = sorted(sheet.stem for sheet in SHEETS.glob("*.json"))
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.3)
        raise ConfigError(
            f"no data sheet of a device called {name!r}; {'near' if near else 'known'}: {', '.join(near or known)}"
        )
    return read_sheet(path)


def device_sheets() -> dict[str, DeviceSheet]:
    """All of them, by name, the fastest memory first."""
    sheets = {path.stem: read_sheet(path) for path in sorted(SHEETS.glob("*.json"))}
    return dict(sorted(sheets.items(), key=lambda item: -item[1].bandwidth_gb_s))
