"""Decode steps and requests a second, ours and peers', from the newest files."""

import json
import re
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.report.documents import Entry, Row
from experiments.serving.workload import half_interval
from experiments.steps.bars import of_own_kernels
from experiments.steps.devices import device_sheet, sheet_of
from experiments.steps.peers import counts
from pallas_kernels.bench.bars import H200

PASTED = Path(__file__).parents[1] / "workloads" / "peers_h200.json"  # peers' figures, noted by hand in another run
REQUESTS = 1024  # of the QPS workload


@dataclass(frozen=True)
class Results:
    """The newest entries, to be asked by label, of one device where nothing else is said."""

    entries: list[Entry]
    device: str = H200

    def on(self, device: str) -> "Results":
        return replace(self, device=device)

    def entry(self, label: str, device: str | None = None) -> Entry | None:
        wanted = label, device or self.device
        return next((entry for entry in self.entries if (entry.label, entry.device) == wanted), None)

    def named(self, pattern: str) -> list[Entry]:
        """Those of the device whose label matches, the newest first."""
        found = [e for e in self.entries if e.device == self.device and re.fullmatch(pattern, e.label)]
        return sorted(found, key=lambda entry: entry.document["date"], reverse=True)

    def rows(self, label: str, **wanted: Any) -> list[Row]:
        entry = self.entry(label)
        return [] if entry is None else [row for row in entry.rows if wanted.items() <= row.items()]


def devices(results: Results) -> list[str]:
    """Those that LLaMA-2-7B's steps or requests were measured on: first where one job timed a peer's steps beside ours,
    then the newest figures."""

    def rank(entry: Entry) -> tuple[bool, str]:
        return entry.label.startswith("throughput") and any("peer" in row for row in entry.rows), entry.document["date"]

    runs = [entry for entry in results.entries if re.match(r"(throughput|qps)_llama-2-7b_", entry.label)]
    first = sorted(runs, key=rank, reverse=True)
    return [device for device in dict.fromkeys(entry.device for entry in first) if device != "cpu"]


def pasted(device: str = H200, **wanted: Any) -> list[Row]:
    """Rows that stand in for a peer's where no file of a job on this device has any."""
    document = json.loads(PASTED.read_text(encoding="utf-8"))
    rows = document["rows"] if document["device"] == device else []
    return [row for row in rows if wanted.items() <= row.items()]


# Decode steps


@dataclass(frozen=True)
class Series:
    """Milliseconds of a decode step by batch, 8 tokens in and 256 out."""

    name: str
    kind: str  # "jllm", "floor" or "peer"
    ms: dict[int, float]


STEP_FILES = {"16 bits": "bf16_kv-bf16", "int8-g8 KV": "bf16_kv-int8-g8", "8 bits": "w8a8_kv-int8-g8"}
STEP_NAMES = {"16 bits": "bf16", "int8-g8 KV": "bf16, int8-g8 KV", "8 bits": "w8a8, int8-g8 KV"}


def decode_series(results: Results) -> dict[str, list[Series]]:
    """By the bits of weights and KV: jllm, its floor, and peers with as many bits."""
    return {
        "16 bits": [
            *_ours(results, "16 bits"),
            *_peer_steps(results, "PyTorch", "torch.compile and CUDA graphs", "bf16"),
            *_peer_steps(results, "vLLM", "vLLM", "bf16"),
        ],
        "int8-g8 KV": [
            *_ours(results, "int8-g8 KV"),
            Series("PPL.LLM*, H800 scaled", "peer", _scaled(results)),
        ],
        "8 bits": [
            *_ours(results, "8 bits"),
            *_peer_steps(results, "PyTorch w8a8", "torch.compile and CUDA graphs", "w8a8"),
            *_peer_steps(results, "vLLM fp8", "vLLM", "fp8"),
        ],
    }


def floor_shares(results: Results) -> Iterator[Row]:
    """What each model's steps reach of their floors, at least and at most: decoding after few and after many tokens,
    and prefilling 1,024 tokens or more."""
    for entry in sorted(results.named(r"throughput_[^_]*_[^_]*_[^_-]*-(bf16|int8-g8)"), key=lambda e: e.label):
        if rows := [row for row in entry.rows if "peer" not in row]:
            shares = {
                "decode, 8 -> 256": [row["floor_fraction"] for row in rows if row["input"] == 8],
                "decode, 1024 -> 1024": [row["floor_fraction"] for row in rows if row["input"] == 1024],
                "prefill": [row["prefill_floor_fraction"] for row in rows if row["batch"] * row["input"] >= 1024],
            }
            ranges = {what: (min(values), max(values)) for what, values in shares.items() if values}
            yield {"entry": entry, "name": f"{rows[0]['model']} {rows[0]['scheme']}, KV {rows[0]['kv']}"} | ranges


def spread(results: Results) -> dict[str, float]:
    """By format, how much longer than the best of its repeats a decode step of the tables took at most."""
    found: dict[str, float] = {}
    for bits, file in STEP_FILES.items():
        rows = results.rows(f"throughput_llama-2-7b_{file}", input=8)
        if shares := [row["decode_ms_most"] / row["decode_ms"] - 1 for row in rows if "decode_ms_most" in row]:
            found[STEP_NAMES[bits]] = max(shares)
    return found


def _ours(results: Results, bits: str) -> Iterator[Series]:
    name = STEP_NAMES[bits]
    every = results.rows(f"throughput_llama-2-7b_{STEP_FILES[bits]}", input=8)
    rows = [row for row in every if "peer" not in row]
    yield _series(f"floor, {name}", "floor", rows, "decode_floor_ms")
    yield _series(f"jllm {name}", "jllm", rows)


