"""`python -m jllm.generate` from the outside: what it prints and writes, its errors, its exit statuses."""

import contextlib
import errno
import importlib
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import jllm
from jllm.batch import Rung
from jllm.checkpoint import save
from jllm.cli import jsonl
from jllm.cli.arguments import make_parser, sampling_params
from jllm.cli.display import InOrder
from jllm.cli.main import main
from jllm.compile_cache import default_path, enable_compile_cache
from jllm.engine.loop import Engine
from jllm.errors import OutputError
from tests.tiny import tiny_model

TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}<assistant>"
TALE = "once upon a time there was an old king who had three sons and one golden bird in a tree by the sea"
WORDS = TALE.split(" ")
SUMMARY = re.compile(r"(\d+) tokens in (\d+\.\d\d) s: (\d+\.\d) tokens/s \(.*\)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model directory with a tokenizer and a chat template."""
    import sentencepiece

    path = tmp_path_factory.mktemp("model")
    text = (" ".join(WORDS[i % len(WORDS)] for i in range(start, start + 12)) for start in range(200))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=text,
        model_prefix=str(path / "tokenizer"),
        vocab_size=320,
        hard_vocab_limit=False,
        byte_fallback=True,
        minloglevel=2,
    )
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    size = len((path / "tokenizer.vocab").read_text().splitlines())
    model = tiny_model(num_layers=1, vocab_size=size, tie_embeddings=True)
    save(path, model.params, model.config)
    return path


@pytest.fixture(scope="module")
def model(folder) -> jllm.Model:
    return jllm.load(folder)


@pytest.fixture
def run(folder, capsys):
    """Runs the command line on the tiny model: exit status, standard output, standard error. Equal sizes for all, so
    that the steps are compiled once."""

    def run(*args: object, model: Path = folder) -> tuple[int, str, str]:
        flags = ["--model", model, "--max-slots", 4, "--max-step-tokens", 32, "--no-compile-cache"]
        try:
            status = main([str(a) for a in (*flags, *args)])
        except SystemExit as exit:
            status = exit.code
        return status, *capsys.readouterr()

    return run


def expected(model, prompts, sampling) -> list[jllm.Completion]:
    """What the library says, at the same compiled sizes."""
    ladder = (Rung(4, 0, 0), Rung(4, 8, 1), Rung(4, 32, 4))
    return jllm.generate(model, prompts, sampling, max_slots=4, max_step_tokens=32, ladder=ladder)


def params(**kw) -> jllm.SamplingParams:
    return jllm.SamplingParams(**{"max_new_tokens": 8, "ignore_eos": True, "seed": 5, **kw})


FLAGS = ("--max-new-tokens", 8, "--ignore-eos", "--seed", 5)


# Text and JSON


def test_text_in_a_pipe(run, model):
    status, out, err = run("once upon a time", *FLAGS)
    (done,) = expected(model, "once upon a time", params())
    assert (status, out) == (0, done.text + "\n")  # the prompt is not repeated
    summary = SUMMARY.fullmatch(err.splitlines()[-1])
    assert summary[1] == "8"
    assert "first token after" in summary[0]


def test_text_comes_in_pieces(folder, monkeypatch, capsys):
    pieces = []
    monkeypatch.setattr("jllm.cli.sinks.write_stdout", pieces.append)
    flags = ["--max-slots", "4", "--max-step-tokens", "32", "--no-compile-cache", "--max-new-tokens", "20"]
    assert main(["--model", str(folder), *flags, "--seed", "1", "a king", "--ignore-eos"]) == 0
    assert len(pieces) > 10
    assert pieces[-1].endswith("\n")


