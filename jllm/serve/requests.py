"""Parses bodies of the OpenAI API into requests for the engine. Functions are pure. A field that is not served is an
error."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jllm.engine.checks import Prompt, fitted, token_ids
from jllm.engine.inputs import Inputs
from jllm.engine.request import SamplingParams, bias_by_id
from jllm.errors import JllmError, RequestError, TokenizerError, TooLongError
from jllm.files.messages import check_only, shown
from jllm.files.tokenizer import Tokenizer
from jllm.guides.guide import Guide
from jllm.guides.guide_schema import read_float
from jllm.serve import fields
from jllm.serve.errors import TOO_LONG, HttpError, bad
from jllm.serve.fields import check_fields
from jllm.serve.tools import Tools, read_tools

MOST_STOPS = 16  # most stop strings of a request
COMPLETION_TOKENS = 16  # default of max_tokens
Check = Callable[[Prompt, SamplingParams], list[int]]


@dataclass(frozen=True)
class Served:
    """Holds the model and limits that requests are checked against."""

    name: str  # the model's name in requests
    tokenizer: Tokenizer | None
    context: int  # most tokens of one sample, its prompt included
    most_samples: int  # most samples of one request
    check: Check  # returns a prompt's ids, or raises if the engine refuses it
    tool_parser: str | None = None  # the format of tool calls (tool_formats.py); None: read from the template
    inputs: Callable[[str], Inputs | None] | None = None  # returns the arrays of a name; None: requests have none
    adapters: tuple[str, ...] = ()  # names of loaded ones: a request takes one as the model "name:adapter"

    @property
    def models(self) -> tuple[str, ...]:
        """Returns the names that requests can have for a model."""
        return self.name, *(f"{self.name}:{adapter}" for adapter in self.adapters)

    def name_with(self, adapter: str | None) -> str:
        """Returns the name of the model with an adapter."""
        return self.name if adapter is None else f"{self.name}:{adapter}"


@dataclass(frozen=True)
class Wanted:
    """Holds one parsed body."""

    prompts: tuple[list[int], ...]
    sampling: SamplingParams
    chat: bool
    stream: bool = False
    usage: bool = False  # streamed: token counts at the end
    usage_of_each: bool = False  # streamed: token counts in each chunk
    token_ids: bool = False  # return token ids beside the text
    echo: bool = False
    priority: int = 0
    keep: bool = True  # False: nothing should be generated, so the engine's one token is dropped
    open_ended: bool = False  # the body has no limit of tokens: use the default, or what fits
    tools: Tools | None = None  # tools that may be called
    inputs: Inputs | None = None  # the request's own arrays
    response: Mapping[str, Any] | None = None  # the body of /v1/responses, which its answer repeats

    @property
    def at_once(self) -> bool:
        """Returns whether a stream has each sample as one chunk. Prompt scores come first in the text, but last from
        the engine."""
        return self.echo and (self.sampling.prompt_logprobs or not self.keep)

    def requests(self, most: int) -> list[tuple[list[int], SamplingParams]]:
        """Returns the prompts and parameters to submit. `most` is the engine's limit of tokens per sample."""
        return [
            (ids, fitted(self.sampling, len(ids), most) if self.open_ended else self.sampling) for ids in self.prompts
        ]


# Fields: their names in SamplingParams, and their types.
NUMBER = (int, float)
SAMPLING: Mapping[str, tuple[str, type | tuple[type, ...]]] = {
    "temperature": ("temperature", NUMBER),
    "top_p": ("top_p", NUMBER),
    "top_k": ("top_k", int),
    "min_p": ("min_p", NUMBER),
    "n": ("n", int),
    "seed": ("seed", int),
    "stop": ("stop", (str, list)),
    "stop_token_ids": ("stop_token_ids", list),
    "ignore_eos": ("ignore_eos", bool),
    "repetition_penalty": ("repetition_penalty", NUMBER),
    "presence_penalty": ("presence_penalty", NUMBER),
    "frequency_penalty": ("frequency_penalty", NUMBER),
    "logit_bias": ("logit_bias", dict),
    "max_tokens": ("max_new_tokens", int),
}
GUIDES: Mapping[str, tuple[Callable[[Any], Guide], tuple[type, ...]]] = {  # vLLM's fields
    "guided_json": (Guide.json, (dict, str)),
    "guided_regex": (Guide.regex, (str,)),
    "guided_choice": (Guide.choice, (list,)),
    "guided_grammar": (Guide.grammar, (str,)),
}
COMMON = {"model", "stream", "stream_options", "return_token_ids", "priority", "inputs", *SAMPLING}
COMMON |= {"response_format", "structured_outputs", *GUIDES}
COMPLETION = COMMON | {"prompt", "logprobs", "echo", "best_of"}
CHAT = COMMON | {"messages", "logprobs", "top_logprobs", "max_completion_tokens"}
CHAT |= {"tools", "tool_choice", "parallel_tool_calls"}
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")
NAMES = {int: "an integer", bool: "true or false", str: "text", list: "a list", dict: "an object", float: "a number"}


