"""`python -m jllm.chat`: turns through one engine, its commands, a pipe and a terminal."""

import contextlib
import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jllm
from jllm.cli.chat.conversation import PLAIN_STOP, Conversation, prompt_ids
from jllm.cli.chat.main import main
from jllm.cli.chat.session import Session, answer, load, save
from jllm.errors import RequestError, SnapshotError
from jllm.files.safetensors_io import read_metadata
from jllm.files.save import save as save_model
from jllm.files.snapshot import load_snapshot, save_snapshot
from tests.cli.cases import params
from tests.tiny import tiny_model

EXACT = "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}\n{% endfor %}<assistant>"
STEPS = ("--max-slots", "4", "--max-step-tokens", "32")
SIZES = (*STEPS, "--no-compile-cache")
FLAGS = ("--max-new-tokens", "8", "--ignore-eos", "--seed", "5")
SUMMARY = re.compile(
    r"(\d+) turns?: (\d+) tokens?, (\d+) of (\d+) prompt tokens computed, the others were there(, .*)?"
)


@pytest.fixture
def chat(folder, capsys, monkeypatch):
    """Runs the command in a pipe; returns its exit status, standard output and standard error."""

    def run(*lines: str, flags=FLAGS, model: Path = folder) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        try:
            status = main(["--model", str(model), *SIZES, *map(str, flags)])
        except SystemExit as exit:
            status = exit.code
        return status, *capsys.readouterr()

    return run


@pytest.fixture(params=[None, "ngram"])
def session(model, request):
    """An engine, a template that repeats answers as they were, and letters drawn as a tokenizer would not cut them. The
    one with drafts also has an adapter."""
    start = jllm.init_adapter(model.config, jax.random.key(0), 2, targets=["q_proj"])
    own = {name: replace(each, b=jnp.ones_like(each.b)) for name, each in start.items()}
    options = {"speculate": "ngram", "adapters": {"loud": own}} if request.param else {}
    engine = jllm.Engine(model, max_slots=1, page_size=8, max_step_tokens=32, num_pages=32, **options)
    tokenizer = replace(model.tokenizer, chat_template=EXACT)
    pieces = [model.tokenizer.vocabulary.piece(id) for id in range(model.config.vocab_size)]
    banned = {id: float("-inf") for id, piece in enumerate(pieces) if not (piece.isascii() and piece.isalpha())}
    drawn = params(max_new_tokens=12, temperature=2.0, logit_bias=banned, adapter="loud" if request.param else None)
    with contextlib.closing(engine):
        yield Session(engine, tokenizer, drawn, model.config.context)


def say(session: Session, conversation: Conversation, text: str) -> Conversation:
    return answer(session, conversation.ask(text), lambda text: None, lambda: False)[0]


def computed(session: Session) -> int:
    return session.engine.metrics()["prefill_tokens"]


def same_talk(model, texts: list[str], **changes) -> Conversation:
    """What the library makes of it, each turn by itself."""
    talk = Conversation()
    for i, text in enumerate(texts):
        talk = talk.ask(text)
        prompt = prompt_ids(talk, model.tokenizer)
        (done,) = jllm.generate(model, prompt, params(**{"seed": 5 + i, **changes}), max_slots=4, max_step_tokens=32)
        talk = talk.answer(done.text, [*prompt, *done.token_ids])
    return talk


def answers(talk: Conversation) -> str:
    return "".join(f"{message.content}\n" for message in talk.messages if message.role == "assistant")


def test_turns_in_a_pipe(chat, model):
    status, out, err = chat("who was old?", "", "and the sea?")
    assert (status, out) == (0, answers(same_talk(model, ["who was old?", "and the sea?"])))
    assert "\x1b" not in out + err
    assert SUMMARY.fullmatch(err.splitlines()[-1]).group(1, 2) == ("2", "16")


