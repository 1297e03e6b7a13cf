"""Writes tables as markdown."""

from collections.abc import Sequence


def markdown(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *cells]
    return "\n".join(f"| {' | '.join(escape(cell) for cell in line)} |" for line in lines)


def escape(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")
