"""Defines the parts of a claim: its measurement, its decision, and the words for the result."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from experiments.serving.workload import half_interval
from pallas_kernels.bench.measure import device_us

Row = dict[str, Any]
Answer = tuple[str, str]  # direction and size: is the claimed effect there, and as large as stated
RESULTS = Path(__file__).parents[1] / "results"
NOT_TESTED = "not tested"


@dataclass(frozen=True)
class Interval:
    """A mean over rounds, with half of its 95 % interval (Student's t). A single round has the noise as its half."""

    mean: float
    half: float
    rounds: int

    def reaches(self, least: float) -> bool | None:
        """Returns whether the whole interval does, or None if part of it does."""
        return True if self.mean - self.half >= least else False if self.mean + self.half < least else None

    def within(self, least: float, most: float) -> bool | None:
        """Returns whether the whole interval is within, or None if part of it is."""
        low, high = self.mean - self.half, self.mean + self.half
        return True if least <= low and high <= most else False if high < least or low > most else None

    def shown(self, form: str, scale: float = 1.0, unit: str = "") -> str:
        """Returns its mean and ends in a form like "{:.2f}", or a single round's value alone."""
        mean, *ends = (form.format(scale * (self.mean + side * self.half)) for side in (0, -1, 1))
        return f"{mean}{unit}" if self.rounds == 1 else f"{mean}{unit} ({' to '.join(ends)})"


def interval_of(values: Sequence[float], noise: float = 0.0) -> Interval:
    """Returns the interval of the values of the rounds. `noise` is half of a single round's interval."""
    half = half_interval(values)
    return Interval(statistics.fmean(values), noise if half is None else half, len(values))


def over_rounds(key: str, values: Sequence[float]) -> Row:
    """Returns the fields of a row for a value measured in several rounds. See `interval_in`."""
    found = interval_of(values)
    return {key: round(found.mean, 4), f"{key}_ci": round(found.half, 4), "rounds": found.rounds}


def interval_in(row: Row, key: str) -> Interval:
    """Returns the interval of a row's value. Rows of older files, without rounds, have a single one."""
    return Interval(row[key], row.get(f"{key}_ci", 0.0), row.get("rounds", 1))


def change_of(rows: Iterable[Row], over: Iterable[Row], key: str, noise: float = 0.0) -> Interval | None:
    """Returns the relative change of a value between rows, within each round that has both. Returns None if no round
    has. Rows of older files, without rounds, count as one round."""
    base = {row.get("round"): row[key] for row in over}
    changes = [row[key] / base[row.get("round")] - 1 for row in rows if row.get("round") in base]
    return interval_of(changes, noise) if changes else None


def all_hold(sides: Iterable[bool | None]) -> bool | None:
    """Returns whether all hold. One that fails decides; else one that is open leaves it open."""
    sides = list(sides)
    return False if False in sides else None if None in sides else True


def in_most(sides: Iterable[bool | None]) -> str:
    """Returns "yes" if a claim holds in more than half of the decided cases, else "no".

    A side is None if noise leaves its case open. The answer is "open" if more than half are, and "not tested" without
    any case.
    """
    sides = list(sides)
    decided = [side for side in sides if side is not None]
    if not sides:
        return NOT_TESTED
    if 2 * len(decided) < len(sides):
        return "open"
    return "yes" if 2 * sum(decided) > len(decided) else "no"


def in_all(sides: Iterable[bool | None]) -> str:
    """Returns "yes" if a claim holds in every case, "mostly" if `in_most` returns yes, else the answer of `in_most`."""
    sides = list(sides)
    found = in_most(sides)
    return "mostly" if found == "yes" and not all(sides) else "" if found == NOT_TESTED else found


def spread(values: Iterable[float], form: str = "{:.2f}") -> str:
    """Returns the least and largest value, or the only one: "1.05 to 1.18"."""
    values = list(values)
    return " to ".join(dict.fromkeys(form.format(end(values)) for end in (min, max)))


def percents(values: Iterable[float], form: str = "{:.0f}") -> str:
    """Returns the least and largest share: "-5 to 26 %"."""
    return f"{spread([100 * value for value in values], form)} %"


@dataclass(frozen=True)
class Claim:
    """A claim, and how it is tested.

    measure(toy) yields flat rows. A claim that lasts also takes seconds, one with loads takes these, and one with a
    chosen model takes a subject. A row with "error" could not be measured. holds(rows) decides by the other rows.
    words(rows) returns the measurement in twelve words, and its meaning in one sentence. It is called only if something
    is decided.
    """

    id: str
    stated: str  # the authors' figure, in twelve words
    measure: Callable[..., Iterable[Row]]
    holds: Callable[[list[Row]], Answer]
    words: Callable[[list[Row]], tuple[str, str]]
    hopper: bool = False  # about a kernel that runs only on Hopper, so toy size means nothing
    serves: bool = False  # fills a GPU's memory with an engine's pages
    computed: bool = False  # computed or simulated: the verdict is valid on any machine
    alternates: bool = False  # its rows are rounds, which claims of one command share
    chosen: bool = False  # the user may choose the model and text
    lasts: bool = False  # requests arrive for some seconds, which the user may choose
    loads: bool = False  # the user may choose loads, as shares of the throughput of all at once


def measured_rows(document: Row) -> list[Row]:
    """Returns the rows of a claim's file without failures."""
    return [row for row in document["rows"] if "error" not in row]


def microseconds(call: Callable[[], Any]) -> float:
    """Returns the microseconds of one call. On a GPU it is the device's time without gaps; else the host's median of
    five."""
    if jax.default_backend() == "gpu":
        return device_us(call)
    jax.block_until_ready(call())
    times = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def text_table(rows: list[Row]) -> str:
    """Returns rows as text tables, one for each set of keys."""
    blocks: list[tuple[list[str], list[Row]]] = []
    for row in rows:
        keys = [key for key in row if key != "claim"]
        if not blocks or blocks[-1][0] != keys:
            blocks.append((keys, []))
        blocks[-1][1].append(row)
    lines = []
    for keys, block in blocks:
        cells = [keys, *([_cell(row[key]) for key in keys] for row in block)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(keys))]
        lines += ["  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in cells] + [""]
    return "\n".join(lines[:-1])


def _cell(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
