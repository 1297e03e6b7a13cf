"""From an input file to an output file, and taking it up again."""

import errno
import io
import json
import os
import re
import shutil
import signal
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jllm
from jllm.cli import jsonl
from jllm.engine.engine import Engine
from jllm.errors import OutputError
from jllm.files.hf_config import load_config
from jllm.files.run_identity import of_machine, of_model, of_scheme
from jllm.files.safetensors_io import write_file
from jllm.files.save import save
from pallas_kernels import one_writer
from tests.cli.cases import FLAGS, SUMMARY, WORDS, expected, params, results
from tests.tiny import tiny_model


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


def test_lines_name_their_arrays(run, tmp_path, model):
    (first,) = expected(model, [5, 6, 7], params(temperature=0.0))
    write_file(tmp_path / "a.safetensors", {"token": np.asarray(first.token_ids[0] + 1, np.int32)})
    lines, flags = tmp_path / "in.jsonl", ("--hooks", "tests.cli.cases:BANS", "--inputs", tmp_path, *FLAGS)

    def told(*given, flags=flags):
        asked = [{"prompt": [5, 6, 7], "temperature": 0, **one} for one in given]
        lines.write_text("".join(json.dumps(one) + "\n" for one in asked))
        return run("--input", lines, "--json", *flags)

    status, text, err = told({"inputs": "a"}, {})
    assert status == 0, err
    one, two = map(json.loads, text.splitlines())
    assert first.token_ids[0] not in one["token_ids"]
    assert two["token_ids"] == list(first.token_ids)
    assert (one["inputs"], "inputs" in two) == ("a", False)
    for given, more, why in (
        ({"inputs": "b"}, flags, "line 1: inputs: 'b' is not in .*, which has a"),
        ({"inputs": 3}, flags, 'line 1: "inputs" must be the name of a file in --inputs, not 3'),
        ({"inputs": "a"}, flags[:2] + FLAGS, "line 1: inputs are names of files in a folder: give it as --inputs DIR"),
        ({}, ("--hooks", "tests.cli.cases:NONE", *FLAGS), "--hooks must be MODULE:NAME of a jllm.Hooks, not tests"),
    ):
        status, _, err = told(given, flags=more)
        assert status == 2
        assert re.search(why, err.splitlines()[-1])
    assert told({"inputs": "a"}, flags=(*flags, "--output", tmp_path / "out.jsonl"))[0] == 0
    write_file(tmp_path / "a.safetensors", {"token": np.asarray(0, np.int32)})
    status, _, err = told({"inputs": "a"}, flags=(*flags, "--output", tmp_path / "out.jsonl"))
    assert status == 2
    assert "was made with inputs" in err


def test_lines_of_standard_input(run, lines, tmp_path, monkeypatch):
    def read(data: bytes, *args) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        return run("--input", "-", *args, *FLAGS)

    assert read(lines.read_bytes(), "--output", tmp_path / "one.jsonl")[0] == 0
    run("--input", lines, "--output", tmp_path / "two.jsonl", *FLAGS)
    assert results(tmp_path / "one.jsonl") == results(tmp_path / "two.jsonl")
    assert "all 11 prompts were done before" in read(lines.read_bytes(), "--output", tmp_path / "one.jsonl")[2]
    assert read(b'{"prompt": "a"}\n{', "--json")[2].startswith("error: standard input, line 2: not JSON")
    assert read(b"\n", "--json")[2] == "error: standard input holds no prompts: give one JSON object a line\n"
    monkeypatch.setattr("sys.stdin", None)
    assert "standard input is closed" in run("--input", "-", "--json")[2]


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


DRAFTERS = {
    "none": (),
    "ngram": ("--speculate", "ngram", "--drafts", 3),
    "itself": ("--speculate", "draft", "--drafts", 2),
}


