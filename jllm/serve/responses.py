"""Serves POST /v1/responses as a chat, and answers with items and typed events."""

import re
import secrets
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from jllm.engine.request import Completion, Event
from jllm.files.messages import check_only, shown
from jllm.serve.answers import Answer, ending
from jllm.serve.errors import HttpError, bad, http_error
from jllm.serve.fields import BOTH, CHAT, Neutral, check_fields, one_of
from jllm.serve.requests import SAMPLING, Served, Wanted, chat
from jllm.serve.talk import Talk
from jllm.serve.tool_parser import Part

SAME = {"model", "stream", "user", "tool_choice", "parallel_tool_calls", "priority", "inputs", *SAMPLING} - {
    "n",
    "max_tokens",
}
FIELDS = SAME | {"input", "instructions", "text", "tools", "max_output_tokens"}
CHAT_NAMES = {"messages": "input", "response_format": "text", "max_completion_tokens": "max_output_tokens"}
REASONING = ["reasoning.encrypted_content"]  # requested by clients, but never returned


def _asks(value: object) -> bool:
    return value not in (None, "none")


NEUTRAL: Mapping[str, Neutral] = {
    **{name: BOTH[name] for name in ("metadata", "safety_identifier", "prompt_cache_key", "service_tier", "store")},
    "background": one_of(False),
    "truncation": one_of("disabled"),
    "top_logprobs": one_of(0),
    "include": one_of([], REASONING),
    "reasoning": Neutral(
        lambda value: isinstance(value, dict) and not any(map(_asks, value.values())), "without effort or summary"
    ),
    "stream_options": one_of({}, {"include_obfuscation": False}),
    **{name: CHAT[name] for name in ("prompt_cache_retention", "prompt_cache_options")},
}
TEXTS = ("input_text", "output_text", "text")  # types of text parts
MESSAGE = re.compile(r"^messages\[(\d+)\](?:\.tool_calls\[(\d+)\](?:\.function)?)?")  # in errors of chats
ITEMS = ("message", "function_call", "function_call_output")
LEFT_OUT_OF_ITEMS = ("id", "status", "parsed_arguments")  # of returned items: accepted, and ignored


def response(body: Mapping[str, object], served: Served) -> Wanted:
    """Parses the body as a chat. Errors have the body's own field names."""
    if "previous_response_id" in body:
        why = "is not served, since nothing is stored: send the items of earlier answers in input"
        raise bad("previous_response_id", why)
    check_fields(body, FIELDS, NEUTRAL)
    messages, places = _messages(body)
    asked = {name: body[name] for name in SAME if name in body} | {"messages": messages}
    asked |= {"max_completion_tokens": body["max_output_tokens"]} if "max_output_tokens" in body else {}
    asked |= {"response_format": _format(body["text"])} if "text" in body else {}
    asked |= {"tools": _tools(body["tools"])} if "tools" in body else {}
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and "name" in choice:
        asked["tool_choice"] = {"type": choice.get("type"), "function": {"name": choice["name"]}}
    try:
        return replace(chat(asked, served), response=body)
    except HttpError as error:
        text = MESSAGE.sub(lambda found: places[int(found[1])][int(found[2] or -1) + 1], str(error))
        text = re.sub(r"(tools\[\d+\])\.function\b", r"\1", text)
        text = re.sub(r"^(input\[\d+\])\.(?:tool_call_)?id\b", r"\1.call_id", text)
        for name, ours in CHAT_NAMES.items():
            text = re.sub(rf"^{name}\b", ours, text)
        param = CHAT_NAMES.get(error.param or "", error.param)
        raise HttpError(error.status, text, param=param, code=error.code, headers=error.headers) from None


