"""Writes the engine's events as the OpenAI API has them. Functions only build objects; nothing is sent here."""

import codecs
import math
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jllm.engine.request import Completion, Event, TokenLogprob
from jllm.files.tokenizer import Tokenizer
from jllm.serve.errors import HttpError, http_error
from jllm.serve.requests import Served, Wanted
from jllm.serve.talk import Talk
from jllm.serve.tool_parser import Part

CUT = ("deadline", "abort")  # engine finish reasons that the API lacks: reported as "length", with end_reason
LEAST = -9999.0  # replaces log-probabilities that JSON cannot write, as in vLLM


class Answer:
    """Is the answer to one body, as a whole or in chunks of the same id."""

    done = b"data: [DONE]\n\n"  # the end of a stream

    def __init__(self, wanted: Wanted, served: Served):
        self._wanted, self._tokenizer = wanted, served.tokenizer
        kind = "chat.completion" if wanted.chat else "text_completion"
        self._chunk_kind = f"{kind}.chunk" if wanted.chat else kind
        self._head = {
            "id": ("chatcmpl-" if wanted.chat else "cmpl-") + secrets.token_hex(12),
            "object": kind,
            "created": int(time.time()),
            "model": served.name_with(wanted.sampling.adapter),
        }
        self._done: dict[tuple[int, int], Completion] = {}
        self._begun: dict[tuple[int, int], Offsets] = {}  # samples with at least one chunk
        self._talks: dict[tuple[int, int], Talk] = {}  # samples that may call tools
        self._streamed = 0  # tokens streamed so far

    def add(self, event: Event) -> None:
        """Records the end of a sample. Raises HttpError if the sample failed."""
        if event.completion is not None:
            if event.completion.finish_reason == "error":
                why = "its logits were not finite, or a step could not be run"
                if self._wanted.sampling.guide is not None:
                    why = f"its guide had no way on, {why}"
                raise HttpError(500, f"the model failed: {why}")
            self._done[event.id, event.sample] = event.completion

    def whole(self) -> dict[str, object]:
        """Returns the answer with all samples, once every sample has ended."""
        choices = [self._choice(*key, completion) for key, completion in sorted(self._done.items())]
        return {**self._head, "choices": choices, "usage": self.usage()}

    def chunks(self, event: Event) -> list[dict[str, object]]:
        """Returns the chunks that an event adds to a stream."""
        wanted, key, done = self._wanted, (event.id, event.sample), event.completion
        if wanted.at_once and done:
            self._streamed += len(done.token_ids)
            return [{**self._head, "choices": [self._choice(*key, done)], **self._chunk_usage()}]
        if wanted.at_once or not (event.text or event.token_ids or done):
            return []
        self._streamed += len(event.token_ids)
        first = key not in self._begun
        if first:
            self._begun[key] = Offsets(self._tokenizer, wanted.prompts[event.id])
            if wanted.tools:
                self._talks[key] = Talk(wanted.tools, self._tokenizer, wanted.prompts[event.id])
        offsets = self._begun[key]
        text, tokens = event.text, event.token_ids
        if first and wanted.echo:
            prompt = wanted.prompts[event.id]
            text, tokens = self._text_of(prompt) + text, (*prompt, *tokens)
        talk = self._talks.get(key)
        said = talk.say(tokens, text, done is not None) if talk else [Part(text)]
        logprobs: Any = None if wanted.sampling.logprobs is None else event.logprobs
        if not (said or first or done or logprobs or wanted.token_ids):
            return []
        choice: dict[str, object] = {"index": self._index(*key)}
        if wanted.chat:
            deltas = [self._delta(part, key) for part in said] or [{}]
            choice["delta"] = ({"role": "assistant", "content": None} if first else {}) | deltas.pop(0)
            choice["logprobs"] = None if logprobs is None else chat_logprobs(self._tokenizer, logprobs)
        else:
            deltas = []
            choice["text"] = text
            choice["logprobs"] = None if logprobs is None else text_logprobs(self._tokenizer, logprobs, offsets)
        if wanted.token_ids:
            choice["token_ids"] = tokens
        choices = [choice, *({"index": choice["index"], "delta": delta, "logprobs": None} for delta in deltas)]
        going: dict[str, object] = {"finish_reason": None}
        ends = [going] * len(deltas) + [ending(self._reason(done, key)) if done else going]
        head = {**self._head, "object": self._chunk_kind}
        return [{**head, "choices": [one | end], **self._chunk_usage()} for one, end in zip(choices, ends)]

    def _chunk_usage(self) -> dict[str, object]:
        if self._wanted.usage_of_each:
            return {"usage": self._counts(self._streamed)}
        return {"usage": None} if self._wanted.usage else {}

    def _delta(self, part: Part, key: tuple[int, int]) -> dict[str, object]:
        if part.call is None:
            return {"content": part.text}
        return {"tool_calls": [{"index": part.call, **self._talks[key].call(part)}]}

    def _reason(self, done: Completion, key: tuple[int, int]) -> str:
        talk = self._talks.get(key)
        return "tool_calls" if talk and talk.calls and done.finish_reason == "stop" else done.finish_reason

    def last_chunks(self) -> list[dict[str, object]]:
        """Returns the chunk with the usage and no choice, if it was requested."""
        more = {"choices": [], "usage": self.usage()}
        return [{**self._head, "object": self._chunk_kind, **more}] if self._wanted.usage else []

    def failed(self, error: Exception) -> dict[str, object]:
        """Returns the chunk that ends a stream after an error."""
        return http_error(error).body()

    def usage(self) -> dict[str, int]:
        return self._counts(sum(len(completion.token_ids) for completion in self._done.values()))

    def _counts(self, made: int) -> dict[str, int]:
        prompt, made = sum(map(len, self._wanted.prompts)), made if self._wanted.keep else 0
        return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}

    def _text_of(self, ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            return ""
        decoder = self._tokenizer.stream_decoder()  # accepts the padding ids that a model has beyond the tokenizer's
        return "".join(map(decoder.push, ids)) + decoder.finish()

    def _index(self, prompt: int, sample: int) -> int:
        return prompt * self._wanted.sampling.n + sample

    def _choice(self, prompt: int, sample: int, done: Completion) -> dict[str, object]:
        wanted, tokenizer, ids = self._wanted, self._tokenizer, self._wanted.prompts[prompt]
        text, tokens = (done.text or "", done.token_ids) if wanted.keep else ("", ())
        choice: dict[str, object] = {"index": self._index(prompt, sample)}
        logprobs = None if done.logprobs is None else done.logprobs[: len(tokens)]
        if wanted.chat:
            choice["message"] = {"role": "assistant", "refusal": None, **self._message((prompt, sample), text, tokens)}
            choice["logprobs"] = None if logprobs is None else chat_logprobs(tokenizer, logprobs)
        else:
            offsets = Offsets(tokenizer, () if wanted.echo else ids)
            if wanted.echo:
                text, tokens = self._text_of(ids) + text, (*ids, *tokens)
            choice["text"] = text
            entries = [*prompt_entries(ids, done), *(logprobs or ())]
            choice["logprobs"] = None if logprobs is None else text_logprobs(tokenizer, entries, offsets)
        reason = self._reason(done, (prompt, sample))
        choice |= ending(reason if wanted.keep or reason in CUT else "length")
        if wanted.token_ids:
            choice["token_ids"] = tokens
        return choice

    def _message(self, key: tuple[int, int], text: str, tokens: Sequence[int]) -> dict[str, object]:
        """Returns the text and the tool calls of a sample."""
        if self._wanted.tools is None:
            return {"content": text}
        talk = self._talks[key] = Talk(self._wanted.tools, self._tokenizer, self._wanted.prompts[key[0]])
        said, calls = talk.whole(tokens, text)
        return {"content": said, "tool_calls": calls} if calls else {"content": said}


def ending(reason: str) -> dict[str, str]:
    """Returns how a sample ended, in the API's words."""
    return {"finish_reason": "length", "end_reason": reason} if reason in CUT else {"finish_reason": reason}


class Offsets:
    """Finds the text offset at which each next token begins."""

    def __init__(self, tokenizer: Tokenizer | None, before: Sequence[int]):
        self._decoder = None if tokenizer is None else tokenizer.stream_decoder(before)
        self._length = 0

    def next(self, token: int) -> int:
        at = self._length
        if self._decoder is not None:
            self._length += len(self._decoder.push(token))
        return at


def prompt_entries(ids: Sequence[int], done: Completion) -> list[TokenLogprob]:
    """Returns the log-probability entry of each prompt token, or nothing if they were not requested. The first entry is
    NaN, as no token precedes it."""
    if done.prompt_logprobs is None or done.prompt_best is None:
        return []
    rest = zip(ids[1:], done.prompt_logprobs, done.prompt_best)
    return [TokenLogprob(ids[0], math.nan), *(TokenLogprob(id, p, (best,)) for id, p, best in rest)]


def token_text(tokenizer: Tokenizer | None, token: int) -> tuple[str, list[int] | None]:
    r"""Returns the text of a token, and its bytes. A token with incomplete UTF-8 becomes "bytes:\\xe2\\x80", as OpenAI
    writes it. A token without text becomes "token_id:5", as vLLM writes it."""
    data = b"" if tokenizer is None else tokenizer.vocabulary.piece(token)
    if not data:
        return f"token_id:{token}", None
    try:
        return codecs.decode(data, "utf-8"), list(data)
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), list(data)


