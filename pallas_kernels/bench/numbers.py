"""Numbers on command lines: types for argparse, which say in one line what is wrong."""

import argparse
import math


def positive(text: str) -> int:
    """A number of tokens, rows, steps or the like."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def natural(text: str) -> int:
    """A seed, or a number of what there may be none of."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def positive_number(text: str) -> float:
    """A time, a rate or a size."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return number
