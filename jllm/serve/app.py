"""Builds the endpoints, as an ASGI application over an AsyncEngine."""

import asyncio
import json
from collections.abc import Callable, Mapping

from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from jllm.errors import RequestError
from jllm.serve.answers import Answer
from jllm.serve.async_engine import AsyncEngine, Stream
from jllm.serve.errors import HttpError
from jllm.serve.http import Guard, Limits, read_body, send_bytes, send_json, while_connected
from jllm.serve.metrics import Exporter
from jllm.serve.requests import Served, Wanted, chat, completion, detokenize, of_guide, parse_json, tokenize
from jllm.serve.responses import answer_to, response
from jllm.serve.update import Updates

Parse = Callable[[Mapping[str, object], Served], Wanted]
MODEL = "/v1/models/"
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


def make_app(
    engine: AsyncEngine,
    served: Served,
    *,
    key: str | None = None,
    deadline: float | None = None,
    limits: Limits,
    updates: Updates | None = None,
) -> ASGIApp:
    """Returns the application. key: the API key that clients must send (None: no key). deadline: seconds after which a
    request is cut. updates: what takes other weights (None: nothing does)."""
    exporter = Exporter(engine.metrics)
    models = {name: _model(name, served, engine.vocab_size) for name in served.models}
    endpoints: dict[str, ASGIApp] = {
        "/v1/completions": Generate(engine, served, completion, deadline, limits),
        "/v1/chat/completions": Generate(engine, served, chat, deadline, limits),
        "/v1/responses": Generate(engine, served, response, deadline, limits),
        "/v1/models": Get(lambda: {"object": "list", "data": [*models.values()]}),
        "/tokenize": Post(lambda body: _tokens(tokenize(body, served), served), limits),
        "/detokenize": Post(lambda body: {"prompt": detokenize(body, served)}, limits),
        "/tokenizer_info": Get(lambda: _tokenizer_info(served)),
        "/health": Get(lambda: _health(engine)),
        "/metrics": Metrics(exporter),
    }
    if updates is not None:
        endpoints["/v1/update"] = Post(updates, limits)
    routes = [Route(path, endpoint) for path, endpoint in endpoints.items()]
    routes.append(Route(f"{MODEL}{{name:path}}", OneModel(models)))
    paths = frozenset([*endpoints, *(f"{MODEL}{name}" for name in models)])
    return Guard(Router(routes, redirect_slashes=False), key, limits, paths, exporter.count)


class Generate:
    """Is a POST endpoint that generates text. It answers as a whole, or with server-sent events. A client that
    disconnects ends its request."""

    def __init__(self, engine: AsyncEngine, served: Served, parse: Parse, deadline: float | None, limits: Limits):
        self._engine, self._served, self._parse = engine, served, parse
        self._deadline, self._limits = deadline, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wanted = await self._wanted(await read_body(scope, receive, self._limits))
        requests = wanted.requests(self._served.context)
        stream = self._engine.submit_all(
            requests,
            priority=wanted.priority,
            deadline=self._deadline,
            inputs=wanted.inputs,
            ends_only=not wanted.stream or wanted.at_once,
        )
        async with stream:
            answer = answer_to(wanted, self._served)
            work = self._stream(stream, answer, wanted, send) if wanted.stream else self._whole(stream, answer, send)
            await while_connected(receive, work)

    async def _wanted(self, data: bytes) -> Wanted:
        """Returns the checked request of a body. The guide is checked separately, since that may take long."""

        def parse() -> tuple[dict[str, object], Wanted]:
            body = parse_json(data)
            return body, self._parse(body, self._served)

        body, wanted = await asyncio.to_thread(parse)
        try:
            await self._engine.check_guide(wanted.sampling.guide)
        except RequestError as error:
            raise of_guide(error, wanted, body) from None
        return wanted

    async def _whole(self, stream: Stream, answer: Answer, send: Send) -> None:
        async for event in stream:
            answer.add(event)
        await send_json(send, answer.whole())

    async def _stream(self, stream: Stream, answer: Answer, wanted: Wanted, send: Send) -> None:
        """Streams the answer. Status and headers go out with the first events, so an earlier error has its own status.
        A later error becomes the last event."""
        started = False
        try:
            while events := await stream.take():
                data = b""
                for event in events:
                    answer.add(event)
                    data += b"".join(map(_event, answer.chunks(event)))
                if not started:
                    await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
                    started = True
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            data = b"".join(map(_event, answer.last_chunks())) + answer.done
        except Exception as error:
            if started:
                await send({"type": "http.response.body", "body": _event(answer.failed(error))})
            raise  # the caller logs it, or answers with it
        await send({"type": "http.response.body", "body": data})


class Get:
    """Is a GET endpoint of a small JSON value."""

    def __init__(self, value: Callable[[], object]):
        self._value = value

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _check_get(scope)
        await send_json(send, self._value())


class OneModel:
    """Is the GET endpoint of each model by its name, which may hold slashes."""

    def __init__(self, models: Mapping[str, object]):
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _check_get(scope)
        await send_json(send, self._models[scope["path_params"]["name"]])


class Post:
    """Is a POST endpoint that answers a JSON object with a function's result."""

    def __init__(self, function: Callable[[Mapping[str, object]], object], limits: Limits):
        self._function, self._limits = function, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(scope, receive, self._limits)
        await send_json(send, await asyncio.to_thread(lambda: self._function(parse_json(body))))


class Metrics:
    """Is a GET endpoint of the metrics, in Prometheus' format."""

    def __init__(self, exporter: Exporter):
        self._exporter = exporter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _check_get(scope)
        text = await asyncio.to_thread(self._exporter.text)
        await send_bytes(send, text, "text/plain; version=1.0.0; charset=utf-8")


def _check_get(scope: Scope) -> None:
    if scope["method"] not in ("GET", "HEAD"):
        raise HttpError(405, f"{scope['method']} is not served here; GET is", headers={"Allow": "GET"})


def _event(chunk: Mapping[str, object]) -> bytes:
    text = json.dumps(chunk, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    kind = f"event: {chunk['type']}\n" if "type" in chunk else ""  # chunks of chats have no type
    return kind.encode() + b"data: " + text.encode("utf-8", "replace") + b"\n\n"


def _model(name: str, served: Served, vocab_size: int) -> dict[str, object]:
    found: dict[str, object] = {"id": name, "object": "model", "created": 0, "owned_by": "jllm"}
    found |= {"max_model_len": served.context, "vocab_size": vocab_size}
    return found if name == served.name else found | {"parent": served.name}


def _health(engine: AsyncEngine) -> dict[str, object]:
    if engine.refused is not None:
        raise HttpError(503, f"this server takes no more work: {engine.refused}", code="unavailable")
    return {"status": "ok", "unfinished": engine.unfinished}


def _tokens(ids: list[int], served: Served) -> dict[str, object]:
    return {"tokens": ids, "count": len(ids), "max_model_len": served.context}


def _tokenizer_info(served: Served) -> dict[str, object]:
    """Returns special tokens by role, and the chat template, as in tokenizer_config.json."""
    if served.tokenizer is None:
        raise HttpError(404, "this model has no tokenizer")
    return {**served.tokenizer.special_tokens, "chat_template": served.tokenizer.chat_template}
