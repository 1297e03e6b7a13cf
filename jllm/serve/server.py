"""Runs uvicorn around the application. On shutdown requests end first, then connections."""

import asyncio
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from jllm.errors import counted
from jllm.serve.async_engine import AsyncEngine
from jllm.serve.http import Limits

LAST_WORDS = 5  # seconds to send answers after their requests have ended
POLL = 0.05  # seconds between checks for a second Ctrl-C


class Server(uvicorn.Server):
    """Is a server that ends the engine's requests before it closes connections. So requests that are cut are answered
    too."""

    def __init__(self, config: uvicorn.Config, engine: AsyncEngine, grace: float, ready: Callable[[], None]):
        super().__init__(config)
        self._engine, self._grace, self._ready = engine, grace, ready
        self.cut = 0  # samples cut by the shutdown

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.refuse("the server is being stopped")
        end = time.monotonic() + self._grace
        while self._engine.unfinished and time.monotonic() < end and not self.force_exit:
            await asyncio.sleep(POLL)
        self.cut = await self._engine.close()
        await super().shutdown(sockets)


def make_server(
    engine: AsyncEngine, app: ASGIApp, limits: Limits, grace: float, ready: Callable[[], None] = lambda: None
) -> Server:
    """Returns a server that calls `ready` once it accepts connections."""
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        access_log=False,
        log_level="error",
        server_header=False,
        h11_max_incomplete_event_size=limits.header,
        timeout_keep_alive=limits.keep_alive,  # type: ignore[arg-type]  # it takes fractions too
        timeout_graceful_shutdown=LAST_WORDS,
    )
    return Server(config, engine, grace, ready)


async def run(server: Server, listener: socket.socket) -> None:
    """Serves until SIGTERM or SIGINT. Reports on standard error how many samples were cut."""
    with _signals_that_only_stop():
        await server.serve([listener])
    cut = f"{counted(server.cut, 'sample')} cut" if server.cut else "all requests had ended"
    print(f"stopped: {cut}", file=sys.stderr, flush=True)


@contextmanager
def _signals_that_only_stop() -> Iterator[None]:
    """Ignores both signals after the server has stopped. uvicorn raises them again then."""
    before = {each: signal.signal(each, lambda *_: None) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