def test_a_last_line_without_an_end_and_no_line_at_all(chat, monkeypatch, capsys, folder):
    whole = chat("a king")
    monkeypatch.setattr(sys, "stdin", io.StringIO("a king"))
    assert main(["--model", str(folder), *SIZES, *FLAGS]) == 0
    assert capsys.readouterr().out == whole[1]
    assert chat()[:2] == (0, "")


def test_a_turn_costs_its_own_tokens(session):
    """And at most a page more, however long the conversation is; also after the last turn was edited."""
    talk, costs = Conversation(), []
    for text in ("who was old?", "and the sea?", "why?"):
        before, known = computed(session), len(talk.ids)
        talk = say(session, talk, text)
        own = len(talk.ids) - 12 - known
        costs.append(computed(session) - before)
        assert own <= costs[-1] <= own + 8
    assert sum(costs) < len(talk.ids)
    before = computed(session)
    edited = say(session, talk.take_back(), "how?")
    assert computed(session) - before <= len(prompt_ids(Conversation().ask("how?"), session.tokenizer)) + 8
    assert edited.asked == ("who was old?", "and the sea?", "how?")


def test_end_tokens_of_an_answer(chat, model):
    flags = ("--temperature", "0", "--max-new-tokens", "12")
    (token,) = same_talk(model, ["a king"], temperature=0.0, max_new_tokens=12).ids[-6:-5]
    said = chat("a king", flags=(*flags, "--ignore-eos"))[1]
    for more in (("--stop-token-id", token, "--ignore-eos"), ("--eos-token-id", token)):
        status, out, _ = chat("a king", flags=(*flags, *more))
        assert (status, said.startswith(out.rstrip("\n")), len(out) < len(said)) == (0, True, True)


def test_penalties_and_speculation_are_passed_on(chat, model):
    flags = (*FLAGS, "--repetition-penalty", 1.5, "--temperature", 0.7, "--top-k", 40)
    want = same_talk(model, ["a king", "the sea"], repetition_penalty=1.5, temperature=0.7, top_k=40)
    assert chat("a king", "the sea", flags=flags)[:2] == (0, answers(want))
    plain, drafted = chat("a king", "the sea"), chat("a king", "the sea", flags=(*FLAGS, "--speculate", "ngram"))
    assert drafted[:2] == plain[:2]
    assert "drafts" in SUMMARY.fullmatch(drafted[2].splitlines()[-1])[5]


def test_reset_edit_and_help(chat, model):
    status, out, _ = chat("a king", "/reset", "the sea", "/edit who was old?", "/help")
    fresh, edited = same_talk(model, ["the sea"]), same_talk(model, ["who was old?"])
    assert status == 0
    assert out.startswith(answers(same_talk(model, ["a king"])) + answers(fresh) + answers(edited) + "/reset")


def test_the_system_message_stays(chat, model, monkeypatch):
    prompts = []
    monkeypatch.setattr("jllm.engine.engine.Engine.submit", keep(prompts, jllm.Engine.submit))
    assert chat("a king", "/reset", "the sea", flags=(*FLAGS, "--system", "be brief"))[0] == 0
    texts = [model.tokenizer.decode(prompt) for prompt in prompts]
    assert texts == [f"<system> be brief <user> {text} <assistant>" for text in ("a king", "the sea")]


def test_a_line_may_come_from_windows_and_one_turn_is_one(chat):
    plain, theirs = chat("a king"), chat("\ufeffa king\r")
    assert theirs[1] == plain[1]
    assert plain[2].splitlines()[-1].startswith("1 turn: 8 tokens, ")


def keep(prompts, submit):
    return lambda engine, prompt, sampling: (prompts.append(prompt), submit(engine, prompt, sampling))[1]