def _messages(body: Mapping[str, object]) -> tuple[list[dict[str, object]], list[list[str]]]:
    """Returns the messages of a chat, and the places of each and of its calls in the body."""
    given, messages, places = body.get("input"), list[dict[str, Any]](), list[list[str]]()
    if (said := body.get("instructions")) is not None:
        if not isinstance(said, str):
            raise bad("instructions", f"must be text, not {shown(said)}")
        messages, places = [{"role": "system", "content": said}], [["instructions"]]
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}], [*places, ["input"]]
    if not isinstance(given, list) or not given:
        raise bad("input", "must be text, or a list of items that is not empty")
    for i, item in enumerate(given):
        message = _message(item, f"input[{i}]")
        calls = message.get("tool_calls")
        if calls and messages and messages[-1]["role"] == "assistant":  # one answer may be several items
            messages[-1].setdefault("tool_calls", []).extend(calls)
            places[-1].append(f"input[{i}]")
        else:
            messages.append(message)
            places.append([f"input[{i}]"] * (2 if calls else 1))
    return messages, places


def _message(item: Any, where: str) -> dict[str, Any]:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    only = partial(check_only, left_out=LEFT_OUT_OF_ITEMS, error=partial(bad, "input"))
    if kind == "message":
        only(item, ("type", "role", "content"), where)
        return {"role": item.get("role"), "content": _content(item.get("content"), f"{where}.content")}
    if kind == "function_call":
        only(item, ("type", "call_id", "name", "arguments"), where)
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        only(item, ("type", "call_id", "output"), where)
        if not isinstance(output := _content(item.get("output"), f"{where}.output"), str | list):
            raise bad("input", f"{where}.output must be text, or a list of text parts, not {shown(output)}")
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    raise bad("input", f"{where} must be an item of the type {', '.join(ITEMS)}, not {shown(item)}")


def _content(content: object, where: str) -> object:
    """Returns content in the form of chats, which check it further."""
    if not isinstance(content, list):
        return content
    for i, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") not in TEXTS:
            raise bad("input", f"{where}[{i}] must be a part of the type {', '.join(TEXTS)}, not {shown(part)}")
    return [{"type": "text", "text": part.get("text")} for part in content]


def _format(text: object) -> dict[str, object]:
    """Returns the equivalent response_format of a chat."""
    if not isinstance(text, dict):
        raise bad("text", f"must be an object, not {shown(text)}")
    for name, value in text.items():
        if name != "format" and not (name == "verbosity" and value in (None, "medium")):
            raise bad("text", f"{shown(name)} is not served there; format is")
    found = text.get("format") or {"type": "text"}
    if not isinstance(found, dict) or found.get("type") != "json_schema":
        return found
    return {"type": "json_schema", "json_schema": {name: found[name] for name in found if name != "type"}}


def _tools(tools: object) -> object:
    if not isinstance(tools, list):
        return tools
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def _tool(tool: object, where: str) -> dict[str, object]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        example = '{"type": "function", "name": "...", "parameters": {...}}'
        raise bad("tools", f"{where} must be an object like {example}: only tools of the type function are served")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


