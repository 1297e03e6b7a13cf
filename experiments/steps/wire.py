"""Sends the workload over HTTP. Each request has its own connection to a server of the OpenAI API."""

import asyncio
import http.client
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from jllm.errors import ConfigError, RequestError


@dataclass(frozen=True)
class Answered:
    """The times of a request: seconds from its arrival, and between its events."""

    first: float
    total: float
    gaps: tuple[float, ...]


@dataclass(frozen=True)
class Target:
    """The server of the requests."""

    host: str
    port: int
    path: str
    key: str | None = None

    @classmethod
    def of(cls, url: str, key: str | None) -> "Target":
        """Returns the target of a URL. Raises ConfigError for anything but http://HOST:PORT/v1."""
        parts = urlsplit(url)
        try:
            if parts.scheme == "http" and parts.hostname:
                return cls(parts.hostname, parts.port or 80, parts.path.rstrip("/"), key)
        except ValueError:
            pass  # an invalid port
        raise ConfigError(f"--url must be like http://localhost:8000/v1, not {url}")

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def limits(self) -> tuple[int | None, int | None]:
        """Returns the vocabulary and the context of the server's first model. Each is None if the server does not tell
        it. Raises RequestError if there is no server, and ConfigError for a path that it does not have."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        try:
            connection.request("GET", f"{self.path}/models", headers=self.headers)
            answer = connection.getresponse()
            status, body = answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise self.silent(error) from None
        finally:
            connection.close()
        if status == 404 and not self.path.endswith("/v1"):
            raise ConfigError(f"--url must end in /v1: the server answered 404 to GET {self.path}/models")
        try:
            first = json.loads(body)["data"][0]
            return first.get("vocab_size"), first.get("max_model_len")
        except (ValueError, LookupError, TypeError, AttributeError):
            return None, None

    def silent(self, error: Exception) -> RequestError:
        """Returns the error of a server that does not answer."""
        return RequestError(f"no answer from {self.host} port {self.port}: {error}")

    def request(self, body: dict[str, Any]) -> bytes:
        data = json.dumps(body).encode()
        key = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        head = f"POST {self.path}/completions HTTP/1.1\r\nHost: {self.host}\r\nConnection: close\r\n{key}"
        return f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


async def ask(target: Target, data: bytes, tokens: int, start: float) -> Answered:
    """Sends one request and reads its whole answer. `start` is its arrival. Raises RequestError for an answer with
    another number of tokens."""
    reader, writer = await asyncio.open_connection(target.host, target.port, limit=1 << 22)
    try:
        writer.write(data)
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            said = " ".join((await reader.read(500)).decode(errors="replace").split())
            raise RequestError(f"the server answered {head[9:12].decode()}: {said}")
        times, usage = [], None
        while line := await reader.readline():
            if b'"usage":{' in line:
                usage = json.loads(line.removeprefix(b"data: "))["usage"]
            elif line.startswith(b"data: {"):
                times.append(time.perf_counter())
        end = time.perf_counter()
    finally:
        writer.close()
    if usage is None or usage["completion_tokens"] != tokens:
        raise RequestError(f"a request of {tokens} tokens was answered with usage {usage}")
    times = times or [end]
    return Answered(times[0] - start, end - start, tuple(b - a for a, b in zip(times, times[1:])))


async def serve(
    target: Target, requests: Sequence[tuple[int, int, float]], vocab: int, seed: int, body: dict[str, Any]
) -> tuple[list[Answered], float]:
    """Sends requests (tokens of prompt and output, arrival) as they arrive. Returns each one's times, and the seconds
    until the last one ended. Bodies are written before the clock starts."""
    rng = np.random.default_rng(seed)
    more = {"stream_options": {"include_usage": True}} if body["stream"] else {}
    datas = [
        target.request({**body, **more, "prompt": rng.integers(3, vocab, p).tolist(), "max_tokens": o, "seed": i})
        for i, (p, o, _) in enumerate(requests)
    ]
    start = time.perf_counter()

    async def one(data: bytes, tokens: int, arrival: float) -> Answered:
        await asyncio.sleep(max(0.0, start + arrival - time.perf_counter()))
        return await ask(target, data, tokens, start + arrival)

    try:
        answers = await asyncio.gather(*(one(data, o, at) for data, (_, o, at) in zip(datas, requests)))
    except (OSError, EOFError) as error:
        raise target.silent(error) from None
    return answers, time.perf_counter() - start
