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
from experiments.claims.claim import devices_of
from jllm.analysis.evaluate import Evaluation, Part, record
from jllm.analysis.protocols import find_protocol
from jllm.params import linears
from pallas_kernels.quantized_rows import dequantize_rows, quantize_rows
from pallas_kernels.quantized_weights import decode, encode
from pallas_kernels.weight_formats import WeightFormat
from tests.test_quant_accuracy import Pieces
from tests.test_results_page import GOOD
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


@pytest.mark.parametrize(
    ("added", "times", "verdict"),
    [(0.001, 1.6, "partly"), (0.001, 2.1, "yes"), (0.01, 2.1, "partly"), (0.01, 1.9, "no")],
)
def test_c6_wants_both(added, times, verdict):
    found = c6.judge([FIGURES | {"kv": "int8-g8", "times": times, "added": added}])
    assert found.verdict == verdict
    assert found.bars[0]["met"] == (added < 0.002)
    assert f"+100% requests, llama-2-7b: int8-g8 {times - 1:+.0%}" in found.measured


def test_c7_takes_speed_from_files_and_names_them(pretended, tmp_path, monkeypatch):
    shape = {"M": 64, "K": 4096, "N": 12288}

    def write(name, experiment, rows):
        document = {"experiment": experiment, "device": "H", "command": "python", "rows": rows}
        (tmp_path / name).write_text(json.dumps(document))

    monkeypatch.setattr(c7, "RESULTS", tmp_path)
    rows = list(c7.measure(False))
    assert [row["part"] for row in rows] == ["accuracy"] * 2
    assert c7.judge(rows).verdict == "not measured: speed"
    write("int8_matmul-1-h.json", "int8_matmul", [shape | {"peer": "int8_matmul", "us": 10.0}])
    write("matmul-1-h.json", "matmul", [shape | {"dtype": "bfloat16", "us": 17.0}])
    steps = [{"scheme": s, "kv": "bf16", "batch": 64, "decode_ms": ms} for s, ms in (("bf16", 9.0), ("w8a8-all", 4.0))]
    rows, files = list(c7.measure(False))[2:], "int8_matmul-1-h.json, matmul-1-h.json"
    assert rows == [c7.product_row(64, 4096, 12288, 10.0, 17.0, {"file": files, "measured_on": "H"})]
    assert c7.judge(rows + [FIGURES | {"part": "accuracy", "scheme": "w8a8-all"}]).verdict == "partly"
    write("quant_steps-1-h.json", "quant_steps", steps)
    rows = list(c7.measure(False))
    assert (rows[-1]["times"], rows[-1]["file"]) == (2.25, "quant_steps-1-h.json")
    assert devices_of({"device": "cpu", "rows": rows}) == ["cpu", "H"]  # accuracy is measured here, speed was there
    assert (
        c7.judge(rows)
        .answers[0]
        .startswith("Yes: 1 decode steps of a model 2 times as fast: 2.25 to 2.25, median 2.25; ")
    )
    worse = c7.judge([row | {"added": 0.1} if "added" in row else row for row in rows])
    assert [text.partition(": ")[0] for text in worse.answers] == ["Yes", "No"]
    assert "accuracy kept on the bundled model: w8a8-all adds +10.00 %" in worse.answers[1]


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
    assert c7.judge(rows).answers == (
        "Yes: products from 1,024 rows on: 2.00 to 2.20",
        "No: products of 1 row: 1.80 to 1.80; products of 256: 1.60 to 1.80",
    )


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


def scaled(of, **errors):
    """Rows of three scales: a quarter, right, four times too large."""
    return [
        {"part": "scale", "of": of, "factor": f, **{f"{kind}_error": each[i] for kind, each in errors.items()}}
        for i, f in enumerate((0.25, 1.0, 4.0))
    ]


def test_c9_judges_ten_times_and_sensitivity():
    def rounding(over):
        ends = {"part": "rounding", "which": "all", "fp8_over_int8": over, "squared": over**2}
        return [ends | {"of": of} for of in ("weights", "activations")]

    one_sided = scaled("weights", int8=(9.0, 1.0, 4.0), fp8=(1.1, 1.0, 1.0))
    both = scaled("weights", int8=(9.0, 1.0, 4.0), fp8=(9.0, 1.0, 1.0))
    flat = scaled("weights", int8=(1.0, 1.0, 1.0), fp8=(1.0, 1.0, 1.0))
    assert c9.judge([*rounding(10.0), *one_sided]).verdict == "yes"
    assert c9.judge([*rounding(4.0), *one_sided]).verdict == "partly"
    assert c9.judge([*rounding(10.0), *both]).verdict == "partly"
    assert c9.judge([*rounding(2.0), *flat]).verdict == "no"
    assert (
        "FP8 insensitive to a scale up to 4 times too large, which INT8 is not: errors x1.00 and x4.00"
        in (c9.judge([*rounding(4.0), *both]).answers[1])
    )


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


@pytest.mark.parametrize(
    ("errors", "verdict"), [((1.0, 2.0, 3.0), "yes"), ((2.0, 1.0, 3.0), "partly"), ((3.0, 2.0, 1.0), "no")]
)
def test_c10_wants_errors_that_grow_with_groups(errors, verdict):
    rows = [
        {"of": "weights", "codes": "int8", "scale_for": s, "relative_error": e}
        for s, e in zip(("8", "32", "tensor"), errors)
    ]
    rows = [row | ({"kl": row["relative_error"]} if row["scale_for"] != "tensor" else {}) for row in rows]
    assert c10.judge(rows).verdict == verdict


