"""Data sheets of devices, and what was measured of them: configs/devices/*.json, one file a device, decimal units as
their makers give them.

Arithmetic is that of dense matrices, accumulated as serving does (float32, int32); a kind that a device has no matrix
instructions for is left out. The host's link counts in one direction. A price is the lowest rent of one device, on
demand, in the lists that were read (their commits tell the day); a device that none of them names has no price.
`device_kind` is what JAX calls a device. What was measured are the best rates that anything reached there, and the file
that says so (experiments/ceilings.py measures them).
"""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

from jllm.errors import ConfigError

SHEETS = Path(__file__).parents[2] / "configs" / "devices"
KINDS = ("bf16", "f16", "fp8", "int8")
REFERENCE = "h200-sxm"  # whose steps others are estimated by, and whose ceilings count where a device is unknown


@dataclass(frozen=True)
class Ceilings:
    """What a device does a second at most, which floors count with (experiments/steps/floors.py)."""

    bandwidth: float  # bytes of its memory
    peaks: Mapping[str | None, float] = field(hash=False)  # operations of products, by activations; None: 16 bits
    attention: float  # operations of causal attention
    source: str

    @property
    def rates(self) -> str:
        """In words, with where they are from."""
        of = {kind: f"{peak / 1e12:,.0f}" for kind, peak in self.peaks.items() if kind}
        said = [f"{rate} in {kind}" for kind, rate in of.items()]
        if len(set(of.values())) == 1:
            said = [f"{next(iter(of.values()))} in 8 bits"]
        eight = f" ({', '.join(said)})" if of else ""
        return (
            f"{self.bandwidth / 1e12:.2f} TB/s, {self.peaks[None] / 1e12:.0f} TFLOP/s{eight} and "
            f"{self.attention / 1e12:.0f} TFLOP/s of prompts' attention, {self.source}"
        )

    @property
    def document(self) -> dict[str, Any]:
        """For a result file."""
        peaks = {kind or "16 bits": peak for kind, peak in self.peaks.items()}
        return {"bandwidth": self.bandwidth, "peaks": peaks, "attention": self.attention, "source": self.source}


@dataclass(frozen=True)
class Measured:
    """The best rates measured on a device. Raises ConfigError where one is missing."""

    bandwidth_gb_s: float
    dense_tflops: Mapping[str, float] = field(hash=False)
    attention_tflops: float
    source: str  # the file that has them, or where else they are written

    def __post_init__(self) -> None:
        figures = (self.bandwidth_gb_s, self.attention_tflops, *self.dense_tflops.values())
        known = "bf16" in self.dense_tflops and set(self.dense_tflops) <= set(KINDS)
        if not known or not min(figures) > 0 or not self.source:
            raise ConfigError(f"measured needs rates > 0, of bf16 at least, and a source, not {vars(self)!r}")


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
    device_kind: str | None = None  # JAX's name
    measured: Measured | None = None

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
        """Returns Bytes."""
        return 1e9 * self.memory_gb

    @property
    def bandwidth(self) -> float:
        """Returns bytes a second."""
        return 1e9 * self.bandwidth_gb_s

    @property
    def host_rate(self) -> float:
        """Returns bytes a second between host and device, in one direction."""
        return 1e9 * self.host_gb_s

    @property
    def peak16(self) -> float:
        """Operations a second on 16-bit numbers."""
        return 1e12 * self.dense_tflops.get("bf16", self.dense_tflops.get("f16", 0.0))

    @property
    def nominal(self) -> Ceilings:
        """By the data sheet alone."""
        peaks = {None: self.peak16} | _eight_bits(self.dense_tflops)
        return Ceilings(self.bandwidth, peaks, self.peak16, f"the data sheet of {self.name}, as nothing was measured")

    @property
    def ceilings(self) -> Ceilings:
        """As measured, or else by the data sheet."""
        if self.measured is None:
            return self.nominal
        found = self.measured
        peaks = {None: 1e12 * found.dense_tflops["bf16"]} | _eight_bits(found.dense_tflops)
        said = f"the best figures measured on {self.name} ({found.source})"
        return Ceilings(1e9 * found.bandwidth_gb_s, peaks, 1e12 * found.attention_tflops, said)


def _eight_bits(tflops: Mapping[str, float]) -> dict[str | None, float]:
    return {kind: 1e12 * tflops[kind] for kind in ("int8", "fp8") if kind in tflops}


def read_sheet(path: Path) -> DeviceSheet:
    """Raises ConfigError where the file is no data sheet."""
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        parts = {"price": Price, "measured": Measured}
        return DeviceSheet(**given | {name: make(**given[name]) for name, make in parts.items() if name in given})
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: not a device's data sheet: {error}") from None


def device_sheet(name: str) -> DeviceSheet:
    """Returns the sheet configs/devices/<name>.json. Raises ConfigError for an unknown name, with those near it."""
    path = SHEETS / f"{name}.json"
    if not path.exists():
        known = sorted(sheet.stem for sheet in SHEETS.glob("*.json"))
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.3)
        raise ConfigError(
            f"no data sheet of a device called {name!r}; {'near' if near else 'known'}: {', '.join(near or known)}"
        )
    return read_sheet(path)


def sheet_of(device_kind: str) -> DeviceSheet | None:
    """Of the device that JAX calls so, where one names it."""
    return next((each for each in device_sheets().values() if each.device_kind == device_kind), None)


def ceilings_of(device_kind: str, bandwidth: float | None = None) -> Ceilings:
    """Of the device that JAX calls so, REFERENCE's where no sheet names it; with another bandwidth (bytes a second)
    where one is given."""
    sheet = sheet_of(device_kind)
    found = device_sheet(REFERENCE).ceilings if sheet is None else sheet.ceilings
    if sheet is None:
        found = replace(found, source=f"{found.source}, as no data sheet is of {device_kind!r}")
    if bandwidth is not None:
        found = replace(found, bandwidth=bandwidth, source=f"{found.source}, but for the bandwidth that was asked for")
    return found


def device_sheets(folder: Path = SHEETS) -> dict[str, DeviceSheet]:
    """Returns all of them, by name, the fastest memory first."""
    sheets = {path.stem: read_sheet(path) for path in sorted(folder.glob("*.json"))}
    return dict(sorted(sheets.items(), key=lambda item: -item[1].bandwidth_gb_s))
