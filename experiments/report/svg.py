"""Draws pictures as SVG. The same rows give the same bytes."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

GRID = {"axes.grid": True, "grid.alpha": 0.3}


@contextmanager
def svg(
    file: Path | IO[str],
    size: tuple[float, float],
    salt: str,
    style: Mapping[str, Any] = GRID,
    title: str | None = None,
) -> Iterator[Any]:
    """Yields a matplotlib figure of `size` inches, which is written to a file at the end. `salt` seeds the names of its
    parts. Raises ImportError without matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    options: Any = {"svg.fonttype": "none", "svg.hashsalt": salt, "font.size": 9, **style}
    with matplotlib.rc_context(options):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        if title is not None:
            figure.suptitle(title, fontsize=9)
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})


@contextmanager
def without_matplotlib_said(file: Path) -> Iterator[None]:
    """Prints that a result's file has no picture, if matplotlib is missing."""
    try:
        yield
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] != "matplotlib":
            raise
        print(f"no picture: matplotlib is missing (the extra `notebooks`); later: --draw {file.name}", file=sys.stderr)


def heading(document: Mapping[str, Any]) -> str:
    """Returns a picture's title: the experiment, its date and its device."""
    return f"{document['experiment']}, {document['date']} ({document['device']})"
