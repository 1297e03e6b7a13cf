"""Turns the rows of experiments.quant_accuracy into tables."""

from collections.abc import Iterable

from experiments.accuracy.rows import Row
from jllm.analysis.protocols import PROTOCOLS

Table = list[list[str]]  # the first line is the header


def part(rows: Iterable[Row], name: str) -> list[Row]:
    return [row for row in rows if row.get("part", "scheme") == name]


def tables(document: Row) -> list[tuple[str, Table]]:
    """Returns title and cells of each table with rows."""
    rows = document["rows"]
    every = [
        ("Schemes and KV formats", scheme_table(part(rows, "scheme"))),
        ("Differences on the same documents or windows, the first less the second", pair_table(part(rows, "pair"))),
        ("By part of a mixture: KL, KL by the routes of the model as loaded", mixture_table(part(rows, "mixture"))),
        ("By layer: KL if it alone is quantized (signal-to-noise after it if all are, dB)", layer_table(rows)),
    ]
    return [(title, table) for title, table in every if len(table) > 1]


def scheme_table(rows: list[Row]) -> Table:
    sizes = "bytes/weight|bytes/KV element"
    head = f"weights|KV|protocol|intervals over|perplexity|added, %|KL, nats/token|top-1, %|{sizes}"
    table = [head.split("|")]
    for row in rows:
        table.append([
            row["scheme"], row["kv"], row["protocol"], _parts(row), _with_interval(row, "perplexity", "{:.3f}"),
            _with_interval(row, "added", "{:+.3f}", 100), _with_interval(row, "kl", "{:.3g}"),
            _with_interval(row, "top1", "{:.2f}", 100), f"{row['bytes_per_weight']:.3f}", f"{row['bytes_per_kv']:.3f}",
        ])  # fmt: skip
    return table


def pair_table(rows: list[Row]) -> Table:
    head = "weights|KV|less weights|less KV|intervals over|perplexity, %|KL, nats/token|top-1, %"
    table = [head.split("|")]
    for row in rows:
        table.append([
            row["scheme"], row["kv"], row["over_scheme"], row["over_kv"], _parts(row),
            _with_interval(row, "perplexity", "{:+.3f}", 100), _with_interval(row, "kl", "{:+.3g}"),
            _with_interval(row, "top1", "{:+.2f}", 100),
        ])  # fmt: skip
    return table


def _parts(row: Row) -> str:
    """Returns the number of documents or windows behind a row's intervals."""
    count, kind = (
        row.get("parts", 1),
        "window" if getattr(PROTOCOLS.get(row["protocol"]), "joined", False) else "document",
    )
    return f"{count} {kind}s" if count > 1 else f"none: 1 {kind}"


def _with_interval(row: Row, name: str, form: str, scale: float = 1) -> str:
    text = form.format(row[name] * scale)
    if f"{name}_95" not in row:
        return text
    low, high = (form.format(x * scale) for x in row[f"{name}_95"])
    return f"{text} [{low}, {high}]"


def layer_table(rows: list[Row]) -> Table:
    found = {(row["scheme"], row["layer"]): row for row in part(rows, "layer")}
    schemes = list(dict.fromkeys(scheme for scheme, _ in found))
    layers = list(dict.fromkeys(layer for _, layer in found))

    def cell(row: Row | None) -> str:
        if row is None:
            return ""
        return f"{row['kl']:.3g}" + ("" if row["snr_db"] is None else f" ({row['snr_db']:.1f})")

    return [["layer", *schemes], *([str(i), *(cell(found.get((s, i))) for s in schemes)] for i in layers)]


def mixture_table(rows: list[Row]) -> Table:
    table = [["part", "bits", "KL, nats/token", "KL, routes replayed", "routes changed, %"]]
    for row in rows:
        cost = (_with_interval(row, name, "{:.3g}") for name in ("kl", "kl_replayed"))
        table.append([row["module"], str(row["bits"]), *cost, _with_interval(row, "routes", "{:.2f}", 100)])
    return table


def as_text(table: Table) -> str:
    widths = [max(map(len, column)) for column in zip(*table)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in table)


def text_report(document: Row) -> str:
    return "\n\n".join(f"{title}\n\n{as_text(table)}" for title, table in tables(document))
