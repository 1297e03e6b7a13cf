"""Finds decode steps and requests per second, ours and peers', in the newest files."""

import re
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments.accuracy.rows import PLAIN_KV
from experiments.baselines import BASELINES
from experiments.report.documents import Entry, Row, short
from experiments.serving.workload import half_interval
from experiments.steps.bars import of_own_kernels
from experiments.steps.batches import WholeBatch, floor_columns
from experiments.steps.cost_model import CONFIGS, model_shapes
from experiments.steps.devices import Ceilings, ceilings_of, device_sheet, sheet_of
from experiments.steps.floors import make_floors, token_bytes
from experiments.steps.peers import counts
from jllm.quant.schemes import PLAIN

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"


@dataclass(frozen=True)
class Results:
    """The newest entries, by label. They are of one device, unless another is named."""

    entries: list[Entry]
    device: str = H100

    def on(self, device: str) -> "Results":
        return replace(self, device=device)

    def entry(self, label: str, device: str | None = None) -> Entry | None:
        wanted = label, device or self.device
        return next((entry for entry in self.entries if (entry.label, entry.device) == wanted), None)

    def named(self, pattern: str) -> list[Entry]:
        """Returns the device's entries with a matching label, newest first."""
        found = [e for e in self.entries if e.device == self.device and re.fullmatch(pattern, e.label)]
        return sorted(found, key=lambda entry: entry.date, reverse=True)

    def rows(self, label: str, **wanted: Any) -> list[Row]:
        entry = self.entry(label)
        return [] if entry is None else [row for row in entry.rows if wanted.items() <= row.items()]


# Decode steps


@dataclass(frozen=True)
class Series:
    """Milliseconds of a decode step by batch, 8 tokens in and 256 out."""

    name: str
    kind: str  # "jllm", "floor" or "peer"
    ms: dict[int, float]
    ours: dict[int, float] = field(default_factory=dict)  # of a peer: jllm's in the same job
    source: Path | None = None  # of a peer: its file


STEP_FILES = {"bf16": "bf16_kv-bf16", "bf16, int8-g8 KV": "bf16_kv-int8-g8", "w8a8, int8-g8 KV": "w8a8_kv-int8-g8"}


def own_steps(results: Results, name: str) -> list[Row]:
    """Returns jllm's rows of decode steps with 8 tokens in, by the name of their formats."""
    rows = results.rows(f"throughput_llama-2-7b_{STEP_FILES[name]}", input=8)
    return [row for row in rows if "peer" not in row]


def of_engines(results: Results) -> bool:
    """Returns whether whole engines were timed in all rows of decode steps."""
    rows = [row for name in STEP_FILES for row in own_steps(results, name)]
    return bool(rows) and all("engine_ms" in row for row in rows)


def of_steps(results: Results) -> Results:
    """Returns the results of the device whose steps are shown: an H200's, once whole engines were timed in all formats
    there."""
    newer = results.on(H200)
    return newer if of_engines(newer) and all(own_steps(newer, name) for name in STEP_FILES) else results


def decode_series(results: Results) -> dict[str, list[Series]]:
    """Returns the steps of jllm, of its floor and of peers, by the formats of weights and KV. Peers have as many
    bits. jllm's are its engine's where these were timed."""
    peers = {
        "bf16": [("PyTorch", "torch.compile and CUDA graphs", "bf16"), ("vLLM", "vLLM", "bf16")],
        "w8a8, int8-g8 KV": [("vLLM fp8", "vLLM", "fp8")],
    }
    found, step = {}, "engine_ms" if of_engines(results) else "decode_ms"
    for name in STEP_FILES:
        own = own_steps(results, name)
        series = [Series(f"floor, {name}", "floor", _by_batch(own, "decode_floor_ms"))]
        series.append(Series(f"jllm {name}", "jllm", _by_batch(own, step)))
        for peer in peers.get(name, ()):
            series += _peer_steps(results, *peer, step if peer[1] == "vLLM" else "decode_ms")
        if name == "bf16, int8-g8 KV" and (scaled := _scaled(results, own)):
            series.append(Series("PPL.LLM, H800 scaled by bandwidth", "peer", scaled, series[1].ms))
        found[name] = [each for each in series if each.ms]
    return found


def _by_batch(rows: Iterable[Row], key: str = "decode_ms") -> dict[int, float]:
    return {row["batch"]: row[key] for row in rows if key in row}


