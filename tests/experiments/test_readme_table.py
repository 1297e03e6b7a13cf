"""README's one table of measured figures is made of the newest recorded files."""

from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from experiments.report.documents import RESULTS, read_result
from experiments.serving.workload import half_interval

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SCHEMES = {"bf16": ("bf16_kv-bf16", "bfloat16"), "w8a8": ("w8a8_kv-int8-g8", "w8a8_kv-int8-g8")}
MODELS = {"LLaMA-2-7B": "llama-2-7b", "LLaMA-3.1-8B": "llama-3.1-8b"}


def rows(experiment: str, **wanted: Any) -> list[dict[str, Any]]:
    """Rows of an H200's newest file that have these values."""
    path = sorted(RESULTS.glob(f"{experiment}-{'[0-9]' * 8}-h200.json"))[-1]
    return [row for row in read_result(path)["rows"] if wanted.items() <= row.items()]


def decode_cells(scheme: str, batch: int) -> str:
    """Milliseconds of an engine's step, its share of the limit, and vLLM's milliseconds."""
    experiment = f"throughput_llama-2-7b_{SCHEMES[scheme][0]}"
    (ours,) = [row for row in rows(experiment, batch=batch, input=8) if "peer" not in row]
    (theirs,) = rows(experiment, batch=batch, peer="vLLM")
    return f"{ours['engine_ms']:.2f} | {100 * ours['engine_fraction']:.0f} % | {theirs['decode_ms']:.2f}"


def served_cells(scheme: str, model: str) -> str:
    """Requests a second with half of their 95 % interval: ours (the mean of several runs), and vLLM's."""
    found = rows(f"qps_{model}_{SCHEMES[scheme][1]}")
    ours = [row for row in found if "peer" not in row][-1]
    theirs = [row["qps"] for row in found if row.get("peer") == "vLLM"]
    return f"{ours['qps']:.1f} ± {ours['qps_ci']:.1f} | | {mean(theirs):.1f} ± {half_interval(theirs):.1f}"


@pytest.mark.parametrize("batch", [1, 16, 64, 256])
def test_decode_steps(batch):
    cells = " | ".join(decode_cells(scheme, batch) for scheme in SCHEMES)
    assert f"| decode step, batch {batch}, ms | {cells} |" in README


@pytest.mark.parametrize("name", MODELS)
def test_requests_a_second(name):
    cells = " | ".join(served_cells(scheme, MODELS[name]) for scheme in SCHEMES)
    assert f"| requests a second, {name} | {cells} |" in README


def test_a_steady_load():
    found = rows("qps_llama-3.1-8b_bfloat16_rate30", rate=30.0)
    (theirs,) = [row for row in found if row.get("peer") == "vLLM"]
    ours = [row for row in found if "peer" not in row][-1]
    cells = " | | ".join(f"{row['ttft_ms_p50']:.0f}, {row['itl_ms_p99']:.0f}" for row in (ours, theirs))
    assert f"| first token (median), between tokens (p99), ms | {cells} | | | |" in README
