"""Over sockets: the official client, lm-eval, clients that hang up, the command and its end."""

import argparse
import asyncio
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from functools import partial

import numpy as np
import pytest

from jllm.cli.arguments import ENGINE_FLAGS, Gone, add_engine
from jllm.engine.engine import Engine
from jllm.engine.options import EngineOptions
from jllm.engine.request import SamplingParams
from jllm.files.load import load
from jllm.serve.arguments import KEY_VARIABLE, parse_args
from tests.clients.serve_small import write_small
from tests.clients.trial import main as trial
from tests.lm_eval_cases import CONTEXT, write_tasks
from tests.serve.conftest import listening
from tests.tiny import full_logits, log_softmax, serve

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

MESSAGES = [{"role": "system", "content": "be short"}, {"role": "user", "content": "the wolf"}]
GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def address(model):
    with listening(model, key="secret") as (_, url):
        yield url


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="secret", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def want(model):
    """Greedy text after "the wolf"."""
    return serve(model, ["the wolf"], [SamplingParams(temperature=0, ignore_eos=True, max_new_tokens=9)])[0]


def test_completions(client, want):
    ask = partial(client.completions.create, model="small", prompt="the wolf", max_tokens=9, **GREEDY)
    found = ask(logprobs=2)
    assert found.choices[0].text == want.text
    assert found.choices[0].finish_reason == "length"
    assert len(found.choices[0].logprobs.tokens) == len(found.choices[0].logprobs.top_logprobs) == 9
    assert found.usage.completion_tokens == 9
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == want.text
    assert chunks[-1].usage == found.usage
    assert ask(stop=[want.text[4:6]]).choices[0].text == want.text[: want.text.find(want.text[4:6])]


def test_samples_and_seeds(client):
    ask = partial(client.completions.create, model="small", prompt=["the wolf", "a girl"], max_tokens=6, n=3)
    one, two, other = (ask(seed=seed) for seed in (7, 7, 8))
    assert [choice.index for choice in one.choices] == list(range(6))
    texts = [[choice.text for choice in found.choices] for found in (one, two, other)]
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[0])) == 6


def test_chats(client):
    more = {"logprobs": True, "top_logprobs": 2}
    ask = partial(client.chat.completions.create, model="small", messages=MESSAGES, max_completion_tokens=6, **GREEDY)
    found = ask(**more)
    text = found.choices[0].message.content
    tokens = found.choices[0].logprobs.content
    assert (found.choices[0].message.role, len(tokens)) == ("assistant", 6)
    assert "".join(token.token for token in tokens) == text
    assert [len(token.top_logprobs) for token in tokens] == [2] * 6
    assert tokens[0].logprob == tokens[0].top_logprobs[0].logprob
    parts = [chunk.choices[0].delta.content for chunk in ask(stream=True)]
    assert "".join(parts) == text
    assert len(parts) > 1


def test_an_answer_is_sent_back_as_it_came(client):
    message = (
        client.chat.completions.create(model="small", messages=MESSAGES, max_tokens=3, seed=2**63).choices[0].message
    )
    more = {
        "metadata": {"job": "1"},
        "service_tier": "auto",
        "modalities": ["text"],
        "tools": [],
        "tool_choice": "none",
    }
    for back in (message, message.model_dump(), message.to_dict()):
        messages = [back, {"role": "user", "content": "w", "name": "ann"}]
        again = client.chat.completions.create(model="small", messages=messages, max_tokens=3, **more)
        assert again.choices[0].finish_reason in ("length", "stop")


def test_errors_are_those_that_the_client_knows(client, address):
    with pytest.raises(openai.BadRequestError, match="n must be an integer >= 1") as raised:
        client.completions.create(model="small", prompt="a", n=0)
    assert raised.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError, match="is not served here") as raised:
        client.completions.create(model="other", prompt="a")
    assert raised.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="is too long") as raised:
        client.completions.create(model="small", prompt=[5] * 100)
    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "prompt")
    stranger = openai.OpenAI(base_url=f"{address}/v1", api_key="guess", max_retries=0)
    with pytest.raises(openai.AuthenticationError), stranger:
        stranger.models.list()
    assert [model.id for model in client.models.list()] == ["small"]
    assert client.models.retrieve("small").id == "small"


def test_many_at_once(address, want):
    async def main():
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="secret") as client:
            ask = partial(client.completions.create, model="small", prompt="the wolf", max_tokens=9, **GREEDY)
            found = await asyncio.gather(*(ask() for _ in range(40)))
            return {one.choices[0].text for one in found}

    assert asyncio.run(main()) == {want.text}


def test_the_trial_of_the_official_client(tmp_path, capsys):
    """The part of tests/clients that needs no other client."""
    write_small(tmp_path)
    with listening(load(tmp_path)) as (_, url):
        status = trial(["--url", f"{url}/v1", "--only", "openai"])
    assert (status, capsys.readouterr().out) == (0, f"openai {openai.__version__}: passed\n")


