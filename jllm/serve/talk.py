"""Splits a sample into text and tool calls."""

import secrets
from collections.abc import Sequence
from typing import Any

from jllm.files.tokenizer import Tokenizer
from jllm.serve.tool_formats import CALLS
from jllm.serve.tool_parser import Part, Shown
from jllm.serve.tools import Tools


class Talk:
    """Holds the text and tool calls of one sample, from its events or all at once."""

    def __init__(self, tools: Tools, tokenizer: Tokenizer | None, prompt: Sequence[int]):
        self._shown, self._parser = Shown(tools.hidden, tokenizer, prompt), tools.parser()
        self._short = tools.form.mark == CALLS
        self.calls = 0

    def say(self, tokens: Sequence[int], text: str, last: bool) -> list[Part]:
        """Takes more tokens and text, and returns the parts that will not change."""
        parts = self._parser.push(self._shown.push(tokens, text), last)
        self.calls += sum(part.name is not None for part in parts)
        return parts

    def call(self, part: Part) -> dict[str, object]:
        """Returns the beginning or the next piece of a call, in the form of chats."""
        if part.name is None:
            return {"function": {"arguments": part.arguments}}
        return {"id": self.new_id(), "type": "function", "function": {"name": part.name, "arguments": ""}}

    def new_id(self) -> str:
        """Returns a new call id. Mistral's templates require exactly nine letters and digits."""
        return secrets.token_hex(12)[:9] if self._short else f"call_{secrets.token_hex(12)}"

    def whole(self, tokens: Sequence[int], text: str) -> tuple[str | None, list[dict[str, object]]]:
        """Returns the text and the calls of a sample. Empty text beside calls becomes None."""
        said, calls = "", list[dict[str, Any]]()
        for part in self.say(tokens, text, last=True):
            said += part.text
            if part.name is not None:
                calls.append(self.call(part))
            elif part.call is not None:
                calls[part.call]["function"]["arguments"] += part.arguments
        return said or (None if calls else ""), calls
