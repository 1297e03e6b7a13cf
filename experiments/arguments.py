"""What the command lines of several experiments share."""

import argparse


def positive(text: str) -> int:
    """A number of tokens, rows, steps or the like."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def check_draws_only(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the command where --draw, which measures nothing, stands beside options of a measurement."""
    if args.draw:
        changed = [name for name, value in vars(args).items() if name != "draw" and value != parser.get_default(name)]
        if changed:
            parser.error(f"--draw measures nothing, so it goes without --{changed[0].replace('_', '-')}")
