"""RESULTS.md: everything in short, on a page that is read in five minutes."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from experiments.accuracy.measured_speed import measured_speeds
from experiments.accuracy.pictures import speed_key
from experiments.claims.claim import measured_rows
from experiments.claims.registry import TITLES, find
from experiments.report.asked import ASKED
from experiments.report.details import Places, places_of
from experiments.report.documents import Entry, short
from experiments.report.figures import (
    PASTED,
    PeerSteps,
    Results,
    Series,
    decode_series,
    floor_shares,
    requests_rows,
)
from experiments.report.judged import claim_of
from experiments.report.markdown import markdown, shown_bar
from experiments.report.sections import PAGES
from experiments.report.sections.section import FLOOR
from experiments.report.standing import claim_rows, lines_of, shortfall, stale
from experiments.report.strips import strips

BATCHES = (1, 8, 32, 64, 128, 256, 512)
SCHEMES = ("w8a16", "w8a8-talk", "w8a8-all", "fp8", "nf4", "w4a16-g64", "w4a16-g128")  # of the table of accuracy
FORMATS = ("int8-g8", "int8-g128", "fp8", "int4-g32")
LONGEST = 150  # characters of each answer to a claim


def overview(results: Results) -> str:
    """The page's text."""
    places = places_of(results.entries)
    sections = [
        ("Decode steps", chain(_steps(results), _shares(results, places))),
        ("Requests a second", _requests(results)),
        ("Kernels against peers", _kernels(results)),
        ("Accuracy against bytes", _accuracy(results)),
        ("Claims of the original system", _claims(results, places)),
        ("Bars", _bars(results, places)),
        ("What is stale", _stale(results, places)),
    ]
    links = ", ".join(f"[{title.lower()}](results/{name}.md)" for name, (title, _) in PAGES.items())
    parts = [
        "# Results",
        "Written by `python -m experiments.results_page` from [the files of results](results), never by hand. "
        f"Details: {links}. What was expected and learned: [LOG.md](LOG.md).",
    ]
    for title, section in sections:
        if found := list(section):
            parts += [f"## {title}", *found]
    return "\n\n".join(parts) + "\n"


def _steps(results: Results) -> Iterator[str]:
    every = {bits: [each for each in series if each.ms] for bits, series in decode_series(results).items()}
    columns = [each for series in every.values() if any(s.kind == "jllm" for s in series) for each in series]
    if not columns:
        return
    yield (f"LLaMA-2-7B on one H200, 8 tokens in and 256 out. The floor is {FLOOR}.")
    yield "\n".join(f"- {line}" for series in every.values() for line in _ratios(series))
    yield "![Decode steps and requests a second against peers](results/summary-steps.svg)"
    cells = [[str(batch), *(_ms(each, batch) for each in columns)] for batch in BATCHES]
    yield markdown(["ms at batch", *(each.name for each in columns)], cells)
    peers = [each for each in columns if isinstance(each, PeerSteps)]
    sources = "".join(f"; {each.name}: [{each.source.stem}]({_from_page(each.source)})" for each in peers)
    yield (
        "\\* of no job that timed jllm's steps. PPL.LLM's are its published steps on an H800 times the ratio of the "
        f"two bandwidths{sources}. A peer's step is that of its fastest variant."
    )


