"""Turns the JSON of experiments.quant_accuracy into bars, tables (text and markdown) and pictures."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from scipy.stats import spearmanr

from experiments.accuracy.measured_speed import measured_speeds
from experiments.accuracy.pictures import Speeds, draw_all, speed_key
from experiments.accuracy.rows import PLAIN_KV, Row
from jllm.analysis.protocols import PROTOCOLS
from pallas_kernels.bench.bars import bar
from pallas_kernels.bench.command import RECORDED

Table = list[list[str]]  # the first line is the header
W8A8_ADDED, KV8_ADDED = 0.015, 0.002  # in perplexity
ORDER = 0.9  # rank correlation
UNMEASURED = "not measured"


def part(rows: Iterable[Row], name: str) -> list[Row]:
    return [row for row in rows if row.get("part", "scheme") == name]


# Bars


def bars(rows: list[Row], against: Row | None = None, file: str | None = None) -> list[Row]:
    """Returns the bars that the run's rows can answer."""
    found = [*_added(rows), *_orders(rows)]
    if against is not None:
        pairs = common(rows, against["rows"])
        value = round(float(spearmanr(*zip(*pairs)).statistic), 4)
        name = f"rank correlation of KL with {file}, {len(pairs)} rows"
        found.append(bar(name, value, "1", ORDER))
    return found


def common(rows: list[Row], others: list[Row]) -> list[tuple[float, float]]:
    """Returns the KL of the quantized schemes and formats that both runs have."""
    other = {(row["scheme"], row["kv"]): row["kl"] for row in others if row.get("part", "scheme") == "scheme"}
    keys = [((row["scheme"], row["kv"]), row["kl"]) for row in part(rows, "scheme")]
    return [(kl, other[key]) for key, kl in keys if key in other and kl > 0]


def _added(rows: list[Row]) -> Iterator[Row]:
    for row in part(rows, "scheme"):
        eight = row["scheme"] in ("w8a8", "w8a8-all") and row["kv"] == PLAIN_KV
        limit = W8A8_ADDED if eight else KV8_ADDED if (row["scheme"], row["kv"]) == ("bf16", "int8-g8") else None
        if limit is not None:
            name = f"perplexity added, weights {row['scheme']}, KV {row['kv']}"
            yield bar(name, row["added"], "1", limit, most=True)


def _orders(rows: list[Row]) -> Iterator[Row]:
    """Yields ratios that must be below 1: smaller groups over larger ones, and NF4 over linear int4."""
    kl = {(row["scheme"], row["kv"]): row["kl"] for row in part(rows, "scheme")}
    error = {(row["what"], row["codes"], row["group"]): row["relative_error"] for row in part(rows, "group")}

    def below(name: str, values: dict[Any, float], a: Any, b: Any) -> Iterator[Row]:
        if a in values and b in values:
            ratio = round(values[a] / values[b], 4)
            yield {"name": name, "value": ratio, "unit": "x", "bar": 1, "met": ratio < 1}

    largest = max((group for what, _, group in error if what == "k" and group), default=0)
    for codes in ("int8", "int4"):
        for small, large in ((8, 32), (32, largest))[: 2 if largest > 32 else 1]:
            name = f"group {small} over {large}, {codes}"
            yield from below(f"KL, KV {name}", kl, ("bf16", f"{codes}-g{small}"), ("bf16", f"{codes}-g{large}"))
            for what in ("k", "v", "weights"):
                yield from below(f"error, {what} {name}", error, (what, codes, small), (what, codes, large))
    yield from below("KL, NF4 over int4, group 64", kl, ("nf4", PLAIN_KV), ("w4a16-g64", PLAIN_KV))
    yield from below(
        "error of weights, NF4 over int4, group 64", error, ("weights", "nf4", 64), ("weights", "int4", 64)
    )


# Tables


def tables(document: Row, speeds: Speeds) -> list[tuple[str, Table]]:
    """Returns title and cells of each table with rows."""
    rows = document["rows"]
    every = [
        ("Schemes and KV formats", scheme_table(part(rows, "scheme"), speeds)),
        ("Differences on the same documents or windows, the first less the second", pair_table(part(rows, "pair"))),
        ("By layer: KL if it alone is quantized (signal-to-noise after it if all are, dB)", layer_table(rows)),
        ("By group: norm of the rounding error over that of the values (bytes a value)", group_table(rows)),
        ("Bars", [["", "value", "bar", "met"], *([b["name"], *_bar_cells(b)] for b in document["bars"])]),
    ]
    return [(title, table) for title, table in every if len(table) > 1]