def finite(logprob: float) -> float:
    return max(logprob, LEAST) if logprob == logprob else LEAST


def chat_logprobs(tokenizer: Tokenizer | None, entries: Iterable[TokenLogprob]) -> dict[str, object]:
    """Returns log-probabilities in the form of chat completions."""

    def one(token: int, logprob: float) -> dict[str, object]:
        text, data = token_text(tokenizer, token)
        return {"token": text, "logprob": finite(logprob), "bytes": data}

    content = [one(e.token_id, e.logprob) | {"top_logprobs": [one(*each) for each in e.top]} for e in entries]
    return {"content": content, "refusal": None}


def text_logprobs(tokenizer: Tokenizer | None, entries: Sequence[TokenLogprob], offsets: Offsets) -> dict[str, object]:
    """Returns log-probabilities in the form of completions. `top_logprobs` has the likeliest tokens and the drawn one,
    by text."""
    tops: list[Mapping[str, float] | None] = []
    for entry in entries:
        top: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            top.setdefault(token_text(tokenizer, token)[0], finite(logprob))
        tops.append(top if entry.logprob == entry.logprob else None)
    return {
        "tokens": [token_text(tokenizer, entry.token_id)[0] for entry in entries],
        "token_logprobs": [finite(e.logprob) if e.logprob == e.logprob else None for e in entries],
        "top_logprobs": tops,
        "text_offset": [offsets.next(entry.token_id) for entry in entries],
    }
