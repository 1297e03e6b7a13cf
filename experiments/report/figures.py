"""The figures that RESULTS.md shows, from the newest files: what its tables and pictures are made of."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from experiments.claims.registry import TITLES, claim_named
from experiments.report.commands import load, module_of, parses
from experiments.report.documents import Entry, Row
from experiments.steps.devices import device_sheet

PEERS = Path(__file__).parents[1] / "workloads" / "peers_h200.json"  # of runs of which there is no file
DEVICE = "NVIDIA H200"
REQUESTS = 1024  # of the QPS workload


@dataclass(frozen=True)
class Results:
    """The newest entries, to be asked by label."""

    entries: list[Entry]

    def entry(self, label: str, device: str = DEVICE) -> Entry | None:
        return next((entry for entry in self.entries if (entry.label, entry.device) == (label, device)), None)

    def rows(self, label: str, device: str = DEVICE, **wanted: Any) -> list[Row]:
        entry = self.entry(label, device)
        return [] if entry is None else [row for row in entry.rows if wanted.items() <= row.items()]


def read_peers(**wanted: Any) -> list[Row]:
    rows = json.loads(PEERS.read_text(encoding="utf-8"))["rows"]
    return [row for row in rows if wanted.items() <= row.items()]


# Decode steps


@dataclass(frozen=True)
class Series:
    """Milliseconds of a decode step by batch, 8 tokens in and 256 out."""

    name: str
    kind: str  # "jllm", "floor" or "peer"
    ms: dict[int, float]


STEP_FILES = {"16 bits": "bf16_kv-bf16", "int8-g8 KV": "bf16_kv-int8-g8", "8 bits": "w8a8_kv-int8-g8"}


def decode_series(results: Results) -> dict[str, list[Series]]:
    """By the bits of weights and KV: jllm, its floor, and peers with as many bits."""
    return {
        "16 bits": [
            *_ours(results, "16 bits", "bf16"),
            _series("PyTorch", "peer", _torch(results)),
            _series("vLLM*", "peer", read_peers(weights="bf16")),
        ],
        "int8-g8 KV": [
            *_ours(results, "int8-g8 KV", "bf16, int8-g8 KV"),
            Series("PPL.LLM*, H800 scaled", "peer", _scaled(results)),
        ],
        "8 bits": [
            *_ours(results, "8 bits", "w8a8, int8-g8 KV"),
            _series("vLLM* fp8", "peer", read_peers(weights="fp8")),
        ],
    }


def floor_shares(results: Results) -> Iterator[Row]:
    """What each model's steps reach of their floors, at least and at most: decoding after few and after many tokens,
    and prefilling 1,024 tokens or more."""
    for entry in results.entries:
        rows = [row for row in entry.rows if "peer" not in row]
        if re.fullmatch(r"throughput_[^_]*_[^_]*_[^_-]*-(bf16|int8-g8)", entry.label) and rows:
            shares = {
                "decode, 8 -> 256": [row["floor_fraction"] for row in rows if row["input"] == 8],
                "decode, 1024 -> 1024": [row["floor_fraction"] for row in rows if row["input"] == 1024],
                "prefill": [row["prefill_floor_fraction"] for row in rows if row["batch"] * row["input"] >= 1024],
            }
            ranges = {what: (min(values), max(values)) for what, values in shares.items() if values}
            yield {"entry": entry, "name": f"{rows[0]['model']} {rows[0]['scheme']}, KV {rows[0]['kv']}"} | ranges


def _ours(results: Results, bits: str, name: str) -> Iterator[Series]:
    rows = results.rows(f"throughput_llama-2-7b_{STEP_FILES[bits]}", input=8)
    yield _series(f"floor, {name}", "floor", rows, "decode_floor_ms")
    yield _series(f"jllm {name}", "jllm", rows)


def _series(name: str, kind: str, rows: Iterable[Row], key: str = "decode_ms") -> Series:
    return Series(name, kind, {row["batch"]: row[key] for row in rows if key in row})


def _torch(results: Results) -> list[Row]:
    """PyTorch's compiled steps of the newest run that had them beside its own."""
    found = [e for e in results.entries if e.label.startswith("throughput_llama-2-7b") and e.device == DEVICE]
    peers = [[row for row in entry.rows if "peer" in row] for entry in sorted(found, key=lambda e: e.document["date"])]
    return next((rows for rows in reversed(peers) if rows), [])


