"""What the claims about accuracy measure, and what they make of their rows."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.accuracy.rows import weight_error
from experiments.claims import __main__ as command
from experiments.claims import c6, c7, c9, c10, c15
from experiments.claims.accuracy import Judge
from jllm.analysis.evaluate import Evaluation, Part, record
from jllm.analysis.protocols import find_protocol
from jllm.model.params import linears
from pallas_kernels.formats.quantized_rows import dequantize_rows, quantize_rows
from pallas_kernels.formats.quantized_weights import decode, encode
from pallas_kernels.formats.weight_formats import WeightFormat
from tests.experiments.test_quant_accuracy import Pieces
from tests.tiny import tiny_model

FIGURES = {"protocol": "document", "perplexity": 9.0, "added": 0.001, "added_95": [-0.001, 0.002], "kl": 1e-3}
FIGURES |= {"kl_95": [9e-4, 2e-3], "top1": 0.99}


@pytest.fixture
def pretended(monkeypatch):
    """A tiny model, and figures of evaluations by what was asked for, in its order."""
    asked = []

    def found(self, scheme="bf16", kv="model"):
        """Each evaluation's divergence is 0.1 less than that of the one before."""
        asked.append((scheme, kv))
        parts = tuple(Part(10, 4, 9.0, 9.0, 9.0 + i - len(asked), 9) for i in range(4))
        return dict(FIGURES), Evaluation(find_protocol("document"), parts)

    judge = Judge(tiny_model(tokenizer=Pieces(), intermediate_size=64), ("Once upon a time " * 8,), "document", None)
    monkeypatch.setattr(Judge, "found", found)
    for module in (c6, c7, c9, c10, c15):
        monkeypatch.setattr(module, "judge_of", lambda toy, *subject: judge)
    return asked


def test_c6_counts_requests_with_their_scales(pretended):
    rows = {row["kv"]: row for row in c6.measure(False)}
    # 32 layers, K and V of 32 heads of 128 values; int8-g8: 128 codes and 16 f16 scales
    assert rows["bf16"]["requests"] == (40 << 30) // (1024 * 32 * 2 * 32 * 256)
    assert rows["int8-g8"]["requests"] == (40 << 30) // (1024 * 32 * 2 * 32 * (128 + 32))
    assert {kv: rows[kv]["times"] for kv in ("int8-g8", "fp8", "int8-g128")} == {
        "int8-g8": 1.6, "fp8": 2.0, "int8-g128": 1.9625
    }  # fmt: skip
    assert "kl" not in rows["int8-g128"]  # the small model's heads are smaller
    assert pretended[:2] == [("bf16", "model"), ("bf16", "fp8")]


def test_c7_takes_speed_from_files_and_names_them(pretended, tmp_path, monkeypatch):
    shape = {"M": 64, "K": 4096, "N": 12288}

    def write(name, experiment, rows):
        document = {"experiment": experiment, "device": "H", "command": "python", "rows": rows}
        (tmp_path / name).write_text(json.dumps(document))

    monkeypatch.setattr(c7, "RESULTS", tmp_path)
    rows = list(c7.measure(False))
    assert [row["part"] for row in rows] == ["accuracy"] * 2
    write("int8_matmul-1-h.json", "int8_matmul", [shape | {"peer": "int8_matmul", "us": 10.0}])
    write("matmul-1-h.json", "matmul", [shape | {"dtype": "bfloat16", "us": 17.0}])
    steps = [{"scheme": s, "kv": "bf16", "batch": 64, "decode_ms": ms} for s, ms in (("bf16", 9.0), ("w8a8-all", 4.0))]
    rows, files = list(c7.measure(False))[2:], "int8_matmul-1-h.json, matmul-1-h.json"
    assert rows == [c7.product_row(64, 4096, 12288, 10.0, 17.0, {"file": files, "measured_on": "H"})]
    write("quant_steps-1-h.json", "quant_steps", steps)
    rows = list(c7.measure(False))
    assert (rows[-1]["times"], rows[-1]["file"]) == (2.25, "quant_steps-1-h.json")