@pytest.mark.parametrize(("before", "after"), [("ngram", "none"), ("none", "ngram"), ("ngram", "itself")])
def test_another_drafter_goes_on_with_a_file(run, lines, folder, tmp_path, before, after):
    """Tokens don't depend on it, so nothing in a results file tells which there was."""
    flags = {name: [f"draft:{folder}" if flag == "draft" else flag for flag in DRAFTERS[name]] for name in DRAFTERS}
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    run("--input", lines, "--output", whole, *FLAGS)
    first, rest = tmp_path / "first.jsonl", lines.read_bytes().splitlines(keepends=True)
    first.write_bytes(b"".join(rest[:5]))
    assert run("--input", first, "--output", out, *FLAGS, *flags[before])[0] == 0
    kept = out.read_bytes()
    status, _, err = run("--input", lines, "--output", out, *FLAGS, *flags[after])
    assert (status, "11 of 11 prompts done, 5 of them before" in err) == (0, True)
    assert out.read_bytes().startswith(kept)
    assert results(out) == results(whole)


def interrupt_after(monkeypatch, steps: int) -> None:
    """Ctrl-C in the middle of a step, once."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # where the tests run in the background, it is ignored
    step, left = Engine.step, steps

    def interrupted(self):
        nonlocal left
        if self.metrics()["running"]:
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGINT)
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
        patch.setattr(one_writer, "open", lambda path, mode, buffering: Disk(path, mode), raising=False)
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
    "surrogate": ({"messages": [{"role": "user", "content": "\ud800"}]}, "lone surrogate"),
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


def test_lines_take_adapters_by_name(run, folder, model, tmp_path):
    """Prompts take the first one, and a line may take another or none. A file is not resumed with other adapters."""
    adapter = jllm.init_adapter(model.config, jax.random.key(0), 2)
    for name, value in (("loud", 1.0), ("soft", 0.5)):
        changed = {field: replace(each, b=jnp.full_like(each.b, value)) for field, each in adapter.items()}
        jllm.save_adapter(tmp_path / name, changed, model.config)
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text('{"prompt": [5, 6]}\n{"prompt": [5, 6], "adapter": "soft"}\n{"prompt": [5, 6], "adapter": null}\n')
    flags = ["--adapter", f"loud={tmp_path / 'loud'}", "--adapter", f"soft={tmp_path / 'soft'}"]
    asked = ["--input", path, "--output", out, *FLAGS]
    assert run(*asked, *flags)[0] == 0
    texts = [found["token_ids"] for found in results(out).values()]
    assert len({tuple(ids) for ids in texts}) == 3
    jllm.save_adapter(tmp_path / "soft", adapter, model.config)
    status, _, err = run(*asked, *flags)
    assert status == 2
    assert "adapters" in err
    status, _, err = run("--adapter", "loud", "a")
    assert (status, err) == (2, "error: argument --adapter: must be NAME=DIR, not 'loud' (see --help)\n")


def test_chat_takes_no_token_ids(run, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": [5]}\n')
    assert "line 1: --chat needs text or messages" in run("--chat", "--json", "--input", tmp_path / "in.jsonl")[2]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--temperature", 0.5), "temperature the default, and now it is 0.5"),
        (("--max-new-tokens", 9), "max_new_tokens 8, and now it is 9"),
        (("--seed", 6), "was made with seed"),
        (("--kv-cache", "f16"), 'kv_cache the default, and now it is "f16"'),
        (("--chat",), "chat the default, and now it is true"),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, tuple) else "",
)
def test_results_of_other_settings_are_not_mixed(run, lines, tmp_path, flags, words, finished):
    out = tmp_path / "out.jsonl"
    out.write_bytes(finished)
    status, text, err = run("--input", lines, "--output", out, *FLAGS, *flags)
    assert (status, text, err.count("\n")) == (2, "", 1)
    assert words in err
    assert out.read_bytes() == finished


@pytest.fixture(scope="module")
def finished(folder) -> bytes:
    """The output of `lines`, as far as reading it goes: made without running the model."""
    from jllm.cli.jsonl import Job, record, to_json
    from jllm.engine.request import Completion, Timings

    job = Job(0, {"prompt": " ".join(WORDS[:3]), "id": "r0"}, params(), "", {"model": str(folder)}, run_of(folder))
    return to_json(record(job, 0, Completion((3,), "a", "length", None, None, Timings(0.1, 0.2, 3, 1), 5))).encode()


def run_of(folder) -> dict[str, str]:
    return of_model(folder) | of_machine()


def test_what_decides_results_is_known_by_content(run, lines, tmp_path, folder, finished, capsys, monkeypatch):
    """A scheme that was edited, another model at the same relative path: refused, with nothing changed. The same model
    from elsewhere goes on."""
    out, rules = tmp_path / "out.jsonl", tmp_path / "rules.toml"
    rules.write_text('rules = [["o_proj", "w8a16"]]')
    scheme = of_scheme(rules)
    line = json.loads(finished)
    line["settings"]["quantize"], line["run"]["scheme"] = str(rules), scheme
    made = (json.dumps(line) + "\n").encode()
    rules.write_text('rules = [["o_proj", "w8a8"]]')
    out.write_bytes(made)
    status, _, err = run("--input", lines, "--output", out, *FLAGS, "--quantize", rules)
    assert (status, err.count("\n"), out.read_bytes()) == (2, 1, made)
    assert f'{out}, line 1: was made with scheme "{scheme}", and now it is "{of_scheme(rules)}"; choose another' in err
    for place, seed in (("one", 5), ("two", 0)):
        copied = tmp_path / place / "m"
        copied.mkdir(parents=True)
        for file in folder.iterdir():
            shutil.copy(file, copied)
        if seed:
            config = load_config(folder)
            sizes = {"num_layers": 1, "vocab_size": config.vocab_size, "tie_embeddings": True}
            save(copied, tiny_model(seed=seed, **sizes).params, config)
        line = json.loads(finished)
        line["settings"]["model"] = "m"
        out.write_text(json.dumps(line) + "\n")
        monkeypatch.chdir(tmp_path / place)
        with monkeypatch.context() as patch:
            patch.setattr("jllm.cli.main._prepare", refuse)
            status, _, err = run("--input", lines, "--output", out, *FLAGS, model="m")
        assert ("was made with weights" in err) == bool(seed)
        assert ("goes on" in err) == (not seed)
        assert out.read_text() == json.dumps(line) + "\n"


def refuse(args, model, todo):
    """In place of loading: nothing would come after it but the run."""
    raise OutputError(f"goes on with {len(todo)}")


def test_a_second_command_is_refused(run, lines, tmp_path, monkeypatch):
    """Before it loads a model; the first one's lines stay."""
    monkeypatch.setattr("jllm.cli.main._prepare", None)
    out = tmp_path / "out.jsonl"
    first = jsonl.ResultsFile(out)
    status, _, err = run("--input", lines, "--output", out, *FLAGS)
    assert (status, err) == (
        2, f"error: another process is writing {out}: wait for its end, or choose another --output\n"
    )  # fmt: skip
    first.write("kept\n")
    first.close()
    assert out.read_text() == "kept\n"


def test_ctrl_c_before_the_first_line_leaves_no_file(run, lines, tmp_path, monkeypatch):
    """While a model is loaded, say, when it ends the process at once."""
    out, ended = tmp_path / "out.jsonl", []

    def interrupted(args, model, todo):
        assert out.exists()
        with monkeypatch.context() as patch:
            patch.setattr(os, "_exit", lambda status: ended.append((status, out.exists())))
            signal.raise_signal(signal.SIGINT)
        raise OutputError("over")

    monkeypatch.setattr("jllm.cli.main._prepare", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background ignores
    try:
        run("--input", lines, "--output", out, *FLAGS)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == [(130, False)]


def test_foreign_output_is_not_touched(run, lines, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text("my diary\n")
    status, _, err = run("--input", lines, "--output", out)
    assert (status, err.count("\n"), out.read_text()) == (2, 1, "my diary\n")
    assert "is not an output of this input" in err
