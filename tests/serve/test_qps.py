"""The QPS workload over HTTP, against a small server."""

import json

import pytest

from experiments.qps import main
from jllm.serve import app
from tests.serve.conftest import listening

pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")


def workload(tmp_path, *more, requests=((5, 6), (3, 4), (9, 3), (2, 5))):
    (tmp_path / "work.json").write_text(json.dumps({"requests": requests}))
    command = ["--workload", str(tmp_path / "work.json"), "--warmup", "1", "--repeats", "2"]
    return [*command, "--results", str(tmp_path / "results"), "--json", *more]


@pytest.mark.parametrize("stream", [(), ("--stream",)], ids=["whole", "stream"])
def test_a_workload_over_http(model, tmp_path, capsys, stream):
    """Its token ids are of the server's vocabulary, without a --config."""
    with listening(model) as (server, url):
        assert main(workload(tmp_path, "--url", f"{url}/v1", "--rate", "500", *stream)) == 0
        assert server._engine.metrics()["output_tokens"] == 6 + 2 * 18  # one request to warm up
    out, err = capsys.readouterr()
    notes = [line.partition(" s: ")[2].partition(" in ")[0] for line in err.splitlines()]
    assert notes == ["served 1 requests to warm up", "repeat 0: 4 requests", "repeat 1: 4 requests"]
    document = json.loads(out.splitlines()[-1])
    assert document["complete"]
    assert document["experiment"] == ("qps_http_stream" if stream else "qps_http")
    assert [row["repeat"] for row in document["rows"]] == [0, 1, "mean"]
    mean = document["rows"][-1]
    assert mean["output_tokens_s"] / mean["qps"] == pytest.approx(18 / 4, rel=0.05)
    assert (mean["ttft_ms_p50"] is not None) == bool(stream)
    assert (mean["itl_ms_p50"] is not None) == bool(stream)


@pytest.mark.parametrize("told", [{}, {"max_model_len": 48}, None], ids=["nothing", "context", "no list"])
def test_a_server_that_does_not_tell_its_vocabulary(model, checkpoint, tmp_path, capsys, monkeypatch, told):
    """Then --config has it. The default's is larger, and the server refuses its ids."""
    monkeypatch.setattr(app, "_model", lambda *_: told)
    with listening(model) as (_, url):
        run = workload(tmp_path, "--url", f"{url}/v1")
        assert main([*run, "--config", str(checkpoint / "config.json")]) == 0
        capsys.readouterr()
        assert main(run) == 2
    assert "error: the server answered 400: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("requests", "said"),
    [
        ([(20, 28), (47, 1), (20, 29), (3, 4), (48, 1)], "2 of 5 {}: --requests 2 leaves them out, or give another"),
        ([(48, 1), (3, 4)], "1 of 2 {}: give another"),
    ],
)
def test_requests_longer_than_the_context_are_refused_before_any_is_sent(model, tmp_path, capsys, requests, said):
    with listening(model) as (server, url):
        assert main(workload(tmp_path, "--url", f"{url}/v1", requests=requests)) == 2
        assert server._engine.metrics()["output_tokens"] == 0
    said = said.format("requests are longer than the server's context, 48 tokens")
    assert capsys.readouterr().err == f"error: {said} --workload\n"
    assert not (tmp_path / "results").exists()


def test_servers_that_refuse_or_are_not_there(model, tmp_path, capsys):
    with listening(model, key="secret") as (_, url):
        assert main(workload(tmp_path, "--url", f"{url}/v1")) == 2
        assert "error: the server answered 401: " in capsys.readouterr().err
    assert main(workload(tmp_path, "--url", f"{url}/v1")) == 2
    assert "error: no answer from 127.0.0.1 port" in capsys.readouterr().err
    with listening(model) as (_, url):
        assert main(workload(tmp_path, "--url", url)) == 2
        wrong = "error: --url must end in /v1: the server answered 404 to GET /models\n"
        assert capsys.readouterr().err == wrong
    assert main(workload(tmp_path, "--url", "https://localhost/v1")) == 2
    assert "error: --url must be like http://localhost:8000/v1, not https://localhost/v1" in capsys.readouterr().err
    for wrong in (["--stream"], ["--url", "http://localhost/v1", "--slots", "4"]):
        with pytest.raises(SystemExit):
            main(workload(tmp_path, *wrong))
        assert wrong[-2 if len(wrong) > 1 else 0] in capsys.readouterr().err
