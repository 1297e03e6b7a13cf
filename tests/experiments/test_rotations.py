"""The experiment of rotations: its rows, what is not computed again, its bars."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from experiments import rotations
from tests.tiny import tiny_model


@pytest.fixture
def asked(monkeypatch):
    """What is evaluated, in place of evaluating: rotated K and V lose a tenth."""
    seen = []

    def evaluate(model, ids, protocol, *, reference, kv_cache=None):
        seen.append(kv_cache)
        kl = 0.01 if kv_cache and kv_cache.endswith("-h") else 0.1
        return SimpleNamespace(tokens=2, kl=kl, interval=lambda name: (kl, kl))

    monkeypatch.setattr(rotations, "evaluate", evaluate)
    monkeypatch.setattr(rotations, "record", lambda *args: None)
    monkeypatch.setattr(rotations, "read_tokens", lambda model, args: ([[1, 2]], "document"))
    monkeypatch.setattr(rotations, "own_tokens", lambda *args, **options: np.zeros((1, 8), np.int32))
    monkeypatch.setattr(
        rotations, "METHODS", dict.fromkeys(rotations.METHODS, lambda model, scheme, tokens: model.params)
    )
    return seen


def test_rows_and_bars(asked):
    args = rotations.parse_args(["--strengths", "1", "4", "--seeds", "0", "1", "--parts", "kv", "weights"])
    found = list(rotations.rows(tiny_model(), args))
    formats = len(rotations.kv_formats(16))
    assert len(found) == 3 * (formats + 3 * len(rotations.WEIGHTS))  # strength 1 has nothing to draw
    assert [row["kv"] for row in found[:formats]] == asked[:formats]
    bars = list(rotations.bars(found))
    assert [bar["name"].partition(",")[0] for bar in bars] == [
        "int4-g16-h over int4-g16",
        "int4-g16-zp-h over int4-g16-zp",
        "int4-g32-h over int4-g32",
        "w8a8-all (round) rotated all over as it is",
        "fp8 (round) rotated all over as it is",
    ]
    assert [(bar["value"], bar["met"]) for bar in bars] == [(0.1, True)] * 3 + [(1.0, False)] * 2
    worse = [row | {"kl": 0.06 if row.get("kv", "").endswith("-h") else row["kl"]} for row in found]
    assert not any(bar["met"] for bar in rotations.bars(worse))
    count = len(asked)
    before = json.loads(json.dumps(found[:-2]))
    again = list(rotations.rows(tiny_model(), args, before))
    assert len(asked) == count + 2
    assert again == found


def test_rows_of_the_stream(asked, monkeypatch):
    """Outliers are planted by seed, and a rotation of them too; of none only rotations differ by seed."""
    made = []
    monkeypatch.setattr(rotations, "quantize_model", lambda model, scheme: made.append(model) or model)
    args = rotations.parse_args(["--seeds", "0", "1", "--parts", "stream"])
    found = list(rotations.rows(tiny_model(), args))
    keys = list(dict.fromkeys((row["channels"], row["rotate"], row["seed"]) for row in found))
    drawn = [(4, "none", 0), (4, "all", 0), (4, "none", 1), (4, "all", 1)]
    assert keys == [(0, "none", 0), (0, "all", 0), (0, "all", 1), *drawn]
    heads = {np.asarray(model.params.head).tobytes() for model in made}
    assert len(heads) == len(keys)
    bars = list(rotations.bars([row | {"kl": 1.0 if row["rotate"] == "none" else 0.5} for row in found]))
    assert [(bar["value"], bar["met"]) for bar in bars] == [(0.5, True)] * len(rotations.STREAM)
    assert list(rotations.rows(tiny_model(), args, found)) == found
    assert len(made) == len(found)


def test_rows_of_channels_scaled_ahead(asked, monkeypatch):
    alphas = []

    def smoothed(model, tokens, *, alpha):
        alphas.append(alpha)
        return model.params

    monkeypatch.setattr(rotations.ptq, "smooth_attention", smoothed)
    args = rotations.parse_args(["--strengths", "1", "4", "--seeds", "0", "1", "--parts", "smooth"])
    found = list(rotations.rows(tiny_model(), args))
    formats = rotations.kv_formats(16)[:4]
    assert len(found) == 3 * 3 * len(formats)
    assert [row["kv"] for row in found] == asked
    assert alphas == [0.5, 1.0] * 3
    scored = [row | {"kl": 1.0 - 0.6 * row["alpha"]} for row in found]
    assert [(bar["value"], bar["met"]) for bar in rotations.bars(scored)] == [(0.4, True)] * len(formats)


def test_an_unknown_model_is_said(capsys, tmp_path):
    assert rotations.main(["--model", str(tmp_path / "none"), "--results", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")
