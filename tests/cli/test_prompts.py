"""`python -m jllm.generate` on prompts: what it prints."""

import io
import json
import re
import shutil
import sys

from sentencepiece import SentencePieceProcessor

import jllm
from jllm.cli.arguments import make_parser, sampling_params
from jllm.cli.display import InOrder
from jllm.cli.main import main
from tests.cli.cases import FLAGS, SUMMARY, expected, params


def test_text_in_a_pipe(run, model):
    status, out, err = run("once upon a time", *FLAGS)
    (done,) = expected(model, "once upon a time", params())
    assert (status, out) == (0, done.text + "\n")  # the prompt is not repeated
    summary = SUMMARY.fullmatch(err.splitlines()[-1])
    assert summary[1] == "8"
    assert "first token after" in summary[0]
    assert re.search(r"ready after \d+\.\d s, 3 programs compiled in \d+\.\d s, 0 of them from the cache", summary[0])


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
    plain = run("once upon a time", *FLAGS)[:2]
    assert run(*FLAGS)[:2] == plain
    monkeypatch.setattr(sys, "stdin", io.StringIO("\ufeffonce upon a time\r\n"))  # from Windows
    assert run(*FLAGS)[:2] == plain
    lines = []
    for text in ("once\nupon", "once\r\nupon\r\n", "once\rupon\r"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        lines.append(run(*FLAGS)[:2])
    assert lines[0] == lines[1] == lines[2]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    message = "error: no prompt: standard input is empty, and no argument gives one (--help shows examples)\n"
    assert run(*FLAGS) == (2, "", message)


def test_token_ids_on_the_command_line(run, model):
    done = expected(model, [[5, 6, 7], [8, 9]], [params(seed=5), params(seed=6)])
    status, out, _ = run("--prompt-ids", "5 6 7", "--prompt-ids", "8,9", "--json", *FLAGS)
    found = [json.loads(line) for line in out.splitlines()]
    assert (status, [r["prompt"] for r in found]) == (0, [[5, 6, 7], [8, 9]])
    assert [r["token_ids"] for r in found] == [list(d.token_ids) for d in done]
    assert run("--prompt-ids", "5 6 7", *FLAGS)[:2] == (0, done[0].text + "\n")


def test_stop_and_greedy(run, model):
    (free,) = expected(model, "a king", params(temperature=0.0, max_new_tokens=20))
    stop = free.text[5:7]
    out = run("a king", "--temperature", 0, "--stop", "§", "--stop", stop, "--max-new-tokens", 20, "--ignore-eos")[1]
    assert out == free.text[: free.text.index(stop)] + "\n"


def test_without_a_number_of_tokens_a_text_ends_where_the_pool_does(run, tmp_path):
    """A number that is asked for and has no room is an error; the default is what there is room for."""
    (tmp_path / "in.jsonl").write_text('{"prompt": [5, 6]}\n{"prompt": [5, 6], "max_new_tokens": 20}\n')
    small = ("--num-pages", 4, "--page-size", 8, "--ignore-eos", "--json")
    status, out, _ = run("--prompt-ids", "5 6", *small)
    assert (status, len(json.loads(out)["token_ids"])) == (0, 4 * 8 + 1 - 2)
    status, out, _ = run("--input", tmp_path / "in.jsonl", *small)
    assert sorted(len(json.loads(line)["token_ids"]) for line in out.splitlines()) == [20, 31]
    assert "the page pool has 4" in run("--prompt-ids", "5 6", *small, "--max-new-tokens", 40)[2]


def test_end_tokens(run, model, folder, tmp_path):
    """The tokenizer's, though config.json names another; --eos-token-id in their place; --stop-token-id beside them."""
    free, long = ("--temperature", 0, "--json"), ("--max-new-tokens", 20)
    (all,) = expected(model, "a king", params(temperature=0.0, max_new_tokens=20))
    end = all.token_ids[6]
    ends = {"token_ids": list(all.token_ids[: all.token_ids.index(end)]), "finish_reason": "stop"}
    on = {"token_ids": list(all.token_ids), "finish_reason": "length"}
    shutil.copytree(folder, tmp_path / "model")
    piece = SentencePieceProcessor(model_file=str(folder / "tokenizer.model")).id_to_piece(end)
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": piece}}))
    for flags, want in {
        ("--model", tmp_path / "model"): ends,
        ("--model", tmp_path / "model", "--ignore-eos"): on,
        ("--model", tmp_path / "model", "--eos-token-id", 0): on,
        ("--eos-token-id", f"{end},0"): ends,
        ("--eos-token-id", 0, "--eos-token-id", end, "--ignore-eos"): on,
        ("--ignore-eos", "--stop-token-id", 0, "--stop-token-id", end): ends,
    }.items():
        found = json.loads(run("a king", *free, *long, *flags)[1])
        assert {name: found[name] for name in want} == want, flags
        asked = {name: value for name, value in found["settings"].items() if name.endswith(("token_id", "token_ids"))}
        assert bool(asked) == any(str(flag).endswith("-id") for flag in flags)
    for flag in ("--eos-token-id", "--stop-token-id"):
        assert run("a king", flag, 10**6)[0] == 2


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
    from jllm.files.load import DTYPES
    from pallas_kernels.formats.kv_formats import FLOATS

    for name in (*DTYPES, *(set(FLOATS) - {"f64"}), "int8-gN", "int4-gN", "examples:", "exit status"):
        assert name in text


def test_speculation_changes_no_text_and_is_summed_up(run):
    """Also where drafts come from the prompt's own repetition."""
    prompt = "once upon a time there was once upon a time there"
    plain, drafted = run(*FLAGS, prompt), run(*FLAGS, "--speculate", "ngram", "--drafts", 2, prompt)
    assert drafted[:2] == plain[:2]
    assert "tokens a step with drafts, % accepted by depth:" in drafted[2]
    assert "drafts" not in plain[2]
