"""What the command lines of several experiments share."""

import argparse
import math
import os

MEMORY_SHARE = 0.9  # of a GPU's memory, for weights, pages and steps


def positive(text: str) -> int:
    """A number of tokens, rows, steps or the like."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def positive_seconds(text: str) -> float:
    """A time to measure for."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return seconds


def claim_memory() -> None:
    """Lets JAX have MEMORY_SHARE of a GPU, unless the environment says otherwise: its own three quarters leave the
    QPS workload fewer pages than slots. Before JAX first looks at its devices."""
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", str(MEMORY_SHARE))


def check_draws_only(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the command where --draw, which measures nothing, stands beside options of a measurement."""
    if args.draw:
        changed = [name for name, value in vars(args).items() if name != "draw" and value != parser.get_default(name)]
        if changed:
            parser.error(f"--draw measures nothing, so it goes without --{changed[0].replace('_', '-')}")
