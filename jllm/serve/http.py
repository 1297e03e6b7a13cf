"""Guards every endpoint: the key, limits of bodies, errors as JSON, the access log, and clients that disconnect."""

import asyncio
import hmac
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jllm.serve.errors import HttpError, http_error

ACCESS = logging.getLogger("jllm.serve.access")
ERRORS = logging.getLogger("jllm.serve")
OPEN = ("/health",)  # paths that need no key


@dataclass(frozen=True)
class Limits:
    """Holds limits of a request, so that no client can harm the others."""

    body: int = 8 << 20  # bytes
    header: int = 16 << 10  # bytes of a request line and all headers
    body_seconds: float = 30.0  # seconds until a body must be complete
    keep_alive: float = 75.0  # seconds that a connection may be idle between two requests


class Guard:
    """Checks the key, counts and logs requests, and turns errors of an endpoint into answers. The log has method, path,
    status and seconds, and never prompts or query strings."""

    def __init__(
        self, app: ASGIApp, key: str | None, limits: Limits, paths: frozenset[str], count: Callable[[str, int], None]
    ):
        self._app, self._most, self._paths, self._count = app, limits.header, paths, count
        self._key = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        status, started, path = 0, time.perf_counter(), scope["path"]

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            line = len(scope.get("raw_path") or path.encode()) + len(scope.get("query_string", b""))
            if line + sum(len(name) + len(value) for name, value in scope["headers"]) > self._most:
                raise HttpError(431, f"the request line and headers are too large: at most {self._most} bytes")
            self._check_key(scope)
            if path not in self._paths:
                there = ", ".join(sorted(self._paths))
                raise HttpError(404, f"there is nothing at {path[:100]!r}; there are {there}")
            await self._app(scope, receive, watched)
        except Exception as error:
            found = http_error(error)
            if found.status == 500:
                ERRORS.error("%s failed", path, exc_info=None if isinstance(error, HttpError) else error)
            if not status:
                await send_json(watched, found.body(), found.status, found.headers)
        finally:
            known = path if path in self._paths else "other"
            self._count(known, status)
            seconds = time.perf_counter() - started
            client = (scope.get("client") or ("-",))[0]
            ACCESS.info("%s %s %s %s %.3f s", client, scope["method"], known, status or "gone", seconds)

    def _check_key(self, scope: Scope) -> None:
        if self._key is None or scope["path"] in OPEN:
            return
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if not hmac.compare_digest(given, self._key):
            challenge = {"WWW-Authenticate": "Bearer"}
            raise HttpError(401, "the API key is missing or wrong", code="invalid_api_key", headers=challenge)


async def send_json(send: Send, body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
    data = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")
    await send_bytes(send, data, "application/json", status, headers)


async def send_bytes(
    send: Send, data: bytes, kind: str, status: int = 200, headers: Mapping[str, str] | None = None
) -> None:
    given = {"content-type": kind, "content-length": str(len(data)), **(headers or {})}
    pairs = [(name.lower().encode(), value.encode()) for name, value in given.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": data})


async def read_body(scope: Scope, receive: Receive, limits: Limits) -> bytes:
    """Returns the body of a POST of JSON. It requires the JSON type: browsers let other sites send other types without
    asking."""
    if scope["method"] != "POST":
        raise HttpError(405, f"{scope['method']} is not served here; POST is", headers={"Allow": "POST"})
    headers = dict(scope["headers"])
    if headers.get(b"content-type", b"").split(b";")[0].strip().lower() != b"application/json":
        raise HttpError(415, "the body must be sent with Content-Type: application/json")
    too_large = HttpError(413, f"the body is too large: at most {limits.body} bytes", headers={"Connection": "close"})
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length) > limits.body:
        raise too_large
    data = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise HttpError(400, "the client has gone")
                data += message.get("body", b"")
                if len(data) > limits.body:
                    raise too_large
                if not message.get("more_body"):
                    return bytes(data)
    except TimeoutError:
        text = f"the body took more than {limits.body_seconds:g} s"
        raise HttpError(408, text, headers={"Connection": "close"}) from None


async def while_connected(receive: Receive, work: Awaitable[None]) -> None:
    """Runs the work, and cancels it if the client disconnects first."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        (task if task.done() else watcher).result()  # raises the error, if there was one
    finally:
        for each in (task, watcher):
            each.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await each
