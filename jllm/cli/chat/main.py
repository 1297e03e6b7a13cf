"""Runs the chat: reads messages and commands, and prints answers."""

import contextlib
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from jllm.cli.arguments import ENGINE_FLAGS, sampling_params
from jllm.cli.chat.arguments import MAX_NEW_TOKENS, parse_args
from jllm.cli.chat.conversation import PLAIN_STOP, Conversation, Message, prompt_ids
from jllm.cli.chat.lines import Lines
from jllm.cli.display import write_stdout
from jllm.cli.generation_config import warn_of_ignored
from jllm.cli.interrupt import INTERRUPTED, Interrupt, catch_interrupts
from jllm.cli.process import compile_cache, drafted, load_model, note, open_streams, run_command
from jllm.engine.request import SamplingParams
from jllm.errors import EngineClosed, JllmError, OutputError, RequestError, counted

if TYPE_CHECKING:
    from jllm.cli.chat.session import Session

HELP = """\
/reset        forget the conversation, except for the system message
/edit [TEXT]  replace the last message by TEXT, and drop its answer
/save FILE    write the conversation and its KV cache to a file
/load FILE    continue from a file
Ctrl-C stops an answer, Ctrl-D ends; python -m jllm.chat --help shows more
"""
ENDS = {
    "abort": "stopped",
    "length": "cut: --max-new-tokens, the model's context or --num-pages has no room for more",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit status."""
    with catch_interrupts() as interrupt, open_streams() as closed:
        args = parse_args(argv)
        return run_command(lambda: _main(args, interrupt, closed))


def _main(args: Namespace, interrupt: Interrupt, closed: Sequence[str]) -> int:
    if "stdout" in closed:
        raise OutputError("standard output is closed, and a chat prints its answers there")
    lines, start = Lines(interrupt), Conversation()
    if args.system is not None:
        start = Conversation((Message("system", args.system),))
    session = _open(args, sampling_params(args, MAX_NEW_TOKENS), start)
    if lines.terminal:
        note("/help lists commands, Ctrl-C stops an answer, Ctrl-D ends")
    try:
        with interrupt.noted() if lines.terminal else contextlib.nullcontext():
            return Chat(session, lines, interrupt, start).run()
    finally:
        session.engine.close()


def _open(args: Namespace, sampling: SamplingParams, start: Conversation) -> "Session":
    """Returns a session whose engine has compiled what the first step needs. The other steps are compiled while the
    user types. All flags are checked; nothing has run."""
    cache = compile_cache(args)
    from jllm.cli.chat.session import Session
    from jllm.engine.engine import Engine
    from jllm.files.find import find_model
    from jllm.files.load import BUNDLED

    folder = find_model(BUNDLED if args.model is None else args.model)
    warn_of_ignored(folder, sampling)
    model = load_model(folder, args)
    if model.tokenizer is None:
        raise RequestError(f"a chat needs a tokenizer: put tokenizer.json or tokenizer.model into {folder}")
    if model.tokenizer.chat_template is None:
        note("this model has no chat template: it is given User: and Assistant: as plain text, and may not answer")
        sampling = replace(sampling, stop=(*sampling.stop, PLAIN_STOP))
    prompt_ids(start.ask("?"), model.tokenizer)  # a template may refuse system messages
    given = {name: getattr(args, name) for name in ENGINE_FLAGS}
    engine = Engine(model, **_sizes(given, sampling), executables=cache)
    engine.compile_ahead([sampling], wait=False)
    return Session(engine, model.tokenizer, sampling, args.max_new_tokens is None)


def _sizes(given: dict, sampling: SamplingParams) -> dict:
    """Returns engine options for one text at a time, mostly with short prompts."""
    from jllm.engine.one_run import options_for_run
    from jllm.step.buckets import Bucket

    options = options_for_run([(256, sampling)], given)
    if all(bucket.tokens == 0 or bucket.tokens > 64 for bucket in options.get("buckets", ())):
        options["buckets"] = (*options["buckets"], Bucket(options["max_slots"], 32, 1))
    return options


@dataclass
class Chat:
    """Holds the conversation so far, and its session."""

    session: "Session"
    lines: Lines
    interrupt: Interrupt
    start: Conversation
    turns: int = 0

    def run(self) -> int:
        """Runs until there are no more lines. Returns the exit status."""
        conversation = self.start
        while (line := self.lines.read()) is not None:
            try:
                conversation = self._take(conversation, line)
            except EngineClosed:
                raise
            except JllmError as error:
                if not self.lines.terminal:
                    raise
                note(f"error: {error}")
            if self.interrupt.asked and not self.lines.terminal:
                break
        note(self._summary())
        return INTERRUPTED if self.interrupt.asked and not self.lines.terminal else 0

    def _take(self, conversation: Conversation, line: str) -> Conversation:
        if not line.startswith("/"):
            text = line.strip()
            return self._answer(conversation.ask(text)) if text else conversation
        name, _, rest = line[1:].partition(" ")
        commands: dict[str, Callable[[Conversation, str], Conversation]] = {
            "reset": self._reset,
            "edit": self._edit,
            "save": self._save,
            "load": self._load,
            "help": self._help,
        }
        if name not in commands:
            known = ", ".join(f"/{name}" for name in commands)
            raise RequestError(f"no command /{name}: known are {known}; a message may begin with a space")
        return commands[name](conversation, rest.strip())

    def _answer(self, conversation: Conversation) -> Conversation:
        from jllm.cli.chat.session import answer

        with self.interrupt.noted():
            answered, done = answer(self.session, conversation, write_stdout, lambda: self.interrupt.asked)
        write_stdout("\n")
        if done.finish_reason == "error":
            raise RequestError("the logits were not finite; another --dtype or --kv-cache may help")
        self.turns += 1
        if self.lines.terminal and done.finish_reason in ENDS:
            note(f"({ENDS[done.finish_reason]})")
        return answered

    def _edit(self, conversation: Conversation, text: str) -> Conversation:
        before = conversation.take_back()
        edited = text or self.lines.edit(conversation.asked[-1])
        return self._answer(before.ask(edited.strip())) if edited and edited.strip() else conversation

    def _reset(self, conversation: Conversation, rest: str) -> Conversation:
        _takes_nothing("reset", rest)
        return self.start

    def _help(self, conversation: Conversation, rest: str) -> Conversation:
        _takes_nothing("help", rest)
        write_stdout(HELP)
        return conversation

    def _save(self, conversation: Conversation, file: str) -> Conversation:
        from jllm.cli.chat.session import save

        with self.interrupt.noted():
            tokens = save(self.session, conversation, _path("save", file))
        note(f"saved {counted(len(conversation.asked), 'message')} and K and V of {counted(tokens, 'token')} to {file}")
        return conversation

    def _load(self, conversation: Conversation, file: str) -> Conversation:
        from jllm.cli.chat.session import load

        with self.interrupt.noted():
            loaded = load(self.session, _path("load", file))
        note(f"loaded {counted(len(loaded.asked), 'message')} and {counted(len(loaded.ids), 'token')} from {file}")
        return loaded

    def _summary(self) -> str:
        m = self.session.engine.metrics()
        prompts = f"{m['prefill_tokens']} of {m['prompt_tokens']} prompt tokens computed, the others were there"
        said = f"{counted(self.turns, 'turn')}: {counted(m['output_tokens'], 'token')}"
        return ", ".join([said, prompts, *drafted(self.session.engine)])


def _takes_nothing(name: str, rest: str) -> None:
    if rest:
        raise RequestError(f"/{name} takes nothing after it, not {rest!r}")


def _path(name: str, file: str) -> Path:
    if not file:
        raise RequestError(f"which file? /{name} FILE")
    return Path(file).expanduser()
