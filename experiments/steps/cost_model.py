"""Estimates the cost of a step without running it. The floors of its matmuls and of its attention each count at a
measured share of their limit, plus a fixed time per layer.

`calibrated` fits these to a results file of experiments.decode_step (whole steps by batch, bf16). Another KV format's
cost beyond its bytes comes from a file of decode attention's benchmark. The result names the files, and the fit's
distance from its own steps. Prompts follow the same rule, which no whole step has confirmed yet.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.steps.devices import REFERENCE, device_sheet
from experiments.steps.floors import Floor, Work, make_floor, step_work, token_bytes
from jllm.config import LlamaConfig
from jllm.errors import InputFileError
from jllm.files.hf_config import load_config
from jllm.model.model import Model
from jllm.model.param_specs import init_params
from jllm.quant.quantize import quantize

Row = dict[str, Any]
CONFIGS = Path(__file__).parents[2] / "configs"
RESULTS = Path(__file__).parents[1] / "results"
FOUND = {"measured_ms", "estimated_ms", "off_by", "file"}  # in which rows of one case may differ
TIED = 1e-9  # sum of relative errors that counts as equal


@dataclass(frozen=True)
class Shares:
    """The shares of a cost: seconds of a step = fixed * layers + products * matmuls' floor + attention * attention's
    floor."""

    fixed: float = 0.0  # seconds per layer
    products: float = 1.0
    attention: float = 1.0
    source: str = "floors alone"
    error: float | None = None  # the largest relative one, over the steps of the fit


@dataclass(frozen=True)
class CostModel:
    """The cost of steps of one model with one KV format on one device."""

    floor: Floor
    token_bytes: float  # of K and V of a token, all layers
    shares: Shares = Shares()

    def seconds(self, work: Work, computed: int | None = None) -> float:
        """Returns the seconds of one step. `computed` is its number of rows in the compiled size."""
        products, attention = self.floor.parts(work, self.token_bytes, computed)
        s = self.shares
        return s.fixed * self.floor.layers + s.products * products + s.attention * attention


def model_shapes(name: str, scheme: str | None = None) -> Model:
    """Returns the model configs/<name>.json, or that of a directory or config.json, as shapes alone. It is in bf16 or
    quantized. It cannot run, but floors only need shapes. Raises ConfigError."""
    path = CONFIGS / f"{name}.json"
    return shapes_of(load_config(path if path.exists() else name), scheme)


def shapes_of(config: LlamaConfig, scheme: str | None = None, dtype: str = "bfloat16") -> Model:
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0), jnp.dtype(dtype)))
    return Model(config, quantize(params, scheme) if scheme else params, None)


def make_cost_model(model: Model, kv_cache: str | None, shares: Shares) -> CostModel:
    return CostModel(reference_floor(model), token_bytes(model, kv_cache), shares)


def reference_floor(model: Model) -> Floor:
    """Returns the floor of a model on the device from which others are estimated."""
    return make_floor(model.params, model.config, device_sheet(REFERENCE).ceilings)


def fit(
    steps: Iterable[tuple[Work, float]], floor: Floor, kv_token_bytes: float, source: str, *, relative: bool = True
) -> Shares:
    """Returns shares fitted to measured steps (work, seconds) by least squares. Errors are relative, or in seconds,
    where single steps that seem to take no time have less weight. No share is less than 1, and the fixed time is not
    negative: nothing is faster than its floor. In steps with few rows, reading weights bounds all matmuls; a fixed time
    and a share look alike, and count as fixed. Raises InputFileError for fewer than three steps."""
    steps = list(steps)
    if len(steps) < 3:
        raise InputFileError(f"{source}: {len(steps)} steps are too few to fit a cost model to; it needs 3")
    measured = np.array([seconds for _, seconds in steps])
    terms = np.array([(floor.layers, *floor.parts(work, kv_token_bytes)) for work, _ in steps], float)
    unit = measured if relative else np.full(len(steps), measured.mean())
    found = _bounded_least_squares(terms / unit[:, None], measured / unit, np.array([0.0, 1.0, 1.0]))
    error = float(np.max(np.abs(terms @ found / measured - 1)))
    fixed, products, attention = found.tolist()
    return Shares(fixed, products, attention, source, error)


def _bounded_least_squares(a: np.ndarray, b: np.ndarray, least: np.ndarray) -> np.ndarray:
    """Returns x >= least that minimizes |a x - b|, by trying each set of equality bounds. Among equal solutions it
    takes the one with the most bounds, and then the first of x free."""
    best, best_x = np.inf, least
    for free in map(list, sorted(product((True, False), repeat=a.shape[1]), key=sum)):
        x = least.copy()
        if any(free):
            x[free] += np.linalg.lstsq(a[:, free], b - a @ least, rcond=None)[0]
        distance = float(np.linalg.norm(a @ x - b))
        if (x >= least - 1e-12).all() and distance < best - TIED:
            best, best_x = distance, x
    return best_x


def recorded_steps(document: Row) -> list[tuple[Work, float]]:
    """Returns the steps of a decode_step file with bf16 pages: those of the kernels, if it has both backends."""
    rows = [row for row in document["rows"] if "decode_ms" in row and row.get("kv") in ("bfloat16", "bf16")]
    ours = [row for row in rows if row.get("backend") != "xla"] or rows
    return [(step_work(b := row["batch"], b * (row["context"] + 1)), row["decode_ms"] / 1e3) for row in ours]


def format_factor(document: Row, kv_cache: str | None) -> float | None:
    """Returns decode attention's time over pages of a format, relative to its bytes at bf16's rate. It is 1 for bf16,
    and None if the benchmark lacks such rows. Of two formats (k=.., v=..) the larger counts."""
    if kv_cache is None:
        return 1.0
    formats = {part.partition("=")[2] or part for part in kv_cache.split(",")}
    found = [_rate(document, "bf16", name) for name in formats]
    return max((factor for factor in found if factor), default=None) if all(found) else None


def _rate(document: Row, plain: str, name: str) -> float | None:
    if name in (plain, "bfloat16"):
        return 1.0
    rows = [r for r in document["rows"] if r.get("kernel") == "decode_attention" and r.get("gb_s")]
    cells: dict[Any, dict[str, float]] = {}
    for r in rows:
        cell = cells.setdefault((r["R"], r["length"], r["H"], r["K"]), {})
        cell[r["kv"]] = max(cell.get(r["kv"], 0.0), r["gb_s"])
    ratios = [cell[plain] / cell[name] for cell in cells.values() if plain in cell and name in cell]
    return max(1.0, sum(ratios) / len(ratios)) if ratios else None


def newest(results: Path, experiment: str, device: str = "h200") -> tuple[str, Row] | None:
    """Returns name and document of an experiment's newest unlabelled results file on a device, by its name in files."""
    for path in sorted(results.glob(f"{experiment}-{'[0-9]' * 8}-{device}.json"), reverse=True):
        return path.name, json.loads(path.read_text(encoding="utf-8"))
    return None