def test_c7_holds_products_against_the_fastest_of_bf16_in_any_run(tmp_path):
    """Labelled runs and other benchmarks' rows of bf16 count too; so does the newer run of our own kernel."""
    shapes = [
        {"M": m, "K": 4096, "N": n} for m, n in ((1, 4096), (256, 4096), (256, 12288), (1024, 4096), (4096, 4096))
    ]
    files = {
        "int8_matmul-1-h": [{"peer": "int8_matmul", "us": us} for us in (8.0, 10.0, 20.0, 20.0, 80.0)],
        "fp8_matmul-2-h": [{"peer": "int8_matmul", "us": us} for us in (5.0, 11.0, 20.0, 20.0, 80.0)],
        "matmul-1-h": [{"peer": "xla", "dtype": "bfloat16", "us": us} for us in (10.0, 27.5, 40.0, 70.0, 200.0)],
        "matmul-many-1-h": [
            {"peer": "mosaic", "dtype": "bfloat16", "us": us} for us in (11.0, 16.0, 36.0, 90.0, 300.0)
        ],
        "weight_only_matmul-large-1-h": [{"scheme": "bf16", "us": us} for us in (9.0, 30.0, 60.0, 52.0, 160.0)],
        "weight_only_matmul-1-h": [{"scheme": "nf4", "us": 1.0}] * 5,
        "fp8_matmul-1-h": [{"peer": "torch bf16", "us": us} for us in (19.0, 26.0, 38.0, 44.0, 170.0)],
    }
    for name, rows in files.items():
        rows = [shape | row for shape, row in zip(shapes, rows, strict=True)]
        document = {"experiment": name.partition("-1")[0], "device": "H", "command": "python", "rows": rows}
        if name.startswith("fp8"):
            document["experiment"] = "fp8_matmul"
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    rows = list(c7.products(tmp_path))
    assert [row["times"] for row in rows] == [1.8, 1.6, 1.8, 2.2, 2.0]
    assert rows[0]["file"] == "fp8_matmul-2-h.json, weight_only_matmul-large-1-h.json"
    assert rows[1]["file"] == "int8_matmul-1-h.json, matmul-many-1-h.json"


def test_c9_rounds_as_the_library_does():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 64)), jnp.float32)
    for kind in ("int8", "fp8"):
        want = dequantize_rows(quantize_rows(x, kind))
        np.testing.assert_allclose(c9.round_trip(x, kind, 1.0), want, rtol=1e-6, atol=1e-6)
    # a scale twice as large: steps of int8 twice as wide, while a float's stay where they are
    errors = {kind: [c9.relative_error([x], kind, factor) for factor in (1.0, 2.0)] for kind in ("int8", "fp8")}
    assert errors["int8"][1] / errors["int8"][0] == pytest.approx(2, rel=0.1)
    assert errors["fp8"][1] / errors["fp8"][0] == pytest.approx(1, rel=0.02)
    assert c9.relative_error([x], "int8", 0.25) > 10 * errors["int8"][0]


def test_c9_measures_weights_activations_and_scales(pretended):
    rows = list(c9.measure(True))
    which = [(row["of"], row["which"]) for row in rows if row["part"] == "rounding"]
    assert len(which) == 10
    assert {row["factor"] for row in rows if row["part"] == "scale"} == set(c9.FACTORS)
    assert rows[10] == {
        "part": "model", "of": "w8a16 and fp8-weight", "int8_kl": 1e-3, "fp8_kl": 1e-3, "fp8_over_int8": 1.0
    }  # fmt: skip
    assert all(0 < row["int8_error"] < 0.02 < row["fp8_error"] < 0.04 for row in rows[:4])


def test_c10_has_every_size_of_group(pretended, monkeypatch):
    monkeypatch.setattr(c10, "CODES", ("int4",))
    rows = list(c10.measure(True))
    assert [(row["of"], row["scale_for"]) for row in rows] == [
        ("weights", "2"), ("weights", "4"), ("weights", "8"), ("weights", "16"), ("weights", "tensor"),
        ("K and V", "2"), ("K and V", "4"), ("K and V", "8"), ("K and V", "row"), ("K and V", "tensor"),
    ]  # fmt: skip
    assert pretended == [("w4a16-g8", "model"), ("w4a16-g16", "model"), ("bf16", "int4-g8"), ("bf16", "int4-g16")]
    for rows_of in (rows[:5], rows[5:]):
        errors = [row["relative_error"] for row in rows_of]
        assert errors == sorted(errors)