def test_save_and_load(chat, tmp_path):
    """Another process goes on as the first would have, and computes nothing again."""
    file = tmp_path / "talk.safetensors"
    straight = chat("who was old?", "and the sea?", "why?")[1]
    status, before, err = chat("who was old?", "and the sea?", f"/save {file}")
    assert status == 0
    assert f"saved 2 messages and K and V of {load_snapshot(file).length} tokens to {file}" in err
    status, after, err = chat(f"/load {file}", "why?")
    assert (status, before + after) == (0, straight)
    computed, prompt = map(int, SUMMARY.fullmatch(err.splitlines()[-1]).group(3, 4))
    assert prompt > 2 * load_snapshot(file).length  # of loading, and of the turn
    assert computed < load_snapshot(file).length


def test_a_conversation_ends_where_the_pool_does(chat, tmp_path):
    """And what has room is saved."""
    file = tmp_path / "talk.safetensors"
    flags = ("--ignore-eos", "--seed", "5", "--num-pages", "6", "--page-size", "8")
    status, _, err = chat("who?", f"/save {file}", flags=flags)
    assert status == 0
    assert f"K and V of {6 * 8 - 1} tokens" in err
    status, _, err = chat("who?", flags=(*flags, "--max-new-tokens", "90"))
    assert (status, "the page pool has 6" in err) == (2, True)


def test_a_loaded_conversation_is_in_the_prefix_cache(session, tmp_path):
    talk = say(session, say(session, Conversation(), "who was old?"), "and the sea?")
    assert save(session, talk, tmp_path / "talk") == len(talk.ids) - 1
    want = say(session, talk, "why?")
    session.engine.reset_prefix_cache()
    before = computed(session)
    back = load(session, tmp_path / "talk")
    assert back == talk
    assert computed(session) - before == 1
    assert say(session, back, "why?") == want
    assert computed(session) - before <= 1 + len(want.ids) - 12 - len(talk.ids) + 8


def test_keys_per_channel_are_saved_in_whole_blocks(model, tmp_path):
    options = {"max_slots": 1, "page_size": 8, "max_step_tokens": 32, "num_pages": 32, "kv_cache": "kivi2-g8-r16"}
    with contextlib.closing(jllm.Engine(model, **options)) as engine:
        tokenizer = replace(model.tokenizer, chat_template=EXACT)
        chat = Session(engine, tokenizer, params(max_new_tokens=12), model.config.context)
        talk = say(chat, say(chat, Conversation(), "who was old?"), "and the sea?")
        assert save(chat, talk, tmp_path / "talk") == (len(talk.ids) - 1) // 16 * 16
        assert load(chat, tmp_path / "talk") == talk


def test_files_that_are_no_conversation_of_this_model(session, model, tmp_path):
    talk, file = say(session, Conversation(), "who was old?"), tmp_path / "talk"
    with pytest.raises(RequestError, match="nothing to save yet"):
        save(session, Conversation(), file)
    save(session, talk, file)
    about, value = read_metadata(file), load_snapshot(file)
    for text, message in (
        (None, "not a conversation: /save writes those"),
        ("[1]", "talk: its conversation is garbled"),
    ):
        save_snapshot(file, value, {} if text is None else {"conversation": text})
        with pytest.raises(SnapshotError, match=message):
            load(session, file)
    save_snapshot(file, value, {"conversation": about["conversation"]})
    assert load(session, file) == talk
    other = jllm.Engine(tiny_model(seed=1, num_layers=1, vocab_size=model.config.vocab_size), max_slots=1)
    with contextlib.closing(other), pytest.raises(SnapshotError, match="made with other weights, or another config"):
        load(Session(other, model.tokenizer, params(), 128), file)
    with pytest.raises(SnapshotError, match="No such file"):
        load(session, tmp_path / "none")


ERRORS = {
    "no command": (("/bogus",), "no command /bogus: known are /reset, /edit, /save, /load, /help"),
    "no message": (("/edit what?",), "there is no message to edit yet"),
    "no text": (("a king", "/edit"), "give the new message: /edit TEXT"),
    "no file": (("/save",), "which file? /save FILE"),
    "nothing to save": (("/save x",), "there is nothing to save yet"),
    "no such file": (("/load /none/such",), "/none/such: cannot be read: No such file"),
    "too much": (("/reset all",), "/reset takes nothing after it, not 'all'"),
    "too long": (("king " * 200,), "tokens is too long: the model's context leaves room for 127"),
}


