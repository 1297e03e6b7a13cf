"""What a claim is here: rows that measure it, a verdict with by-how-much, and a picture; and how one is run."""

import statistics
import textwrap
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from experiments.report.svg import svg
from experiments.result_file import ResultFile
from experiments.serving.workload import half_interval
from experiments.steps.devices import REFERENCE, device_sheet
from pallas_kernels.bench.measure import device_us

Row = dict[str, Any]
FEW = 4  # cases that an answer names one by one
TITLE = 100  # characters that a picture is wide
SHEETS = "data sheets"  # in the place of a device, of what is computed from these


@dataclass(frozen=True)
class Interval:
    """A mean over rounds, and half of its 95 % interval (Student's t); of a single round what noise leaves of it."""

    mean: float
    half: float
    rounds: int

    def reaches(self, least: float) -> bool | None:
        """Whether all of it does; None where it has room for either."""
        return True if self.mean - self.half >= least else False if self.mean + self.half < least else None

    def within(self, least: float, most: float) -> bool | None:
        """Whether all of it is; None where it has room for either."""
        low, high = self.mean - self.half, self.mean + self.half
        return True if least <= low and high <= most else False if high < least or low > most else None

    def shown(self, form: str, scale: float = 1.0, unit: str = "") -> str:
        """Its mean and ends in a form like "{:.2f}"; of a single round the figure alone."""
        mean, *ends = (form.format(scale * (self.mean + side * self.half)) for side in (0, -1, 1))
        return f"{mean}{unit}" if self.rounds == 1 else f"{mean}{unit} [{', '.join(ends)}]"


def interval_of(values: Sequence[float], noise: float = 0.0) -> Interval:
    """Of the values of each round; `noise` is half of the interval of a single one."""
    half = half_interval(values)
    return Interval(statistics.fmean(values), noise if half is None else half, len(values))


def over_rounds(key: str, values: Sequence[float]) -> Row:
    """What a row says of a figure that was measured in each of some rounds: see `interval_in`."""
    found = interval_of(values)
    return {key: round(found.mean, 4), f"{key}_ci": round(found.half, 4), "rounds": found.rounds}


def interval_in(row: Row, key: str) -> Interval:
    """A row's figure; rows of older files, which name no rounds, are of a single one."""
    return Interval(row[key], row.get(f"{key}_ci", 0.0), row.get("rounds", 1))


def change_of(rows: Iterable[Row], over: Iterable[Row], key: str, noise: float = 0.0) -> Interval | None:
    """By which share a figure of some rows is above that of others, within each round that has both; None where none
    has. Rows of older files, which name no round, are of one."""
    base = {row.get("round"): row[key] for row in over}
    changes = [row[key] / base[row.get("round")] - 1 for row in rows if row.get("round") in base]
    return interval_of(changes, noise) if changes else None


def all_hold(sides: Iterable[bool | None]) -> bool | None:
    """Whether all do: no where one does not, open where one is."""
    sides = list(sides)
    return False if False in sides else None if None in sides else True


@dataclass(frozen=True)
class Part:
    """One thing that a claim says, with what was measured of it."""

    said: str
    holds: bool | None  # None: the interval has room for either


@dataclass(frozen=True)
class Verdict:
    """What the rows say of a claim."""

    verdict: str  # "yes", "partly", "no" or "open"
    answers: tuple[str, ...]  # by how much; of several parts what is yes, what is no, and what is open
    figures: tuple[str, ...] = ()  # what else was found
    bars: tuple[Row, ...] = ()  # {name, value, unit, bar, met}

    @property
    def measured(self) -> str:
        """All of it in a line."""
        return ". ".join((*self.answers, *([f"Further: {'; '.join(self.figures)}"] if self.figures else [])))


def verdict_of(parts: Iterable[Part], *figures: str, how: str = "", bars: Iterable[Row] = ()) -> Verdict:
    """ "yes" where every part holds, "no" where none does, else "partly". The answers say which part is yes, which is
    no, and which is open; where all are, so is the verdict. `how` is said ahead, like "Simulated"."""
    parts = list(parts)
    said = {
        name: "; ".join(part.said for part in parts if part.holds is holds)
        for name, holds in (("Yes", True), ("No", False), ("Open", None))
    }
    found = [name for name, text in said.items() if text]
    verdict = found[0].lower() if len(found) == 1 else "partly" if said["Yes"] else "no"
    answers = [f"{name}: {said[name]}" for name in found]
    return Verdict(
        verdict, ((how, *answers) if how else tuple(answers)), tuple(text for text in figures if text), tuple(bars)
    )


def by_case(said: str, found: Mapping[str, bool | None], few: int = FEW) -> list[Part]:
    """What a claim says of several cases, each named with its figures: where it holds, where it does not, and where
    (None) that is open. Of more than `few` on a side their number alone is said."""
    parts = []
    for side in (True, False, None):
        names = [name for name, holds in found.items() if holds is side]
        where = f"all {len(names)}" if len(names) == len(found) else f"{len(names)} of {len(found)}"
        listed = f" ({', '.join(names)})" if len(names) <= few else ""
        if names:
            parts.append(Part(f"{said} in {where} cases{listed}" if len(found) > 1 else f"{said}{listed}", side))
    return parts