def test_c10_a_smaller_group_that_is_better_breaks_the_ceiling():
    errors = {"4": 0.5, "8": 1.0, "32": 2.0, "tensor": 3.0}
    for four, verdict in ((0.5, "partly"), (1.5, "yes")):
        rows = [
            {"of": "weights", "codes": "int8", "scale_for": s, "relative_error": e}
            | ({"kl": e} if s in ("8", "32") else {})
            for s, e in (errors | {"4": four}).items()
        ]
        found = c10.judge(rows)
        assert found.verdict == verdict
        assert any(text.startswith("No: 8 the ceiling") for text in found.answers) == (verdict == "partly")


def test_c15_compares_at_equal_bits(pretended, monkeypatch):
    monkeypatch.setattr(c15, "GROUPS", (32,))
    rows = list(c15.measure(True))
    assert pretended == [("w4a16-g32", "model"), ("nf4-g32", "model")]
    assert len({row["bytes_per_weight"] for row in rows}) == 1
    assert rows[1]["kl_over_int4_95"] == [-0.1, -0.1]
    assert rows[1]["added_over_int4_95"] == [0.0, 0.0]
    by = [({"kl": 0.5}, "yes"), ({"kl": 2.0}, "partly"), ({"kl": 2.0, "relative_error": 9.0, "added": 1.0}, "no")]
    for worse, verdict in by:
        nf4, int4 = (
            {"relative_error": 0.1, "kl": 0.5, "added": 0.001},
            {"relative_error": 0.2, "kl": 1.0, "added": 0.002},
        )
        found = [{"codes": c, "group": 32} | row for c, row in (("nf4", nf4 | worse), ("int4", int4))]
        assert c15.judge(found).verdict == verdict
    for ends, holds in (([-0.2, -0.1], True), ([0.1, 0.2], False), ([-0.1, 0.1], None), ([-0.1, 0.0], None)):
        assert c15.less({"kl": 0.5, "kl_over_int4_95": ends}, {"kl": 1.0}, "kl") is holds


def test_error_of_weights_is_that_of_all_of_them():
    model = tiny_model(intermediate_size=64)
    fmt = WeightFormat("int8", 32)
    leaves = list(linears(model.params).values())
    noise = sum(float(jnp.sum((decode(jax.jit(encode, static_argnums=1)(w, fmt)) - w) ** 2)) for w in leaves)
    want = np.sqrt(noise / sum(float(jnp.sum(w * w)) for w in leaves))
    assert weight_error(model.params, fmt) == (pytest.approx(1 + 2 / 32), pytest.approx(want, rel=1e-5))


def test_each_claim_draws_its_rows(tmp_path, pretended):
    kinds = {"int8_error": 0.01, "fp8_error": 0.03}
    examples = {
        "C6": [FIGURES | {"kv": "int8-g8", "times": 1.6}, {"kv": "int8-g128", "times": 1.97}],
        "C7": [FIGURES | {"part": "accuracy", "scheme": "w8a8-all"}, c7.product_row(1, 2, 3, 1.0, 2.0, {"file": "f"})],
        "C9": [
            {"part": "rounding", "of": "weights", "which": "all"} | kinds,
            {"part": "scale", "of": "weights", "factor": 1} | kinds,
        ],
        "C10": [
            {"of": of, "codes": codes, "scale_for": "8", "bytes": 1.25, "relative_error": 0.1, "kl": 0.1}
            for of in ("weights", "K and V") for codes in ("int8", "int4")
        ],
        "C15": [FIGURES | {"codes": "nf4", "group": 64, "bytes_per_weight": 0.53, "relative_error": 0.09}],
    }  # fmt: skip
    for name, rows in examples.items():
        path = tmp_path / f"claims-{name}.json"
        rows = [*rows, {"verdict": "incomplete"}]
        path.write_text(json.dumps(GOOD | {"experiment": f"claims-{name}", "rows": rows}))
        assert command.main(["--draw", str(path)]) == 0
        assert path.with_suffix(".svg").read_text().count("<path") > 10


@pytest.mark.parametrize("text", ["[]", "{}", '{"experiment": "claims-C6"}', json.dumps(GOOD)])
def test_what_is_no_claims_result_is_not_drawn(tmp_path, capsys, text):
    (tmp_path / "x.json").write_text(text)
    assert command.main(["--draw", str(tmp_path / "x.json")]) == 2
    assert capsys.readouterr().err.startswith("error: x.json: ")


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
    assert [row["protocol"] for row in rows[:-1]] == ["windows-512"] * 2
    assert {row["subject"] for row in rows[:-1]} == {"the model mine"}
    assert rows[-1]["measured"].startswith("On the model mine. ")
    assert asked == ["mine"]
    assert command.main(["C15", "C2", *options, "--label", "mine"]) == 2
    assert "--model has no meaning for C2" in capsys.readouterr().err
    for wrong, said in [(options, "--model needs a --label"), (["--model", "mine", "--label", "x"], "belong together")]:
        with pytest.raises(SystemExit):
            command.main(["C15", *wrong])
        assert said in capsys.readouterr().err