def scheme_table(rows: list[Row], speeds: Speeds) -> Table:
    sizes = "bytes/weight|bytes/KV element|times as fast"
    head = f"weights|KV|protocol|intervals over|perplexity|added, %|KL, nats/token|top-1, %|{sizes}"
    table = [head.split("|")]
    for row in rows:
        speed = speeds.get(speed_key(row))
        table.append([
            row["scheme"], row["kv"], row["protocol"], _parts(row), _with_interval(row, "perplexity", "{:.3f}"),
            _with_interval(row, "added", "{:+.3f}", 100), _with_interval(row, "kl", "{:.3g}"),
            _with_interval(row, "top1", "{:.2f}", 100), f"{row['bytes_per_weight']:.3f}", f"{row['bytes_per_kv']:.3f}",
            UNMEASURED if speed is None else f"{speed.times:.2f}",
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


def group_table(rows: list[Row]) -> Table:
    found = {(row["what"], row["codes"], row["group"]): row for row in part(rows, "group")}
    kinds = list(dict.fromkeys((what, codes) for what, codes, _ in found))
    groups = sorted({group for _, _, group in found if group}) + [None] * any(g is None for _, _, g in found)

    def cell(row: Row | None) -> str:
        return "" if row is None else f"{row['relative_error']:.3g} ({row['bytes']:.3f})"

    head = ["values", *("a scale a row, or none" if group is None else f"group {group}" for group in groups)]
    return [head, *([" ".join(kind), *(cell(found.get((*kind, group))) for group in groups)] for kind in kinds)]


def _bar_cells(bar: Row) -> list[str]:
    """Returns the value, the bar and its verdict. Growth of perplexity is in per cent, as in the table of schemes."""
    scale, unit = (100, " %") if bar["name"].startswith("perplexity added") else (1, "")
    value, limit = (f"{scale * bar[key]:{form}}{unit}" for key, form in (("value", ".4g"), ("bar", "g")))
    return [value, limit, "yes" if bar["met"] else "no"]


def as_text(table: Table) -> str:
    widths = [max(map(len, column)) for column in zip(*table)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in table)


def as_markdown(table: Table) -> str:
    lines = [table[0], ["---"] * len(table[0]), *table[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def sources(speeds: Speeds, rows: Iterable[Row]) -> str:
    """Returns the sources of the table's speeds, or a note that there are none."""
    used: dict[str, list[str]] = {}
    for row in part(rows, "scheme"):
        if speed := speeds.get(speed_key(row)):
            used.setdefault(speed.what, []).append(f"{row['scheme']} with KV {row['kv']}")
    text = "; ".join(f"{what} ({', '.join(names)})" for what, names in used.items())
    return text or "no result file of a GPU has these schemes (experiments.quant_steps makes one)"


def speeds_for(results: Path) -> Speeds:
    """Returns the speeds of files in a directory, or else the recorded ones."""
    return measured_speeds(results) or measured_speeds(RECORDED)


def text_report(document: Row, results: Path) -> str:
    speeds = speeds_for(results)
    blocks = [f"{title}\n\n{as_text(table)}" for title, table in tables(document, speeds)]
    return "\n\n".join([*blocks, f"Speeds: {sources(speeds, document['rows'])}"])


def write_report(document: Row, file: Path) -> list[Path]:
    """Writes the markdown page and the pictures of a result beside its file. Returns all files that exist."""
    speeds = speeds_for(file.parent)
    lines = [f"# {document['experiment']}, {document['date']}, {document['device']}", ""]
    lines += [
        f"`{document['command']}`; text: {document.get('text', 'of its own')}. Made of",
        f"[{file.name}]({file.name}).",
    ]
    lines += [] if document["complete"] else ["**The run did not complete.**"]
    for title, table in tables(document, speeds):
        lines += ["", f"## {title}", "", as_markdown(table)]
    lines += ["", f"Times as fast as 16-bit weights, K and V: {sources(speeds, document['rows'])}.", ""]
    drawn, page = draw_all(document, speeds, file), file.with_suffix(".md")
    lines += [f"![{path.stem}]({path.name})" for path in drawn]
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [file, page, *drawn]