def _scaled(results: Results) -> dict[int, float]:
    """PPL.LLM's published steps by the bandwidths of the two data sheets."""
    factor = device_sheet("h800-sxm").bandwidth / device_sheet("h200-sxm").bandwidth
    rows = results.rows(f"throughput_llama-2-7b_{STEP_FILES['int8-g8 KV']}", input=8)
    return {row["batch"]: factor * row["h800_decode_ms"] for row in rows if "h800_decode_ms" in row}


# Requests a second


def requests_rows(results: Results) -> Iterator[Row]:
    """Systems on the QPS workload: the mean of the repeats, where there is one with its interval; peers of other runs
    have no file."""
    for entry in results.entries:
        match = re.fullmatch(r"qps_llama-2-7b_(.*)", entry.label)
        own = [row for row in entry.rows if "peer" not in row]
        if match and entry.device == DEVICE and own and own[-1].get("rate") is None:
            repeats = [row for row in own if isinstance(row["repeat"], int)]
            mean = next((row for row in own if row["repeat"] == "mean"), None)
            row = mean or {"qps": sum(each["qps"] for each in repeats) / len(repeats)}
            name = f"jllm {own[0]['scheme']}, KV {own[0]['kv']}".replace("bfloat16", "bf16")
            name += f", {own[0]['guided']:.0%} guided" if own[0].get("guided") else ""
            figures = {"qps": row["qps"], "ci": row.get("qps_ci"), "share": row.get("floor_fraction")}
            yield {"name": name, **figures, "repeats": len(repeats), "file": entry.path.name}
    for row in read_peers():
        if "qps" in row:
            part = "" if row["requests"] == REQUESTS else f" ({row['requests']} requests)"
            yield {"name": f"{row['peer']}* {row['weights']}, KV {row['kv']}{part}", "qps": row["qps"]}


# Kernels


Cells = dict[str, list[float]]  # case -> how many times as fast as the peer, shape by shape
TORCH_FP8 = r"\((\d+), .* torch's fp8 \+ 10 %$"


@dataclass(frozen=True)
class Strip:
    """One kernel against one peer, case by case."""

    kernel: str
    peer: str
    cells: Cells
    elsewhere: bool = False  # whether the peer's times are a constant of another run


def strips(results: Results) -> list[Strip]:
    """Every kernel's newest benchmark."""
    found = [
        Strip("decode attention, 32/32", "FlashInfer", _attention_bars(results, "32/32"), elsewhere=True),
        Strip("decode attention, 32/8", "FlashInfer", _attention_bars(results, "32/8"), elsewhere=True),
        Strip("decode attention", "cuDNN, contiguous", _cudnn(results)),
        Strip("prefill attention", "FlashInfer", _of_bars(results, "prefill_attention", r"^(\S+) causal$"), True),
        Strip("prefill attention", "cuDNN", _pairs(results, "prefill_attention", "cudnn", _prefill_case, kv="bf16")),
        Strip("bf16 product, by rows", "XLA", _by_rows(results, ("matmul-other", "matmul-many"), "xla")),
        Strip("bf16 SwiGLU, by rows", "two kernels", _by_rows(results, ("swiglu", "swiglu-other"), "default")),
        Strip("int8 product, by rows", "torch's fp8", _of_bars(results, "int8_matmul", TORCH_FP8, slack=1.1), True),
        Strip("fp8 product, by rows", "torch's fp8", _of_bars(results, "fp8_matmul", TORCH_FP8, slack=1.1), True),
        Strip("w4a16-g128 product, by rows", "XLA's bf16", _weights(results)),
        Strip("norm to int8, by rows", "XLA", _pairs(results, "norm_quant", "xla", "{T}", kind="int8")),
        Strip("SiLU, product to int8, by rows", "XLA", _pairs(results, "silu_mul_quant", "xla", "{T}", kind="int8")),
        Strip("rotary, cache write, by rows", "XLA", _pairs(results, "cache_update", "xla", "{T}", "fused", kv="bf16")),
        Strip("sampling of 128,256, by rows", "XLA", _pairs(results, "sample", "xla", "{R}, {asked}", V=128256)),
    ]
    return [strip for strip in found if strip.cells]


def _of_bars(results: Results, label: str, pattern: str, case: str = "{}", slack: float = 1.0) -> Cells:
    """Cells of bars that are a peer's times, with some slack."""
    entry = results.entry(label)
    cells: Cells = {}
    for bar in entry.document["bars"] if entry else ():
        if match := re.search(pattern, bar["name"]):
            cells.setdefault(case.format(*match.groups()), []).append(bar["bar"] / slack / bar["value"])
    return cells


