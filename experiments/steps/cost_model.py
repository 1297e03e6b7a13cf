"""What a step costs without running it: the floor of its products and of its attention, each at a share of its limit
that was measured, and a fixed time a layer.

`calibrated` fits these to a results file of experiments.decode_step (whole steps by batch, bf16) and takes what other
KV formats cost beyond their bytes from one of decode attention's benchmark; it says which files, and how far the fit is
from the steps that it was made of. Prompts are counted by the same rule, which no whole step has confirmed yet.
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
FOUND = {"measured_ms", "estimated_ms", "off_by", "file"}  # what rows of one case may differ in
TIED = 1e-9  # relative errors, together: what is nearer by less is as near


@dataclass(frozen=True)
class Shares:
    """seconds of a step = fixed * layers + products * the floor of its products + attention * that of its attention."""

    fixed: float = 0.0  # seconds a layer
    products: float = 1.0
    attention: float = 1.0
    source: str = "floors alone"
    error: float | None = None  # the largest, of itself, over the steps that it was fitted to


@dataclass(frozen=True)
class CostModel:
    """The cost of steps of one model with one KV format on one device."""

    floor: Floor
    token_bytes: float  # of K and V of a token, all layers
    shares: Shares = Shares()

    def seconds(self, work: Work, computed: int | None = None) -> float:
        """Returns seconds of one step; `computed` are the rows that it computes, where a compiled size rounds them
        up."""
        products, attention = self.floor.parts(work, self.token_bytes, computed)
        s = self.shares
        return s.fixed * self.floor.layers + s.products * products + s.attention * attention


def model_shapes(name: str, scheme: str | None = None) -> Model:
    """Returns the model configs/<name>.json, or of a directory or config.json, as shapes alone, in bf16 or quantized;
    nothing can run it, floors need no more. Raises ConfigError."""
    path = CONFIGS / f"{name}.json"
    return shapes_of(load_config(path if path.exists() else name), scheme)


def shapes_of(config: LlamaConfig, scheme: str | None = None, dtype: str = "bfloat16") -> Model:
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0), jnp.dtype(dtype)))
    return Model(config, quantize(params, scheme) if scheme else params, None)


def make_cost_model(model: Model, kv_cache: str | None, shares: Shares) -> CostModel:
    return CostModel(reference_floor(model), token_bytes(model, kv_cache), shares)


def reference_floor(model: Model) -> Floor:
    """Returns the floor of a model on the device whose steps others are estimated by."""
    return make_floor(model.params, model.config, device_sheet(REFERENCE).ceilings)


def fit(
    steps: Iterable[tuple[Work, float]], floor: Floor, kv_token_bytes: float, source: str, *, relative: bool = True
) -> Shares:
    """Shares from measured steps (work, seconds), by least squares of relative errors, or of seconds, which single
    steps that seem to take no time cannot bend. No share is less than 1 and the fixed time not negative, since nothing
    is faster than its floor. Steps of so few rows that reading the weights bounds all products cannot tell a fixed time
    from a share: it counts as fixed. InputFileError for fewer than three steps."""
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
    """Returns x >= least that minimizes |a x - b|, by trying each set of bounds that may hold with equality. Of equal
    ones that with the most such bounds, and of these with the first of x free."""
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
    """Returns the steps of a decode_step file: those of the kernels where it has both backends, bf16 pages alone."""
    rows = [row for row in document["rows"] if "decode_ms" in row and row.get("kv") in ("bfloat16", "bf16")]
    ours = [row for row in rows if row.get("backend") != "xla"] or rows
    return [(step_work(b := row["batch"], b * (row["context"] + 1)), row["decode_ms"] / 1e3) for row in ours]


def format_factor(document: Row, kv_cache: str | None) -> float | None:
    """Returns how many times as long decode attention takes over pages of a format as its bytes would at the rate of
    bf16's; 1 for bf16, None where the benchmark has no such rows. Of two formats (k=.., v=..) the larger."""
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
    """Returns name and document of the newest results file of an experiment on a device, by its name in files, of runs
    without a label."""
    for path in sorted(results.glob(f"{experiment}-{'[0-9]' * 8}-{device}.json"), reverse=True):
        return path.name, json.loads(path.read_text(encoding="utf-8"))
    return None


def each_once(checks: Iterable[tuple[str, Row]]) -> list[Row]:
    """Measured steps beside their estimates, each case once: rows are of the same one if they differ in nothing but
    FOUND. Each comes with the date of its file, YYYY-MM-DD, and the newest counts; of one day's, whose order files do
    not tell, the one that is further from its estimate."""
    kept: dict[frozenset[tuple[str, Any]], tuple[tuple[str, float], Row]] = {}
    for date, row in checks:
        case, rank = frozenset((key, row[key]) for key in row.keys() - FOUND), (date, abs(row["off_by"]))
        if case not in kept or kept[case][0] < rank:
            kept[case] = rank, row
    return [row for _, row in kept.values()]


def calibrated(kv_cache: str | None, results: Path = RESULTS) -> Shares:
    """Shares fitted to the newest measured decode steps, which were LLaMA-2-7B's; floors alone where there are none."""
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
