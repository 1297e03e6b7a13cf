"""Reads devices' data sheets and measured rates: configs/devices/*.json, one file per device, in the makers' decimal
units.

Arithmetic is that of dense matrices, with serving's accumulation (float32, int32). A kind without matrix instructions
is left out. The host's link counts in one direction. A price is the lowest on-demand rent of one device in the lists
that were read (their commits give the day). A device in none of them has no price. `device_kind` is JAX's name of the
device. Measured values are the best rates that anything reached there, with their file (experiments/ceilings.py
measures them). Sustained ones hold for seconds, at the clocks that the device's power allows.
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
REFERENCE = "h200-sxm"  # estimates others' steps; its ceilings count for unknown devices


@dataclass(frozen=True)
class Ceilings:
    """A device's greatest rates, for floors (experiments/steps/floors.py)."""

    bandwidth: float  # bytes/s of its memory
    peaks: Mapping[str | None, float] = field(hash=False)  # operations/s of matmuls, by activations; None: 16 bits
    attention: float  # operations/s of causal attention
    source: str
    sustained: "Ceilings | None" = None  # rates that hold for seconds, where they were measured

    @property
    def rates(self) -> str:
        """Returns the rates in words, with their source."""
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
        """Returns the rates for a result file."""
        peaks = {kind or "16 bits": peak for kind, peak in self.peaks.items()}
        found = {"bandwidth": self.bandwidth, "peaks": peaks, "attention": self.attention, "source": self.source}
        return found if self.sustained is None else found | {"sustained": self.sustained.document}


@dataclass(frozen=True)
class Measured:
    """The best rates measured on a device. Raises ConfigError if one is missing."""

    bandwidth_gb_s: float
    dense_tflops: Mapping[str, float] = field(hash=False)
    attention_tflops: float
    source: str  # the file that has them, or another source

    def __post_init__(self) -> None:
        figures = (self.bandwidth_gb_s, self.attention_tflops, *self.dense_tflops.values())
        known = "bf16" in self.dense_tflops and set(self.dense_tflops) <= set(KINDS)
        if not known or not min(figures) > 0 or not self.source:
            raise ConfigError(f"measured needs rates > 0, of bf16 at least, and a source, not {vars(self)!r}")


@dataclass(frozen=True)
class Sustained:
    """Rates that a device holds for seconds. A quantity that is not listed has its best rate. Raises ConfigError for
    impossible values."""

    source: str
    bandwidth_gb_s: float | None = None
    dense_tflops: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        figures = [*self.dense_tflops.values(), *([] if self.bandwidth_gb_s is None else [self.bandwidth_gb_s])]
        if not figures or not min(figures) > 0 or not set(self.dense_tflops) <= set(KINDS) or not self.source:
            raise ConfigError(f"sustained needs rates > 0 of {', '.join(KINDS)} or memory, not {vars(self)!r}")


