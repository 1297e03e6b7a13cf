"""How a page of details shows an experiment, and what several of them say alike."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from experiments.report.answers import nothing

Row = dict[str, Any]


def _every(row: Row) -> bool:
    return True


@dataclass(frozen=True)
class Table:
    """Some rows of a file. Without columns: all keys, a table for each set of them."""

    columns: tuple[str, ...]
    caption: str = ""
    where: Callable[[Row], bool] = _every
    pivot: tuple[str, str] | None = None  # (key, value): a column for each value of key, with that of `value` in it
    hidden: bool = False  # rows that are not worth a table


@dataclass(frozen=True)
class Section:
    """Files whose experiment matches `pattern`; its groups fill the {} of the title. Rows that no table takes follow
    with all of their keys."""

    pattern: str
    title: str
    intro: str = ""
    tables: tuple[Table, ...] = field(default=())
    answer: Callable[[Row], str] = nothing  # in short, from the document


def of(**wanted: Any) -> Callable[[Row], bool]:
    """Whether a row has these values."""
    return lambda row: all(row.get(key) == value for key, value in wanted.items())


def having(*keys: str) -> Callable[[Row], bool]:
    """Whether a row has all of these keys."""
    return lambda row: all(key in row for key in keys)


FLOOR = (
    "every weight and the K and V of every sequence read once, or the arithmetic of a product or of prompts' attention "
    "where that takes longer, at the device's best rates"
)


COPY = Table(("gb_s",), "the ceiling of the run: a large copy", of(kernel="copy"))
