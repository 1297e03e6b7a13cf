"""The experiment of calibrated quantization: its rows, planted outliers, and what it refuses."""

import json

import jax
import numpy as np
import pytest

import experiments.ptq_methods as ptq_methods
from experiments.accuracy import planted
from jllm.analysis.evaluate import Evaluation, Part
from jllm.analysis.protocols import PROTOCOLS
from jllm.errors import JllmError
from jllm.quant.schemes import Scheme
from tests.experiments.test_quant_accuracy import Pieces
from tests.tiny import full_logits, tiny_model


@pytest.fixture
def calls(monkeypatch):
    """Nothing is generated or evaluated: kl is 0.05 by rounding and less by what calibrates."""
    asked, formats = [], set()

    def evaluate(model, ids, protocol, *, reference, kv_cache, page_size):
        formats.add((kv_cache, page_size))
        kl = [0.05, 0.04][model.params == "calibrated"]
        parts = (Part(10, None, 12.0, 11.0, 10 * kl, 9), Part(20, None, 9.0, 9.0, 18 * kl, 8))
        return Evaluation(PROTOCOLS["document"], parts)

    def method(name):
        def run(model, scheme, tokens, seed):
            asked.append((name, scheme.name, seed, tokens.shape))
            return "rounded" if name == "round" else "calibrated"

        return run

    monkeypatch.setattr(ptq_methods, "record", lambda *args: None)
    monkeypatch.setattr(ptq_methods, "evaluate", evaluate)
    monkeypatch.setattr(ptq_methods, "formats", formats, raising=False)
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


def coarse(weight):
    return (weight * 16).round() / 16


coarse.bits = 6


def test_methods_by_scheme(calls, tmp_path):
    own = f"{coarse.__module__}:coarse"
    _, result = run(ptq_methods.main, tmp_path, "--models", "plain", "--scheme", own)
    of = {scheme: [name for name, of, *_ in calls if of == scheme] for scheme in ("w4a16-g64", "w8a8-all", own)}
    assert of == {"w4a16-g64": list(ptq_methods.FOUR), "w8a8-all": list(ptq_methods.EIGHT), own: ["round"]}
    sizes = {row["scheme"]: row["bytes_per_weight"] for row in result["rows"]}
    assert sizes == {"w4a16-g64": 0.5312, "w8a8-all": pytest.approx(1.01, rel=1e-2), own: coarse.bits / 8}


def test_blocks_of_small_floats_are_rotated(calls, tmp_path):
    """Rounding takes no tokens, rotated or not; what is rotated is held against rounding of what is not."""
    options = ["--models", "plain", "--schemes", "mxfp4", "--methods", "h", "gptq", "mr-gptq", "--seeds", "0", "7"]
    _, result = run(ptq_methods.main, tmp_path, *options)
    named = [(name, seed) for name, _, seed, _ in calls]
    assert named == [("round", 0), ("h", 0), ("gptq", 0), ("mr-gptq", 0), ("gptq", 7), ("mr-gptq", 7)]
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--schemes", "w4a61"], "unknown quantization scheme 'w4a61'"),
        (["--schemes", "w4a16-g64", "w4a16-g48"], "K must be a multiple of 96"),
        (["--schemes", "w8a8-all", "bf16"], "bf16 quantizes nothing"),
        (["--text", "nowhere.txt"], "nowhere.txt: cannot be read"),
        (["--kv", "foo"], "unknown KV format 'foo'"),
    ],
)
def test_refused_before_anything_is_written(calls, tmp_path, capsys, options, message):
    status, result = run(ptq_methods.main, tmp_path, *options)
    error = capsys.readouterr().err
    assert (status, result) == (2, None)
    assert message in error
    assert error.startswith("error: ")


def test_kv_formats_are_evaluated_without_quantized_weights(calls, tmp_path):
    options = ["--models", "kv:8", "--schemes", "bf16", "--methods", "smooth-attention", "--kv", "int4-g64"]
    status, result = run(ptq_methods.main, tmp_path, *options)
    assert (status, ptq_methods.formats) == (0, {("int4-g64", 16)})
    found = [(row["model"], row["method"], row["kv"], row["ratio"]) for row in result["rows"]]
    assert found == [("kv:8", "round", "int4-g64", 1), ("kv:8", "smooth-attention", "int4-g64", 0.8)]


def test_outliers_are_planted_by_name(monkeypatch):
    """Each kind keeps the function of the model, rotated or not; strength and seed change its weights."""
    names = ("planted:8", "norms:8", "norms:8:1", "norms:16", "massive", "stream", "kv:8", "kv:8+rotate-kv")
    ids, weights = [1, 14, 15, 92], set()
    monkeypatch.setattr(planted, "own_tokens", lambda *args, **options: np.array([ids]))
    with jax.enable_x64(True):
        model = tiny_model("float64", bos_id=1)
        assert planted.parse_planted("plain").of(model) is model
        wanted = full_logits(model, ids)
        for name in names:
            found = planted.parse_planted(name).of(model)
            np.testing.assert_allclose(full_logits(found, ids), wanted, rtol=1e-7, atol=1e-9)
            weights.add(sum(float(abs(leaf).sum()) for leaf in jax.tree.leaves(found.params)))
    assert len(weights) == len(names)
    for name in ("kind", "kv:3", "kv:x", "kv:8:1:1", "kv+rotate-x"):
        with pytest.raises(JllmError):
            planted.parse_planted(name)


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
