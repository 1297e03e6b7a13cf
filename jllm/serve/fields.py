"""Lists the fields that this server accepts but ignores, with the values that have no effect."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jllm.files.messages import shown
from jllm.serve.errors import HttpError, bad


@dataclass(frozen=True)
class Neutral:
    """Holds the values of a field that have no effect."""

    fits: Callable[[object], bool]
    right: str  # description of the accepted values, for the error


def one_of(*values: object, why: str = "") -> Neutral:
    """Accepts only the given values. Types must match: 1 is not true."""
    right = " or ".join(map(json.dumps, values)) + (f" ({why})" if why else "")
    return Neutral(lambda value: any(type(value) is type(each) and value == each for each in values), right)


TEXT = Neutral(lambda value: isinstance(value, str), "text")
OBJECT = Neutral(lambda value: isinstance(value, dict), "an object")
BOTH: Mapping[str, Neutral] = {
    # Identify the client; all clients are treated alike.
    "user": TEXT,
    "safety_identifier": TEXT,
    "prompt_cache_key": TEXT,
    "metadata": OBJECT,
    "store": one_of(False, True),  # nothing is stored; reading it later is an error
    "service_tier": one_of("auto", "default"),
    # vLLM's fields, with its defaults.
    "skip_special_tokens": one_of(True),
    "spaces_between_special_tokens": one_of(True),
    "add_special_tokens": one_of(True),
    "include_stop_str_in_output": one_of(False),
    "use_beam_search": one_of(False),
    "length_penalty": one_of(1, 1.0),
    "min_tokens": one_of(0),
    "bad_words": one_of([]),
    "detokenize": one_of(True),
    "return_tokens_as_token_ids": one_of(False),
    "include_reasoning": one_of(True, False),  # there is none
    "request_id": TEXT,
}
COMPLETION: Mapping[str, Neutral] = {**BOTH, "suffix": one_of("")}
CHAT: Mapping[str, Neutral] = {
    **BOTH,
    "functions": one_of([], why="tools take their place"),
    "function_call": one_of("none", "auto", why="tools take their place"),
    "modalities": one_of(["text"]),
    "reasoning_effort": one_of("none"),
    "verbosity": one_of("medium"),
    "prompt_cache_retention": one_of("in_memory"),
    "prompt_cache_options": one_of({}),
    # vLLM's fields, with its defaults.
    "echo": one_of(False),
    "best_of": one_of(1),
    "add_special_tokens": one_of(False),  # a template writes them
    "add_generation_prompt": one_of(True),
    "continue_final_message": one_of(False),
    "chat_template_kwargs": one_of({}),
    "documents": one_of([]),
}


def check_fields(body: Mapping[str, object], served: set[str], neutral: Mapping[str, Neutral]) -> None:
    """Raises HttpError for a field that is not served, unless `neutral` lists its value. The error names the field."""
    for name, value in body.items():
        if name in served:
            continue
        if name not in neutral:
            raise HttpError(400, f"{shown(name)} is not a field that this server serves", param=name[:60])
        if not neutral[name].fits(value):
            raise bad(name, f"must be {neutral[name].right}, not {shown(value)}")