def _series(name: str, kind: str, rows: Iterable[Row], key: str = "decode_ms") -> Series:
    return Series(name, kind, {row["batch"]: row[key] for row in rows if key in row})


@dataclass(frozen=True)
class PeerSteps(Series):
    """A peer's, each batch's of its fastest variant, the file that has them, and jllm's in that same job."""

    source: Path
    ours: dict[int, float]


def _peer_steps(results: Results, name: str, peer: str, weights: str) -> Iterator[PeerSteps]:
    """From the newest job that had them beside our own decode steps, else beside our requests, else pasted; marked, but
    for the first."""
    for work, mark in (("throughput", ""), ("qps", "*")):
        for entry in results.named(f"{work}_llama-2-7b.*"):
            if rows := [row for row in entry.rows if _is_step(row, peer, weights)]:
                own = (row for row in entry.rows if "peer" not in row and row.get("input") == 8)
                yield PeerSteps(name + mark, "peer", _fastest(rows), entry.path, _series("jllm", "jllm", own).ms)
                return
    if rows := [row for row in pasted(results.device, weights=weights) if _is_step(row, peer, weights)]:
        yield PeerSteps(f"{name}*", "peer", _fastest(rows), PASTED, {})


def _is_step(row: Row, peer: str, weights: str) -> bool:
    step = (row.get("peer"), row.get("weights", "bf16"), row.get("input", 8))
    return step == (peer, weights, 8) and "decode_ms" in row


def _fastest(rows: Iterable[Row]) -> dict[int, float]:
    found: dict[int, float] = {}
    for row in sorted(rows, key=lambda row: row["batch"]):
        found[row["batch"]] = min(row["decode_ms"], found.get(row["batch"], row["decode_ms"]))
    return found


def _scaled(results: Results) -> dict[int, float]:
    """PPL.LLM's published steps by the bandwidths of the two data sheets."""
    own = sheet_of(results.device)
    if own is None:
        return {}
    factor = device_sheet("h800-sxm").bandwidth / own.bandwidth
    rows = results.rows(f"throughput_llama-2-7b_{STEP_FILES['int8-g8 KV']}", input=8)
    return {row["batch"]: factor * row["h800_decode_ms"] for row in rows if "h800_decode_ms" in row}


# Requests a second


def requests_rows(results: Results) -> Iterator[Row]:
    """Systems on the QPS workload: the mean of the repeats, where there is one with its interval; peers of other runs
    have no file."""
    for entry in results.named("qps_llama-2-7b_.*"):
        every = [row for row in entry.rows if "peer" not in row and row.get("rate") is None]
        beside = any(map(counts, entry.rows))
        for run in dict.fromkeys(map(_run, every)):
            own = [row for row in every if _run(row) == run]
            repeats = [row for row in own if isinstance(row["repeat"], int)]
            mean = next((row for row in own if row["repeat"] == "mean"), None)
            only = repeats[0] if len(repeats) == 1 else {"qps": statistics.fmean(each["qps"] for each in repeats)}
            row = mean or only
            name = f"jllm {own[0]['scheme']}, KV {own[0]['kv']}".replace("bfloat16", "bf16")
            name += f", {own[0]['guided']:.0%} guided" if own[0].get("guided") is not None else ""
            name += "" if of_own_kernels(own[0]) else f", {own[0]['backend']}"
            name += f", {own[0]['replicas']} replicas" if own[0].get("replicas", 1) > 1 else ""
            name += f", {own[0]['devices']} devices each" if "devices" in own[0] else ""
            figures = {"qps": row["qps"], "ci": row.get("qps_ci"), "share": row.get("floor_fraction")}
            yield {"name": name, **figures, "repeats": len(repeats), "beside": beside, "file": entry.path.name}
    yield from _peer_requests(results)


def best_requests(results: Results) -> dict[str, Row]:
    """By its name each system's job of most repeats; of as many, one that had peers beside it, then the newest."""
    oldest_first = reversed(list(requests_rows(results)))
    rows = sorted(oldest_first, key=lambda row: (row.get("repeats", 0), row.get("beside", False)))
    return {row["name"]: row for row in rows}


def _run(row: Row) -> tuple[str | None, int, int]:
    """Rows alike are of one run: by backend, on as many devices."""
    return row.get("backend"), row.get("replicas", 1), row.get("devices", 1)


def _peer_requests(results: Results) -> Iterator[Row]:
    """Each peer's, of the newest job that had it beside our own: as of ours the mean of the runs that ended; else
    pasted."""
    found: dict[tuple[str, str], Row] = {}
    for entry in reversed(results.named("qps_llama-2-7b_.*")):
        runs: dict[tuple[str, str], list[Row]] = {}
        for row in filter(counts, entry.rows):
            runs.setdefault((row["peer"].split("'")[0], row.get("weights", "bf16")), []).append(row)
        for system, of in runs.items():
            qps = [row["qps"] for row in of]
            figures = {"qps": statistics.fmean(qps), "ci": half_interval(qps), "repeats": len(of)}
            found[system] = of[0] | {"kv": of[0].get("kv", "bf16"), "file": entry.path.name} | figures
    for row in pasted(results.device):
        if "qps" in row:
            found.setdefault((row["peer"], row["weights"]), row)
    for (peer, weights), row in found.items():
        some = "" if row.get("requests", REQUESTS) == REQUESTS else f" ({row['requests']} requests)"
        name = f"{peer}{'' if 'file' in row else '*'} {weights}, KV {row['kv']}{some}"
        yield {"name": name} | {key: row[key] for key in ("qps", "ci", "repeats", "file") if key in row}
