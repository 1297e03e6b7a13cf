"""Converts JSON schemas to a form that llguidance takes. Anything that it would silently change or ignore is mapped or
refused.

llguidance reads numbers as doubles, integers as i64, and the steps of multipleOf as u32. It skips keywords that the
draft in `$schema` lacks, so `$schema` is removed. Then it refuses unknown keywords. No JAX is needed here.
"""

import json
import math
from collections.abc import Collection, Iterable
from decimal import Decimal
from fractions import Fraction
from typing import Any

from jllm.errors import RequestError

LARGEST = 2**53  # up to it each whole number is a double
EXACT_POWER = 22  # the largest power of ten that is a double
DEEPEST = 120  # nested objects and lists; llguidance reads 128, its own included
MOST_STEPS = 2**32  # the most steps of multipleOf
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
BY_NAME = ("properties", "patternProperties", "$defs", "definitions")  # objects whose values are schemas
ASKS_NOTHING = ("$schema", "default", "examples", "example", "title", "description", "$comment")
OF_OLD = ("divisibleBy", "disallow", "extends")  # keywords of early drafts, which llguidance lacks
JOINED = ("allOf", "anyOf", "oneOf", "$ref", "patternProperties")  # keywords that intersect schemas


class Changed(float):
    """Is a number of JSON that a double cannot hold exactly. `text` is its original text."""

    text: str


def read_float(text: str) -> float:
    """Returns a decimal of JSON, as Changed if a double cannot hold it. It serves as parse_float of json.loads for
    schemas."""
    value = float(text)
    try:
        same = math.isfinite(value) and Decimal(text) == Decimal(repr(value))
    except ArithmeticError:  # an exponent beyond Decimal's
        same = False
    if same:
        return value
    made = Changed(value)
    made.text = text
    return made


def parse(text: str) -> Any:
    """Returns a schema's text as an object. Raises RequestError for text that is not JSON."""
    try:
        return json.loads(text, parse_float=read_float, object_pairs_hook=_each_once)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise RequestError(f"the JSON schema is not JSON: {error}") from None


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in found if names.count(name) > 1)!r} occurs twice in one object")
    return found


def served(schema: Any) -> Any:
    """Returns the schema in the form that llguidance takes. Raises RequestError for parts that it would change or
    ignore."""
    if schema is False:
        raise RequestError("the JSON schema false allows nothing")
    walk = _Walk()
    made = walk.schema(schema, 1)
    if walk.joined:
        _check_steps(walk.steps)
    if walk.merged:
        _check_open(walk.open, walk.bounds)
    return {} if made is True else made


class _Walk:
    """Makes one pass over a schema. `steps` are those of its multipleOf, as whole numbers of 10^-exponent. `open` has
    the exclusive bounds."""

    def __init__(self) -> None:
        self.steps: set[tuple[int, int]] = set()
        self.bounds, self.open = set[float](), set[float]()
        self.joined = self.merged = False

    def schema(self, given: object, depth: int) -> object:
        if depth > DEEPEST:
            raise _too_deep()
        if isinstance(given, list | tuple):
            return [self.schema(each, depth + 1) for each in given]
        if not isinstance(given, dict):
            return given
        made: dict[str, Any] = {}
        for name, value in given.items():
            if name in ASKS_NOTHING or (name == "uniqueItems" and value is False):
                continue
            if name == "additionalItems" and not isinstance(given.get("items"), list):
                continue  # it has no meaning here, but llguidance would drop prefixItems for it
            if name in OF_OLD or (name in BOUNDS[2:] and value is True and name[9:].lower() not in given):
                raise RequestError(f"{name} of a JSON schema is not supported in this form")
            self.joined, self.merged = self.joined or name in JOINED, self.merged or name == "allOf"
            made[name] = self._keyword(name, value, depth)
        if made.get("type") != "integer":
            bounds: dict[str, float] = {name: made[name] for name in BOUNDS if _is_number(made.get(name))}
            left_out = {bounds[name] for name in BOUNDS[2:] if name in bounds}
            left_out |= {bounds[name] for name in BOUNDS[:2] if name in bounds and made.get(_exclusive(name)) is True}
            _check_open(left_out, list(bounds.values()))
            self.bounds, self.open = self.bounds | {*bounds.values()}, self.open | left_out
        return made

    def _keyword(self, name: str, value: Any, depth: int) -> Any:
        if name in ("const", "enum"):
            _check_instance(name, value, depth + 1)
            return value
        if name == "x-guidance":
            if depth > 1 or not isinstance(value, dict) or value.get("lenient") or value.get("coerce_one_of"):
                only = "an object at the top, neither lenient nor with coerce_one_of, which ignore keywords"
                raise RequestError(f"x-guidance of a JSON schema must be {only}")
            return value
        if _is_number(value):
            if name in BOUNDS:
                _check_number(name, value)
            elif name == "multipleOf":
                self.steps.add(_step(value))
            return int(value) if name in COUNTS and isinstance(value, float) and value.is_integer() else value
        if name in BY_NAME and isinstance(value, dict):
            return {each: self.schema(inner, depth + 2) for each, inner in value.items()}
        return self.schema(value, depth + 1)


