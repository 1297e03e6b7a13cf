"""Rotations: the function stays before anything is rounded, and what rounding costs beside outliers falls."""

import jax
import pytest

from jllm.analysis.evaluate import evaluate
from jllm.analysis.outliers import plant
from tests.tiny import tiny_model

IDS = [[1, 14, 15, 92, 65, 35, 89, 79, 4, 11, 60, 33, 8, 90, 21, 7], [5, 77, 12, 45, 45, 61, 3, 18, 54, 93]]


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("windows", [(None, None), (5, None)])
def test_rotated_kv_changes_nothing_but_rounding(windows):
    model = tiny_model("float64", windows=windows)
    same = evaluate(model, IDS, "document", reference=model, kv_cache="f64-h")
    assert abs(same.kl) < 1e-12
    assert same.top1 == 1
    rounded = evaluate(model, IDS, "document", reference=model, kv_cache="int4-g16-h")
    assert rounded.kl > 1e-6


@pytest.mark.parametrize("seed", range(3))
def test_rotated_kv_halves_what_outliers_cost(seed):
    model = tiny_model("float64", seed=seed)
    planted = plant(model, channels=0, gated=0, massive=False, kv=2, strength=16.0, seed=seed)
    plain, turned = (
        evaluate(planted, IDS, "document", reference=model, kv_cache=name).kl for name in ("int4-g16", "int4-g16-h")
    )
    assert turned < plain / 2
