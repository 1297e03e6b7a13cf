"""Finds tool calls in an answer's text as it arrives. The result does not depend on how the text is cut into pieces."""

import json
import re
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from typing import NamedTuple

from jllm.files.tokenizer import Tokenizer
from jllm.serve.tool_formats import ARGS, CALL_ID, CALLS, PYTHON, Format

HIDDEN = 0xD800  # hidden tokens become lone surrogates in the parsed text, where no text has them
MARKS = re.compile("[\ud800-\udfff]")
MEMBERS = {"name", "arguments", "parameters", "id", "type"}  # of an object that is a call
SPACE = re.compile(r"[ \t\r\n]*")
CALL_LETTERS = re.compile(r"[A-Za-z0-9]{0,32}")  # a call's id in Mistral's format

type Waits[T] = Generator[None, None, T]  # yields if it needs more text


class Part(NamedTuple):
    """Is a piece of an answer: text, the beginning of a call (with its name), or more of a call's arguments."""

    text: str = ""
    call: int | None = None  # index from 0
    name: str | None = None
    arguments: str = ""


class Shown:
    """Puts a format's hidden tokens, which text leaves out, back in their places."""

    def __init__(self, hidden: Mapping[str, int], tokenizer: Tokenizer | None, before: Sequence[int]):
        self._marks = {id: mark_of(token, hidden) for token, id in hidden.items()}
        self._decoder = tokenizer.stream_decoder(before) if tokenizer and hidden else None
        self._made = self._given = 0  # letters decoded from tokens, and letters of text
        self._due: deque[tuple[int, str]] = deque()  # marks, with the number of letters before each

    def push(self, tokens: Sequence[int], text: str) -> str:
        """Takes new tokens, and new text that may lag behind them. Returns the text with its marks."""
        if self._decoder is None:
            return text
        for token in tokens:
            if token in self._marks:
                self._due.append((self._made, self._marks[token]))
            else:
                self._made += len(self._decoder.push(token))
        parts, at, before = [], 0, self._given
        self._given += len(text)
        while self._due and self._due[0][0] <= self._given:
            place, mark = self._due.popleft()
            parts += [text[at : max(at, place - before)], mark]
            at = max(at, place - before)
        return "".join([*parts, text[at:]])


def mark_of(token: str, hidden: Mapping[str, int]) -> str:
    """Returns a token's form in the parsed text."""
    return chr(HIDDEN + list(hidden).index(token)) if token in hidden else token


class Nesting:
    """Finds the end of a JSON object. It reads each letter once."""

    def __init__(self) -> None:
        self._depth, self._quoted, self._escaped = 0, False, False

    def read(self, text: str, start: int) -> int | None:
        """Reads a text from `start` on. Returns the place after the object, or None if it does not end there."""
        for i in range(start, len(text)):
            letter = text[i]
            if self._quoted:
                self._quoted = self._escaped or letter != '"'
                self._escaped = letter == "\\" and not self._escaped
            elif letter == '"':
                self._quoted = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "]}":
                self._depth -= 1
                if self._depth <= 0:
                    return i + 1
        return None


def read_call(text: str, names: Sequence[str]) -> tuple[str, str] | None:
    """Returns the name and the arguments of an object that calls one of these functions, or None."""
    found: dict[str, tuple[int, int]] = {}
    decoder, at = json.JSONDecoder(), 0
    try:
        whole = json.loads(text, parse_constant=_no_constant)
        while not found or text[at] != "}":
            key, end = decoder.raw_decode(text, _after_space(text, at + 1))
            start = _after_space(text, _after_space(text, end) + 1)  # after the colon
            if key in found:
                return None
            found[key] = start, decoder.raw_decode(text, start)[1]
            at = _after_space(text, found[key][1])
    except (ValueError, RecursionError):
        return None
    given = [key for key in ("arguments", "parameters") if key in whole]
    if whole.get("name") not in names or len(given) != 1 or not whole.keys() <= MEMBERS:
        return None
    value = whole[given[0]]
    arguments = value if isinstance(value, str) else text[slice(*found[given[0]])]  # some models quote the object
    return (whole["name"], arguments) if isinstance(_value(arguments), dict) else None


def _value(text: str) -> object:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None


def _no_constant(name: str) -> float:
    raise ValueError(name)


def _after_space(text: str, at: int) -> int:
    return SPACE.match(text, at).end()  # type: ignore[union-attr]  # it always matches


