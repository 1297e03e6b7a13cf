"""Checks the messages of a chat, and gives them the one form that chat templates see.

The commands, the server and Tokenizer.chat take what this module takes.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jllm.errors import TokenizerError

Message = Mapping[str, Any]
TAKEN: Mapping[str, tuple[str, ...]] = {  # by role: fields that a template sees, beside role and content
    "system": ("name",),
    "developer": ("name",),
    "user": ("name",),
    "assistant": ("name",),
}
LEFT_OUT = ("parsed",)  # a client's own reading of an answer's content, in an answer sent back
EXAMPLE = '[{"role": "user", "content": "..."}]'


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Returns messages with a known role, and with text as content. Raises TokenizerError, naming the field.

    Text parts are joined. Fields that are null or empty ask for nothing, and are left out.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise TokenizerError(f"messages must be a non-empty list like {EXAMPLE}")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TokenizerError(f'{where} must be an object like {{"role": "user", "content": "..."}}')
    if "role" not in message:
        raise TokenizerError(f"{where}.role is missing: it must be {_roles()}")
    role = message["role"]
    if not isinstance(role, str) or role not in TAKEN:
        raise TokenizerError(f"{where}.role must be {_roles()}, not {shown(role)}")
    return {"role": role, "content": _content(message, where), **_others(message, role, where)}


def _others(message: Message, role: str, where: str) -> dict[str, Any]:
    """Returns the fields beside role and content that ask for something."""
    found = {}
    for name, value in message.items():
        if name in ("role", "content", *LEFT_OUT) or value is None or value == [] or value == {}:
            continue
        if name not in TAKEN[role]:
            raise TokenizerError(f"{where}.{_name(name)} is not served{_why(name)}")
        found[name] = FIELDS[name](value, f"{where}.{name}")
    return found


def _why(name: Any) -> str:
    return ": tools are not" if name in ("tool_calls", "tool_call_id", "function_call") else ""


def _content(message: Message, where: str) -> str:
    content, where = message.get("content"), f"{where}.content"
    if not isinstance(content, Sequence) or isinstance(content, str | bytes):
        return _text(content, where)
    if not content:
        raise TokenizerError(f"{where} has no part: it must be text, or a list of text parts")
    return "".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise TokenizerError(f'{where} must be a part like {{"type": "text", "text": "..."}}')
    if part["type"] != "text":
        raise TokenizerError(f"{where} has the type {shown(part['type'])}: only text parts are served")
    for name, value in part.items():
        if name not in ("type", "text") and value is not None and value != [] and value != {}:
            raise TokenizerError(f"{where}.{_name(name)} is not served; type and text are")
    return _text(part.get("text"), f"{where}.text")


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise TokenizerError(f"{where} must be text, not {shown(value)}")
    return value


FIELDS: Mapping[str, Callable[[Any, str], Any]] = {"name": _text}  # what checks each field of TAKEN


def _roles() -> str:
    *most, last = TAKEN
    return f"{', '.join(most)} or {last}"


def _name(name: Any) -> str:
    return str(name)[:60]


def shown(value: Any) -> str:
    """Returns a value as JSON has it, cut to 60 letters, or its type where JSON has no such value."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."
