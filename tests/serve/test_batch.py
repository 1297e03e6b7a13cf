"""`jllm batch`: from a file of requests to a file of answers, and taking it up again."""

import json

import pytest

import jllm
from jllm.engine.request import SamplingParams
from jllm.serve.batch import main
from tests.serve.conftest import OPTIONS
from tests.tiny import serve

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 6}


def line(name, body, url=COMPLETIONS, method="POST"):
    return {"custom_id": name, "method": method, "url": url, "body": body}


RIGHT = [
    line("one", {"model": "small", "prompt": "the wolf", **GREEDY}),
    line("many", {"prompt": ["the girl", [5, 6, 7]], "n": 2, "seed": 3, "max_tokens": 5, "ignore_eos": True}),
    line("chat", {"messages": [{"role": "user", "content": "who?"}], **GREEDY}, CHAT),
    line("again", {"model": "small", "prompt": "the wolf", **GREEDY}),
]
RULES = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(20_000)) + 'r20000: "a"'
NUMBER = json.dumps(line("number", {"prompt": "a", "guided_json": {"const": 0}})).replace(
    "0}}", "0.10000000000000001}}"
)
WRONG = {
    "model": (404, line("model", {"model": "large", "prompt": "a"})),
    "method": (405, line("method", {"prompt": "a"}, method="GET")),
    "url": (404, line("url", {"input": "a"}, "/v1/embeddings")),
    "stream": (400, line("stream", {"prompt": "a", "stream": True})),
    "field": (400, line("field", {"prompt": "a", "tmperature": 1})),
    "value": (400, line("value", {"prompt": "a", "temperature": -1})),
    "nan": (400, line("nan", {"prompt": "a", "temperature": float("nan")})),
    "context": (400, line("context", {"prompt": [5] * 10_000})),
    "guide": (400, line("guide", {"prompt": "a", "guided_regex": r"[^\s\S]"})),
    "deep guide": (400, line("deep guide", {"prompt": "a", "guided_grammar": RULES})),
    "number": (400, NUMBER),
    "pages": (400, line("pages", {"prompt": [5] * 100, "max_tokens": 100})),
}


@pytest.fixture
def run(checkpoint, tmp_path, capsys):
    """Runs the command on these lines: exit status, answers by custom_id, and standard error."""

    def run(lines, *flags, read=True):
        text = "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines)
        (tmp_path / "in.jsonl").write_text(text)
        command = ["--model", checkpoint, "--served-name", "small", "--no-compile-cache", "--max-slots", 4]
        command += ["--page-size", 8, "--num-pages", 16, "--max-step-tokens", 64, *flags]
        files = ["--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl"]
        try:
            status = main([str(each) for each in (*command, *files)])
        except SystemExit as end:
            status = end.code
        if not read:
            return status, capsys.readouterr().err
        out = tmp_path / "out.jsonl"
        found = [json.loads(each) for each in out.read_text().splitlines()] if out.exists() else []
        return status, {each["custom_id"]: each for each in found}, capsys.readouterr().err

    return run


def test_answers_are_the_server_s_and_errors_stop_no_other(run, model):
    status, answers, err = run([*RIGHT[:2], *(each for _, each in WRONG.values()), *RIGHT[2:]])
    assert status == 0
    assert "16 of 16 requests answered, 12 with an error" in err
    assert answers.keys() == {each["custom_id"] for each in RIGHT} | WRONG.keys()
    assert len({each["id"] for each in answers.values()}) == 16
    for answer in answers.values():
        assert answer.keys() == {"id", "custom_id", "response", "error"}
        assert answer["error"] is None
    for name, (code, _) in WRONG.items():
        response = answers[name]["response"]
        assert response["status_code"] == code, name
        assert response["body"]["error"]["message"].count("\n") == 0
    bodies = {each["custom_id"]: answers[each["custom_id"]]["response"]["body"] for each in RIGHT}
    (greedy,) = serve(model, ["the wolf"], [SamplingParams(temperature=0, ignore_eos=True, max_new_tokens=6)])
    for name in ("one", "again"):
        assert bodies[name]["choices"][0]["text"] == greedy.text
        assert bodies[name]["usage"]["completion_tokens"] == 6
    prompts = ["the girl", [5, 6, 7]]
    sampling = SamplingParams(n=2, seed=3, max_new_tokens=5, ignore_eos=True)
    want = jllm.generate(model, prompts, sampling, **OPTIONS, executables=None)
    assert [each["text"] for each in bodies["many"]["choices"]] == [done.text for done in want]
    assert bodies["chat"]["object"] == "chat.completion"
    assert bodies["chat"]["choices"][0]["message"]["role"] == "assistant"


