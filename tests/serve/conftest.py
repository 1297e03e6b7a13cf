"""A small model with a tokenizer and a chat template, served."""

import asyncio
import json
import threading
from contextlib import asynccontextmanager, contextmanager

import pytest

from jllm.engine.engine import Engine
from jllm.files.load import load
from jllm.serve.async_engine import AsyncEngine
from jllm.step.buckets import Bucket
from tests.lm_eval_cases import CONFIG, write_checkpoint

OPTIONS = {"max_slots": 4, "page_size": 8, "max_step_tokens": 64, "buckets": (Bucket(4, 64, 4),)}
TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}<assistant>"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("served")
    write_checkpoint(path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


TOOL_TEMPLATE = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}
{% endfor %}<assistant>"""
HIDDEN = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>")  # special tokens of the model that calls tools


def write_tool_checkpoint(path, context):
    """Writes a model with room for tools in its context, whose template writes calls as Hermes."""
    write_checkpoint(path)
    (path / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    (path / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": context}))
    raw = json.loads((path / "tokenizer.json").read_text())
    ids = raw["model"]["vocab"]
    for token, unused in zip(HIDDEN, sorted(ids, key=ids.get)[-len(HIDDEN) :], strict=True):
        ids[token] = ids.pop(unused)
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        raw["added_tokens"].append({"id": ids[token], "content": token, "special": True, **flags})
    (path / "tokenizer.json").write_text(json.dumps(raw))


@pytest.fixture(scope="session")
def tool_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tools")
    write_tool_checkpoint(path, 1024)
    return load(path)


@pytest.fixture(scope="session")
def tool_server(tool_model):
    """Its application, and what runs coroutines beside it."""
    with asyncio.Runner() as runner:
        context = serving(tool_model)
        _, app = runner.run(context.__aenter__())
        yield app, runner.run
        runner.run(context.__aexit__(None, None, None))


@pytest.fixture(scope="session")
def model(checkpoint):
    return load(checkpoint)


@asynccontextmanager
async def serving(model, *, max_waiting=256, grace=0.0, options=None, inputs=None, **more):
    """An AsyncEngine, and the application over it. `inputs` is a folder of arrays that requests name."""
    from jllm.files.input_files import read_input_file
    from jllm.serve.app import make_app
    from jllm.serve.http import Limits
    from jllm.serve.requests import Served

    engine = AsyncEngine(Engine(model, **(OPTIONS | (options or {}))), max_waiting=max_waiting)
    arrays = None if inputs is None else lambda name: engine.check_inputs(read_input_file(inputs, name))
    limits = engine.most_tokens, engine.limit, engine.check
    more_served = {"inputs": arrays, "adapters": tuple((options or {}).get("adapters", ()))}
    served = Served("small", model.tokenizer, *limits, **more_served)
    more.setdefault("limits", Limits())
    try:
        yield engine, make_app(engine, served, **more)
    finally:
        await engine.close(grace)


@contextmanager
def listening(model, *, grace=0.0, **more):
    """The same over sockets, in a thread: its server and its address."""
    from jllm.serve.http import Limits
    from jllm.serve.main import listen
    from jllm.serve.server import make_server

    ready, found = threading.Event(), []

    async def main(listener):
        async with serving(model, **more) as (engine, app):
            server = make_server(engine, app, more.get("limits") or Limits(), grace, ready.set)
            found.append(server)
            await server.serve([listener])

    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=lambda: asyncio.run(main(listener)), daemon=True)
        thread.start()
        assert ready.wait(120)
        try:
            yield found[0], f"http://127.0.0.1:{port}"
        finally:
            found[0].should_exit = True
            thread.join(60)
            assert not thread.is_alive()


class Gone(Exception):
    """The client has closed the connection."""


async def ask(app, path, body=None, *, method=None, headers=(), leave=None, chunks=None):
    """Status, headers and body of what the application answers; `leave` seconds after its request, or once that is
    set, the client goes."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    method = method or ("GET" if body is None else "POST")
    given = {b"content-type": b"application/json", **dict(headers)}
    given = [(name, value) for name, value in given.items() if value is not None]
    scope = {"type": "http", "method": method, "path": path, "headers": given, "query_string": b"", "root_path": ""}
    parts = [data] if chunks is None else chunks
    queue = [{"type": "http.request", "body": part, "more_body": i + 1 < len(parts)} for i, part in enumerate(parts)]
    sent = []

    async def receive():
        if queue:
            return queue.pop(0)
        await (leave.wait() if isinstance(leave, asyncio.Event) else asyncio.sleep(3600 if leave is None else leave))
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    if not sent:
        raise Gone
    content = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], dict(sent[0]["headers"]), content


async def answer(app, path, body=None, **more):
    """Status and the JSON of the answer."""
    status, _, content = await ask(app, path, body, **more)
    return status, json.loads(content)
