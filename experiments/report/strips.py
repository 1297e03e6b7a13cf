"""Compares kernels with peers, case by case, from the newest benchmarks."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from experiments.report.documents import Row
from experiments.report.figures import H100, H200, Results

Cells = dict[str, list[float]]  # case -> speed over the peer's, shape by shape
Name = str | Callable[[Row], str]  # names a row's case: a format string for its values, or a function
CONTIGUOUS = "cuDNN (contiguous K, V)"
WHO = {  # what is no part of a case
    *("peer", "variant", "script", "version", "us", "wall_us", "gb_s", "tflop_s", "fraction", "floor_fraction", "off")
}


@dataclass(frozen=True)
class Strip:
    """One kernel against one peer, case by case."""

    kernel: str
    peer: str
    cells: Cells
    device: str = H100


def strips(results: Results) -> list[Strip]:
    """Returns every kernel's newest benchmark that has the peer: of an H200, or else of the page's device."""
    found: dict[tuple[str, str], Strip] = {}
    for device in dict.fromkeys((results.device, H200)):
        for strip in _strips(results.on(device)):
            if strip.cells:
                found[strip.kernel, strip.peer] = replace(strip, device=device)
    return list(found.values())


def _strips(results: Results) -> list[Strip]:
    return [
        *(
            _beside(results, f"decode attention, 32/{k}", "FlashInfer", "decode_attention", "{R} x {length}", K=k)
            for k in (32, 8)
        ),
        *(
            Strip(
                f"decode attention, 32/{k}",
                CONTIGUOUS,
                _pairs(results, "decode_attention", "cudnn, contiguous", "{R} x {length}", Q=1, H=32, K=k, kv="bf16"),
            )
            for k in (32, 8)
        ),
        _beside(results, "prefill attention", "FlashInfer", "prefill_attention", _prefill_case, kv="bf16"),
        Strip("prefill attention", "cuDNN", _pairs(results, "prefill_attention", "cudnn", _prefill_case, kv="bf16")),
        Strip("bf16 product, by rows", "XLA", _by_rows(results, "matmul(-other|-many)?", "xla")),
        Strip("bf16 SwiGLU, by rows", "two kernels", _by_rows(results, "swiglu(-other)?", "default")),
        _beside(results, "int8 product, by rows", "torch fp8", "int8_matmul", "{M}", ours="int8_matmul"),
        _beside(results, "fp8 product, by rows", "torch fp8", "fp8_matmul", "{M}", ours="fp8_matmul"),
        Strip("w4a16-g128 product, by rows", "XLA's bf16", _weights(results)),
        Strip("norm to int8, by rows", "XLA", _pairs(results, "norm_quant", "xla", "{T}", kind="int8")),
        Strip("SiLU, product to int8, by rows", "XLA", _pairs(results, "silu_mul_quant", "xla", "{T}", kind="int8")),
        Strip("rotary, cache write, by rows", "XLA", _pairs(results, "cache_update", "xla", "{T}", "fused", kv="bf16")),
        Strip("sampling of 128,256, by rows", "XLA", _pairs(results, "sample", "xla", "{R}, {asked}", V=128256)),
        _beside(results, "product of experts, by tokens", "tokamax", "ragged_matmul", "{tokens}", scheme="bf16"),
    ]


def _beside(
    results: Results, kernel: str, peer: str, label: str, case: Name, ours: str = "mosaic", **wanted: Any
) -> Strip:
    """Returns ours against a peer's fastest variant, by the rows of the newest file with both, under any label."""
    for entry in results.named(f"{label}(-.*)?"):
        theirs = [row for row in entry.rows if row.get("peer") == peer and "us" in row]
        cells: Cells = {}
        for row in entry.rows:
            if row.get("peer") != ours or row.get("Q", 1) != 1 or "us" not in row or not wanted.items() <= row.items():
                continue
            alike = [
                other["us"]
                for other in theirs
                if all(row.get(k) == v for k, v in other.items() if k not in (*WHO, "kernel", "Q"))
            ]
            if alike:
                cells.setdefault(_named(case, row), []).append(min(alike) / row["us"])
        if cells:
            return Strip(kernel, peer, cells)
    return Strip(kernel, peer, {})


def _named(case: Name, row: Row) -> str:
    return case(row) if callable(case) else case.format(**row)


def _pairs(results: Results, pattern: str, peer: str, case: Name, ours: str = "mosaic", **wanted: Any) -> Cells:
    """Returns cells of rows that differ only in who computed them. Of several files with one shape the newest
    counts."""
    found: dict[str, dict[str, Row]] = {}
    for entry in results.named(pattern):
        pairs: dict[str, dict[str, Row]] = {}
        for row in entry.rows:
            if "us" in row and row.get("peer") in (ours, peer) and wanted.items() <= row.items():
                key = json.dumps({k: v for k, v in row.items() if k not in WHO})
                pairs.setdefault(key, {})[row["peer"]] = row
        found = {key: pair for key, pair in pairs.items() if len(pair) == 2} | found
    cells: Cells = {}
    for pair in found.values():
        cells.setdefault(_named(case, pair[ours]), []).append(pair[peer]["us"] / pair[ours]["us"])
    return cells


def _by_rows(results: Results, pattern: str, peer: str) -> Cells:
    """Returns the matmuls of files of that name, by their rows."""
    cells = _pairs(results, pattern, peer, "{M}")
    return {rows: cells[rows] for rows in sorted(cells, key=int)}


def _prefill_case(row: Row) -> str:
    queries, keys = row["q_lens"], row["kv_lens"]
    if len(set(queries)) > 1:
        return f"{len(queries)} mixed"
    return f"{len(queries)}x{queries[0]}" + ("" if keys[0] == queries[0] else f" after {keys[0] - queries[0]}")


def _weights(results: Results) -> Cells:
    cells: Cells = {}
    for label in ("weight_only_matmul", "weight_only_matmul-middle", "weight_only_matmul-large"):
        for row in results.rows(label, peer="mosaic", scheme="w4a16-g128"):
            if "over_bf16" in row:
                cells.setdefault(str(row["M"]), []).append(row["over_bf16"])
    return {case: cells[case] for case in sorted(cells, key=int)}
