"""Reads the tools of a chat's body, shows them to its template, and makes the guide that holds calls to them."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jllm.files.messages import check_only, shown
from jllm.files.tokenizer import Tokenizer
from jllm.guides.guide import Guide
from jllm.serve.arguments import TOOL_CALL_PARSERS
from jllm.serve.errors import bad
from jllm.serve.tool_formats import Format, calls_guide, format_of, hidden_tokens, takes_tools
from jllm.serve.tool_parser import CallParser

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
CHOICES = ("none", "auto", "required")
FUNCTION = '{"type": "function", "function": {"name": "..."}}'
KINDS = {
    "name": (str, "text"),
    "description": (str, "text"),
    "parameters": (dict, "an object"),
    "strict": (bool, "true or false"),
}
Asked = tuple[str, Callable[[], Guide]]  # a field that asks for a guide, and a function that makes it


@dataclass(frozen=True)
class Tools:
    """Holds the tools that a model may call in one chat."""

    form: Format
    hidden: Mapping[str, int]  # tokens of the form that text does not show
    functions: tuple[dict[str, Any], ...]  # in the form that templates read
    callable: tuple[str, ...]  # names: all, or the chosen one
    required: bool  # there must be a call
    many: bool  # there may be more than one call
    strict: bool  # calls must fit their schemas, even if calls are optional
    shaped: bool  # text that replaces calls must be JSON

    @property
    def held(self) -> bool:
        """Returns whether a guide holds calls to their form."""
        return self.required or self.strict or self.shaped or not self.many

    def parser(self) -> CallParser:
        return CallParser(self.form, self.callable, self.hidden, held=self.held)

    def guides(self, asked: Sequence[Asked]) -> list[Asked]:
        """Returns the guides that the text needs: of the tools, or else of other fields."""
        formats = [make for field, make in asked if field == "response_format"]
        if len(formats) < len(asked):  # a guide of the whole text, calls included
            if self.held:
                wrong = next(field for field, _ in asked if field != "response_format")
                raise bad(wrong, "cannot go with tools that are required, strict or not parallel, or response_format")
            return list(asked)
        if not self.held:
            return []
        answer = None if self.required else formats[0]().text if formats else ""
        return [("tools", partial(self._guide, answer))]

    def _guide(self, answer: str | None) -> Guide:
        schemas = {f["function"]["name"]: _schema(f["function"]) for f in self.functions}
        wanted = {name: schemas[name] for name in self.callable}
        return calls_guide(self.form, wanted, self.hidden, many=self.many, answer=answer)


def read_tools(body: Mapping[str, Any], tokenizer: Tokenizer, parser: str | None) -> Tools | None:
    """Returns the tools of a body's `tools`, `tool_choice` and `parallel_tool_calls`, or None.

    parser: the name of the format given to the server, if any.
    """
    functions = _functions(body.get("tools", []))
    choice, named = _choice(body.get("tool_choice", "auto"), [f["function"]["name"] for f in functions])
    many = body.get("parallel_tool_calls", True)
    if not isinstance(many, bool):
        raise bad("parallel_tool_calls", f"must be true or false, not {shown(many)}")
    if not functions or choice == "none":
        return None
    template = tokenizer.template(True)
    if template is None or not takes_tools(template):
        raise bad("tools", "cannot be shown to this model: its chat template takes no tools")
    form = format_of(template, parser)
    if form is None:
        how = f"start it with --tool-call-parser {', '.join(TOOL_CALL_PARSERS[:-1])} or {TOOL_CALL_PARSERS[-1]}"
        raise bad("tools", f"are written by this model in a format that the server does not know: {how}")
    shape = body["response_format"] if isinstance(body.get("response_format"), dict) else {}
    strict = any(tool["function"].get("strict") for tool in body["tools"])
    names = tuple(f["function"]["name"] for f in functions)
    return Tools(
        form=form,
        hidden=hidden_tokens(form, tokenizer),
        functions=tuple(functions),
        callable=names if named is None else (named,),
        required=choice == "required" or named is not None,
        many=many and named is None,
        strict=strict,
        shaped=shape.get("type") in ("json_object", "json_schema"),
    )


def _functions(given: object) -> list[dict[str, Any]]:
    if not isinstance(given, list):
        raise bad("tools", f"must be a list like [{FUNCTION}], not {shown(given)}")
    found = [_function(tool, f"tools[{i}]") for i, tool in enumerate(given)]
    names = [function["function"]["name"] for function in found]
    for name, count in Counter(names).items():
        if count > 1:
            raise bad("tools", f"{shown(name)} is there twice")
    return found


def _function(tool: Any, where: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function":
        raise bad("tools", f"{where} must be an object like {FUNCTION}: only tools of the type function are served")
    check_only(tool, ("type", "function"), where, error=partial(bad, "tools"))
    check_only(function, tuple(KINDS), f"{where}.function", error=partial(bad, "tools"))
    for name, (kind, what) in KINDS.items():
        if function.get(name) is not None and not isinstance(function[name], kind):
            raise bad("tools", f"{where}.function.{name} must be {what}, not {shown(function[name])}")
    if not NAME.fullmatch(function.get("name") or ""):
        raise bad("tools", f"{where}.function.name must be 1 to 64 letters, digits and _ . -")
    seen = {name: function[name] for name in ("name", "description", "parameters") if function.get(name) is not None}
    if seen.get("parameters", {}).get("type", "object") != "object":
        raise bad("tools", f"{where}.function.parameters must be of the type object")
    return {"type": "function", "function": seen}


def _schema(function: Mapping[str, Any]) -> str:
    """Returns the schema of a function's arguments, which are an object. Without a schema there are no arguments."""
    schema = function.get("parameters", {"properties": {}, "additionalProperties": False})
    return Guide.json({"type": "object"} | schema).text


def _choice(given: Any, names: Sequence[str]) -> tuple[str, str | None]:
    """Returns one of CHOICES, and the name of the function to call, if one is named."""
    if given in CHOICES:
        if given == "required" and not names:
            raise bad("tool_choice", "is required, and there are no tools")
        return given, None
    function = given.get("function") if isinstance(given, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or given.get("type") != "function":
        raise bad("tool_choice", f"must be {', '.join(CHOICES)} or like {FUNCTION}, not {shown(given)}")
    if name not in names:
        raise bad("tool_choice", f"names {shown(name)}, which is not among the tools")
    return "required", name
