"""The experiments of calibrated quantization and of outliers: their rows, bars and picture, and what they refuse."""

import json

import numpy as np
import pytest

import experiments.outliers as outliers
import experiments.ptq_methods as ptq_methods
from jllm.analysis.evaluate import Evaluation, Part
from jllm.analysis.protocols import PROTOCOLS
from jllm.quant.schemes import Scheme
from tests.experiments.test_quant_accuracy import Pieces
from tests.tiny import tiny_model


@pytest.fixture
def calls(monkeypatch):
    """Nothing is generated or evaluated: kl is 0.05 by rounding and less by what calibrates."""
    asked = []

    def evaluate(model, ids, protocol, *, reference):
        kl = [0.05, 0.04][model.params == "calibrated"]
        parts = (Part(10, None, 12.0, 11.0, 10 * kl, 9), Part(20, None, 9.0, 9.0, 18 * kl, 8))
        return Evaluation(PROTOCOLS["document"], parts)

    def method(name):
        def run(model, scheme, tokens, seed):
            asked.append((name, scheme.name, seed, tokens.shape))
            return "rounded" if name == "round" else "calibrated"

        return run

    for module in (ptq_methods, outliers):
        monkeypatch.setattr(module, "record", lambda *args: None)
        monkeypatch.setattr(module, "evaluate", evaluate)
    tokens = lambda model, rows, length, seed: np.zeros((rows, length), np.int32)  # noqa: E731
    monkeypatch.setattr("experiments.ptq_methods.own_tokens", tokens)
    monkeypatch.setattr(ptq_methods, "METHODS", {name: method(name) for name in ptq_methods.METHODS})
    return asked


def run(main, tmp_path, *options):
    status = main(["--results", str(tmp_path), *options])
    files = list(tmp_path.glob("*.json"))
    return status, json.loads(files[0].read_text()) if files else None


def test_methods_are_held_against_rounding(calls, tmp_path):
    options = ["--models", "plain", "--schemes", "w4a16-g64", "--methods", "gptq", "--seeds", "0", "7", "--rows", "2"]
    status, result = run(ptq_methods.main, tmp_path, *options)
    assert (status, result["complete"]) == (0, True)
    assert calls == [("round", "w4a16-g64", 0, (2, 256)), ("gptq", "w4a16-g64", 0, (2, 256)),
                     ("gptq", "w4a16-g64", 7, (2, 256))]  # fmt: skip
    rounding, *gptq = result["rows"]
    assert (rounding["kl"], rounding["ratio"], rounding["ratio_95"]) == (pytest.approx(0.0467, rel=1e-3), 1, [1, 1])
    assert [(row["seed"], row["ratio"], row["ratio_95"]) for row in gptq] == [(s, 0.8, [0.8, 0.8]) for s in (0, 7)]
    (bar,) = result["bars"]
    assert (bar["value"], bar["met"]) == (0.8, True)
    assert bar["name"].startswith("gptq over rounding, w4a16-g64, plain")


def test_methods_by_scheme(calls, tmp_path):
    run(ptq_methods.main, tmp_path, "--models", "plain")
    of = {scheme: [name for name, of, *_ in calls if of == scheme] for scheme in ("w4a16-g64", "w8a8-all")}
    assert of == {"w4a16-g64": list(ptq_methods.FOUR), "w8a8-all": list(ptq_methods.EIGHT)}


def test_blocks_of_small_floats_are_rotated(calls, tmp_path):
    """Rounding takes no tokens, rotated or not; what is rotated is held against rounding of what is not."""
    options = ["--models", "plain", "--schemes", "mxfp4", "--methods", "h", "gptq", "mr-gptq", "--seeds", "0", "7"]
    _, result = run(ptq_methods.main, tmp_path, *options)
    named = [(name, seed) for name, _, seed, _ in calls]
    assert named == [("round", 0), ("h", 0), ("gptq", 0), ("mr-gptq", 0), ("gptq", 7), ("mr-gptq", 7)]
    assert [(bar["name"].partition(",")[0], bar["value"], bar["met"]) for bar in result["bars"]] == [
        ("mr-gptq over rounding", 0.8, True),
        ("h over round", pytest.approx(0.8, rel=1e-2), True),
        ("mr-gptq over gptq", 1.0, False),
    ]
    scheme = Scheme("x", (("o_proj", "bf16"), ("*.mlp.*", "nvfp4-weight|w4a16-g32"), ("*_proj", "mxfp4")))
    wanted = (("o_proj", "bf16"), ("*.mlp.*", "nvfp4-h-weight|w4a16-g32"), ("*_proj", "mxfp4-h"))
    assert ptq_methods.rotated_blocks(scheme).rules == wanted


def test_an_interrupted_run_goes_on(calls, tmp_path, monkeypatch):
    """Only with its own setup; rounding is scored once more for what is held against it."""
    options = ["--models", "plain", "--schemes", "w4a16-g64", "--methods", "gptq", "--seeds", "0", "7", "--rows", "2"]
    whole = ptq_methods.METHODS["gptq"]

    def killed(model, scheme, tokens, seed):
        if seed == 7:
            raise KeyboardInterrupt
        return whole(model, scheme, tokens, seed)

    monkeypatch.setitem(ptq_methods.METHODS, "gptq", killed)
    assert run(ptq_methods.main, tmp_path, *options)[0] == 130
    (path,) = tmp_path.glob("*.json")
    cut = json.loads(path.read_text())
    assert (cut["complete"], len(cut["rows"])) == (False, 2)
    monkeypatch.setitem(ptq_methods.METHODS, "gptq", whole)
    cut["rows"][1]["kl"] = 99  # to be known again
    path.write_text(json.dumps(cut))
    calls.clear()
    assert run(ptq_methods.main, tmp_path, *options, "--tokens", "77") == (2, cut)
    status, result = run(ptq_methods.main, tmp_path, *options)
    assert (status, result["complete"], len(result["rows"])) == (0, True, 3)
    assert [(name, seed) for name, _, seed, _ in calls] == [("gptq", 7), ("round", 7)]
    assert result["rows"][1]["kl"] == 99
    assert result["rows"][2]["ratio"] == 0.8