class CallParser:
    """Parses one answer.

    held: a guide holds calls to their form, so arguments are returned as they arrive. Other calls are held back until
    they are complete, as they may turn out to be text. White space alone beside calls is dropped.
    """

    def __init__(self, form: Format, names: Sequence[str], hidden: Mapping[str, int], *, held: bool):
        self._form, self._names, self._held = form, names, held
        self._mark = mark_of(form.mark or "", hidden)
        self._tag, self._id, self._args = (mark_of(token, hidden) for token in (PYTHON, CALL_ID, ARGS))
        self._tail = mark_of(form.tail.removeprefix("}").strip(), hidden)
        self._follows = (self._tail,) if self._tail else (",", "]") if form.mark == CALLS else (";", ",", "{")
        self._rest, self._last = "", False
        self._out: list[Part] = []
        self._calls = 0
        self._white, self._spoken = "", False  # text since the last call: white space; whether it has more
        self._run = self._answer()
        next(self._run)

    def push(self, text: str, last: bool = False) -> list[Part]:
        """Takes more text (`last`: the final piece). Returns the parts that will not change."""
        self._rest, self._last = self._rest + text, last
        next(self._run, None)
        if last and not self._calls and self._white:
            self._out.append(Part(self._white))
        found, self._out = self._out, []
        return found

    def _answer(self) -> Waits[None]:
        yield
        if not self._mark:
            tag = yield from self._expect(0, (self._tag,))
            yield from self._list(tag[1] if tag else 0)
        while self._mark and (yield from self._to_mark()):
            before, start = self._calls, len(self._mark)
            if self._form.mark == CALLS:
                yield from self._mistral(start)
            else:
                yield from self._call(start)
            if self._calls == before:
                self._say_or_cut(len(self._rest) if self._last else start, start)
        while not self._last or self._rest:
            self._say(len(self._rest))
            yield

    def _to_mark(self) -> Waits[bool]:
        """Returns whether a mark follows. Emits the text before it, so the rest then begins with the mark."""
        while (at := self._rest.find(self._mark)) < 0:
            kept = max(map(self._begun, (self._mark, self._tail) if self._last else (self._mark,)))
            self._say(len(self._rest) - kept)
            if self._last:
                self._say_or_cut(kept, kept)
                return False
            yield
        self._say(at)
        return True

    def _begun(self, word: str) -> int:
        """Returns how many letters at the end of the rest are an incomplete beginning of `word`."""
        sizes = range(min(len(word) - 1, len(self._rest)), 0, -1)
        return next((n for n in sizes if word.startswith(self._rest[-n:])), 0)

    def _say_or_cut(self, cut: int, said: int) -> None:
        """Drops the unfinished beginning of a mark, call or tail if a guide holds calls. Otherwise emits it as text."""
        if self._held and self._last and self._calls and not self._spoken:
            self._rest = self._rest[cut:]
        else:
            self._say(said)

    def _mistral(self, at: int) -> Waits[None]:
        """Reads a list of calls, or one call by name, after Mistral's mark."""
        heads = {name + mark: name for name in self._names for mark in (self._args, self._id, "{")}
        found = yield from self._expect(at, ("[", *heads))
        if found and found[0] == "[":
            yield from self._list(found[1])
        elif found:
            name, at = heads[found[0]], found[1] - found[0].endswith("{")
            if found[0] == name + self._id:
                while (end := CALL_LETTERS.match(self._rest, at).end()) == len(self._rest) and not self._last:  # type: ignore[union-attr]
                    yield
                after = yield from self._expect(end, (self._args,))
                if after is None:
                    return
                at = after[1]
            yield from self._arguments(name, at)

    def _list(self, at: int) -> Waits[None]:
        """Reads calls until something else follows."""
        while (yield from self._call(at)) and (found := (yield from self._expect(0, self._follows))):
            at = found[1] - (found[0] == "{")
            if found[0] == "]":
                self._rest = self._rest[at:]
                return

    def _call(self, at: int) -> Waits[bool]:
        """Reads a call off the rest. Returns whether there was one."""
        heads = {self._form.head(name).lstrip(): name for name in self._names} if self._held else {}
        if heads and (head := (yield from self._expect(at, tuple(heads)))):
            yield from self._stream(heads[head[0]], head[1])
            found = yield from self._expect(0, ("}",))
            if found and self._tail:
                found = (yield from self._expect(found[1], self._follows)) or found
            self._rest = self._rest[found[1] if found else 0 :]
            return True
        end = yield from self._object(at)
        call = end and read_call(self._rest[_after_space(self._rest, at) : end], self._names)
        if not (end and call):
            return False
        after = yield from self._expect(end, self._follows)
        if after is None and self._rest[end:].strip():
            return False
        self._begin(call[0])
        self._out.append(Part(call=self._calls - 1, arguments=call[1]))
        self._rest = self._rest[after[1] if after and self._tail else end :]
        return True

    def _arguments(self, name: str, at: int) -> Waits[None]:
        if self._held:
            yield from self._stream(name, at)
        elif end := (yield from self._object(at)):
            text = self._rest[_after_space(self._rest, at) : end]
            if read_call(f'{{"name": {json.dumps(name)}, "arguments": {text}}}', self._names):
                self._begin(name)
                self._out.append(Part(call=self._calls - 1, arguments=text))
                self._rest = self._rest[end:]

    def _stream(self, name: str, at: int) -> Waits[None]:
        self._begin(name)
        self._rest = self._rest[at:]
        nesting, end = Nesting(), None
        while True:
            end = nesting.read(self._rest, 0)
            if piece := self._rest[:end]:
                self._out.append(Part(call=self._calls - 1, arguments=piece))
            self._rest = self._rest[len(piece) :]
            if end is not None or self._last:
                return
            yield

    def _object(self, at: int) -> Waits[int | None]:
        """Returns the place after an object, or None if none begins here."""
        found = yield from self._expect(at, ("{",))
        if found is None:
            return None
        nesting, seen = Nesting(), found[1] - 1
        while (end := nesting.read(self._rest, seen)) is None and not self._last:
            seen = len(self._rest)
            yield
        return end

    def _expect(self, at: int, texts: Sequence[str]) -> Waits[tuple[str, int] | None]:
        """Returns the text of `texts` that comes next, after white space, and the place after it."""
        longest = max(map(len, texts), default=0)
        while True:
            start = _after_space(self._rest, at)
            there = self._rest[start : start + longest]
            if found := next((text for text in texts if there.startswith(text)), None):
                return found, start + len(found)
            if self._last or not any(text.startswith(there) for text in texts):
                return None
            yield

    def _begin(self, name: str) -> None:
        self._white, self._spoken = "", False
        self._out.append(Part(call=self._calls, name=name))
        self._calls += 1

    def _say(self, length: int) -> None:
        """Emits this much of the rest as text."""
        text = self._white + MARKS.sub("", self._rest[:length])
        self._rest, self._white = self._rest[length:], ""
        if not self._spoken and not text.strip():
            self._white = text
        elif text:
            self._spoken = True
            self._out.append(Part(text))