@pytest.mark.parametrize(("lines", "message"), ERRORS.values(), ids=ERRORS)
def test_a_wrong_line_of_a_pipe_ends_it(chat, lines, message):
    status, _, err = chat(*lines, "a king")
    assert status == 2
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


FLAG_ERRORS = {
    "temperature": (("--temperature", -1), "temperature must be"),
    "drafts": (("--drafts", 3), "--drafts needs --speculate NAME"),
    "samples": (("-n", 2), "unrecognized arguments: -n 2"),
    "prompt": (("hi",), "unrecognized arguments: hi"),
    "scheme": (("--quantize", "w1a1"), "unknown quantization scheme"),
}


@pytest.mark.parametrize(("flags", "message"), FLAG_ERRORS.values(), ids=FLAG_ERRORS)
def test_wrong_flags(chat, flags, message):
    status, out, err = chat("a king", flags=flags)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err


def copy_of(folder: Path, to: Path, *names: str) -> None:
    for name in ("config.json", "model.safetensors", *names):
        (to / name).symlink_to(folder / name)


def test_without_a_template_turns_are_plain_text(chat, folder, tmp_path, monkeypatch, model):
    prompts = []
    monkeypatch.setattr("jllm.engine.engine.Engine.submit", keep(prompts, jllm.Engine.submit))
    copy_of(folder, tmp_path, "tokenizer.model")
    status, _, err = chat("a king", model=tmp_path)
    assert status == 0
    assert err.startswith("this model has no chat template: it is given User: and Assistant: as plain text")
    assert prompts == [jllm.load_tokenizer(tmp_path).encode("User: a king\nAssistant:")]
    assert PLAIN_STOP == "\nUser:"


def test_without_a_tokenizer(chat, folder, tmp_path):
    copy_of(folder, tmp_path)
    status, _, err = chat("a king", model=tmp_path)
    assert (status, err.count("\n")) == (2, 1)
    assert "a chat needs a tokenizer" in err


def test_a_template_that_refuses_system_messages(chat, folder, tmp_path):
    copy_of(folder, tmp_path, "tokenizer.model")
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{% endfor %}"
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template + "x"}))
    status, out, err = chat("a king", model=tmp_path, flags=("--system", "be brief"))
    assert (status, out) == (2, "")
    assert "the chat template refuses these messages: no system" in err


def test_an_answer_that_is_not_finite(chat, folder, tmp_path):
    made = jllm.load(folder)
    save_model(tmp_path, replace(made.params, norm=made.params.norm.at[0].set(float("nan"))), made.config)
    (tmp_path / "tokenizer.model").symlink_to(folder / "tokenizer.model")
    status, _, err = chat("a king", model=tmp_path)
    assert status == 2
    assert "error: the logits were not finite" in err


def test_help_needs_no_jax():
    code = """if True:
        import runpy, sys
        sys.argv[1:] = ["--help"]
        try:
            runpy.run_module("jllm.chat", run_name="__main__")
        except SystemExit as exit:
            sys.exit(f"{exit.code} {sorted({'jax', 'numpy', 'tqdm', 'sentencepiece'} & sys.modules.keys())}")
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == "0 []\n"
    assert done.stdout.startswith("usage: python -m jllm.chat [options]\n")


SLOW = """if True:
    import fcntl, os, signal, sys, termios, time
    signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in the background, it is ignored
    if os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    from jllm.cli.chat.main import main
    from jllm.engine.engine import Engine
    step = Engine.step
    Engine.step = lambda engine: (time.sleep(0.1), step(engine))[1]  # or answers would be over too soon
    sys.exit(main({args}))