def parse_json(data: bytes) -> dict[str, object]:
    """Returns the object in a body. Fields that are null count as missing."""
    try:
        body = json.loads(data, parse_constant=_no_constant, parse_float=read_float, object_pairs_hook=_each_once)
    except RecursionError:
        raise HttpError(400, "the body is nested too deeply") from None
    except ValueError as error:  # includes UnicodeDecodeError
        raise HttpError(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise HttpError(400, "the body must be a JSON object")
    return {name: value for name, value in body.items() if value is not None}


def completion(body: Mapping[str, object], served: Served) -> Wanted:
    """Parses the body of POST /v1/completions."""
    check_fields(body, COMPLETION, fields.COMPLETION)
    adapter = _adapter(body, served)
    stream, usage, each = _streaming(body)
    n, echo, logprobs = _take(body, "n", int, 1), _take(body, "echo", bool, False), _take(body, "logprobs", int, None)
    if (best := _take(body, "best_of", int, n)) != n:
        raise bad("best_of", f"must be n, {n}, not {best}: all samples are returned")
    if echo and (logprobs or 0) > 1:
        raise bad("logprobs", f"must be 0 or 1 with echo, not {logprobs}: prompts only have their likeliest token")
    tokens = _take(body, "max_tokens", int, COMPLETION_TOKENS)
    keep = not (echo and tokens == 0)
    more: dict[str, Any] = {"logprobs": logprobs, "prompt_logprobs": echo and logprobs is not None, "adapter": adapter}
    sampling = _sampling(body, max_new_tokens=tokens if keep else 1, **more)
    if sampling.prompt_logprobs and tokens == 1:
        # Clients that score prompts expect one entry for the new token, even for an end token, which has no text.
        sampling = replace(sampling, ignore_eos=True)
    if "prompt" not in body:
        raise bad("prompt", "is missing")
    prompts = _prompts(body["prompt"])
    if len(prompts) * sampling.n > served.most_samples:
        what = f"{len(prompts)} prompts with n = {sampling.n} are too many samples"
        raise bad("prompt", f"{what}: at most {served.most_samples} may run and wait")
    token_ids, priority = _take(body, "return_token_ids", bool, False), _take(body, "priority", int, 0)
    wanted = Wanted((), sampling, False, stream, usage, each, token_ids, echo, priority, keep, "max_tokens" not in body)
    return _checked(wanted, prompts, body, "prompt", served)


def chat(body: Mapping[str, object], served: Served) -> Wanted:
    """Parses the body of POST /v1/chat/completions."""
    check_fields(body, CHAT, fields.CHAT)
    adapter = _adapter(body, served)
    stream, usage, each = _streaming(body)
    wants, top = _take(body, "logprobs", bool, False), _take(body, "top_logprobs", int, None)
    if top and not wants:
        raise bad("top_logprobs", "needs logprobs to be true")
    limits = {body[name] for name in ("max_tokens", "max_completion_tokens") if isinstance(body.get(name), int)}
    if len(limits) > 1:
        raise bad("max_tokens", "and max_completion_tokens are the same: give one")
    if served.tokenizer is None:
        raise bad("messages", "need a tokenizer with a chat template, and this model has none")
    if "messages" not in body:
        raise bad("messages", "are missing")
    tools = read_tools(body, served.tokenizer, served.tool_parser)
    ids = _chat_ids(body["messages"], served.tokenizer, tools)
    given = {name: _take(body, name, int, None) for name in ("max_tokens", "max_completion_tokens")}
    tokens = next((tokens for tokens in given.values() if tokens is not None), None)
    most = served.context if tokens is None else tokens
    asked: dict[str, Any] = {"logprobs": (top or 0) if wants else None, "adapter": adapter}
    sampling = _sampling(body, tools, max_new_tokens=most, **asked)
    if sampling.n > served.most_samples:
        raise bad("n", f"must be at most {served.most_samples}, the number of samples that may run and wait")
    token_ids, priority = _take(body, "return_token_ids", bool, False), _take(body, "priority", int, 0)
    more: dict[str, Any] = {"token_ids": token_ids, "priority": priority, "open_ended": tokens is None, "tools": tools}
    return _checked(Wanted((), sampling, True, stream, usage, each, **more), [ids], body, "messages", served)


def tokenize(body: Mapping[str, object], served: Served) -> list[int]:
    """Returns the token ids for POST /tokenize, as in vLLM. BOS is added unless add_special_tokens is false."""
    check_fields(body, {"model", "prompt", "add_special_tokens"}, {})
    text = _take(body, "prompt", str, None)
    if text is None:
        raise bad("prompt", "is missing")
    return _tokenizer(served).encode(text, _take(body, "add_special_tokens", bool, True))


def detokenize(body: Mapping[str, object], served: Served) -> str:
    """Returns the text for POST /detokenize, as in vLLM."""
    check_fields(body, {"model", "tokens"}, {})
    tokens = _take(body, "tokens", list, [])
    if not all(_is(token, int) for token in tokens):
        raise bad("tokens", "must be a list of integers")
    return _tokenizer(served).decode(tokens)


def _chat_ids(messages: Any, tokenizer: Tokenizer, tools: Tools | None) -> list[int]:
    try:
        return tokenizer.encode(tokenizer.chat(messages, tools.functions if tools else None), add_bos=False)
    except TokenizerError as error:
        raise HttpError(400, str(error), param="messages") from None


def _tokenizer(served: Served) -> Tokenizer:
    if served.tokenizer is None:
        raise TokenizerError("this model has no tokenizer")
    return served.tokenizer


# Parts of a body


def _no_constant(name: str) -> float:
    raise ValueError(f"JSON has no {name}")  # Python reads NaN and Infinity, but JSON has neither


def _each_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise HttpError(400, f"{shown(twice)} occurs twice in one object of the body", param=twice[:60])
    return found


def _is(value: object, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _take(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any) -> Any:
    """Returns a field, or the default. Raises HttpError for a wrong type."""
    value = body.get(name, default)
    if name in body and not _is(value, kind):
        kinds = " or ".join(dict.fromkeys(NAMES[each] for each in (kind if isinstance(kind, tuple) else (kind,))))
        raise bad(name, f"must be {'a number' if kind == NUMBER else kinds}, not {shown(value)}")
    return value


def _adapter(body: Mapping[str, object], served: Served) -> str | None:
    """Returns the adapter in the model's name, or None for the model alone."""
    name = _take(body, "model", str, served.name)
    if name not in served.models:
        rest = "is" if not served.adapters else f"is, with adapters {', '.join(served.adapters)} after a colon"
        text = f"the model {shown(name)} is not served here, but {shown(served.name)} {rest}"
        raise HttpError(404, text, param="model", code="model_not_found")
    return None if name == served.name else name.removeprefix(f"{served.name}:")


def _streaming(body: Mapping[str, object]) -> tuple[bool, bool, bool]:
    """Returns whether to stream, and whether to send usage at the end and in each chunk."""
    stream, given = _take(body, "stream", bool, False), _take(body, "stream_options", dict, {})
    asked = {name: value for name, value in given.items() if value is not None}
    for name, value in asked.items():
        if name not in STREAM_OPTIONS:
            raise bad("stream_options", f"{shown(name)} is not served; {' and '.join(STREAM_OPTIONS[:2])} are")
        if not isinstance(value, bool):
            raise bad("stream_options", f"{name} must be true or false, not {shown(value)}")
    if asked.get("include_obfuscation"):
        raise bad("stream_options", "include_obfuscation is not served: chunks are as long as their texts")
    if any(asked.values()) and not stream:
        raise bad("stream_options", "needs stream to be true")
    return stream, *(asked.get(name, False) for name in STREAM_OPTIONS[:2])


def _sampling(body: Mapping[str, Any], tools: Tools | None = None, **more: Any) -> SamplingParams:
    given = {ours: _take(body, name, kind, None) for name, (ours, kind) in SAMPLING.items() if name in body}
    tokens = given["max_new_tokens"] = more.pop("max_new_tokens")
    if tokens < 1:
        field = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
        raise bad(field, f"must be an integer >= 1, not {tokens}")
    if "seed" in given:
        given["seed"] = _seed(given["seed"])
    if given.get("top_k") == -1:
        given["top_k"] = 0  # vLLM's value for off
    if isinstance(given.get("stop"), list) and len(given["stop"]) > MOST_STOPS:
        raise bad("stop", f"at most {MOST_STOPS} strings, not {len(given['stop'])}")
    if given.get("stop") == "":
        del given["stop"]
    guides = list(_guides(body))
    if len(guides) > 1:
        raise bad(guides[1][0], f"and {guides[0][0]} cannot go together: give one")
    for field, make in guides if tools is None else tools.guides(guides):
        try:
            given["guide"] = make()
        except RequestError as error:
            raise bad(field, str(error)) from None
    try:
        if "logit_bias" in given:
            given["logit_bias"] = bias_by_id(given["logit_bias"])
        return SamplingParams(**given, **more)
    except RequestError as error:
        raise _of_field(error, body, None) from None


def _checked(
    wanted: Wanted, prompts: Sequence[Prompt], body: Mapping[str, object], field: str, served: Served
) -> Wanted:
    """Returns the request with the prompts' ids, after the engine's checks. The guide is left out, since that takes
    longer. `field` is the name of the prompts' field."""
    name = _take(body, "inputs", str, None)
    if name is not None and served.inputs is None:
        raise bad("inputs", "are not served here: start the server with --inputs DIR")
    try:
        ids = tuple(token_ids(prompt, served.tokenizer) for prompt in prompts)
        inputs = None if name is None or served.inputs is None else served.inputs(name)
        wanted = replace(wanted, prompts=ids, inputs=inputs)
        for prompt, sampling in wanted.requests(served.context):
            served.check(prompt, replace(sampling, guide=None))
    except TooLongError as error:
        tokens = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
        alone = tokens not in body or max(map(len, ids)) >= served.context
        raise HttpError(400, str(error), param=field if alone else tokens, code=TOO_LONG) from None
    except (RequestError, TokenizerError) as error:
        raise _of_field(error, body, field) from None
    return wanted


def of_guide(error: RequestError, wanted: Wanted, body: Mapping[str, object]) -> HttpError:
    """Returns the error of a guide, with the field that defined it."""
    names = (*GUIDES, "response_format", "structured_outputs", "text")
    given = ["tools"] if wanted.tools and wanted.tools.held else [name for name in names if name in body]
    return HttpError(400, str(error), param=next(iter(given), None))


def _of_field(error: JllmError, body: Mapping[str, object], field: str | None) -> HttpError:
    """Returns an engine's error with the body's field that caused it, or else `field`."""
    first = str(error).partition(" ")[0].rstrip(":")
    names = [name for name, (ours, _) in SAMPLING.items() if ours == first] + [first]
    return HttpError(400, str(error), param=next((name for name in names if name in body), field))


def _guides(body: Mapping[str, object]) -> Iterator[tuple[str, Callable[[], Guide]]]:
    """Yields the fields that constrain the text, each with a function that makes its guide."""
    asked = _take(body, "response_format", dict, {"type": "text"})
    kind, schema = asked.get("type"), asked.get("json_schema")
    only = partial(check_only, error=partial(bad, "response_format"))
    only(asked, ("type", "json_schema") if kind == "json_schema" else ("type",), "response_format")
    if kind == "json_object":
        yield "response_format", Guide.json
    elif kind == "json_schema":
        if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
            raise bad("response_format", 'json_schema must be an object like {"name": "cat", "schema": {...}}')
        only(schema, ("name", "description", "schema", "strict"), "json_schema")
        yield "response_format", partial(Guide.json, schema["schema"])
    elif kind != "text":
        raise bad("response_format", f"type must be text, json_object or json_schema, not {shown(kind)}")
    nested = _take(body, "structured_outputs", dict, {})
    for name in nested:
        if f"guided_{name}" not in GUIDES:
            raise bad("structured_outputs", f"{shown(name)} is not served; json, regex, choice and grammar are")
    for name, (make, kinds) in GUIDES.items():
        if name in body:
            yield name, partial(make, _take(body, name, kinds, None))
        if (value := nested.get(name.removeprefix("guided_"))) is not None:
            if not _is(value, kinds):
                raise bad("structured_outputs", f"{name.removeprefix('guided_')} must be {NAMES[kinds[0]]}")
            yield "structured_outputs", partial(make, value)


def _seed(given: int) -> int:
    """Returns the engine's seed for one of 64 bits, signed or unsigned."""
    if not -(2**63) <= given < 2**64:
        raise bad("seed", f"must be an integer of 64 bits, not {shown(given)}")
    return given % 2**32


def _prompts(given: object) -> list[Prompt]:
    """Returns the prompts of a text, a list of token ids, or a list of either."""
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list) or not given:
        raise bad("prompt", "must be text, a list of token ids, or a non-empty list of either")
    if all(_is(each, int) for each in given):
        return [given]
    for prompt in given:
        ids = isinstance(prompt, list) and all(_is(each, int) for each in prompt)
        if not (isinstance(prompt, str) or ids):
            raise bad("prompt", f"must be text, a list of token ids, or a list of either; one is {shown(prompt)}")
    return given