def test_clients_that_hang_up_leave_no_page(model):
    """At any moment, streaming or not, half of a request included."""
    with listening(model) as (server, url):
        port = int(url.rpartition(":")[2])
        for i in range(24):
            asked = {"prompt": "the wolf", "max_tokens": 40, "ignore_eos": True, "stream": i % 2 == 0}
            body = json.dumps(asked).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            data = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(data[: len(data) - (i % 3 == 0)])
                if i % 3 == 1:
                    time.sleep(0.01)
                if i % 3 == 2 and i % 2 == 0:
                    assert connection.recv(20).startswith(b"HTTP/1.1 200")
        engine = server._engine
        end = time.monotonic() + 60
        while engine.unfinished or engine._engine.has_work:
            assert time.monotonic() < end
            time.sleep(0.01)
        metrics = engine.metrics()
        assert metrics["pages_used"] == 0
        assert metrics["requests_aborted"] > 0
        with openai.OpenAI(base_url=f"{url}/v1", api_key="any") as client:
            assert client.completions.create(model="small", prompt="a", max_tokens=2).usage.completion_tokens <= 2


def test_connections_live_as_long_as_the_command_says(model):
    from jllm.serve.arguments import parse_args
    from jllm.serve.http import Limits

    assert (parse_args([]).keep_alive, parse_args(["--keep-alive", "0.2"]).keep_alive) == (75, 0.2)
    for limits, seconds in ((Limits(), 75), (Limits(keep_alive=0.2), 0.2)):
        with listening(model, limits=limits) as (server, url):
            assert server.config.timeout_keep_alive == seconds
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection:
                connection.settimeout(60)
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                assert connection.recv(1000).startswith(b"HTTP/1.1 200")
                if seconds < 1:
                    while connection.recv(1000):  # until the server ends it
                        pass


def test_headers_are_limited(address):
    """Those that are there, and those that never end."""
    request = urllib.request.Request(f"{address}/health", headers={"X-Long": "a" * 20_000})
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(request)
    assert raised.value.code == 431
    raised.value.close()
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as connection:
        connection.settimeout(60)
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        answered = False
        for _ in range(10):
            if not answered:  # whatever is sent to a closed connection discards its answer
                connection.sendall(b"X-Long: " + b"a" * 4000 + b"\r\n")
                answered = bool(select.select([connection], [], [], 0.5)[0])
        assert connection.recv(20).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("grace", [0.0, 60.0])
def test_what_runs_at_the_end_is_finished_or_cut_and_answered(model, grace):
    body = json.dumps({"prompt": "the wolf", "max_tokens": 40, "ignore_eos": True}).encode()
    with listening(model, grace=grace) as (server, url):
        found = []

        def ask():
            headers = {"Content-Type": "application/json"}
            with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body, headers)) as answer:
                found.append(json.load(answer)["choices"][0])

        threads = [threading.Thread(target=ask) for _ in range(12)]
        for thread in threads:
            thread.start()
        while server._engine.unfinished < 12 and not found:
            time.sleep(0.001)
        server.should_exit = True
        for thread in threads:
            thread.join(60)
    assert len(found) == 12
    assert {choice["finish_reason"] for choice in found} == {"length"}
    assert sum(choice.get("end_reason") == "abort" for choice in found) == server.cut
    assert server.cut == 0 if grace else server.cut > 0


@pytest.mark.filterwarnings("default")  # other people's
def test_lm_eval_scores_what_the_model_says(model, tmp_path):
    """local-completions, with the server's own tokenizer: log-probabilities of continuations and whether they are what
    greedy decoding says, and generated answers."""
    lm_eval = pytest.importorskip("lm_eval")
    pytest.importorskip("tenacity")
    from lm_eval.tasks import TaskManager

    write_tasks(tmp_path)
    with listening(model) as (_, url):
        about = {"model": "small", "base_url": f"{url}/v1/completions", "max_length": CONTEXT, "num_concurrent": 4}
        results = lm_eval.simple_evaluate(
            model="local-completions",
            model_args={**about, "tokenizer_backend": "remote", "max_retries": 1},
            tasks=["small_choice", "small_last", "small_answer"],
            task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
            log_samples=True,
            bootstrap_iters=0,
        )
    seen = []
    for sample in (*results["samples"]["small_choice"], *results["samples"]["small_last"]):
        for (context, continuation), ((logprob, greedy),) in zip(sample["arguments"], sample["resps"], strict=True):
            ids, last = loglikelihood_ids(model.tokenizer, context, continuation)
            rows = log_softmax(full_logits(model, ids).astype(np.float64))[-last - 1 : -1]
            assert logprob == pytest.approx(sum(row[i] for row, i in zip(rows, ids[-last:])), abs=1e-3)
            assert greedy == all(row.argmax() == i for row, i in zip(rows, ids[-last:]))
            seen.append(greedy)
    assert len(seen) == 22
    answers = {sample["doc_id"]: sample["resps"][0][0] for sample in results["samples"]["small_answer"]}
    texts = [sample["arguments"][0][0] for sample in results["samples"]["small_answer"]]
    ids = [model.tokenizer.encode(text, add_bos=False)[-(CONTEXT - 1 - 14) :] for text in texts]
    stop = SamplingParams(temperature=0, max_new_tokens=14, stop=("Q", "\n\n", "</s>"))
    assert list(answers.values()) == [done.text for done in serve(model, ids, [stop] * len(ids))]