"""


class Terminal:
    """The chat on a terminal of its own."""

    def __init__(self, args: list[str], **environment: str):
        self._ours, theirs = pty.openpty()
        ends = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "start_new_session": True}
        environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "", **environment}
        self.process = subprocess.Popen([sys.executable, "-c", SLOW.format(args=args)], env=environment, **ends)
        os.close(theirs)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def until(self, pattern: str) -> str:
        """What comes up to the end of the first match; all of it is then forgotten."""
        end = time.monotonic() + 240
        while (found := re.search(pattern, self.seen)) is None:
            assert time.monotonic() < end, self.seen
            assert self._more(), self.seen
        shown, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return shown

    def interrupt(self, pattern: str) -> str:
        """Ctrl-C until the pattern comes. One that comes just before Python waits for a key is seen with the next."""
        self.type("\x03")
        while not select.select([self._ours], [], [], 10)[0]:
            self.type("\x03")
        return self.until(pattern)

    def rest(self) -> str:
        while self._more():
            pass
        self.process.wait(240)
        os.close(self._ours)
        return self.seen

    def _more(self) -> bool:
        if not select.select([self._ours], [], [], 120)[0]:
            return False
        with contextlib.suppress(OSError):  # how Linux says that the other end is closed
            data = os.read(self._ours, 1024)
            self.seen += data.decode(errors="replace")
            return bool(data)
        return False


def test_a_terminal(folder):
    """Ctrl-C stops the answer, then a line, and not the program; the last turn is edited; Ctrl-D ends."""
    flags = ["--model", str(folder), *STEPS, "--ignore-eos", "--seed", "5", "--max-new-tokens", "90"]
    terminal = Terminal(flags)
    prompt = r"\x1b\[1m> \x1b\[0m"
    terminal.until("Ctrl-D ends")
    terminal.until(prompt)
    terminal.type("a king\n")
    terminal.until(r"a king\r\n(?s:.){12}")
    terminal.type("\x03\x03")  # the second one changes nothing
    terminal.until(r"\(stopped\)")
    terminal.until(prompt)
    terminal.type("half a li")
    terminal.until("half a li")
    terminal.interrupt(prompt)
    terminal.type("/edit\n")
    terminal.until(prompt)
    terminal.until("a king")  # to be edited
    terminal.type(" and a sea\n")
    terminal.until(r"and a sea\r\n(?s:.){12}")
    terminal.type("\x03")
    terminal.until(r"\(stopped\)")
    terminal.until(prompt)
    terminal.type("/bogus\n")
    terminal.until("error: no command /bogus")
    terminal.until(prompt)
    terminal.type("two\\\n")
    terminal.until(r"\. ")
    terminal.type("\x04")
    rest = terminal.rest()
    assert terminal.process.returncode == 0, rest
    assert SUMMARY.search(rest)[1] == "2"
    assert "Traceback" not in rest


def test_ctrl_c_in_a_pipe_ends_it_with_what_there_is(folder):
    flags = ["--model", str(folder), *STEPS, "--ignore-eos", "--seed", "5", "--max-new-tokens", "90"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", SLOW.format(args=flags)], **pipes) as process:
        process.stdin.write(b"a king\nthe sea\n")
        process.stdin.flush()
        seen = process.stdout.read(8)
        process.send_signal(2)
        seen += process.stdout.read()
        assert process.wait() == 130
        assert SUMMARY.fullmatch(process.stderr.read().decode().splitlines()[-1])[1] == "1"
    assert seen.endswith(b"\n")


def test_no_escape_codes_where_none_are_wanted(folder):
    terminal = Terminal(["--model", str(folder), *STEPS, *FLAGS], NO_COLOR="1", TERM="dumb")
    terminal.until("> ")
    terminal.type("a king\n")
    terminal.until(r"a king\r\n(?s:.)+\r\n(?s:.)*> ")
    terminal.type("\x04")
    rest = terminal.rest()
    assert terminal.process.returncode == 0
    assert "\x1b[1m" not in rest
