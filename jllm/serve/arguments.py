"""Defines the server's command line. Parsing imports no JAX, so that --help is fast."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from jllm.cli.arguments import (
    START,
    Group,
    Parser,
    add_engine,
    add_hooks,
    add_model,
    add_numbers,
    add_replicas,
    check_drafts,
    check_inputs,
)
from jllm.errors import ConfigError

KEY_VARIABLE = "JLLM_API_KEY"
TOOL_CALL_PARSERS = ("hermes", "llama3", "mistral")
DESCRIPTION = """\
Serve a LLaMA-like language model over HTTP with the OpenAI API: /v1/models, /v1/completions,
/v1/chat/completions, /v1/responses; /health, /metrics (Prometheus); /tokenize, /detokenize. Without --model, a small
bundled model tells fairy tales."""

EPILOG = f"""\
examples:
  python -m jllm.serve --port 8000
  python -m jllm.serve --model ~/models/Llama-3.2-1B-Instruct --kv-cache int8-g8 --max-slots 64
  {KEY_VARIABLE}=... python -m jllm.serve --host 0.0.0.0

key: the environment variable {KEY_VARIABLE} or the first line of --api-key-file sets it. Clients must then send the
  header "Authorization: Bearer KEY" to every path except /health.

end: after SIGTERM or Ctrl-C the server takes no more requests. Running ones get --grace seconds to finish. The rest
  are cut, keep their text and get end_reason "abort"; a last line counts them. A second Ctrl-C does not wait.

exit status: 0; 2 after an error."""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line. Ends the process with status 2 and one line if it is wrong."""
    parser = make_parser()
    args = parser.parse_args(argv)
    bounds = {"port": 65535, **dict.fromkeys(("max_waiting", "grace", "deadline", "keep_alive"))}
    for name, most in bounds.items():
        value = getattr(args, name)
        if value is not None and not (0 <= value < float("inf") and (most is None or value <= most)):
            parser.error(f"--{name.replace('_', '-')} must be 0 to {most or 'any finite number'}, not {value}")
    if problem := check_drafts(args) or check_inputs(args):
        parser.error(problem)
    if args.updates is not None and not args.updates.is_dir():
        parser.error(f"--updates must be a directory, not {args.updates}")
    return args


def make_parser() -> Parser:
    parser = Parser("jllm.serve", EPILOG + START, usage="%(prog)s [options]", description=DESCRIPTION)
    add_served_model(parser.add_argument_group("what to serve"))
    add_numbers(parser.add_argument_group("precision and devices"))
    engine = parser.add_argument_group("engine")
    add_engine(engine)
    add_replicas(engine)
    add_hooks(engine)
    serving = parser.add_argument_group("serving")
    serving.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    serving.add_argument("--port", type=int, default=8000, help="port; 0 picks a free one (default: %(default)s)")
    serving.add_argument("--api-key-file", type=Path, metavar="FILE", help="file with the clients' key (see below)")
    waiting = "most samples in the queue; further requests get status 429 (default: %(default)s)"
    serving.add_argument("--max-waiting", type=int, default=256, metavar="N", help=waiting)
    deadline = "cut requests that take longer, keeping their text (default: never)"
    serving.add_argument("--deadline", type=float, metavar="SECONDS", help=deadline)
    updates = (
        "let clients replace the weights by those of a directory in DIR, with POST /v1/update; the device then needs "
        "room for both (default: no)"
    )
    serving.add_argument("--updates", type=Path, metavar="DIR", help=updates)
    grace = "time that running requests get to finish when the server stops (default: %(default)s)"
    serving.add_argument("--grace", type=float, default=30.0, metavar="SECONDS", help=grace)
    idle = "longest idle time of a connection between two requests (default: %(default)s)"
    serving.add_argument("--keep-alive", type=float, default=75.0, metavar="SECONDS", help=idle)
    serving.add_argument("--no-access-log", action="store_true", help="do not log each request on standard error")
    other = parser.add_argument_group("other")
    other.add_argument("-h", "--help", action="help", help="show this text")
    return parser


def add_served_model(group: Group) -> None:
    add_model(group)
    name = "name of the model in requests (default: the value of --model, or fairytale)"
    group.add_argument("--served-name", type=_not_empty, metavar="NAME", help=name)
    calls = "format of the model's tool calls (default: read from its chat template)"
    group.add_argument("--tool-call-parser", choices=TOOL_CALL_PARSERS, help=calls)


def _not_empty(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def served_name(args: argparse.Namespace) -> str:
    return args.served_name or ("fairytale" if args.model is None else str(args.model))


def api_key(args: argparse.Namespace) -> str | None:
    """Returns the key that clients must send, or None. Raises ConfigError for a key that no header can hold."""
    if args.api_key_file is not None:
        try:
            text = args.api_key_file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "not text"
            raise ConfigError(f"cannot read --api-key-file {args.api_key_file}: {reason}") from None
        key, where = text.partition("\n")[0].strip(), f"the first line of {args.api_key_file}"
    elif KEY_VARIABLE in os.environ:
        key, where = os.environ[KEY_VARIABLE], KEY_VARIABLE
    else:
        return None
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"{where} must be a key of printable ASCII letters")
    return key
