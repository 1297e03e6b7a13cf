"""Options that several experiments share."""

import pytest

from experiments import outliers, qps, quant_accuracy, quant_steps


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


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", ""])
def test_counts_are_whole_numbers_from_1_on(text, capsys):
    with pytest.raises(SystemExit):
        qps.main(["--slots", text])
    assert "is not a whole number from 1 on" in capsys.readouterr().err
