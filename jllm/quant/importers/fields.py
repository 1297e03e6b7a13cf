"""Fields of a checkpoint's quantization_config, read strictly: what is not supported is named."""

import json
import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

from jllm.errors import CheckpointError


def refuse(raw: Mapping[str, Any], key: str, supported: str) -> CheckpointError:
    """The error for a field whose value is not supported."""
    value = json.dumps(raw.get(key))
    return CheckpointError(f"quantization_config: {key} = {value} is not supported; supported: {supported}")


def read_choice(raw: Mapping[str, Any], key: str, default: Any, choices: Collection[Any]) -> Any:
    """raw[key], one of `choices`, `default` where it is absent."""
    value = raw.get(key, default)
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        raise refuse(raw, key, ", ".join(json.dumps(choice) for choice in choices))
    return value


def read_flag(raw: Mapping[str, Any], key: str, default: bool) -> bool:
    return read_choice(raw, key, default, (False, True))


def read_group(raw: Mapping[str, Any], key: str, default: int | None) -> int:
    """raw[key], -1 or a multiple of 8."""
    value = raw.get(key, default)
    if type(value) is not int or (value != -1 and (value < 8 or value % 8)):
        raise refuse(raw, key, "-1, or a multiple of 8")
    return value


def read_names(raw: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """raw[key], a list of strings, () where it is absent or null."""
    value = raw.get(key) or []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise refuse(raw, key, "a list of names")
    return tuple(value)


def read_object(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    """raw[key], an object, {} where it is absent or null."""
    value = raw.get(key) or {}
    if not isinstance(value, dict):
        raise refuse(raw, key, "an object")
    return value


def match_glob(pattern: str, text: str) -> bool:
    """Tells whether a name with wildcards stands for this one, or for what it is a part of."""
    return fnmatchcase(text, pattern) or text.startswith(f"{pattern}.")


def match_pattern(pattern: str, text: str) -> bool:
    """re.match, a broken pattern being an error of the config's."""
    try:
        return re.match(pattern, text) is not None
    except re.error as error:
        raise CheckpointError(f"quantization_config: {pattern!r} is not a regular expression: {error}") from None