def _peer_steps(results: Results, name: str, peer: str, weights: str, step: str) -> list[Series]:
    """Returns a peer's steps in the newest job that timed them beside ours, `step` of our rows. Each batch has its
    fastest variant."""
    for entry in results.named("throughput_llama-2-7b.*"):
        found: dict[int, float] = {}
        for row in sorted(entry.rows, key=lambda row: row["batch"]):
            kind = row.get("peer"), row.get("weights", "bf16"), row.get("input", 8)
            if kind == (peer, weights, 8) and "decode_ms" in row:
                found[row["batch"]] = min(row["decode_ms"], found.get(row["batch"], row["decode_ms"]))
        if found:
            own = [row for row in entry.rows if "peer" not in row and row.get("input") == 8]
            return [Series(name, "peer", found, _by_batch(own, step), entry.path)]
    return []


def _scaled(results: Results, rows: Iterable[Row]) -> dict[int, float]:
    """Returns PPL.LLM's published steps on an H800, scaled by the bandwidths of the two data sheets."""
    own = sheet_of(results.device)
    if own is None:
        return {}
    factor = device_sheet("h800-sxm").bandwidth / own.bandwidth
    return {row["batch"]: factor * row["h800_decode_ms"] for row in rows if "h800_decode_ms" in row}


def over(series: Series, other: dict[int, float]) -> tuple[float, float]:
    """Returns the least and the largest ratio of a series to another, over common batches."""
    found = [ms / other[batch] for batch, ms in series.ms.items() if batch in other]
    return min(found), max(found)


def floor_shares(results: Results) -> Iterator[Row]:
    """Yields the least and largest share of its floor that each model reaches, in decoding and in prefill. Decode steps
    after 8 tokens are an engine's where these were timed. Shares of the rates that the device holds for seconds follow,
    where those are known. Models that were timed on the page's device alone come last."""
    seen = set()
    for on in dict.fromkeys((of_steps(results).device, results.device)):
        found = results.on(on).named(r"throughput_[^_]*_[^_]*_[^_-]*-(bf16|int8-g8)")
        for entry in sorted(found, key=lambda entry: entry.label):
            rows = [row for row in entry.rows if "peer" not in row]
            if rows and entry.label not in seen:
                seen.add(entry.label)
                name = f"{rows[0]['model']} {rows[0]['scheme']}, KV {rows[0]['kv']}, {short(entry.device).split()[0]}"
                held = _shares(with_sustained(rows, ceilings_of(entry.device)), "sustained")
                yield {"file": entry.path, "name": name, "sustained": held} | _shares(rows, "floor")


def _shares(rows: list[Row], kind: str) -> dict[str, tuple[float, float]]:
    """Returns the least and largest share of the `kind` of limit, by what is computed."""
    step = f"{kind}_fraction"
    found = {
        "short": [row[step] * row.get("engine_fraction", row["floor_fraction"]) / row["floor_fraction"]
                  for row in rows if row["input"] == 8],
        "long": [row[step] for row in rows if row["input"] == 1024],
        "prefill": [row[f"prefill_{step}"] for row in rows if row["batch"] * row["input"] >= 1024],
    }  # fmt: skip
    return {what: (min(values), max(values)) for what, values in found.items() if values}


def with_sustained(rows: list[Row], ceilings: Ceilings) -> list[Row]:
    """Returns the rows with their shares at sustained rates. Rows of older files get them from the floors' ratio. There
    is none where the rates, or the model's shapes, are not known."""
    if all("sustained_fraction" in row for row in rows):
        return rows
    shapes = CONFIGS / f"{rows[0]['model']}.json"
    if ceilings.sustained is None or not shapes.exists():
        return []
    model = model_shapes(rows[0]["model"], None if rows[0]["scheme"] == PLAIN else rows[0]["scheme"])
    floors, each = make_floors(model.params, model.config, ceilings), token_bytes(model, rows[0]["kv"])
    found = []
    for row in rows:
        case = WholeBatch(row["batch"], row["input"], row["output"])
        least = floor_columns(floors, case, each, 1.0, 1.0)
        decode, prefill = (least[f"{what}_sustained_ms"] / least[f"{what}_floor_ms"] for what in ("decode", "prefill"))
        shares = {"sustained_fraction": decode * row["floor_fraction"]}
        found.append(row | shares | {"prefill_sustained_fraction": prefill * row["prefill_floor_fraction"]})
    return found