def test_json(run, model):
    flags = ("--repetition-penalty", 1.3, "--presence-penalty", -0.5, "--frequency-penalty", 0.5, "--min-p", 0.01)
    flags += ("--top-k", 50, "--top-p", 0.9, "--temperature", 0.7, "--logprobs", 2, "-n", 2, *FLAGS)
    status, out, err = run("a king", "the sea", "--json", *flags)
    assert status == 0
    found = [json.loads(line) for line in out.splitlines()]
    assert [(r["index"], r["sample"]) for r in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    fields = {"repetition_penalty": 1.3, "presence_penalty": -0.5, "frequency_penalty": 0.5, "min_p": 0.01}
    fields |= {"top_k": 50, "top_p": 0.9, "temperature": 0.7, "logprobs": 2, "n": 2}
    sampling = [params(**fields, seed=seed) for seed in (5, 6)]  # one seed a prompt
    for r, done in zip(found, expected(model, ["a king", "the sea"], sampling), strict=True):
        assert r["prompt"] == ["a king", "the sea"][r["index"]]
        assert (r["text"], r["token_ids"], r["seed"]) == (done.text, list(done.token_ids), 5 + r["index"])
        assert r["finish_reason"] == "length"
        assert r["timings"].keys() == {"first_token", "total", "prompt_tokens", "output_tokens"}
        assert 0 < r["timings"]["first_token"] <= r["timings"]["total"]
        assert [[lp["token_id"], len(lp["top"])] for lp in r["logprobs"]] == [[id, 2] for id in r["token_ids"]]
    assert SUMMARY.fullmatch(err.splitlines()[-1])[1] == "32"


def test_a_drawn_seed_is_reported_and_repeats(run):
    once = json.loads(run("a king", "--json", "--max-new-tokens", 8)[1])
    again = json.loads(run("a king", "--json", "--max-new-tokens", 8, "--seed", once["seed"])[1])
    assert once["token_ids"] == again["token_ids"]


def test_several_prompts_stay_in_order(run, model):
    status, out, _ = run("once", "upon a", "time", *FLAGS)
    done = expected(model, ["once", "upon a", "time"], [params(seed=s) for s in (5, 6, 7)])
    assert status == 0
    assert out == "".join(f"== prompt {i + 1} of 3 ==\n{d.text}\n" for i, d in enumerate(done))


def test_in_order():
    shown = []
    out = InOrder([(0, 0), (0, 1), (1, 0)], lambda key: f"<{key[0]}.{key[1]}>", ".", shown.append)
    out.show()
    out.add((1, 0), "z", last=True)
    out.add((0, 1), "m", last=False)
    out.add((0, 0), "a", last=False)
    assert "".join(shown) == "<0.0>a"
    out.add((0, 0), "b", last=True)
    assert "".join(shown) == "<0.0>ab.<0.1>m"
    out.show_rest()
    assert "".join(shown) == "<0.0>ab.<0.1>m.<1.0>z."


def test_prompt_from_stdin(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("once upon a time\n"))
    assert run(*FLAGS)[:2] == run("once upon a time", *FLAGS)[:2]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    message = "error: no prompt: standard input is empty, and no argument gives one (--help shows examples)\n"
    assert run(*FLAGS) == (2, "", message)


def test_stop_and_greedy(run, model):
    (free,) = expected(model, "a king", params(temperature=0.0, max_new_tokens=20))
    stop = free.text[5:7]
    out = run("a king", "--temperature", 0, "--stop", "§", "--stop", stop, "--max-new-tokens", 20, "--ignore-eos")[1]
    assert out == free.text[: free.text.index(stop)] + "\n"


def test_chat(run, model):
    status, out, _ = run("--chat", "who was old?", *FLAGS)
    ids = model.tokenizer.encode("<user> who was old?\n<assistant>", add_bos=False)
    assert (status, out) == (0, expected(model, ids, params())[0].text + "\n")


def test_flags_are_the_library_parameters():
    args = make_parser().parse_args([])
    assert sampling_params(args) == jllm.SamplingParams()
    text = " ".join(make_parser().format_help().split())
    for name in jllm.SamplingParams.__dataclass_fields__:
        assert name in text
    from jllm.pretrained import DTYPES
    from pallas_kernels.kv_pages import FLOATS

    for name in (*DTYPES, *(set(FLOATS) - {"f64"}), "int8-gN", "int4-gN", "examples:", "exit status"):
        assert name in text


# Errors


ERRORS = {
    "no directory": (("--model", "/none/such", "hi"), "/none/such: no such directory"),
    "temperature": (("--temperature", -1, "hi"), "temperature must be a finite number >= 0, not -1.0"),
    "top_p": (("--top-p", 0, "hi"), "top_p must be in (0, 1] (1 is off), not 0.0"),
    "seed": (("--seed", 2**32, "hi"), "seed must be None or an integer in [0, 2**32)"),
    "samples": (("-n", 0, "hi"), "n must be an integer >= 1, not 0"),
    "stop": (("--stop", "", "hi"), "stop must be non-empty strings"),
    "logprobs": (("--logprobs", 21, "--json", "hi"), "logprobs must be None or an integer in [0, 20], not 21"),
    "logprobs in text": (("--logprobs", 2, "hi"), "--logprobs needs --json or --output"),
    "empty": (("",), "the prompt is empty"),
    "too long": (("king " * 200,), "tokens is too long: the model's context leaves room for 127"),
    "which prompt": (("hi", ""), "prompt 2: the prompt is empty"),
    "pool": (("--num-pages", 4, "--page-size", 8, "king " * 60), "the page pool (32 tokens) leaves room for 31"),
    "quantize": (("--quantize", "w1a1", "hi"), "quantization scheme 'w1a1' is not supported"),
    "kv format": (("--kv-cache", "int3", "hi"), "KV cache format 'int3'"),
    "dtype": (("--dtype", "f12", "hi"), "dtype 'f12' is not known; known are bf16, f16, f32"),
    "page size": (("--page-size", 12, "hi"), "page_size must be one of 8, 16"),
    "slots": (("--max-slots", 0, "hi"), "max_slots must be an integer >= 1, not 0"),
    "step tokens": (("--max-step-tokens", 2, "hi"), "max_step_tokens must be at least max_slots = 4"),
    "not a number": (("--top-k", "many", "hi"), "argument --top-k: invalid int value: 'many'"),
    "unknown flag": (("--beams", 3, "hi"), "unrecognized arguments: --beams"),
    "abbreviation": (("--temp", 3, "hi"), "unrecognized arguments: --temp"),
    "output alone": (("--output", "x.jsonl", "hi"), "--output needs --input"),
    "input alone": (("--input", "x.jsonl"), "--input needs --output"),
    "prompt and input": (("--input", "x.jsonl", "--output", "y.jsonl", "hi"), "give prompts or --input, not both"),
    "same file": (("--input", "x.jsonl", "--output", "./x.jsonl"), "are the same file"),
    "no input": (("--input", "/none/x.jsonl", "--json"), "cannot read /none/x.jsonl: No such file"),
    "surrogate": (("a\udcff",), "not valid Unicode"),
}


@pytest.mark.parametrize(("args", "message"), ERRORS.values(), ids=ERRORS)
def test_one_line_and_status_2(run, args, message):
    status, out, err = run(*args)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_without_a_tokenizer_or_template(run, folder, tmp_path, model):
    for name in ("config.json", "model.safetensors", "tokenizer.model"):
        (tmp_path / name).symlink_to(folder / name)
    assert "has no chat template" in run("--chat", "hi", model=tmp_path)[2]
    (tmp_path / "tokenizer.model").unlink()
    assert "a text prompt needs a tokenizer" in run("hi", model=tmp_path)[2]
    assert "a chat needs a tokenizer" in run("--chat", "hi", model=tmp_path)[2]
    (tmp_path / "in.jsonl").write_text('{"prompt": [5, 6, 7]}\n')
    status, out, _ = run("--input", tmp_path / "in.jsonl", "--json", *FLAGS, model=tmp_path)
    (done,) = expected(model, [5, 6, 7], params())
    assert status == 0
    assert (json.loads(out)["token_ids"], json.loads(out)["text"]) == (list(done.token_ids), None)


def test_out_of_memory_is_one_line(run, monkeypatch):
    def full(*_, **__):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 4096 bytes.\nmore")

    monkeypatch.setattr("jllm.pretrained.load", full)
    status, _, err = run("hi")
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith("error: out of memory; try fewer --num-pages")


@pytest.mark.parametrize("extra", [(), ("--json",)])
def test_full_standard_output(run, monkeypatch, extra):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        status, _, err = run("a king", *FLAGS, *extra)
    assert status == 2
    assert err == "error: cannot write to standard output: No space left on device\n"


def test_reader_that_has_gone(run, monkeypatch):
    read, written = os.pipe()
    os.close(read)
    with open(written, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert run("a king", *FLAGS) == (141, "", "")


# Files


@pytest.fixture
def lines(tmp_path) -> Path:
    """More requests than slots, of all kinds."""
    requests = [{"prompt": " ".join(WORDS[i : i + 3]), "id": f"r{i}"} for i in range(9)]
    requests += [
        {"prompt": [5, 6, 7], "temperature": 0, "max_new_tokens": 3},
        {"messages": [{"role": "user", "content": "who?"}], "n": 2, "seed": 99},
    ]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in requests))
    return path


