"""Checks grammars in llguidance's dialect of Lark for parts that it would silently change. Needs no JAX."""

import json
import re

from jllm.errors import RequestError
from jllm.guides.guide_schema import parse, served

# Texts, regular expressions and comments come first, since a directive in them is none.
PARTS = re.compile(
    r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|(?P<json>%json\b)'
    r"|(?P<named><(?!\[)[^\s<>]+>)|(?P<heat>\btemperature\s*=)"
)


def served_lark(text: str) -> str:
    """Returns a grammar whose JSON schemas have the form that llguidance takes. Raises RequestError for parts that it
    would change or ignore."""
    if text.lstrip().startswith("{"):
        raise RequestError("a grammar must be in Lark, not JSON")
    parts, at = [], 0
    while found := PARTS.search(text, at):
        parts.append(text[at : found.end()])
        at = found.end()
        if found["named"]:
            raise RequestError(f"a grammar has special tokens by id, like <[5]>, not {found[0][:40]}")
        if found["heat"]:
            raise RequestError("a grammar cannot set the temperature: the request does")
        if found["json"] and (size := _size_of_json(text[at:])):
            parts.append(" " + json.dumps(served(parse(text[at : at + size]))))
            at += size
    return "".join([*parts, text[at:]])


def _size_of_json(text: str) -> int:
    """Returns how long the white space and the JSON value are that a text begins with, or 0 if there is none."""
    start = len(text) - len(text.lstrip())
    try:
        return json.JSONDecoder(parse_int=str).raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return 0  # llguidance says where it is wrong