# Requests per second

SERVED = {"llama-2-7b": "LLaMA-2-7B", "llama-3.1-8b": "LLaMA-3.1-8B"}  # models on the QPS workload
STEADY = ("ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99", "good_share")  # what a steady load shows


def requests_rows(results: Results, model: str = "llama-2-7b") -> list[Row]:
    """Returns each system's row on the QPS workload, the fastest first. The job with most runs counts, then one with
    peers, then the newest."""
    found: dict[str, Row] = {}
    for entry in reversed(results.named(rf"qps_{re.escape(model)}_.*")):
        beside = any(map(counts, entry.rows))
        for name, rows in _systems(entry.rows).items():
            runs = [row["qps"] for row in rows if row.get("repeat") != "mean"]
            mean = next((row for row in rows if row.get("repeat") == "mean"), None)
            row = {"name": name, "device": short(entry.device), "file": entry.path, "runs": len(runs), "beside": beside}
            row["qps"] = mean["qps"] if mean else statistics.fmean(runs)
            row["ci"] = mean.get("qps_ci") if mean else half_interval(runs)
            row["start_s"] = None if rows[0].get("loaded") else rows[0].get("start_s")
            if name not in found or (len(runs), beside) >= (found[name]["runs"], found[name]["beside"]):
                found[name] = row
    return sorted(found.values(), key=lambda row: -row["qps"])


def steady_rows(results: Results, model: str) -> Iterator[Row]:
    """Yields each system's row at a steady load, in the newest job of each name. Its figures are means of its runs. A
    system without all of them is left out."""
    for entry in results.named(rf"qps_{re.escape(model)}_.*_rate[\d.]+"):
        found: dict[str, list[Row]] = {}
        for row in entry.rows:
            if row.get("rate") is not None and all(row.get(key) is not None for key in STEADY):
                found.setdefault(_system(row), []).append(row)
        for name, rows in found.items():
            runs = [row for row in rows if row.get("repeat") == "mean"] or rows
            means = {key: statistics.fmean(row[key] for row in runs) for key in STEADY}
            yield means | {"name": name, "rate": rows[0]["rate"], "device": short(entry.device), "file": entry.path}


def times_as_many(results: Results, name: str, other: str) -> float | None:
    """Returns how many times the requests of another system one serves, in the newest job that served both."""
    for entry in results.named("qps_llama-2-7b_.*"):
        found = _systems(entry.rows)
        if name in found and other in found:
            ours, theirs = (
                statistics.fmean(row["qps"] for row in found[each] if row.get("repeat") != "mean")
                for each in (name, other)
            )
            return ours / theirs
    return None


def _systems(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Returns rows of requests all at once, by the system that served them."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if counts(row) or ("peer" not in row and row.get("rate") is None and "change" not in row):
            found.setdefault(_system(row), []).append(row)
    return found


def _system(row: Row) -> str:
    """Returns the name of the system that served a row's requests."""
    if "peer" in row:
        peer, kv = row["peer"].split("'")[0], row.get("kv", "bf16")
        return ", ".join(filter(None, [f"{peer} {row.get('weights', 'bf16')}", f"KV {kv}", row.get("settings")]))
    name = f"jllm {row['scheme']}, KV {row['kv']}".replace("bfloat16", "bf16")
    name += f", {row['guided']:.0%} guided" if row.get("guided") is not None else ""
    name += "".join(f", {row[x]}" for x, choices in BASELINES.items() if row.get(x, choices[0]) != choices[0])
    name += "" if of_own_kernels(row) else f", {row['backend']}"
    name += f", {row['replicas']} replicas" if row.get("replicas", 1) > 1 else ""
    return name + (f", {row['devices']} devices each" if "devices" in row else "")


# Accuracy


def accuracy_rows(results: Results, label: str = "quant_accuracy") -> list[Row]:
    """Returns the quantized schemes and KV formats, each beside 16 bits of the other. The user's own schemes have their
    short names."""
    entry = results.entry(label, "cpu")
    rows = [] if entry is None else [row for row in entry.rows if row.get("part", "scheme") == "scheme"]
    rows = [row | {"scheme": row["scheme"].rpartition(":")[2]} for row in rows]
    return [row for row in rows if row["kl"] > 0 and (row["kv"] == PLAIN_KV or row["scheme"] == PLAIN)]