def each_once(checks: Iterable[tuple[str, Row]]) -> list[Row]:
    """Returns measured steps beside their estimates, each case once. Rows of one case differ only in FOUND. Each comes
    with the date of its file, YYYY-MM-DD, and the newest counts. Within a day, whose order files do not show, the one
    further from its estimate counts."""
    kept: dict[frozenset[tuple[str, Any]], tuple[tuple[str, float], Row]] = {}
    for date, row in checks:
        case, rank = frozenset((key, row[key]) for key in row.keys() - FOUND), (date, abs(row["off_by"]))
        if case not in kept or kept[case][0] < rank:
            kept[case] = rank, row
    return [row for _, row in kept.values()]


def calibrated(kv_cache: str | None, results: Path = RESULTS) -> Shares:
    """Returns shares fitted to the newest measured decode steps of LLaMA-2-7B, or floors alone without any."""
    steps = newest(results, "decode_step")
    if steps is None:
        return Shares()
    name, document = steps
    model = model_shapes(_model_name(document["rows"]))
    shares = fit(recorded_steps(document), reference_floor(model), token_bytes(model, None), name)
    bench = newest(results, "decode_attention")
    factor = format_factor(bench[1], kv_cache) if bench else None
    if factor is None:
        return Shares(**{**vars(shares), "source": f"{name}; {kv_cache} as fast as its bytes"})
    source = name if factor == 1.0 or bench is None else f"{name}, {bench[0]}"
    return Shares(**{**vars(shares), "attention": shares.attention * factor, "source": source})


def _model_name(rows: Sequence[Row]) -> str:
    names = {row["model"] for row in rows if "model" in row}
    if len(names) != 1:
        raise InputFileError(
            f"a cost model is fitted to steps of one model, not of {', '.join(sorted(names)) or 'none'}"
        )
    return names.pop()
