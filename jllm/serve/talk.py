"""Reads one sample that may call tools: text, and calls with their ids."""

import secrets
from collections.abc import Sequence
from typing import Any

from jllm.files.tokenizer import Tokenizer
from jllm.serve.tool_formats import CALLS
from jllm.serve.tool_parser import Part, Shown
from jllm.serve.tools import Tools


class Talk:
    """Takes what a sample's events have, or all of it at once."""

    def __init__(self, tools: Tools, tokenizer: Tokenizer | None, prompt: Sequence[int]):
        self._shown, self._parser = Shown(tools.hidden, tokenizer, prompt), tools.parser()
        self._short = tools.form.mark == CALLS
        self.calls = 0

    def say(self, tokens: Sequence[int], text: str, last: bool) -> list[Part]:
        """Takes more tokens and text; returns what is certain by now."""
        parts = self._parser.push(self._shown.push(tokens, text), last)
        self.calls += sum(part.name is not None for part in parts)
        return parts

    def call(self, part: Part) -> dict[str, Any]:
        """Returns a call's beginning, or more of it, as chats have them."""
        if part.name is None:
            return {"function": {"arguments": part.arguments}}
        return {"id": self.new_id(), "type": "function", "function": {"name": part.name, "arguments": ""}}

    def new_id(self) -> str:
        """Makes an id of a call. Mistral's templates refuse any that are not of nine letters and digits."""
        return secrets.token_hex(12)[:9] if self._short else f"call_{secrets.token_hex(12)}"

    def whole(self, tokens: Sequence[int], text: str) -> tuple[str | None, list[dict[str, Any]]]:
        """Returns the text and the calls of a sample; no text beside calls is None."""
        said, calls = "", list[dict[str, Any]]()
        for part in self.say(tokens, text, last=True):
            said += part.text
            if part.name is not None:
                calls.append(self.call(part))
            elif part.call is not None:
                calls[part.call]["function"]["arguments"] += part.arguments
        return said or (None if calls else ""), calls
