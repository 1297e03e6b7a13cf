"""Describes how models write tool calls, and makes guides that hold calls to their schemas."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from jllm.files.chat_template import variables_of
from jllm.files.tokenizer import Tokenizer
from jllm.guides.grammars import SPACES
from jllm.guides.guide import Guide
from jllm.guides.guide_schema import parse, served

TOOL_CALL, PYTHON, CALLS, CALL_ID, ARGS = "<tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
ANY = r"/(.|\n)*/"
NO_CALL = r"/[ \t\r\n]*([^{ \t\r\n](.|\n)*)?/"  # a text that does not begin with an object


@dataclass(frozen=True)
class Format:
    """Describes the format of calls: a mark, then calls. A call is `before`, a name, `after`, arguments and `tail`."""

    mark: str | None  # None: an answer has either text or calls
    before: str
    after: str
    tail: str
    between: str
    each: bool = False  # the mark precedes each call, not just the first
    ends: tuple[str, str] = ("", "")  # around calls that share a mark
    tokens: tuple[str, ...] = ()  # possible special tokens, which text does not show

    def head(self, name: str) -> str:
        return f"{self.before}{name}{self.after}"


HERMES = Format(
    mark=TOOL_CALL,
    before='\n{"name": "',
    after='", "arguments": ',
    tail="}\n</tool_call>",
    between="\n",
    each=True,
    tokens=(TOOL_CALL, "</tool_call>"),
)
LLAMA3 = Format(mark=None, before='{"name": "', after='", "parameters": ', tail="}", between="; ", tokens=(PYTHON,))
MISTRAL = Format(
    mark=CALLS,
    before='{"name": "',
    after='", "arguments": ',
    tail="}",
    between=", ",
    ends=("[", "]"),
    tokens=(CALLS, CALL_ID, ARGS),
)
MISTRAL_ARGS = Format(mark=CALLS, before="", after=ARGS, tail="", between="", each=True, tokens=(CALLS, CALL_ID, ARGS))


@lru_cache(16)
def format_of(template: str, parser: str | None) -> Format | None:
    """Returns the format that `parser` names, or that a chat template uses. Returns None if neither decides."""
    if parser == "mistral" or (parser is None and CALLS in template):
        return MISTRAL_ARGS if ARGS in template else MISTRAL
    if parser == "hermes" or (parser is None and TOOL_CALL in template and "<function=" not in template):
        return HERMES
    llama = '"parameters"' in template and (PYTHON in template or '{"name": ' in template)
    return LLAMA3 if parser == "llama3" or (parser is None and llama) else None


@lru_cache(16)
def takes_tools(template: str) -> bool:
    """Returns whether a template reads the tools that it is given."""
    return "tools" in variables_of(template)


def hidden_tokens(form: Format, tokenizer: Tokenizer) -> dict[str, int]:
    """Returns the ids of a format's tokens that this tokenizer's text does not show."""
    found = {token: tokenizer.vocabulary.id(token) for token in form.tokens}
    return {token: id for token, id in found.items() if id is not None and not tokenizer.vocabulary.piece(id)}


def calls_guide(
    form: Format, schemas: Mapping[str, str], hidden: Mapping[str, int], *, many: bool, answer: str | None
) -> Guide:
    """Returns a guide for calls whose arguments fit the schemas of their functions.

    many: more than one call may follow. answer: the schema of a text that may replace calls ("": any text; None: no
    text).
    """

    if answer and form.mark is None:
        return _call_or_answer(schemas, answer)

    def term(text: str | None) -> str:
        """Returns a text of the format in the grammar's syntax. Hidden tokens are written by id."""
        parts = re.split(f"({'|'.join(map(re.escape, hidden))})", text or "") if hidden else [text]
        return " ".join(f"<[{hidden[part]}]>" if part in hidden else json.dumps(part) for part in parts if part)

    def repeated(rule: str) -> str:
        return f"({term(form.between)} {rule})*" if many else ""

    mark = term(form.mark) or (f"{term(PYTHON)}?" if PYTHON in hidden else "")
    call = [f"{term(form.head(name))} arguments_{i} {term(form.tail)}" for i, name in enumerate(schemas)]
    lead = '" "? ' if form.ends[0] else ""
    shared = f"{lead}{term(form.ends[0])} call {repeated('call')} {term(form.ends[1])}"
    lines = [
        f"call: {' | '.join(call)}",
        f"block: {'call' if form.each else shared}",
        f"calls: {mark} block {repeated(f'{mark} block') if form.each else ''}",
        *(f"arguments_{i}: %json {_with_spaces(schema)}" for i, schema in enumerate(schemas.values())),
    ]
    if answer is None:
        start = ["start: calls"]
    elif answer:
        start = ["start: calls | answer", f"answer: %json {_with_spaces(answer)}"]
    elif form.mark is None:
        start = ["start: calls | TEXT", f"TEXT: {NO_CALL}"]
    else:  # a visible mark always begins a call, so it ends the text before it
        start = ["start: found* TEXT" if many else "start: found | TEXT", "found: lead block", f"TEXT: {ANY}"]
        start.append(f"lead{'' if form.mark in hidden else '[lazy]'}: TEXT {mark}")
    return Guide.grammar("\n".join([*start, *lines]))


def _call_or_answer(schemas: Mapping[str, str], answer: str) -> Guide:
    """Returns the guide of one object: a call without a mark, or an answer. One schema covers both, since they may
    begin alike."""
    parts = [json.loads(schema) for schema in (*schemas.values(), answer)]
    places = [f"#/$defs/{i}" for i in range(len(parts))]
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": {"$ref": place}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name, place in zip(schemas, places)
    ]
    inner = {str(i): _moved(part, place) for i, (part, place) in enumerate(zip(parts, places))}
    return Guide.json({"anyOf": [*calls, {"$ref": places[-1]}], "$defs": inner})


def _moved(schema: object, place: str) -> object:
    """Returns a schema with references that hold inside another one."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _moved(one, place) for name, one in schema.items()}
    if isinstance(ref := found.get("$ref"), str) and ref.startswith("#"):
        found["$ref"] = place + ref[1:]
    return found


def _with_spaces(schema: str) -> str:
    """Returns a schema with the white space that other JSON guides allow."""
    return json.dumps(served(parse(schema)) | {"x-guidance": {"whitespace_pattern": SPACES}})