def test_a_request_that_does_not_say_how_long_gets_what_the_pool_has_room_for(run):
    """Though the file is read before there is a pool."""
    body = {"temperature": 0, "ignore_eos": True}
    lines = [line("chat", {"messages": [{"role": "user", "content": "who?"}], "n": 2, **body}, CHAT)]
    lines += [line("text", {"prompt": [5] * 25, **body}), line("both", {"prompt": [[5] * 25, [5] * 3], **body})]
    lines += [line("long", {"prompt": [5] * 25, "max_tokens": 16})]
    status, answers, _ = run(lines, "--num-pages", 4)
    bodies = {name: answer["response"]["body"] for name, answer in answers.items()}
    assert status == 0
    assert bodies["chat"]["usage"]["completion_tokens"] == 2 * (33 - bodies["chat"]["usage"]["prompt_tokens"])
    assert bodies["text"]["usage"]["completion_tokens"] == 33 - 25
    assert bodies["both"]["usage"]["completion_tokens"] == 33 - 25 + 16
    error = bodies["long"]["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")


def test_what_was_answered_is_not_run_again(run, tmp_path):
    lines, out = [*RIGHT, WRONG["model"][1]], tmp_path / "out.jsonl"
    _, first, _ = run(lines)
    whole = out.read_bytes()
    status, again, err = run(lines)
    assert (status, again, out.read_bytes()) == (0, first, whole)
    assert "all 5 requests were answered before" in err
    kept = whole.splitlines(keepends=True)[:2]
    out.write_bytes(b"".join(kept) + whole.splitlines()[2][:40])  # cut off half-way
    status, resumed, err = run(lines)
    assert status == 0
    assert "5 of 5 requests answered, 2 of them before" in err
    assert out.read_bytes().startswith(b"".join(kept))
    for name, answer in resumed.items():
        assert answer["id"] == first[name]["id"]
        choices = (each[name]["response"]["body"].get("choices") for each in (resumed, first))
        assert len(set(map(json.dumps, choices))) == 1


def test_nothing_of_another_run_is_mixed_in(run, tmp_path):
    run(RIGHT[:2])
    out = tmp_path / "out.jsonl"
    whole = out.read_bytes()
    other = [{**RIGHT[0], "body": {**RIGHT[0]["body"], "max_tokens": 7}}, RIGHT[1]]
    tries = [
        ((other,), "custom_id 'one' was answered by another run"),
        ((RIGHT[:2], "--kv-cache", "int8-g8"), "was answered by another run: its request, the model, its numbers"),
        ((RIGHT[1:],), "custom_id 'one' is not of the input"),
    ]
    for (lines, *flags), says in tries:
        status, _, err = run(lines, *flags)
        assert (status, out.read_bytes()) == (2, whole)
        assert err.count("\n") == 1
        assert says in err
    for content, says in ((whole * 2, "a second answer for custom_id"), (b'"a tale"\n', "line 1: not an answer")):
        out.write_bytes(content)
        status, err = run(RIGHT[:2], read=False)
        assert (status, out.read_bytes()) == (2, content)
        assert says in err


BROKEN = {
    "a line that is no JSON": (["{"], "line 1: not JSON"),
    "no id": ([{"method": "POST", "url": COMPLETIONS, "body": {}}], 'line 1: needs "custom_id", a text'),
    "no body": ([{**RIGHT[0], "body": "the wolf"}], 'line 1: needs "body", an object'),
    "another key": ([RIGHT[0], {**RIGHT[1], "priority": 1}], "line 2: unknown key 'priority'; known are custom_id"),
    "an id twice": ([RIGHT[0], RIGHT[1], RIGHT[0]], "line 3: custom_id 'one' occurs more than once"),
    "no line": ([""], "holds no requests"),
}


@pytest.mark.parametrize(("lines", "says"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_refused_before_anything_runs(run, tmp_path, lines, says):
    status, _, err = run(lines)
    assert (status, err.count("\n")) == (2, 1)
    assert says in err
    assert not (tmp_path / "out.jsonl").exists()


def test_lower_priorities_come_first(run, tmp_path):
    body = {"prompt": "a", "max_tokens": 2, "ignore_eos": True}
    run([line(str(i), {**body, "priority": priority}) for i, priority in enumerate((3, 1, 2, 1))], "--max-slots", 1)
    written = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(each)["custom_id"] for each in written] == ["1", "3", "2", "0"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--input", "a"], "give --input FILE and --output FILE"),
        (["--input", "a", "--output", "a"], "--input and --output are the same file"),
        (["--input", "a", "--output", "b", "--drafts", "2"], "--drafts needs --speculate NAME"),
    ],
)
def test_wrong_flags(capsys, flags, says):
    with pytest.raises(SystemExit) as end:
        main(flags)
    assert (end.value.code, capsys.readouterr().err) == (2, f"error: {says} (see --help)\n")
