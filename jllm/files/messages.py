"""Checks the messages of a chat, and converts them to the form that chat templates take.

The commands, the server and Tokenizer.chat accept the messages that this module accepts.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jllm.errors import TokenizerError

Message = Mapping[str, object]
TAKEN: Mapping[str, tuple[str, ...]] = {  # by role, the fields that a template sees beside role and content
    "system": ("name",),
    "developer": ("name",),
    "user": ("name",),
    "assistant": ("name", "tool_calls"),
    "tool": ("name", "tool_call_id"),
}
LEFT_OUT = ("parsed", "id")  # clients name messages, and add the parsed content to an answer that they send back
LEFT_OUT_OF_CALLS = ("index", "parsed_arguments")  # clients add a call's place in a stream, and parsed arguments
CALL = '{"id": "...", "type": "function", "function": {"name": "...", "arguments": "{}"}}'
EXAMPLE = '[{"role": "user", "content": "..."}]'


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Returns messages with a known role, and with text as content. Raises TokenizerError, which names the field.

    Text parts are joined. Fields that are null or empty are left out. The arguments of tool calls, which clients send
    as JSON in a string, become objects. A message with calls needs no content.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise TokenizerError(f"messages must be a non-empty list like {EXAMPLE}")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: object, where: str) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise TokenizerError(f'{where} must be an object like {{"role": "user", "content": "..."}}')
    if "role" not in message:
        raise TokenizerError(f"{where}.role is missing: it must be {_roles()}")
    role = message["role"]
    if not isinstance(role, str) or role not in TAKEN:
        raise TokenizerError(f"{where}.role must be {_roles()}, not {shown(role)}")
    others = _others(message, role, where)
    content = "" if "tool_calls" in others and not message.get("content") else _content(message, where)
    return {"role": role, "content": content, **others}


def _others(message: Message, role: str, where: str) -> dict[str, object]:
    """Returns the non-empty fields beside role and content."""
    found = {}
    for name, value in message.items():
        if name in ("role", "content", *LEFT_OUT) or value in (None, "", [], {}):
            continue
        if name not in TAKEN[role]:
            raise TokenizerError(f"{where}.{_name(name)} is not served{_why(name)}")
        found[name] = FIELDS[name](value, f"{where}.{name}")
    return found


def _why(name: Any) -> str:
    return {
        "function_call": ": tool_calls are",
        "tool_calls": " there: tools are called by the assistant",
        "tool_call_id": " there: it belongs to the role tool",
    }.get(name, "")


def _calls(value: object, where: str) -> list[dict[str, object]]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise TokenizerError(f"{where} must be a list like [{CALL}]")
    return [_call(call, f"{where}[{i}]") for i, call in enumerate(value)]


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or call.get("type", "function") != "function":
        raise TokenizerError(f"{where} must be an object like {CALL}")
    check_only(call, ("id", "type", "function"), where, LEFT_OUT_OF_CALLS)
    check_only(function, ("name", "arguments"), f"{where}.function", LEFT_OUT_OF_CALLS)
    name = _text(function.get("name"), f"{where}.function.name")
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    id = {} if call.get("id") is None else {"id": _text(call["id"], f"{where}.id")}
    return {**id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(value: object, where: str) -> dict[str, object]:
    try:
        found = json.loads(value or "{}") if isinstance(value, str) else json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise TokenizerError(f"{where} must be a JSON object in a string, not {shown(value)}")
    return found


def _content(message: Message, where: str) -> str:
    content, where = message.get("content"), f"{where}.content"
    if not isinstance(content, Sequence) or isinstance(content, str | bytes):
        return _text(content, where)
    if not content:
        raise TokenizerError(f"{where} has no part: it must be text, or a list of text parts")
    return "".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: object, where: str) -> str:
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise TokenizerError(f'{where} must be a part like {{"type": "text", "text": "..."}}')
    if part["type"] != "text":
        raise TokenizerError(f"{where} has the type {shown(part['type'])}: only text parts are served")
    check_only(part, ("type", "text"), where)
    return _text(part.get("text"), f"{where}.text")


def check_only(
    given: Mapping[str, object],
    taken: Sequence[str],
    where: str,
    left_out: Sequence[str] = (),
    error: Callable[[str], Exception] = TokenizerError,
) -> None:
    """Raises an error for a non-empty field of an object that is neither in `taken` nor in `left_out`."""
    for name, value in given.items():
        if name not in (*taken, *left_out) and value is not None and value != [] and value != {}:
            *most, last = taken
            served = f"{', '.join(most)} and {last} are" if most else f"{last} is"
            raise error(f"{where}.{_name(name)} is not served; {served}")


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise TokenizerError(f"{where} must be text, not {shown(value)}")
    return value


FIELDS: Mapping[str, Callable[[object, str], object]] = {  # the check of each field of TAKEN
    "name": _text,
    "tool_calls": _calls,
    "tool_call_id": _text,
}


def _roles() -> str:
    *most, last = TAKEN
    return f"{', '.join(most)} or {last}"


def _name(name: object) -> str:
    return str(name)[:60]


def shown(value: object) -> str:
    """Returns a value as JSON, cut to 60 letters, or its type if JSON has no such value."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."
