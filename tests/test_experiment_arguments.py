"""Options that several experiments share."""

import pytest

from experiments import decode_step, meshes, outliers, ptq_methods, qps, quant_accuracy, quant_steps, throughput
from pallas_kernels.norm_quant import bench


@pytest.mark.parametrize(
    ("experiment", "other"),
    [(outliers, ["--alpha", "0.6"]), (quant_accuracy, ["--grid"]), (quant_steps, ["--steps", "3"])],
    ids=lambda value: value.__name__ if hasattr(value, "__name__") else "",
)
def test_drawing_takes_no_option_of_a_measurement(experiment, other, capsys):
    with pytest.raises(SystemExit) as stop:
        experiment.main(["--draw", "x.json", *other])
    assert stop.value.code == 2
    assert f"--draw measures nothing, so it goes without {other[0]}" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "²", "many", ""])
def test_counts_are_whole_numbers_from_1_on(text, capsys):
    with pytest.raises(SystemExit):
        qps.main(["--slots", text])
    assert "is not a whole number from 1 on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("main", "options", "says"),
    [
        (qps.main, ["--seed", "-5"], "'-5' is not a whole number from 0 on"),
        (qps.main, ["--rate", "0"], "'0' is not a positive number"),
        (qps.main, ["--pool-gib", "nan"], "'nan' is not a positive number"),
        (decode_step.main, ["--dtype", "f17"], "'f17' is not known; known are bf16, f16, f32"),
        (decode_step.main, ["--page-size", "7"], "invalid choice: 7"),
        (decode_step.main, ["--backend", "cuda"], "invalid choice: 'cuda'"),
        (bench.main, ["--rows", "7"], "invalid choice: 7"),
        (meshes.main, ["--models", "llama-2-7b", "--ranks", "3"], "--ranks 3 fits none of --models"),
        (ptq_methods.main, ["--name", ""], "must be letters, digits"),
    ],
)
def test_a_value_that_none_could_mean_ends_the_command_before_anything_runs(main, options, says, capsys):
    with pytest.raises(SystemExit) as stop:
        main(options)
    assert stop.value.code == 2
    assert says in capsys.readouterr().err


def test_a_dtype_has_its_short_name_too():
    assert decode_step.parse_args(["--dtype", "bf16"]).dtype == "bfloat16"


def test_a_file_of_rules_is_named_as_it_says(tmp_path):
    file = tmp_path / "x.toml"
    file.write_text('name = "half"\nrules = [["o_proj", "w8a16"]]')
    assert (
        throughput.name_of(throughput.parse_args(["--scheme", str(file)])) == "throughput_llama-2-7b_half_kv-bfloat16"
    )
    assert qps.name_of(qps.parse_args(["--quantize", str(file)])) == "qps_llama-2-7b_half"
    assert qps.name_of(qps.parse_args([])) == "qps_llama-2-7b_bfloat16"
