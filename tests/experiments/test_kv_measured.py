"""KV policies served and simulated side by side, at toy size."""

import json

import pytest

from experiments.kv_measured import main, parse_args
from tests.experiments.test_throughput import TINY


def test_policies_are_served_and_simulated(tmp_path, capsys):
    config = tmp_path / "tiny.json"
    config.write_text(json.dumps(TINY))
    workload = tmp_path / "workload.json"
    workload.write_text(json.dumps({"requests": [[9, 20], [5, 3], [7, 12], [3, 30], [12, 6]]}))
    size = ["--slots", "3", "--step-tokens", "16", "--warmup", "0", "--pool-gib", str(6 * 16 * 128 / 2**30)]  # 6 pages
    cases = ["--cases", "reserve", "paged", "extent:longest", "extent:oracle"]
    command = [
        "--config",
        str(config),
        "--workload",
        str(workload),
        *size,
        *cases,
        "--results",
        str(tmp_path),
        "--json",
    ]
    assert main(command) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = {(row["kv_policy"], row["predictor"]): row for row in document["rows"]}
    assert [*rows] == [("reserve", "none"), ("paged", "none"), ("extent", "longest"), ("extent", "oracle")]
    for row in rows.values():
        assert row["requests"] == 5
        assert row["qps"] > 0 < row["sim_qps"]
        assert row["pages_peak"] <= row["pages_total"]
    assert rows["reserve", "none"]["running_mean"] < rows["extent", "oracle"]["running_mean"]
    assert not rows["reserve", "none"]["preemptions"]


@pytest.mark.parametrize(
    ("case", "message"),
    [("static", "policies:"), ("reserve:oracle", "of reserve there are reserve"), ("extent", "extent:oracle")],
)
def test_what_cannot_be_served(capsys, case, message):
    with pytest.raises(SystemExit):
        parse_args(["--cases", case])
    assert message in capsys.readouterr().err


def test_every_request_is_allowed_what_it_makes(tmp_path, capsys):
    workload = tmp_path / "workload.json"
    workload.write_text(json.dumps({"requests": [[9, 20], [5, 3]]}))
    assert main(["--workload", str(workload), "--allow", "19", "--results", str(tmp_path)]) == 2
    assert "longest output, 20, not 19" in capsys.readouterr().err
