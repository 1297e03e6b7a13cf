"""RESULTS.md: everything in short, on a page that is read in five minutes."""

from collections.abc import Iterator, Sequence
from itertools import chain

from experiments.accuracy.measured_speed import measured_speeds
from experiments.accuracy.pictures import speed_key
from experiments.claims.claim import devices_of, measured_rows
from experiments.claims.registry import TITLES, find
from experiments.report import by_device
from experiments.report.asked import ASKED, Found
from experiments.report.behind import link, missed
from experiments.report.details import Anchors, anchors_of
from experiments.report.documents import Entry, short
from experiments.report.figures import Results, best_requests, devices
from experiments.report.judged import claim_of
from experiments.report.markdown import markdown, shown_bar, slug
from experiments.report.sections import PAGES
from experiments.report.standing import claim_rows, of_other_models, shortfall, stale
from experiments.report.strips import compared

SCHEMES = ("w8a16", "w8a8-talk", "w8a8-all", "fp8", "nf4", "w4a16-g64", "w4a16-g128")  # of the table of accuracy
FORMATS = ("int8-g8", "int8-g128", "fp8", "int4-g32")
LONGEST = 150  # characters of each answer to a claim


def overview(results: Results) -> str:
    """The page's text."""
    anchors = anchors_of(results.entries)
    newest, *others = devices(results) or [results.device]
    on = results.on(newest)
    sections = [
        (f"Decode steps, {short(newest)}", chain(by_device.steps(on), by_device.shares(on, anchors))),
        (f"Requests a second, {short(newest)}", chain(by_device.requests(on), _others(results, others))),
        ("Kernels against peers", _kernels(results)),
        ("Accuracy against bytes", _accuracy(results)),
        ("Claims of the original system", _claims(results, anchors)),
        ("Bars", _bars(results, anchors)),
    ]
    links = ", ".join(f"[{title.lower()}](results/{name}.md)" for name, (title, _) in PAGES.items())
    parts = [
        "# Results",
        "Written by `python -m experiments.results_page` from [the files of results](results), never by hand. "
        f"Details: {links}, [steps and requests by device](results/devices.md). What was expected and learned: "
        "[LOG.md](LOG.md). What `w8a8` or `int8-g8` means: [schemes](../docs/quantization.md) and "
        "[KV formats](../docs/kv-cache.md).",
    ]
    for title, section in sections:
        if found := list(section):
            parts += [f"## {title}", *found]
    return "\n\n".join(parts) + "\n"


def _others(results: Results, others: list[str]) -> Iterator[str]:
    """In short, what was measured on them."""
    for device in others:
        on = results.on(device)
        served = {row["qps"]: row["name"] for row in best_requests(on).values() if row["name"].startswith("jllm")}
        parts = [line.removeprefix("- ") for line in by_device.ratios(on)]
        parts += [f"{served[max(served)]}: {max(served):.1f} requests a second"] if served else []
        whole = f"[all of it](results/devices.md#{slug(short(device))})"
        yield f"On one {short(device)} ({whole}): {'. '.join(parts)}."


def _kernels(results: Results) -> Iterator[str]:
    if found := compared(results):
        yield "\n".join([
            "How many times as fast as a peer, case by case: green is faster, red slower; two figures are the range "
            "over shapes. \\* marks peers whose times are of another run, of which there is no file. "
            "[Their scripts](peers/README.md) say how they run.",
            *(f"![Kernels against peers, {short(device)}](results/{_kernels_of(device)}.svg)" for device in found),
        ])  # fmt: skip


def _kernels_of(device: str) -> str:
    return by_device.picture_of("kernels", device)


def _accuracy(results: Results) -> Iterator[str]:
    entry = results.entry("quant_accuracy", "cpu")
    if entry is None:
        return
    speeds = measured_speeds(entry.path.parent)
    rows = [row for row in entry.rows if row.get("part", "scheme") == "scheme"]
    yield f"![Divergence by bytes](results/{entry.path.stem}-bytes.svg)"
    cells, timed = [], []
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
            timed += [speed.what] if speed else []
            added = f"{100 * row['added']:+.2f} [{low:+.2f}, {high:+.2f}]"
            cells.append([name, f"{size:.3f}", f"{row['kl']:.2g}", added, f"{speed.times:.2f}" if speed else ""])
    head = [
        "what is quantized, of the bundled model",
        "bytes a value",
        "KL, nats a token",
        "perplexity, % [95 %]",
        f"times as fast: {'; '.join(dict.fromkeys(timed)) or 'not measured'}",
    ]
    yield markdown(head, cells)


