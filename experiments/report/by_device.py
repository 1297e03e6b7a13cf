"""Whole steps and requests a second on one device: its own files, and peers of the same jobs where these had any."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from experiments.report.details import Anchors, anchors_of
from experiments.report.documents import short
from experiments.report.figures import (
    PASTED,
    PeerSteps,
    Results,
    Series,
    best_requests,
    decode_series,
    devices,
    floor_shares,
    spread,
)
from experiments.report.markdown import markdown
from experiments.report.sections.section import FLOOR
from experiments.steps.devices import ceilings_of

BATCHES = (1, 8, 32, 64, 128, 256, 512)  # shown, where many were measured


def page(results: Results) -> str:
    """results/devices.md: every device's steps and requests, the newest figures first."""
    parts = [
        "# Steps and requests a second by device",
        "Written by `python -m experiments.results_page`, never by hand.",
    ]
    anchors = anchors_of(results.entries)
    for device in devices(results):
        on = results.on(device)
        parts += [f"## {short(device)}", *steps(on), *shares(on, anchors), *requests(on)]
    text = "\n\n".join(parts) + "\n"
    return re.sub(r"\]\((workloads|peers)/", r"](../\1/", text.replace("](results/", "]("))


def picture_of(what: str, device: str) -> str:
    """What the picture of a device's "steps" or "kernels" is called."""
    return f"summary-{what}-{short(device).lower().replace(' ', '-')}"


def steps(results: Results) -> Iterator[str]:
    """Milliseconds of a decode step by batch, beside floors and peers."""
    every = _drawn(results)
    columns = [each for series in every.values() for each in series]
    if not columns:
        return
    device, most = results.device, "; ".join(f"{share:.1%} in {what}" for what, share in spread(results).items())
    apart = f" Of a step's repeats the best; others took more, by up to {most}." if most else ""
    yield (
        f"LLaMA-2-7B on one {short(device)}, 8 tokens in and 256 out. The floor is {FLOOR}: "
        f"{ceilings_of(device).rates}.{apart}"
    )
    yield "\n".join(ratios(results))
    picture = picture_of("steps", device)
    yield f"![Decode steps and requests a second against peers, {short(device)}](results/{picture}.svg)"
    batches = sorted({batch for each in columns if each.kind == "jllm" for batch in each.ms})
    if len(batches) > len(BATCHES):
        batches = [batch for batch in batches if batch in BATCHES]
    cells = [[str(batch), *(_ms(each, batch) for each in columns)] for batch in batches]
    yield markdown(["ms at batch", *(each.name for each in columns)], cells)
    peers = [each for each in columns if isinstance(each, PeerSteps)]
    sources = "".join(f"; {each.name}: [{each.source.stem}]({_from_page(each.source)})" for each in peers)
    yield (
        "\\* of no job that timed jllm's steps; the ratio of a peer without it is over jllm's steps in the same job. "
        f"PPL.LLM's are its published steps on an H800 times the ratio of the two bandwidths{sources}. "
        "A peer's step is that of its fastest variant; [its script](peers/README.md) says how it runs."
    )


def _drawn(results: Results) -> dict[str, list[Series]]:
    """What there is of formats in which jllm ran."""
    every = {bits: [each for each in series if each.ms] for bits, series in decode_series(results).items()}
    return {bits: series for bits, series in every.items() if any(each.kind == "jllm" for each in series)}


def ratios(results: Results) -> Iterator[str]:
    """Lines on what jllm's step is over its floor, and what peers' are over jllm's, of one job where one timed both."""
    for series in _drawn(results).values():
        for ours in [each for each in series if each.kind == "jllm"]:
            parts = [f"{_over(ours, each)} times its floor" for each in series if each.kind == "floor"]
            parts += [
                f"{each.name} takes {_over(each, _beside(each, ours))} times as long"
                for each in series
                if each.kind == "peer"
            ]
            yield f"- **{ours.name}**: {'; '.join(parts)}"


def _beside(peer: Series, ours: Series) -> Series:
    own = peer.ours if isinstance(peer, PeerSteps) else {}
    return replace(ours, ms=own) if own else ours


def _over(a: Series, b: Series) -> str:
    found = [a.ms[batch] / b.ms[batch] for batch in a.ms if batch in b.ms]
    return f"{min(found):.2f} to {max(found):.2f}" if found else "at no common batch, some"


def _ms(series: Series, batch: int) -> str:
    return f"{series.ms[batch]:.2f}" if batch in series.ms else ""


def _from_page(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def shares(results: Results, anchors: Anchors) -> Iterator[str]:
    """Shares of floors, over all batches."""
    columns = ("decode, 8 -> 256", "decode, 1024 -> 1024", "prefill")
    cells = []
    for row in floor_shares(results):
        ranges = [f"{row[what][0]:.0%} to {row[what][1]:.0%}" if what in row else "" for what in columns]
        cells.append([f"[{row['name']}]({anchors[row['entry'].path]})", *ranges])
    if cells:
        yield "Share of the floor over all batches:"
        yield markdown(["", *columns[:2], "prefill of 1,024 tokens or more"], cells)


def requests(results: Results) -> Iterator[str]:
    """Requests a second on the QPS workload."""
    rows = sorted(best_requests(results).values(), key=lambda row: -row["qps"])
    if any("file" in row for row in rows):
        cells = []
        for row in rows:
            interval = f"± {row['ci']:.1f}" if row.get("ci") else ""
            share = f"{row['share']:.0%}" if row.get("share") else ""
            runs = f"{row['repeats']} run{'s' * (row['repeats'] > 1)}" if "file" in row else ""
            source = f"[{runs}](results/{row['file']})" if runs else f"[another run](workloads/{PASTED.name})"
            cells.append([row["name"], f"{row['qps']:.1f}", interval, share, source])
        yield (
            f"The QPS workload, 1,024 conversations at once on one {short(results.device)}; replicas have a device and "
            "as many conversations each. Of each system the mean of one job's runs, with its 95 % interval by "
            "Student's t: of the job with most runs, and of as many of one that timed vLLM too. A single run has no "
            "interval."
        )
        yield markdown(["system", "requests a second", "± 95 %", "of the floor", "from"], cells)