def _attention_bars(results: Results, heads: str) -> Cells:
    return _of_bars(results, "decode_attention", rf"\((\d+), (\d+)\) H/K={heads} bf16$", "{} x {}")


def _pairs(
    results: Results, label: str, peer: str, case: str | Callable[[Row], str], ours: str = "mosaic", **wanted: Any
) -> Cells:
    """Cells of rows that differ in nothing but who computed them."""
    name = case if callable(case) else lambda row: case.format(**row)
    figures = ("peer", "us", "wall_us", "gb_s", "tflop_s", "fraction", "floor_fraction")
    times: dict[str, dict[str, Row]] = {}
    for row in results.rows(label, **wanted):
        if "us" in row and row.get("peer") in (ours, peer):
            key = json.dumps({k: v for k, v in row.items() if k not in figures})
            times.setdefault(key, {})[row["peer"]] = row
    cells: Cells = {}
    for pair in times.values():
        if len(pair) == 2:
            cells.setdefault(name(pair[ours]), []).append(pair[peer]["us"] / pair[ours]["us"])
    return cells


def _by_rows(results: Results, labels: Sequence[str], peer: str) -> Cells:
    """Products of several files, by their rows."""
    cells: Cells = {}
    for label in labels:
        for rows, times in _pairs(results, label, peer, "{M}").items():
            cells.setdefault(rows, []).extend(times)
    return {rows: cells[rows] for rows in sorted(cells, key=int)}


def _prefill_case(row: Row) -> str:
    queries, keys = row["q_lens"], row["kv_lens"]
    if len(set(queries)) > 1:
        return f"{len(queries)} mixed"
    return f"{len(queries)}x{queries[0]}" + ("" if keys[0] == queries[0] else f" after {keys[0] - queries[0]}")


def _cudnn(results: Results) -> Cells:
    """Claim C5's, which times cuDNN beside ours."""
    rows = results.rows("claims-C5")
    return {f"{r['R']} x {r['length']}, {r['H']}/{r['K']}": [r["over_cudnn"]] for r in rows if "over_cudnn" in r}


def _weights(results: Results) -> Cells:
    cells: Cells = {}
    for label in ("weight_only_matmul", "weight_only_matmul-middle", "weight_only_matmul-large"):
        for row in results.rows(label, peer="mosaic", scheme="w4a16-g128"):
            if "over_bf16" in row:
                cells.setdefault(str(row["M"]), []).append(row["over_bf16"])
    return {case: cells[case] for case in sorted(cells, key=int)}


# Claims, bars, and what is stale


def claim_rows(results: Results) -> list[tuple[str, Entry]]:
    """Each claim and the newest file that decides it, in order."""
    found: dict[str, Entry] = {}
    for entry in sorted(results.entries, key=lambda entry: entry.document["date"]):
        name = claim_named(entry.document["experiment"])
        if name and entry.document["rows"] and "verdict" in entry.document["rows"][-1]:
            found[name] = entry
    return [(name, found[name]) for name in TITLES if name in found]


def worst(entry: Entry) -> Row:
    """The missed bar that is the farthest from what was asked for."""

    def far(bar: Row) -> float:
        try:
            ratio = float(bar["value"]) / float(bar["bar"])
        except (TypeError, ValueError, ZeroDivisionError):
            return 0.0
        return max(ratio, 1 / ratio if ratio > 0 else 0.0)

    return max(entry.missed, key=far)


def stale(results: Results) -> Iterator[tuple[Entry, list[str]]]:
    """Entries that say less of today's code than others, and why, as far as the files alone tell."""
    newest = max((date.fromisoformat(entry.document["date"]) for entry in results.entries), default=date.min)
    for entry in results.entries:
        reasons = []
        module = module_of(entry.document["command"])
        if module is None and not entry.document["command"].startswith("python"):
            reasons.append("no command: a sweep while the kernel was built")
        elif module is not None and load(module) is None:
            reasons.append(f"{module} is gone")
        elif module is not None and not parses(entry.document["command"]):
            reasons.append("its command is refused today")
        if not entry.document["complete"] and not reasons:
            reasons.append("cut off before its end")
        if days := (newest - date.fromisoformat(entry.document["date"])).days:
            reasons.append(f"{days} day{'s' * (days > 1)} older than the newest")
        if reasons:
            yield entry, reasons
