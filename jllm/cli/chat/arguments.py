"""Defines the chat's command line. Parsing it imports no JAX, so that --help is fast."""

import argparse
from collections.abc import Sequence

from jllm.cli.arguments import START, Parser, add_engine, add_model, add_numbers, add_sampling, check_drafts

MAX_NEW_TOKENS = 1024  # default length of an answer

DESCRIPTION = """\
Chat with a LLaMA-like language model. Each line is a message, and the answer is printed while it is
generated. Without --model, a small bundled model answers; it only tells fairy tales."""

EPILOG = """\
examples:
  python -m jllm.chat --model ~/models/Llama-3.2-1B-Instruct --system "Answer in one sentence."
  printf '%s\\n' "Why is the sky blue?" "And at night?" | python -m jllm.chat --model ~/models/Llama-3.2-1B-Instruct

at the prompt, and as lines of a pipe:
  /reset        forget the conversation, except for --system
  /edit [TEXT]  replace the last message by TEXT, and drop its answer; on a terminal, without TEXT, edit the message
  /save FILE    write the conversation and its KV cache to a file
  /load FILE    continue from a file, without computing its tokens again
  /help         list these commands
  Ctrl-C stops an answer and keeps its text so far; Ctrl-D ends. On a terminal, a backslash at the end of a line
  continues the message on the next line. Put a space before a message that begins with a slash.

cost of a turn: only its own tokens are computed; the prefix cache has the earlier ones. With a penalty, each turn
  computes the whole conversation, whose tokens it counts.

seeds: with --seed S, message number i (from 0) uses S + i.

exit status: 0; 2 after an error; 130 after Ctrl-C in a pipe. On a terminal a bad message is not an error."""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line. Ends the process with status 2 and one line if it is wrong."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if problem := check_drafts(args):
        parser.error(problem)
    return args


def make_parser() -> Parser:
    parser = Parser("jllm.chat", EPILOG + START, usage="%(prog)s [options]", description=DESCRIPTION)
    what = parser.add_argument_group("what to run")
    add_model(what)
    what.add_argument("--system", metavar="TEXT", help="system message, before the first message")
    add_sampling(parser.add_argument_group("sampling"), MAX_NEW_TOKENS)
    add_numbers(parser.add_argument_group("precision and devices"))
    add_engine(parser.add_argument_group("engine"))
    other = parser.add_argument_group("other")
    other.add_argument("-h", "--help", action="help", help="show this text")
    return parser
