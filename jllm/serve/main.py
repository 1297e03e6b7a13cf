"""Runs the server's command: loads a model, compiles its steps, and serves until it is stopped."""

import argparse
import asyncio
import gc
import logging
import socket
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from jllm.cli.arguments import ENGINE_FLAGS
from jllm.cli.display import one_line
from jllm.errors import ConfigError, JllmError, how_to_install
from jllm.serve.arguments import api_key, parse_args, served_name

if TYPE_CHECKING:
    from jllm.distributed.replicas import Replicas
    from jllm.engine.engine import Engine
    from jllm.files.tokenizer import Tokenizer
    from jllm.serve.update import Updates


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit status."""
    args = parse_args(argv)
    try:
        key = api_key(args)
        with listen(args.host, args.port) as listener:
            if key is None and not _is_local(listener):
                _note(f"warning: anyone who can reach {args.host} can use this server: it has no key (--api-key-file)")
            asyncio.run(_serve(args, key, listener, *_prepare(args)))
    except JllmError as error:
        _note(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        _note("interrupted")
        return 130
    return 0


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket, before anything is loaded. Raises ConfigError if it cannot listen."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=1024)
    except (OSError, UnicodeError) as error:
        reason = str(getattr(error, "strerror", error)).partition(" (while")[0]
        raise ConfigError(f"cannot listen on {host} port {port}: {reason}") from None


def _is_local(listener: socket.socket) -> bool:
    return listener.getsockname()[0] in ("::1",) or listener.getsockname()[0].startswith("127.")


def _prepare(args: argparse.Namespace) -> "tuple[Tokenizer | None, Engine | Replicas, Updates | None]":
    """Returns no model, since a reference to it would keep its weights after an update."""
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: {how_to_install('serve')}") from None
    from jllm.cli.generation_config import warn_of_ignored
    from jllm.cli.process import compile_cache, hooks_of, make_engine, open_model, plain_warnings, read_weights
    from jllm.files.find import find_model
    from jllm.files.load import BUNDLED

    folder = find_model(BUNDLED if args.model is None else args.model)
    with plain_warnings():
        warn_of_ignored(folder)
        model = open_model(folder, args)
    options = {name: getattr(args, name) for name in ENGINE_FLAGS if getattr(args, name) is not None}
    cache = compile_cache(args)
    engine = make_engine(model, folder, args, **options, **hooks_of(args), executables=cache)
    sizes, made = engine.compile_ahead(wait=False), engine.metrics()
    if made["compile_programs"] + made["compile_loaded"] < sizes:
        _note("smaller sizes of steps compile while requests are served: the first answers are slower")
    updates = None
    if args.updates is not None:
        from jllm.model.model import Model
        from jllm.serve.update import Updates

        dtype = model.params.dtype if isinstance(model, Model) else args.dtype  # a trainer may store masters
        read = partial(read_weights, args=argparse.Namespace(**vars(args) | {"dtype": dtype}))
        updates = Updates(args.updates, model.config, read, engine.update)
    return model.tokenizer, engine, updates


async def _serve(
    args: argparse.Namespace,
    key: str | None,
    listener: socket.socket,
    tokenizer: "Tokenizer | None",
    engine: "Engine | Replicas",
    updates: "Updates | None",
) -> None:
    from jllm.files.input_files import read_input_file
    from jllm.serve.app import make_app
    from jllm.serve.async_engine import AsyncEngine
    from jllm.serve.http import Limits
    from jllm.serve.requests import Served
    from jllm.serve.server import make_server, run

    name = served_name(args)
    host = AsyncEngine(engine, max_waiting=args.max_waiting)
    host.prepare_guides()
    inputs = None if args.inputs is None else lambda name: host.check_inputs(read_input_file(args.inputs, name))
    more = args.tool_call_parser, inputs, tuple(args.adapters or ())
    served = Served(name, tokenizer, host.most_tokens, host.limit, host.check, *more)
    limits = Limits(keep_alive=args.keep_alive)
    app = make_app(host, served, key=key, deadline=args.deadline, limits=limits, updates=updates)
    _log_to_stderr(access=not args.no_access_log)
    address = listener.getsockname()
    where = f"[{address[0]}]" if ":" in address[0] else address[0]
    ready = f"serving {name} at http://{where}:{address[1]}/v1"
    gc.collect()
    gc.freeze()  # skips the objects of start-up, most of them JAX's: full collections halt steps
    await run(make_server(host, app, limits, args.grace, lambda: _note(ready)), listener)


def _log_to_stderr(access: bool) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%dT%H:%M:%S"))
    logger = logging.getLogger("jllm")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    if not access:
        logging.getLogger("jllm.serve.access").setLevel(logging.WARNING)


def _note(text: str) -> None:
    print(one_line(text), file=sys.stderr, flush=True)