def test_c10_one_scale_for_a_tensor_is_the_largest_weights():
    w = jnp.asarray(np.random.default_rng(0).normal(size=(32, 64)), jnp.float32)
    step = jnp.abs(w).max() / 127
    want = jnp.linalg.norm(jnp.round(w / step) * step - w) / jnp.linalg.norm(w)
    assert c10._flat_error(w, "int8") == pytest.approx(float(want), rel=1e-5)
    assert c10._together([0.1, 0.2], [jnp.ones(3), jnp.ones(1)]) == pytest.approx(np.sqrt((0.03 + 0.04) / 4))


def test_c15_compares_at_equal_bits(pretended, monkeypatch):
    monkeypatch.setattr(c15, "GROUPS", (32,))
    rows = list(c15.measure(True))
    assert pretended == [("w4a16-g32", "model"), ("nf4-g32", "model")]
    assert len({row["bytes_per_weight"] for row in rows}) == 1
    assert rows[1]["kl_over_int4_95"] == [-0.1, -0.1]
    assert rows[1]["added_over_int4_95"] == [0.0, 0.0]
    for ends, holds in (([-0.2, -0.1], True), ([0.1, 0.2], False), ([-0.1, 0.1], None), ([-0.1, 0.0], None)):
        assert c15.less({"kl": 0.5, "kl_over_int4_95": ends}, {"kl": 1.0}, "kl") is holds


def test_error_of_weights_is_that_of_all_of_them():
    model = tiny_model(intermediate_size=64)
    fmt = WeightFormat("int8", 32)
    leaves = list(linears(model.params).values())
    noise = sum(float(jnp.sum((decode(jax.jit(encode, static_argnums=1)(w, fmt)) - w) ** 2)) for w in leaves)
    want = np.sqrt(noise / sum(float(jnp.sum(w * w)) for w in leaves))
    assert weight_error(model.params, fmt) == (pytest.approx(1 + 2 / 32), pytest.approx(want, rel=1e-5))


def test_a_judge_evaluates_against_what_was_recorded():
    model = tiny_model(tokenizer=Pieces())
    texts = ("abc abd", "xyz")
    found = Judge(model, texts, "document", record(model, texts, "document")).row("w8a16")
    assert 0 < found["kl"] < 1e-2
    assert found["protocol"] == "document"


def test_a_claim_about_another_model_reads_its_text_in_windows(tmp_path, monkeypatch, capsys):
    text = tmp_path / "mine.txt"
    text.write_text("Once upon a time there was a king. " * 40)
    asked = []

    def load(name):
        asked.append(name)
        return tiny_model(tokenizer=Pieces(), hidden_size=64, intermediate_size=64, context=1024)

    monkeypatch.setattr("experiments.claims.accuracy.jllm.load", load)
    options = ["--toy", "--model", "mine", "--text", str(text), "--results", str(tmp_path)]
    assert command.main(["C15", *options, "--label", "mine"]) == 0
    (file,) = tmp_path.glob("claims-C15-mine-*.json")
    rows = json.loads(file.read_text())["rows"]
    assert [row["protocol"] for row in rows] == ["windows-512"] * 2
    assert {row["subject"] for row in rows} == {"the model mine"}
    assert c15.words(rows)[1].endswith(" (the model mine).")
    assert asked == ["mine"]
    assert command.main(["C15", "C2", *options, "--label", "mine"]) == 2
    assert "--model has no meaning for C2" in capsys.readouterr().err
    for wrong, said in [(options, "--model needs a --label"), (["--model", "mine", "--label", "x"], "belong together")]:
        with pytest.raises(SystemExit):
            command.main(["C15", *wrong])
        assert said in capsys.readouterr().err