def _claims(results: Results, anchors: Anchors) -> Iterator[str]:
    cells, others = [], of_other_models(results)
    for name, entry in claim_rows(results):
        row = entry.document["rows"][-1]
        elsewhere = {subject: other.document["rows"][-1]["verdict"] for subject, other in others.get(name, {}).items()}
        for on, verdict, answers in _on_each_device(name, entry):
            differ = [f"; of {subject}: {other}" for subject, other in elsewhere.items() if other != verdict]
            cells.append(
                [
                    f"[{name}]({anchors[entry.path]}) {TITLES[name]}",
                    row["stated"],
                    " ".join(shortened(text) for text in answers),
                    ", ".join(map(short, on)),
                    f"**{verdict}**{''.join(differ)}",
                ]
            )
    if cells:
        yield markdown(["claim", "stated", "measured, in short", "on", "answer"], cells)
        answered = {name for name, _ in claim_rows(results)}
        left = [f"{name} ({title})" for name, title in TITLES.items() if name not in answered]
        yield (
            "The answer is yes where every part of the claim holds by the rule on its page, no where none does, partly "
            "where some do, open where noise has room for either. Of its parts stands after Yes what holds, after No "
            "what does not, after Open what noise leaves open, each with what was measured. A simulated GPU is the "
            "engine's own scheduler, without a device, on steps that are costed by such a GPU's; what a CPU says is "
            "computed, or accuracy, of the bundled model where nothing else "
            "is said." + f" Not measured yet: {', '.join(left)}." * bool(left)
        )


def _on_each_device(name: str, entry: Entry) -> Iterator[tuple[list[str], str, Sequence[str]]]:
    """Yields the devices, the verdict and the answers of each answer that a file gives, one for each of its devices."""
    if claim_of(entry.document) is None:
        row = entry.document["rows"][-1]
        yield entry.devices, row["verdict"], [row["measured"]]
        return
    claim, rows = find(name), measured_rows(entry.document)
    of = list(claim.of_devices(rows).values())
    for some in reversed(of) if len(of) > 1 else [rows]:
        found = claim.verdict(some)
        yield devices_of(entry.document | {"rows": some}) or entry.devices, found.verdict, found.answers


def shortened(text: str) -> str:
    """The first parts of an answer, if it is long."""
    if len(text) <= LONGEST:
        return f"{text}."
    cut = text[:LONGEST]
    return cut[: max(cut.rfind(", "), cut.rfind("; "))] + " …"


def _bars(results: Results, anchors: Anchors) -> Iterator[str]:
    """What bars ask and how they stand; those without a figure, and results that miss bars of their own."""
    cells, without = [], []
    for asked in ASKED:
        found = asked.found(results.entries)
        if not found:
            without.append(f"{asked.what} ({asked.bar}: {', '.join(f'`{line}`' for line in asked.lines.split())})")
            continue
        entry, far = max(found, key=lambda each: shortfall(each[1]))
        _, value, limit = shown_bar(far)
        cells.append([asked.what, asked.bar, _met(found), f"{value} for {limit}", link(entry, anchors)])
    if cells:
        yield markdown(["what", "bar", "met", "the farthest behind, or nearest to it", "in"], cells)
    behind, old = len([*missed(results)]), len([*stale(results)])
    said = [
        "Shares of floors are by each device's own ceilings; limits in milliseconds or requests a second, and "
        "drawing's in microseconds, are an H200's, and no other device is held to them.",
        f"No figure yet, and the line of `experiments.measure_all` that has one: {'; '.join(without)}." * bool(without),
        f"Further results that miss bars of their own: {behind}; stale ones, which cannot be traced to a commit or "
        f"made again by the command that they name: {old}. [Which, why, and what measures them](results/behind.md).",
    ]
    yield " ".join(filter(None, said))


def _met(found: list[Found]) -> str:
    """How many bars are met, on each device where there are several."""
    by = {entry.device: [each["met"] for other, each in found if other.device == entry.device] for entry, _ in found}
    return "; ".join(f"{sum(met)} of {len(met)}{f' on {short(device)}' * (len(by) > 1)}" for device, met in by.items())