def results(path: Path) -> dict[tuple[int, int], dict]:
    """Results by index and sample, without what depends on the clock."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    made = {(r["index"], r.get("sample", 0)): {k: v for k, v in r.items() if k != "timings"} for r in found}
    assert len(made) == len(found)
    return made


def test_file_to_file(run, lines, tmp_path, model):
    out = tmp_path / "out.jsonl"
    status, text, err = run("--input", lines, "--output", out, *FLAGS)
    assert (status, text) == (0, "")
    assert SUMMARY.fullmatch(err.splitlines()[-1])[1] == str(9 * 8 + 3 + 2 * 8)
    assert "11 of 11 prompts done" in err
    found = results(out)
    assert found.keys() == {(i, 0) for i in range(11)} | {(10, 1)}
    assert found[3, 0]["id"] == "r3"
    # Each request alone gives the same: seeds are --seed plus the index, unless the line has one.
    prompts = [" ".join(WORDS[i : i + 3]) for i in (2, 8)]
    two, eight = expected(model, prompts, [params(seed=7), params(seed=13)])
    assert found[2, 0]["token_ids"] == list(two.token_ids)
    assert found[8, 0]["text"] == eight.text
    (greedy,) = expected(model, [5, 6, 7], params(temperature=0.0, max_new_tokens=3))
    assert found[9, 0]["token_ids"] == list(greedy.token_ids)
    ids = model.tokenizer.encode("<user> who?\n<assistant>", add_bos=False)
    chat = expected(model, [ids], params(n=2, seed=99))
    assert [found[10, s]["token_ids"] for s in (0, 1)] == [list(c.token_ids) for c in chat]
    assert found[10, 0]["messages"] == [{"role": "user", "content": "who?"}]
    # Once more: nothing is left to do, and nothing changes.
    before = out.read_bytes()
    status, _, err = run("--input", lines, "--output", out, *FLAGS)
    assert (status, out.read_bytes()) == (0, before)
    assert "all 11 prompts were done before" in err
    # The same on standard output.
    status, text, _ = run("--input", lines, "--json", *FLAGS)
    (tmp_path / "stdout.jsonl").write_text(text)
    assert results(tmp_path / "stdout.jsonl") == found


def test_resume_after_a_cut(run, lines, tmp_path):
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    run("--input", lines, "--output", whole, *FLAGS)
    data = whole.read_bytes()
    kept = data.splitlines(keepends=True)[:4]
    cut.write_bytes(b"".join(kept) + data.splitlines()[4][:30])  # a torn line
    status, _, err = run("--input", lines, "--output", cut, *FLAGS)
    assert status == 0
    assert cut.read_bytes().startswith(b"".join(kept))
    assert results(cut) == results(whole)
    assert re.search(r"11 of 11 prompts done, [34] of them before", err)


def interrupt_after(monkeypatch, steps: int) -> None:
    """Ctrl-C in the middle of a step, once."""
    step, left = Engine.step, steps

    def interrupted(self):
        nonlocal left
        if self.metrics()["running"]:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted)


def test_interrupt_keeps_finished_lines(run, lines, tmp_path, monkeypatch):
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    run("--input", lines, "--output", whole, *FLAGS)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 15)
        status, _, err = run("--input", lines, "--output", out, *FLAGS)
    assert status == 130
    assert SUMMARY.fullmatch(err.splitlines()[-1])
    assert "interrupted" in err
    kept = out.read_bytes()
    assert 0 < len(results(out)) < 12
    assert results(out).items() <= results(whole).items()
    assert run("--input", lines, "--output", out, *FLAGS)[0] == 0
    assert out.read_bytes().startswith(kept)
    assert results(out) == results(whole)


@pytest.mark.parametrize("extra", [(), ("--json",)])
def test_interrupt_keeps_what_is_on_screen(run, model, monkeypatch, extra):
    interrupt_after(monkeypatch, 6)
    status, out, err = run("a king", *FLAGS, *extra)
    (whole,) = expected(model, "a king", params())
    assert status == 130
    if extra:
        assert out == ""  # an object is a finished completion
    else:
        assert out.endswith("\n")
        assert whole.text.startswith(out[:-1])
        assert 0 < len(out) <= len(whole.text)
    assert 0 < int(SUMMARY.fullmatch(err.splitlines()[-1])[1]) < 8
    assert "interrupted" in err


def test_disk_fills_up(run, lines, tmp_path, monkeypatch):
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    run("--input", lines, "--output", whole, *FLAGS)

    class Disk(io.FileIO):
        room = 1000

        def write(self, data) -> int:
            if Disk.room == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            taken = min(Disk.room, len(data))
            Disk.room -= taken
            return super().write(bytes(data[:taken]))

    with monkeypatch.context() as patch:
        patch.setattr(jsonl, "open", lambda path, mode, buffering: Disk(path, mode), raising=False)
        status, _, err = run("--input", lines, "--output", out, *FLAGS)
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith(f"error: cannot write {out}: No space left on device")
    assert 0 < len(results(out)) < 12  # whole lines only
    assert run("--input", lines, "--output", out, *FLAGS)[0] == 0
    assert results(out) == results(whole)
    status, _, err = run("--input", lines, "--output", "/dev/full", *FLAGS)
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith("error: cannot write /dev/full: No space left on device")


LATE = {  # what only the model can tell
    "id": ({"prompt": [3, 10**6]}, "prompt: token id 1000000 is not in [0, "),
    "empty": ({"prompt": ""}, "the prompt is empty"),
    "no ids": ({"prompt": []}, "the prompt is empty"),
    "long": ({"prompt": [3] * 128}, "a prompt of 128 tokens is too long"),
    "messages": ({"messages": [{"content": "x"}]}, "messages must be a non-empty list"),
    "stop id": ({"prompt": "a", "stop_token_ids": [10**6]}, "stop_token_ids: token id 1000000"),
}


@pytest.mark.parametrize(("line", "message"), LATE.values(), ids=LATE)
def test_broken_line_before_anything_runs(run, tmp_path, line, message):
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text('{"prompt": "fine"}\n\n' + json.dumps(line) + "\n")
    status, text, err = run("--input", path, "--output", out)
    assert (status, text, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {path}, line 3: ")
    assert message in err
    assert not out.exists()


def test_chat_takes_no_token_ids(run, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": [5]}\n')
    assert "line 1: --chat needs text or messages" in run("--chat", "--json", "--input", tmp_path / "in.jsonl")[2]


def test_foreign_output_is_not_touched(run, lines, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text("my diary\n")
    status, _, err = run("--input", lines, "--output", out)
    assert (status, err.count("\n"), out.read_text()) == (2, 1, "my diary\n")
    assert "is not an output of this input" in err


# The package and the process


def test_names_of_the_package():
    for name in jllm.__all__:
        assert getattr(jllm, name).__module__.startswith("jllm.")
        assert name in dir(jllm)
    with pytest.raises(AttributeError, match="has no attribute 'generator'"):
        jllm.generator  # noqa: B018


def test_generate_is_always_the_function():
    from jllm.api import generate

    assert importlib.import_module("jllm.generate") is generate
    assert jllm.generate is generate
    from jllm import generate as imported

    assert imported is generate


def test_help_needs_no_jax():
    code = """if True:
        import runpy, sys
        sys.argv[1:] = ["--help"]
        try:
            runpy.run_module("jllm.generate", run_name="__main__")
        except SystemExit as exit:
            slow = {"jax", "numpy", "tqdm", "sentencepiece"} & sys.modules.keys()
            sys.exit(f"{exit.code} {sorted(slow)}")
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == "0 []\n"
    assert done.stdout.startswith("usage: python -m jllm.generate [PROMPT ...] [options]\n")


