"""Checks grammars in llguidance's dialect of Lark for parts that it would silently change. Needs no JAX."""

import json
import re

from jllm.errors import RequestError
from jllm.guides.guide_schema import parse, served

# Texts, regular expressions and comments come first, since a directive in them is none. Unclosed ones are parts, too:
# else each quote in them would be tried. llguidance refuses them.
PARTS = re.compile(
    r'"(?:\\.|[^"\\\n])*"?|(?://|#)[^\n]*|/(?:\\.|[^/\\])+/?|(?P<json>%json\b)'
    r"|(?P<named><(?!\[)[^\s<>]+>)|(?P<heat>\btemperature\s*=)"
)
SPACE = re.compile(r"\s*")


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
        if found["json"] and (end := _end_of_json(text, at)):
            parts.append(" " + json.dumps(served(parse(text[at:end]))))
            at = end
    return "".join([*parts, text[at:]])


def _end_of_json(text: str, at: int) -> int:
    """Returns where the JSON value ends that follows at this place, after white space, or 0 if there is none."""
    try:
        return json.JSONDecoder(parse_int=str).raw_decode(text, SPACE.match(text, at).end())[1]  # type: ignore[union-attr]
    except (ValueError, RecursionError):
        return 0  # llguidance says where it is wrong