def _too_deep() -> RequestError:
    return RequestError(f"the JSON schema is nested deeper than {DEEPEST} objects and lists")


def _check_instance(name: str, value: Any, depth: int) -> None:
    """Checks the values of const or enum."""
    if depth > DEEPEST:
        raise _too_deep()
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            _check_instance(name, each, depth + 1)
    elif _is_number(value):
        _check_number(name, value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _exclusive(name: str) -> str:
    return f"exclusive{name.capitalize()}"


def _check_open(left_out: Iterable[float], bounds: Collection[float]) -> None:
    """Raises RequestError for an exclusive whole bound with another bound less than 1 away: llguidance would allow
    it."""
    for bound in left_out:
        if float(bound).is_integer() and any(0 < abs(bound - other) < 1 for other in bounds):
            name = "exclusiveMinimum or exclusiveMaximum"
            raise RequestError(f"{name} of a JSON schema cannot be {bound} where another bound is less than 1 from it")


def _check_number(name: str, value: int | float) -> None:
    most = LARGEST - name.startswith("exclusive")  # an exclusive bound's neighbour must be exact, too
    if isinstance(value, Changed) or not abs(value) <= most or not _is_read_well(value):  # NaN fails here, too
        kept = "whole numbers up to 2^53, and decimals of 15 digits"
        raise RequestError(f"{name} of a JSON schema cannot be {_written(value)}: guides hold {kept}")


def _is_read_well(value: int | float) -> bool:
    """Checks that llguidance reads a number right: it multiplies a double of all digits by a power of ten."""
    _, digits, exponent = Decimal(repr(value)).as_tuple()
    return int("".join(map(str, digits))) <= LARGEST and isinstance(exponent, int) and exponent >= -EXACT_POWER


def _written(value: int | float) -> str:
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"a number of {value.bit_length()} bits"
    text = value.text if isinstance(value, Changed) else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _step(value: int | float) -> tuple[int, int]:
    """Returns the step of a multipleOf as llguidance finds it: a whole number of 10^-exponent, and the exponent."""
    _check_number("multipleOf", value)
    steps, exponent = abs(float(value)), 0
    while not steps.is_integer():
        steps, exponent = steps * 10, exponent + 1
    if not 0 < steps < MOST_STEPS or Fraction(repr(abs(value))) * 10**exponent != int(steps) or exponent > 9:
        raise RequestError(f"multipleOf of a JSON schema cannot be {_written(value)}: guides hold few digits of it")
    return int(steps), exponent


def _check_steps(steps: set[tuple[int, int]]) -> None:
    """Raises RequestError for steps that llguidance cannot combine. It multiplies them in 32 bits and reports no
    overflow."""
    if len(steps) < 2:
        return
    most = max(exponent for _, exponent in steps)
    whole = [count * 10 ** (most - exponent) for count, exponent in steps]
    if math.lcm(*whole) * max(whole) >= MOST_STEPS:
        raise RequestError("multipleOf of a JSON schema: several that differ have too many digits together")