class Response(Answer):
    """Is the answer to one body, as a whole or in typed events. It has the items of one sample."""

    done = b""

    def __init__(self, wanted: Wanted, served: Served):
        super().__init__(wanted, served)
        asked, sampling = wanted.response or {}, wanted.sampling
        repeated: dict[str, object] = {
            "instructions": None,
            "max_output_tokens": None,
            "metadata": {},
            "tool_choice": "auto",
            "tools": [],
        }
        repeated |= {"parallel_tool_calls": True, "user": None}
        self._response: dict[str, Any] = {
            "id": _id("resp"),
            "object": "response",
            "created_at": self._head["created"],
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": self._head["model"],
            "output": [],
            "previous_response_id": None,
            "background": False,
            "store": False,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "text": {"format": {"type": "text"}} | asked.get("text", {}),
            "truncation": "disabled",
            "usage": None,
            **{name: asked.get(name, default) for name, default in repeated.items()},
        }
        self._talk = Talk(wanted.tools, self._tokenizer, wanted.prompts[0]) if wanted.tools else None
        self._items: list[dict[str, Any]] = []
        self._sent = 0  # events sent

    def whole(self) -> dict[str, object]:
        """Returns the response, once its sample has ended."""
        (done,) = self._done.values()
        self.chunks(Event(0, 0, done.text or "", done.token_ids, done))
        return self._response

    def chunks(self, event: Event) -> list[dict[str, object]]:
        """Returns the stream's events for one of the engine's."""
        done, found = event.completion, list[dict[str, object]]()
        if not self._sent:
            found += [self._event("created"), self._event("in_progress")]
        talk, text = self._talk, [Part(event.text)] if event.text else []
        for part in talk.say(event.token_ids, event.text, done is not None) if talk else text:
            found += self._more(part)
        if done:
            found += self._end(done)
        return found

    def last_chunks(self) -> list[dict[str, object]]:
        return []

    def failed(self, error: Exception) -> dict[str, object]:
        code = "server_error"
        self._response |= {"status": "failed", "error": {"code": code, "message": str(http_error(error))}}
        return self._event("failed")

    def _event(self, kind: str, **more: object) -> dict[str, object]:
        self._sent += 1
        if not more:
            more = {"response": dict(self._response)}
        return {"type": f"response.{kind}", "sequence_number": self._sent - 1, **more}

    def _of_item(self, kind: str, **more: object) -> dict[str, object]:
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return self._event(kind, **place, **more)

    def _more(self, part: Part) -> list[dict[str, object]]:
        """Returns the events that begin or extend an item."""
        found = []
        item: dict[str, Any] = self._items[-1] if self._items else {"type": None}
        if part.name is not None or (part.call is None and item["type"] != "message"):
            found += self._close("completed")
            found += self._open(part.name)
        item = self._items[-1]
        if part.call is None:
            item["content"][0]["text"] += part.text
            found.append(self._of_item("output_text.delta", content_index=0, delta=part.text, logprobs=[]))
        elif part.name is None:
            item["arguments"] += part.arguments
            found.append(self._of_item("function_call_arguments.delta", delta=part.arguments))
        return found

    def _open(self, name: str | None) -> list[dict[str, object]]:
        """Begins a function call, or a message."""
        item: dict[str, object]
        if name is not None and self._talk:
            call = {"call_id": self._talk.new_id(), "name": name, "arguments": ""}
            item = {"id": _id("fc"), "type": "function_call", "status": "in_progress", **call}
            self._items.append(item)
            return [self._event("output_item.added", output_index=len(self._items) - 1, item=dict(item))]
        item = {"id": _id("msg"), "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        self._items.append(item)
        added = self._event("output_item.added", output_index=len(self._items) - 1, item=dict(item))
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item["content"] = [part]
        return [added, self._of_item("content_part.added", content_index=0, part=dict(part))]

    def _close(self, status: str) -> list[dict[str, object]]:
        """Ends the open item, if there is one."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return []
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "message":
            (part,) = item["content"]
            found = [
                self._of_item("output_text.done", content_index=0, text=part["text"], logprobs=[]),
                self._of_item("content_part.done", content_index=0, part=part),
            ]
        else:
            more = {"name": item["name"], "arguments": item["arguments"]}
            found = [self._of_item("function_call_arguments.done", **more)]
        return [*found, self._event("output_item.done", output_index=len(self._items) - 1, item=item)]

    def _end(self, done: Completion) -> list[dict[str, object]]:
        end = ending(self._reason(done, (0, 0)))
        cut = end.pop("finish_reason") == "length"
        status = "incomplete" if cut else "completed"
        found = [] if self._items else self._open(None)
        found += self._close(status)
        self._response |= {"status": status, "output": self._items, "usage": self._usage()} | end
        if cut:
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        return [*found, self._event(status)]

    def _usage(self) -> dict[str, object]:
        usage = self.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"


def answer_to(wanted: Wanted, served: Served) -> Answer:
    """Returns an empty answer of the kind that the body requested."""
    return Answer(wanted, served) if wanted.response is None else Response(wanted, served)
