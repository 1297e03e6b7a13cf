"""Parses numbers on command lines: types for argparse, which say in one line what is wrong."""

import argparse
import math

SEEDS = 1 << 32  # a key of JAX keeps 32 bits of a seed
MOST_GIB = 1 << 33  # 2^63 bytes


def positive(text: str) -> int:
    """Parses a number of tokens, rows, steps or the like."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def natural(text: str) -> int:
    """Parses a number of things that may be zero."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def seed_number(text: str) -> int:
    """Parses a seed of random numbers."""
    if not text.isdecimal() or int(text) >= SEEDS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {SEEDS - 1}")
    return int(text)


def positive_number(text: str) -> float:
    """Parses a time, a rate or a size."""
    if not 0 < (number := _number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return number


def gibibytes(text: str) -> float:
    """Parses a size of memory."""
    if not 0 < (number := _number(text)) <= MOST_GIB:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of GiB, {MOST_GIB} at most")
    return number


def non_negative_number(text: str) -> float:
    """Parses a temperature, or a weight that may be zero."""
    if not 0 <= (number := _number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return number


def fraction(text: str) -> float:
    """Parses a part of a whole, or all of it."""
    if not 0 <= (number := _number(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return number


def portion(text: str) -> float:
    """Parses a part of a whole, but not all of it."""
    if not 0 <= (number := _number(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to below 1")
    return number


def _number(text: str) -> float:
    """Returns nan for a text that is no number: all comparisons with nan are false."""
    try:
        return float(text)
    except ValueError:
        return math.nan
