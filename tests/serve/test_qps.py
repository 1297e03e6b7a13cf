"""The QPS workload over HTTP, against a small server."""

import json

import pytest

from experiments.qps import main
from tests.serve.conftest import listening

pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")


def workload(checkpoint, tmp_path, *more):
    (tmp_path / "work.json").write_text(json.dumps({"requests": [[5, 6], [3, 4], [9, 3], [2, 5]]}))
    command = ["--config", str(checkpoint / "config.json"), "--workload", str(tmp_path / "work.json"), "--warmup", "1"]
    return [*command, "--repeats", "2", "--results", str(tmp_path), "--json", *more]


@pytest.mark.parametrize("stream", [(), ("--stream",)], ids=["whole", "stream"])
def test_a_workload_over_http(model, checkpoint, tmp_path, capsys, stream):
    with listening(model) as (server, url):
        assert main(workload(checkpoint, tmp_path, "--url", f"{url}/v1", "--rate", "500", *stream)) == 0
        assert server._engine.metrics()["output_tokens"] == 6 + 2 * 18  # one request to warm up
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["complete"]
    assert document["experiment"] == ("qps_http_stream" if stream else "qps_http")
    assert [row["repeat"] for row in document["rows"]] == [0, 1, "mean"]
    mean = document["rows"][-1]
    assert mean["output_tokens_s"] / mean["qps"] == pytest.approx(18 / 4, rel=0.05)
    assert (mean["ttft_ms_p50"] is not None) == bool(stream)
    assert (mean["itl_ms_p50"] is not None) == bool(stream)


def test_servers_that_refuse_or_are_not_there(model, checkpoint, tmp_path, capsys):
    with listening(model, key="secret") as (_, url):
        assert main(workload(checkpoint, tmp_path, "--url", f"{url}/v1")) == 2
        assert "error: the server answered 401: " in capsys.readouterr().err
    assert main(workload(checkpoint, tmp_path, "--url", f"{url}/v1")) == 2
    assert "error: no answer from 127.0.0.1 port" in capsys.readouterr().err
    assert main(workload(checkpoint, tmp_path, "--url", "https://localhost/v1")) == 2
    assert "error: --url must be like http://localhost:8000/v1, not https://localhost/v1" in capsys.readouterr().err
    for wrong in (["--stream"], ["--url", "http://localhost/v1", "--slots", "4"]):
        with pytest.raises(SystemExit):
            main(workload(checkpoint, tmp_path, *wrong))
        assert wrong[-2 if len(wrong) > 1 else 0] in capsys.readouterr().err
