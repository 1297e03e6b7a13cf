"""The parts of a claim: how it is measured, what decides it, and the words for what was found."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from experiments.serving.workload import half_interval
from experiments.steps.devices import REFERENCE, device_sheet
from pallas_kernels.bench.measure import device_us

Row = dict[str, Any]
Answer = tuple[str, str]  # direction and size: does it help, and by as much as stated
RESULTS = Path(__file__).parents[1] / "results"
SHEETS = "data sheets"  # in the place of a device, of what is computed from these
NOT_TESTED = "not tested"


@dataclass(frozen=True)
class Interval:
    """A mean over rounds, and half of its 95 % interval (Student's t); of a single round what noise leaves of it."""

    mean: float
    half: float
    rounds: int

    def reaches(self, least: float) -> bool | None:
        """Returns whether all of it does; None where it has room for either."""
        return True if self.mean - self.half >= least else False if self.mean + self.half < least else None

    def within(self, least: float, most: float) -> bool | None:
        """Returns whether all of it is; None where it has room for either."""
        low, high = self.mean - self.half, self.mean + self.half
        return True if least <= low and high <= most else False if high < least or low > most else None

    def shown(self, form: str, scale: float = 1.0, unit: str = "") -> str:
        """Returns its mean and ends in a form like "{:.2f}"; of a single round the figure alone."""
        mean, *ends = (form.format(scale * (self.mean + side * self.half)) for side in (0, -1, 1))
        return f"{mean}{unit}" if self.rounds == 1 else f"{mean}{unit} ({' to '.join(ends)})"


def interval_of(values: Sequence[float], noise: float = 0.0) -> Interval:
    """Returns the interval of the values of each round; `noise` is half of the interval of a single one."""
    half = half_interval(values)
    return Interval(statistics.fmean(values), noise if half is None else half, len(values))


def over_rounds(key: str, values: Sequence[float]) -> Row:
    """Returns what a row says of a figure that was measured in each of some rounds: see `interval_in`."""
    found = interval_of(values)
    return {key: round(found.mean, 4), f"{key}_ci": round(found.half, 4), "rounds": found.rounds}


def interval_in(row: Row, key: str) -> Interval:
    """Returns a row's figure; rows of older files, which name no rounds, are of a single one."""
    return Interval(row[key], row.get(f"{key}_ci", 0.0), row.get("rounds", 1))


def change_of(rows: Iterable[Row], over: Iterable[Row], key: str, noise: float = 0.0) -> Interval | None:
    """Returns by which share a figure of some rows is above that of others, within each round that has both; None where
    none has. Rows of older files, which name no round, are of one."""
    base = {row.get("round"): row[key] for row in over}
    changes = [row[key] / base[row.get("round")] - 1 for row in rows if row.get("round") in base]
    return interval_of(changes, noise) if changes else None


def all_hold(sides: Iterable[bool | None]) -> bool | None:
    """Returns whether all do: no where one does not, open where one is."""
    sides = list(sides)
    return False if False in sides else None if None in sides else True


def in_most(sides: Iterable[bool | None]) -> str:
    """Returns "yes" where a claim holds in more than half of the cases that are decided, else "no".

    A side is None where noise leaves its case open: the answer is "open" where more than half are. It is "not tested"
    of no case at all.
    """
    sides = list(sides)
    decided = [side for side in sides if side is not None]
    if not sides:
        return NOT_TESTED
    if 2 * len(decided) < len(sides):
        return "open"
    return "yes" if 2 * sum(decided) > len(decided) else "no"


def in_all(sides: Iterable[bool | None]) -> str:
    """Returns "yes" where a claim holds in every case, and "mostly" where `in_most` says yes; else what that says."""
    sides = list(sides)
    found = in_most(sides)
    return "mostly" if found == "yes" and not all(sides) else "" if found == NOT_TESTED else found


def spread(values: Iterable[float], form: str = "{:.2f}") -> str:
    """Returns the least and the largest of some values, or the one that there is: "1.05 to 1.18"."""
    values = list(values)
    return " to ".join(dict.fromkeys(form.format(end(values)) for end in (min, max)))


def percents(values: Iterable[float], form: str = "{:.0f}") -> str:
    """Returns the least and the largest of some shares: "-5 to 26 %"."""
    return f"{spread([100 * value for value in values], form)} %"


@dataclass(frozen=True)
class Claim:
    """One claim, and how it is tested.

    measure(toy), measure(toy, seconds) of a claim that lasts, measure(toy, seconds, loads) of one whose loads are
    chosen, or measure(toy, subject) of one whose model is, yields flat rows; where something could not be measured, a
    row has "error". holds(rows) decides by those without one. words(rows) says what was measured in twelve words, and
    what that means in one sentence; it is asked for where something is decided.
    """

    id: str
    stated: str  # by how much, as its authors put it, in twelve words
    measure: Callable[..., Iterable[Row]]
    holds: Callable[[list[Row]], Answer]
    words: Callable[[list[Row]], tuple[str, str]]
    hopper: bool = False  # whether it is about a kernel that runs nowhere else, so that no toy size says anything
    serves: bool = False  # whether it fills a GPU's memory with an engine's pages
    computed: bool = False  # whether its verdict is computed or simulated, and so as good on any machine
    alternates: bool = False  # whether its rows are rounds, which claims of one command share
    chosen: bool = False  # whether a user may choose the model and the text that it is about
    lasts: bool = False  # whether requests arrive for some seconds, which a user may choose
    loads: bool = False  # whether a user may choose these, as shares of what is served all at once


def measured_rows(document: Row) -> list[Row]:
    """Returns the rows of a claim's file without what failed."""
    return [row for row in document["rows"] if "error" not in row]


def devices_of(document: Row) -> list[str]:
    """Returns the devices whose figures a file has: of rows taken from other results those that they name; of simulated
    ones the device whose steps they are costed by, the cost model's reference where they name none; none but the sheets
    of those that are computed from data sheets; of others its own, which also timed the scheduler of simulations that
    say so (host_us)."""
    own: str = document["device"]
    rows = measured_rows(document)
    timed = [own] if any("host_us" in row for row in rows) else []

    def device(row: Row) -> str:
        if row.get("source") == "simulated":
            return f"simulated {row.get('steps_of', device_sheet(REFERENCE).device_kind)}"
        return SHEETS if row.get("source") == "data sheet" else str(row.get("measured_on", own))

    return list(dict.fromkeys([*timed, *map(device, rows)]))


def microseconds(call: Callable[[], Any]) -> float:
    """Returns microseconds of one call: by the device's own clock, without gaps, on a GPU; else by the host's, the
    median of five."""
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
    """Returns rows under the union of their keys, in columns; a block for each set of keys."""
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