@dataclass(frozen=True)
class Price:
    """A published rent of a device. Raises ConfigError for an invalid price or date."""

    usd_hour: float
    offer: str  # the provider, and its name for the device
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
    """The data sheet of one device. Raises ConfigError for impossible values."""

    name: str
    memory_gb: float
    bandwidth_gb_s: float
    dense_tflops: Mapping[str, float] = field(hash=False)  # by kind of the operands, one of KINDS
    host_link: str  # its name
    host_gb_s: float
    source: str  # where the values are published
    price: Price | None = None
    device_kind: str | None = None  # JAX's name
    measured: Measured | None = None
    sustained: Sustained | None = None

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
        """Returns the memory in bytes."""
        return 1e9 * self.memory_gb

    @property
    def bandwidth(self) -> float:
        """Returns the bandwidth in bytes/s."""
        return 1e9 * self.bandwidth_gb_s

    @property
    def host_rate(self) -> float:
        """Returns bytes/s between host and device, in one direction."""
        return 1e9 * self.host_gb_s

    @property
    def peak16(self) -> float:
        """Returns operations/s on 16-bit values."""
        return 1e12 * self.dense_tflops.get("bf16", self.dense_tflops.get("f16", 0.0))

    @property
    def nominal(self) -> Ceilings:
        """Returns the ceilings of the data sheet alone."""
        peaks = {None: self.peak16} | _eight_bits(self.dense_tflops)
        return Ceilings(self.bandwidth, peaks, self.peak16, f"the data sheet of {self.name}, as nothing was measured")

    @property
    def ceilings(self) -> Ceilings:
        """Returns the measured ceilings, or else those of the data sheet."""
        if self.measured is None:
            return self.nominal
        found = self.measured
        peaks = {None: 1e12 * found.dense_tflops["bf16"]} | _eight_bits(found.dense_tflops)
        said = f"the best figures measured on {self.name} ({found.source})"
        best = Ceilings(1e9 * found.bandwidth_gb_s, peaks, 1e12 * found.attention_tflops, said)
        return best if self.sustained is None else replace(best, sustained=_lower(best, self.sustained))


def _lower(best: Ceilings, found: Sustained) -> Ceilings:
    """Returns the best rates, with sustained ones in their place."""
    bandwidth = best.bandwidth if found.bandwidth_gb_s is None else 1e9 * found.bandwidth_gb_s
    peaks = {**best.peaks, **_eight_bits(found.dense_tflops)}
    if "bf16" in found.dense_tflops:
        peaks[None] = 1e12 * found.dense_tflops["bf16"]
    return replace(best, bandwidth=bandwidth, peaks=peaks, source=found.source)


def _eight_bits(tflops: Mapping[str, float]) -> dict[str | None, float]:
    return {kind: 1e12 * tflops[kind] for kind in ("int8", "fp8") if kind in tflops}


def read_sheet(path: Path) -> DeviceSheet:
    """Returns the sheet in a file. Raises ConfigError for any other file."""
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        parts = {"price": Price, "measured": Measured, "sustained": Sustained}
        return DeviceSheet(**given | {name: make(**given[name]) for name, make in parts.items() if name in given})
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: not a device's data sheet: {error}") from None


def device_sheet(name: str) -> DeviceSheet:
    """Returns the sheet configs/devices/<name>.json. Raises ConfigError for an unknown name, with similar ones."""
    path = SHEETS / f"{name}.json"
    if not path.exists():
        known = sorted(sheet.stem for sheet in SHEETS.glob("*.json"))
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.3)
        raise ConfigError(
            f"no data sheet of a device called {name!r}; {'near' if near else 'known'}: {', '.join(near or known)}"
        )
    return read_sheet(path)


def sheet_of(device_kind: str) -> DeviceSheet | None:
    """Returns the sheet of JAX's device_kind, or None."""
    return next((each for each in device_sheets().values() if each.device_kind == device_kind), None)


def ceilings_of(device_kind: str, bandwidth: float | None = None) -> Ceilings:
    """Returns the ceilings of JAX's device_kind, or those of the reference device. `bandwidth` (bytes/s) replaces
    theirs."""
    sheet = sheet_of(device_kind)
    found = device_sheet(REFERENCE).ceilings if sheet is None else sheet.ceilings
    if sheet is None:
        found = replace(found, source=f"{found.source}, as no data sheet is of {device_kind!r}")
    if bandwidth is not None:
        source = f"{found.source}, but for the bandwidth that was asked for"
        found = replace(found, bandwidth=bandwidth, source=source, sustained=None)
    return found


def device_sheets(folder: Path = SHEETS) -> dict[str, DeviceSheet]:
    """Returns all sheets by name, the fastest memory first."""
    sheets = {path.stem: read_sheet(path) for path in sorted(folder.glob("*.json"))}
    return dict(sorted(sheets.items(), key=lambda item: -item[1].bandwidth_gb_s))