def test_outliers_of_a_strength_are_not_computed_again(calls, monkeypatch):
    seen = []

    def planted(model, strength, seed):
        seen.append((strength, seed))
        return model

    monkeypatch.setattr(outliers, "planted", planted)
    monkeypatch.setattr(outliers.ptq, "smooth", lambda model, tokens, alpha: model.params)
    monkeypatch.setattr(outliers, "quantize", lambda params, scheme: params)
    monkeypatch.setattr(outliers, "channel_maxima", lambda model, tokens, layer: np.arange(3.0))
    monkeypatch.setattr(outliers, "read_tokens", lambda model, args: ([[1, 2]], "document"))
    args = outliers.parse_args(["--strengths", "1", "4", "--groups", "8", "--seed", "2"])
    fresh = list(outliers.rows(tiny_model(), args))
    assert seen == [(1, 2), (4, 2), ("massive", 2)]
    seen.clear()
    cut = [row | {"kl": 7.0} if "kl" in row else row for row in fresh[:10]]  # of 7 a strength
    again = list(outliers.rows(tiny_model(), args, cut))
    assert seen == [(4, 2), ("massive", 2)]
    assert again == cut[:7] + fresh[7:]


@pytest.mark.parametrize(
    ("main", "options", "message"),
    [
        (ptq_methods.main, ["--schemes", "w4a61"], "unknown quantization scheme 'w4a61'"),
        (ptq_methods.main, ["--schemes", "w4a16-g64", "w4a16-g48"], "K must be a multiple of 96"),
        (ptq_methods.main, ["--schemes", "w8a8-all", "bf16"], "bf16 quantizes nothing"),
        (ptq_methods.main, ["--text", "nowhere.txt"], "nowhere.txt: cannot be read"),
        (outliers.main, ["--groups", "48"], "K must be a multiple of 96"),
        (outliers.main, ["--layer", "8"], "--layer must be in 0 .. 7, not 8"),
    ],
)
def test_refused_before_anything_is_written(calls, tmp_path, capsys, main, options, message):
    status, result = run(main, tmp_path, *options)
    error = capsys.readouterr().err
    assert (status, result) == (2, None)
    assert message in error
    assert error.startswith("error: ")


def point(**keys):
    return {"protocol": "document", "tokens": 9, "kl_95": [keys["kl"] * 0.9, keys["kl"] * 1.1], **keys}


def test_the_picture_and_bars_of_outliers(tmp_path):
    rows = [
        point(part="strength", strength=strength, scale=scale, smooth=smooth, kl=kl / (1 + 4 * smooth))
        for scale, kl in (("tensor", 0.5), ("token", 0.1))
        for smooth in (False, True)
        for strength in (1, 16, "massive")
    ]
    rows += [point(part="group", strength=s, group=g, kl=g / 100) for s in (1, 16, "massive") for g in (8, 64)]
    rows += [
        {"part": "channel", "strength": s, "model": model, "layer": 4, "absmax": [16.0, 2.0, 1.0]}
        for s in (1, 16, "massive")
        for model in ("planted", "smoothed")
    ]
    assert [(bar["value"], bar["met"]) for bar in outliers.bars(rows)] == [(0.1, True), (0.02, True), (0.1, True)]
    assert not any(bar["met"] for bar in outliers.bars([{**row, "kl": 1.0} if "kl" in row else row for row in rows]))
    file = tmp_path / "outliers-20261122-cpu.json"
    keys = {"date": "2026-11-22", "device": "cpu", "versions": {}, "command": "", "complete": True, "bars": []}
    file.write_text(json.dumps({"experiment": "outliers", "rows": rows, **keys}))
    assert outliers.main(["--draw", str(file)]) == 0
    first = file.with_suffix(".svg").read_bytes()
    assert b"strength 16, smoothed" in first
    assert outliers.main(["--draw", str(file)]) == 0
    assert file.with_suffix(".svg").read_bytes() == first


@pytest.mark.parametrize("text", ['{"experiment": "qps"}', '{"experiment": "outliers"}', "[]", '{"exp'])
def test_another_experiments_result_is_not_drawn(tmp_path, capsys, text):
    (tmp_path / "x.json").write_text(text)
    assert outliers.main(["--draw", str(tmp_path / "x.json")]) == 2
    assert capsys.readouterr().err.startswith("error: x.json: ")


def test_a_protocol_that_joins_texts_gets_them_joined(tmp_path):
    """With one BOS and empty lines between them, and not more tokens than asked for."""
    (tmp_path / "t.jsonl").write_text('{"text": "abc"}\n{"text": "de"}\n')
    model = tiny_model(tokenizer=Pieces())
    for protocol, want in (("windows-512", ["abc\n\nde"]), ("document", ["abc", "de"])):
        options = ["--text", str(tmp_path / "t.jsonl"), "--protocol", protocol]
        ids, name = ptq_methods.read_tokens(model, ptq_methods.parse_args(options))
        assert (ids, name) == ([Pieces().encode(text) for text in want], protocol)
        ids, _ = ptq_methods.read_tokens(model, ptq_methods.parse_args([*options, "--tokens", "3"]))
        assert ids == [Pieces().encode(want[0])[:3]]
    for number in ("0", "-5", "x"):
        with pytest.raises(SystemExit, match="2"):
            ptq_methods.parse_args(["--tokens", number])