def loglikelihood_ids(tokenizer, context, continuation) -> tuple[list[int], int]:
    """As lm-eval makes them: the tokens of both, cut from the left, and how many of them are the continuation's."""
    if not context:
        ids = tokenizer.encode(continuation, add_bos=False)
        return [tokenizer.bos_id or tokenizer.eos_ids[0], *ids], len(ids)  # an id of 0 is none to lm-eval
    spaces = len(context) - len(context.rstrip())
    if spaces:
        context, continuation = context[:-spaces], context[-spaces:] + continuation
    before = tokenizer.encode(context, add_bos=False)
    ids = tokenizer.encode(context + continuation, add_bos=False)
    return ids[-(CONTEXT - 1) :], len(ids) - len(before)


def command(checkpoint, *more, **environment):
    arguments = [sys.executable, "-m", "jllm.serve", "--model", str(checkpoint), "--port", "0"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"} | environment
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    return subprocess.Popen([*arguments, "--max-slots", "2", "--max-step-tokens", "8", *more], **pipes)


@pytest.mark.parametrize(("engines", "stop"), [((), signal.SIGTERM), (("--replicas", "2"), signal.SIGINT)])
def test_the_command_serves_and_stops(checkpoint, engines, stop):
    more = ("--served-name", "small", "--grace", "20", *engines)
    with command(checkpoint, *more, **{KEY_VARIABLE: "secret"}) as process:
        line = process.stderr.readline()
        while not line.startswith("serving small at http://127.0.0.1:"):
            assert line
            line = process.stderr.readline()
        with openai.OpenAI(base_url=line.split()[-1], api_key="secret", max_retries=0) as client:
            stream = client.completions.create(model="small", prompt="the wolf", max_tokens=40, stream=True, **GREEDY)
            next(stream)
            process.send_signal(stop)
            chunks = list(stream)
            assert chunks[-1].choices[0].finish_reason == "length"
        out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (0, "")
    assert err.splitlines()[-1] == "stopped: all requests had ended"
    assert "127.0.0.1 POST /v1/completions 200" in err
    assert "wolf" not in err


def test_the_command_keeps_what_its_start_made_out_of_collections(model, monkeypatch):
    from jllm.serve import main, server

    frozen = [gc.get_freeze_count()]

    async def run(made, listener):
        frozen.append(gc.get_freeze_count())
        await made._engine.close()

    made = model.tokenizer, Engine(model, max_slots=2, max_step_tokens=8), None
    monkeypatch.setattr(main, "_prepare", lambda args: made)
    monkeypatch.setattr(server, "run", run)
    try:
        assert main.main(["--port", "0"]) == 0
    finally:
        gc.unfreeze()
    assert frozen[1] > frozen[0] + 10_000


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--model", "/nowhere"], "/nowhere"),
        (["--port", "70000"], "--port must be 0 to 65535, not 70000"),
        (["--served-name", ""], "argument --served-name: must not be empty"),
        (["--grace", "-1"], "--grace must be 0 to any finite number"),
        (["--drafts", "2"], "--drafts needs --speculate NAME"),
        (["--host", "nowhere.invalid"], "cannot listen on nowhere.invalid"),
        (["--api-key-file", "/nowhere"], "cannot read --api-key-file /nowhere: No such file or directory"),
        (["--api-key-file", "/dev/null"], "must be a key of printable ASCII letters"),
        (["--what"], "unrecognized arguments: --what"),
    ],
)
def test_mistakes_end_with_one_line_and_status_2(arguments, text, capsys):
    from jllm.serve.main import main

    try:
        status = main(["--port", "0", *arguments])
    except SystemExit as error:
        status = error.code
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert text in line


def test_a_port_that_is_taken_is_said_before_anything_is_loaded(capsys):
    from jllm.serve.main import main

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--port", str(port), "--model", "/nowhere"]) == 2
    assert capsys.readouterr().err == f"error: cannot listen on 127.0.0.1 port {port}: Address already in use\n"


def test_every_engine_flag_reaches_the_engine():
    group = argparse.ArgumentParser().add_argument_group()
    add_engine(group)
    flags = {action.dest for action in group._group_actions if not isinstance(action, Gone)}
    flags -= {"compile_cache", "no_compile_cache"}
    assert flags | {"kv_cache"} == set(ENGINE_FLAGS) <= EngineOptions.__dataclass_fields__.keys()


def test_it_listens_on_localhost_unless_told_otherwise():
    assert parse_args([]).host == "127.0.0.1"