def _from_page(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def _shares(results: Results, places: Places) -> Iterator[str]:
    """Shares of floors, over all batches."""
    found = list(floor_shares(results))
    columns = ("decode, 8 -> 256", "decode, 1024 -> 1024", "prefill")
    cells = []
    for row in found:
        ranges = [f"{row[what][0]:.0%} to {row[what][1]:.0%}" if what in row else "" for what in columns]
        cells.append([f"[{row['name']}]({places[row['entry'].path]})", *ranges])
    if cells:
        yield "Share of the floor over all batches:"
        yield markdown(["", *columns[:2], "prefill of 1,024 tokens or more"], cells)


def _ratios(series: list[Series]) -> Iterator[str]:
    """A line on what jllm's step is over its floor, and what peers' are over jllm's."""
    for ours in [each for each in series if each.kind == "jllm"]:
        parts = [f"{_over(ours, each)} times its floor" for each in series if each.kind == "floor"]
        parts += [f"{each.name} takes {_over(each, ours)} times as long" for each in series if each.kind == "peer"]
        yield f"**{ours.name}**: {'; '.join(parts)}"


def _over(a: Series, b: Series) -> str:
    ratios = [a.ms[batch] / b.ms[batch] for batch in a.ms if batch in b.ms]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def _ms(series: Series, batch: int) -> str:
    return f"{series.ms[batch]:.2f}" if batch in series.ms else ""


def _requests(results: Results) -> Iterator[str]:
    rows = sorted(requests_rows(results), key=lambda row: -row["qps"])
    if any("file" in row for row in rows):
        cells = []
        for row in rows:
            interval = f"± {row['ci']:.1f}" if row.get("ci") else ""
            share = f"{row['share']:.0%}" if row.get("share") else ""
            runs = f"{row['repeats']} run{'s' * (row['repeats'] > 1)}" if "file" in row else ""
            source = f"[{runs}](results/{row['file']})" if runs else f"[another run](workloads/{PASTED.name})"
            cells.append([row["name"], f"{row['qps']:.1f}", interval, share, source])
        yield "The QPS workload, 1,024 conversations at once; intervals are Student's t at 95 % over the repeats."
        yield markdown(["system", "requests a second", "", "of the floor", "from"], cells)


def _kernels(results: Results) -> Iterator[str]:
    if strips(results):
        yield (
            "How many times as fast as a peer, case by case: green is faster, red slower; two figures are the range "
            "over shapes. \\* marks peers whose times are of another run, of which there is no file."
        )
        yield "![Kernels against peers](results/summary-kernels.svg)"


def _accuracy(results: Results) -> Iterator[str]:
    entry = results.entry("quant_accuracy", "cpu")
    if entry is None:
        return
    speeds = measured_speeds(entry.path.parent)
    rows = [row for row in entry.rows if row.get("part", "scheme") == "scheme"]
    yield f"![Divergence by bytes](results/{entry.path.stem}-bytes.svg)"
    cells = []
    for row in rows:
        weights, kv = (
            row["scheme"] in SCHEMES and row["kv"] == "model",
            row["scheme"] == "bf16" and row["kv"] in FORMATS,
        )
        if weights or kv:
            name = f"weights {row['scheme']}" if weights else f"KV {row['kv']}"
            size = row["bytes_per_weight"] if weights else row["bytes_per_kv"]
            low, high = (100 * x for x in row["added_95"])
            speed = speeds.get(speed_key(row))
            added = f"{100 * row['added']:+.2f} [{low:+.2f}, {high:+.2f}]"
            cells.append([name, f"{size:.3f}", f"{row['kl']:.2g}", added, f"{speed.times:.2f}" if speed else ""])
    head = [
        "what is quantized",
        "bytes a value",
        "KL, nats a token",
        "perplexity, % [95 %]",
        "step at batch 64, times as fast",
    ]
    yield markdown(head, cells)


def _claims(results: Results, places: Places) -> Iterator[str]:
    cells = []
    for name, entry in claim_rows(results):
        row = entry.document["rows"][-1]
        decided = claim_of(entry.document) is not None
        found = find(name).judge(measured_rows(entry.document)).answers if decided else [row["measured"]]
        cells.append(
            [
                f"[{name}]({places[entry.path]}) {TITLES[name]}",
                row["stated"],
                " ".join(shortened(text) for text in found),
                f"**{row['verdict']}**",
            ]
        )
    if cells:
        yield markdown(["claim", "stated", "measured, in short", "answer"], cells)
        answered = {name for name, _ in claim_rows(results)}
        left = [f"{name} ({title})" for name, title in TITLES.items() if name not in answered]
        yield (
            "Yes: every part of the claim holds; no: none; partly: some, by the rule on its page; open: the interval "
            "has room for either. Where nothing else is said figures are an H200's, those of accuracy the bundled "
            "model's." + f" Not measured yet: {', '.join(left)}." * bool(left)
        )


def shortened(text: str) -> str:
    """The first parts of an answer, if it is long."""
    if len(text) <= LONGEST:
        return f"{text}."
    cut = text[:LONGEST]
    return cut[: max(cut.rfind(", "), cut.rfind("; "))] + " …"


def _bars(results: Results, places: Places) -> Iterator[str]:
    """What bars ask and how they stand; those without a figure, and results that miss bars of their own."""
    cells, without, of_these = [], [], set()
    for asked in ASKED:
        found = asked.found(results.entries)
        of_these |= {(entry.path, each["name"]) for entry, each in found}
        if not found:
            without.append(f"{asked.what} ({asked.bar}: {', '.join(f'`{line}`' for line in asked.lines.split())})")
            continue
        entry, far = max(found, key=lambda each: shortfall(each[1]))
        met = sum(each["met"] for _, each in found)
        _, value, limit = shown_bar(far)
        cells.append([asked.what, asked.bar, f"{met} of {len(found)}", f"{value} for {limit}", _link(entry, places)])
    if cells:
        yield markdown(["what", "bar", "met", "the farthest behind, or nearest to it", "in"], cells)
    others = []
    for entry in results.entries:
        own = [each for each in entry.document["bars"] if (entry.path, each["name"]) not in of_these]
        if missed := sum(not each["met"] for each in own):
            others.append(f"{_link(entry, places)} {missed} of {len(own)}")
    said = [
        f"No figure yet, and the line of `experiments.measure_all` that has one: {'; '.join(without)}." * bool(without),
        f"Bars missed by further results, some of which are older runs: {', '.join(others)}." * bool(others),
    ]
    if any(said):
        yield " ".join(filter(None, said))


def _stale(results: Results, places: Places) -> Iterator[str]:
    found: dict[str, list[Entry]] = {}
    for entry, reason in stale(results):
        found.setdefault(reason, []).append(entry)
    if not found:
        yield "Nothing: every figure is of a commit of this history, and the command that its file names works today."
        return
    every = [entry for entries in found.values() for entry in entries]
    again = dict.fromkeys(line for entry in every for line in lines_of(entry))
    left = [entry.label for entry in every if entry.device != "cpu" and not lines_of(entry)]
    yield (
        "Figures that cannot be traced to a commit, or that the command of their file does not give today. On a GPU "
        f"`measure_all --only {' '.join(again)}` measures them again{', but for ' * bool(left)}{', '.join(left)}:"
    )
    yield "\n".join(
        f"- {reason}: {', '.join(_link(entry, places) for entry in entries)}"
        for reason, entries in sorted(found.items())
    )


def _link(entry: Entry, places: Places) -> str:
    device = "" if entry.device == "NVIDIA H200" else f", {short(entry.device)}"
    return f"[{entry.label}{device}]({places[entry.path]})"
