"""Draws pictures as SVG. The same rows give the same bytes."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

GRID = {"axes.grid": True, "grid.alpha": 0.3}


@contextmanager
def svg(file: Path | IO[str], size: tuple[float, float], salt: str, style: Mapping[str, Any] = GRID) -> Iterator[Any]:
    """Yields a matplotlib figure of `size` inches, which is written to a file at the end. `salt` seeds the names of its
    parts. Raises ImportError without matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    options: Any = {"svg.fonttype": "none", "svg.hashsalt": salt, "font.size": 9, **style}
    with matplotlib.rc_context(options):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
