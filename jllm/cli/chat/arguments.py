"""The chat's command line. Parsing it imports no JAX, so that --help is quick."""

import argparse
from collections.abc import Sequence

from jllm.cli.arguments import Parser, add_engine, add_model, add_numbers, add_sampling, check_drafts

MAX_NEW_TOKENS = 1024  # of an answer, by default

DESCRIPTION = """\
Talk with a LLaMA-like language model: each line is a message, and the answer is printed as it comes.
Without --model, a small bundled one is asked, which knows fairy tales and no chat."""

EPILOG = """\
examples:
  python -m jllm.chat --model ~/models/Llama-3.2-1B-Instruct --system "Answer in one sentence."
  printf '%s\\n' "Why is the sky blue?" "And at night?" | python -m jllm.chat --model ~/models/Llama-3.2-1B-Instruct

at the prompt, and as lines of a pipe:
  /reset        forget the conversation, but for --system
  /edit [TEXT]  take back the last message and its answer, and ask TEXT instead; without TEXT, on a terminal, edit it
  /save FILE    keep the conversation and its KV cache in a file
  /load FILE    go on from there; nothing that it holds is computed again
  /help         list these
  Ctrl-C stops an answer, which stays as far as it came; Ctrl-D ends. A line that ends with a backslash goes on with the
  next one, on a terminal; a message that begins with a slash needs a space before it.

what a turn costs: its own tokens, as the prefix cache has those before it. With a penalty, each turn computes the whole
  conversation, whose tokens it counts.

seeds: with --seed S, message number i (from 0) uses S + i.

exit status: 0; 2 after an error (on a terminal, one that is no message's); 130 after Ctrl-C in a pipe."""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line; ends the process with status 2 and one line for a wrong one."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if problem := check_drafts(args):
        parser.error(problem)
    return args


def make_parser() -> Parser:
    parser = Parser("jllm.chat", EPILOG, usage="%(prog)s [options]", description=DESCRIPTION)
    what = parser.add_argument_group("what to run")
    add_model(what)
    what.add_argument("--system", metavar="TEXT", help="what the model is told before the first message")
    add_sampling(parser.add_argument_group("sampling"), MAX_NEW_TOKENS)
    add_numbers(parser.add_argument_group("numbers"))
    add_engine(parser.add_argument_group("engine"))
    other = parser.add_argument_group("other")
    other.add_argument("-h", "--help", action="help", help="show this text")
    return parser