@dataclass(frozen=True)
class Claim:
    """One claim, and how it is tested.

    measure(toy), measure(toy, seconds) of a claim that lasts, measure(toy, seconds, loads) of one whose loads are
    chosen, or measure(toy, subject) of one whose model is, yields flat rows; where something could not be measured, a
    row has "error". judge(rows) sees those without one. draw(figure, rows) draws them on a matplotlib figure.
    """

    id: str
    stated: str  # by how much, as its authors put it
    rule: str  # from which figures on what it says holds
    measure: Callable[..., Iterable[Row]]
    judge: Callable[[list[Row]], Verdict]
    draw: Callable[[Any, list[Row]], None]
    hopper: bool = False  # whether it is about a kernel that runs nowhere else, so that no toy size says anything
    serves: bool = False  # whether it fills a GPU's memory with an engine's pages
    computed: bool = False  # whether its verdict is computed or simulated, and so as good on any machine
    alternates: bool = False  # whether its rows are rounds, which claims of one command share
    chosen: bool = False  # whether a user may choose the model and the text that it is about
    lasts: bool = False  # whether requests arrive for some seconds, which a user may choose; None: as the claim says
    loads: bool = False  # whether a user may choose these, as shares of what is served all at once; (): as it says
    by_device: bool = False  # whether each device that its rows name has an answer of its own

    def of_devices(self, rows: list[Row]) -> dict[str, list[Row]]:
        """Returns each device's rows, with those that name none; nothing where a single answer is right."""
        devices = dict.fromkeys(row["measured_on"] for row in rows if "measured_on" in row) if self.by_device else {}
        return {device: [row for row in rows if row.get("measured_on", device) == device] for device in devices}

    def verdict(self, rows: list[Row]) -> Verdict:
        """Returns what the rows say; of several devices what those of each say. What is open is no bar."""
        of = {device.removeprefix("NVIDIA "): self.judge(some) for device, some in self.of_devices(rows).items()}
        if len(of) < 2:
            found = self.judge(rows)
            return replace(found, bars=tuple(bar for bar in found.bars if not bar.get("open")))
        said = {found.verdict for found in of.values()}
        bars: dict[str, Row] = {}
        for device, found in of.items():
            for bar in found.bars:
                if not all(bar in other.bars for other in of.values()):
                    what, colon, side = bar["name"].partition(": ")
                    bar = bar | {"name": f"{what}, {device}{colon}{side}"}
                if not bar.get("open"):
                    bars[bar["name"]] = bar
        return Verdict(
            said.pop() if len(said) == 1 else "partly",
            tuple(f"On {device}: {found.verdict}. {found.measured}" for device, found in of.items()),
            bars=tuple(bars.values()),
        )


def run(
    tested: Sequence[tuple[Claim, ResultFile]],
    toy: bool,
    show: Callable[[str], None],
    seconds: float | None = None,
    subject: Any = None,
    loads: Sequence[float] = (),
) -> None:
    """Measures claims into their files, a row of each in turn, so that what they share is alternated; each is concluded
    when it has no more, whatever the others still have. `subject` of claims whose model is chosen, which their rows
    name; None: the bundled one."""

    def measure(claim: Claim) -> Iterable[Row]:
        if claim.loads:
            return claim.measure(toy, seconds, loads)
        if claim.lasts:
            return claim.measure(toy, seconds)
        if not claim.chosen or subject is None:
            return claim.measure(toy)
        return ({"subject": subject.name, **row} for row in claim.measure(toy, subject))

    waiting = deque((claim, result, iter(measure(claim))) for claim, result in tested)
    while waiting:
        claim, result, rows = turn = waiting.popleft()
        if (row := next(rows, None)) is None:
            conclude(claim, result, toy)
        else:
            result.add({"claim": claim.id, **row})
            show("  ".join(f"{key}={value}" for key, value in row.items()))
            waiting.append(turn)


def conclude(claim: Claim, result: ResultFile, toy: bool) -> None:
    """The last row of a claim's file: the verdict."""
    rows = result.document["rows"]
    good = [row for row in rows if "error" not in row]
    bars: tuple[Row, ...] = ()
    verdict, measured = "incomplete", "nothing was measured"
    if good:
        found = claim.verdict(good)
        measured = found.measured
        if len(good) == len(rows):
            verdict = found.verdict
        if toy:  # too small to decide anything
            verdict = "toy size: no verdict"
        else:
            bars = found.bars
    result.add({"claim": claim.id, "stated": claim.stated, "measured": measured, "verdict": verdict})
    result.finish(bars=list(bars), complete=len(good) + 1 == len(result.document["rows"]))


def measured_rows(document: Row) -> list[Row]:
    """The rows of a claim's file without the verdict and without what failed."""
    return [row for row in document["rows"] if "verdict" not in row and "error" not in row]


def devices_of(document: Row) -> list[str]:
    """The devices whose figures a file has: of rows taken from other results those that they name; of simulated ones
    the device whose steps they are costed by, the cost model's reference where they name none; none but the sheets of
    those that are computed from data sheets; of others its own, which also timed the scheduler of simulations that say
    so (host_us)."""
    own: str = document["device"]
    rows = measured_rows(document)
    timed = [own] if any("host_us" in row for row in rows) else []

    def device(row: Row) -> str:
        if row.get("source") == "simulated":
            return f"simulated {row.get('steps_of', device_sheet(REFERENCE).device_kind)}"
        return SHEETS if row.get("source") == "data sheet" else str(row.get("measured_on", own))

    return list(dict.fromkeys([*timed, *map(device, rows)]))


def microseconds(call: Callable[[], Any]) -> float:
    """Microseconds of one call: by the device's own clock, without gaps, on a GPU; else by the host's, the median of
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
    """Rows under the union of their keys, in columns; a block for each set of keys."""
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


def draw(claim: Claim, title: str, document: Row, path: Path) -> None:
    """The claim's picture. Raises ImportError without matplotlib."""
    verdict = document["rows"][-1].get("verdict", "incomplete")
    whole = f"{claim.id}: {title} ({', '.join(devices_of(document) or [document['device']])}): {verdict}"
    with svg(path, (7, 3.6), claim.id, title=textwrap.fill(whole, TITLE)) as figure:
        claim.draw(figure, measured_rows(document))
