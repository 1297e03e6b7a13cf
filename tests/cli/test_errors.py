"""Mistakes on the command line, and what goes wrong around it: one line, and status 2."""

import json
import os
import re
import shutil
import sys
from dataclasses import replace

import pytest

import jllm
from jllm.files.save import save
from tests.cli.cases import FLAGS, expected, params

ERRORS = {
    "no directory": (("--model", "/none/such", "hi"), "/none/such: no such directory"),
    "no name": (("--model", "", "hi"), "the model's name is empty"),
    "half a kv format": (("--kv-cache", "k=bf16", "hi"), "give k=FORMAT,v=FORMAT, each once"),
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
    "pool": (
        ("--num-pages", 4, "--page-size", 8, "king " * 60),
        "the page pool has 4: shorten the request or raise num_pages",
    ),
    "quantize": (("--quantize", "w1a1", "hi"), "unknown quantization scheme 'w1a1'; near ones: w8a16, w8a8"),
    "kv format": (("--kv-cache", "int3", "hi"), "KV cache format 'int3'"),
    "dtype": (("--dtype", "f12", "hi"), "dtype 'f12' is not known; known are bf16, f16, f32"),
    "page size": (("--page-size", 12, "hi"), "page_size must be one of 8, 16"),
    "slots": (("--max-slots", 0, "hi"), "max_slots must be an integer >= 1, not 0"),
    "step tokens": (("--max-step-tokens", 2, "hi"), "max_step_tokens must be at least max_slots = 4"),
    "not a number": (("--top-k", "many", "hi"), "argument --top-k: invalid int value: 'many'"),
    "unknown flag": (("--beams", 3, "hi"), "unrecognized arguments: --beams"),
    "two lines": (("--bo\ngus\r", 3, "hi"), "unrecognized arguments: --bo gus (see --help)"),
    "abbreviation": (("--temp", 3, "hi"), "unrecognized arguments: --temp"),
    "output alone": (("--output", "x.jsonl", "hi"), "--output needs --input"),
    "input alone": (("--input", "x.jsonl"), "--input needs --output"),
    "prompt and input": (("--input", "x.jsonl", "--output", "y.jsonl", "hi"), "give prompts or --input, not both"),
    "prompt and ids": (("--prompt-ids", "5", "hi"), "give prompts or --prompt-ids, not both"),
    "input and ids": (("--prompt-ids", "5", "--input", "x", "--json"), "give prompts or --input, not both"),
    "no ids": (("--prompt-ids", "5 six"), "argument --prompt-ids: must be token ids like 1 763 912, not '5 six'"),
    "empty ids": (("--prompt-ids", " "), "the prompt is empty"),
    "ids outside": (("--prompt-ids", "5 99999"), "prompt: token id 99999 is not in [0, "),
    "ids of a chat": (("--prompt-ids", "5", "--chat"), "--chat needs text or messages, not token ids"),
    "same file": (("--input", "x.jsonl", "--output", "./x.jsonl"), "are the same file"),
    "no input": (("--input", "/none/x.jsonl", "--json"), "cannot read /none/x.jsonl: No such file"),
    "two guides": (("--regex", "a", "--choice", "b", "hi"), "--regex and --choice cannot go together: give one"),
    "no schema": (("--json-schema", "/none/such", "hi"), "--json-schema: cannot read /none/such: No such file"),
    "no end": (("--regex", "a", "--ignore-eos", "hi"), "ignore_eos has no meaning with a guide"),
    "empty choice": (("--choice", "", "hi"), "a choice must be a list of non-empty strings"),
    "drafter": (("--speculate", "oracle", "hi"), "speculate='oracle' is not known: give one of ngram, draft"),
    "heads": (("--speculate", "medusa:/none/such", "hi"), "/none/such"),
    "draft model": (("--speculate", "draft:/none/such", "hi"), "/none/such"),
    "another model's draft": (("--speculate", "draft", "hi"), "vocabulary"),
    "another model's heads": (("--speculate", "eagle", "hi"), "made for another model"),
    "inputs alone": (("--inputs", ".", "hi"), "--inputs needs --input, whose lines name them"),
    "no hooks": (("--input", "x", "--json", "--inputs", "."), "--inputs needs --hooks MODULE:NAME, which declare"),
    "no inputs": (("--input", "x", "--json", "--hooks", "a:b", "--inputs", "/none/such"), "must be a directory, not"),
    "drafts alone": (("--drafts", 3, "hi"), "--drafts needs --speculate NAME"),
    "acceptance": (
        ("--acceptance", "rejection", "hi"),
        "--acceptance is gone: drafts are accepted only where they equal",
    ),
    "no drafts": (("--speculate", "ngram", "--drafts", 0, "hi"), "drafts must be an integer from 1 to 32, not 0"),
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
    for flags, what in ((), "a text prompt needs a tokenizer"), (("--chat",), "a chat needs a tokenizer"):
        status, _, err = run(*flags, "hi", model=tmp_path)
        assert (status, err.count("\n")) == (2, 1)
        assert what in err
        assert 'beside its weights, or give token ids: --prompt-ids "5 6 7", or lines {"prompt": [5, 6, 7]}' in err
    (tmp_path / "in.jsonl").write_text('{"prompt": [5, 6, 7]}\n')  # as that says
    status, out, _ = run("--input", tmp_path / "in.jsonl", "--json", *FLAGS, model=tmp_path)
    (done,) = expected(model, [5, 6, 7], params())
    assert status == 0
    assert (json.loads(out)["token_ids"], json.loads(out)["text"]) == (list(done.token_ids), None)


def test_out_of_memory_is_one_line(run, monkeypatch):
    def full(*_, **__):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 4096 bytes.\nmore")

    monkeypatch.setattr("jllm.files.load.load", full)
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


def test_logits_that_are_not_finite_are_an_error(run, folder, tmp_path):
    model = jllm.load(folder)
    broken = replace(model.params, norm=model.params.norm.at[0].set(float("nan")))
    save(tmp_path, broken, model.config)
    shutil.copy(folder / "tokenizer.model", tmp_path)
    status, _, err = run("a king", model=tmp_path)
    assert status == 2
    assert err.splitlines()[-1].startswith("error: the logits of 1 completion were not finite")


def test_a_model_that_does_not_fit_says_what_would(run, monkeypatch):
    """Weights, then pages and steps: one line each, before anything is allocated."""
    monkeypatch.setattr(
        "jllm.parallel.memory.device_stats", lambda device: {"bytes_limit": 50_000, "bytes_in_use": 20_000}
    )
    status, out, err = run("a king")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "its weights in float32 need 0." in err
    assert "and the device has 0.03 MiB free; no smaller dtype or scheme would fit" in err
    monkeypatch.setattr(
        "jllm.parallel.memory.device_stats", lambda device: {"bytes_limit": 9 << 20, "bytes_in_use": 1 << 20}
    )
    status, out, err = run("a king", "--num-pages", 10_000)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: 10000 KV pages of 16 tokens take 39.06 MiB, a step of 4 decodes and 28 prompt tokens")
    pages = int(re.search(r"what would fit: num_pages=(\d+) \(", err)[1])
    assert run("a king", "--num-pages", pages, *FLAGS)[0] == 0
    assert run("a king", "--num-pages", pages + 1)[0] == 2