def test_terminal(folder, tmp_path):
    """On a terminal: the prompt is echoed in a colour, Ctrl-C stops cleanly, and the compilation cache fills."""
    cache = tmp_path / "cache"
    flags = ["--model", folder, "--compile-cache", cache, "--ignore-eos", "--max-new-tokens", 100, "a king"]
    code = f"""if True:
        import sys, time
        from jllm.cli.main import main
        from jllm.engine.loop import Engine
        step = Engine.step
        Engine.step = lambda engine: (time.sleep(0.1), step(engine))[1]  # or it would be over before it is interrupted
        sys.exit(main({[str(flag) for flag in flags]}))
    """
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": ""}
    ends = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, **ends) as process:
        os.close(theirs)
        seen, prompt = b"", b"\x1b[36ma king\x1b[0m"
        while len(seen.partition(prompt)[2]) < 5:
            seen += os.read(ours, 1024)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # how Linux says that the other end is closed
            while data := os.read(ours, 1024):
                seen += data
    os.close(ours)
    assert process.returncode == 130, seen
    last = seen.decode(errors="replace").splitlines()[-1]
    assert 0 < int(SUMMARY.fullmatch(last)[1]) < 100
    assert "interrupted" in last
    assert b"Traceback" not in seen
    assert any(cache.iterdir())


def test_compile_cache_folder(monkeypatch, tmp_path, run):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "jllm" / "xla"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored
    assert default_path() == Path.home() / ".cache" / "jllm" / "xla"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert default_path() == Path.home() / "Library" / "Caches" / "jllm" / "xla"
    with pytest.raises(OutputError, match="compile cache .* cannot be made"):
        enable_compile_cache(Path("/proc/none"))


def test_unwritable_compile_cache_is_only_a_warning(folder, capsys):
    flags = ["--max-slots", "4", "--max-step-tokens", "32", "--max-new-tokens", "2", "--ignore-eos"]
    assert main(["--model", str(folder), *flags, "--compile-cache", "/proc/none", "a king"]) == 0
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("warning: compile cache /proc/none: cannot be made")
    assert SUMMARY.fullmatch(last)


def test_version(run):
    status, out, _ = run("--version")
    assert status == 0
    assert re.fullmatch(r"jllm \d+\.\d+\.\d+, jax \d+\.\d+\.\d+\n", out)
