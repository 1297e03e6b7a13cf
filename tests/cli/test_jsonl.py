"""Input lines, result lines, and taking up what an interrupted run left."""

import errno
import io
import json
import math
from dataclasses import replace

import pytest

from jllm.cli import jsonl
from jllm.cli.jsonl import Done, Job, ResultsFile, nth_seed, read_jobs, read_results, record, to_json
from jllm.engine.request import Completion, SamplingParams, Timings, TokenLogprob
from jllm.errors import InputFileError, OutputError
from jllm.guides.guide import Guide
from pallas_kernels import one_writer

BASE = SamplingParams(temperature=0.5, max_new_tokens=7)


def write(path, *lines: object):
    path.write_bytes(b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines))
    return path


def job(index: int = 0, n: int = 1, **given) -> Job:
    return Job(index, given or {"prompt": f"p{index}"}, replace(BASE, n=n), f"line {index + 1}")


def result(job: Job, sample: int = 0, seed: int = 11) -> dict:
    done = Completion((3, 4), "ä\n", "stop", None, None, Timings(0.1, 0.2, 5, 2), seed)
    return record(job, sample, done)


def test_lines_over_flags(tmp_path):
    path = write(
        tmp_path / "in.jsonl",
        {"prompt": "a", "temperature": 0, "stop": "x", "id": {"any": [1]}},
        b"  ",
        {"prompt": [1, 2], "logit_bias": {"5": -1.5}, "seed": None, "ignore_eos": True, "stop_token_ids": [4]},
        {"messages": [{"role": "user", "content": "hi"}], "n": 2},
    )
    one, two, three = read_jobs(path, replace(BASE, seed=2**32 - 1))
    assert [j.index for j in (one, two, three)] == [0, 2, 3]  # a blank line counts
    assert one.given == {"id": {"any": [1]}, "prompt": "a"}
    assert one.sampling == replace(BASE, temperature=0, stop=("x",), seed=2**32 - 1)
    bias = {"logit_bias": {5: -1.5}, "ignore_eos": True, "stop_token_ids": (4,)}
    assert two.sampling == replace(BASE, seed=None, **bias)
    assert three.sampling == replace(BASE, n=2, seed=2)  # seeds wrap around
    assert "line 4" in three.where
    assert read_jobs(path, BASE)[2].sampling.seed is None


def test_a_guide_comes_and_goes_as_json(tmp_path):
    guides = [{"regex": "[0-9]+"}, {"json": {"type": "integer"}}, {"choice": ["a", "b"]}, {"grammar": 'start: "x"'}]
    path = write(tmp_path / "in.jsonl", *({"prompt": "a", "guide": guide} for guide in [*guides, None]))
    jobs = read_jobs(path, BASE)
    assert [job.sampling.guide for job in jobs] == [*map(Guide.parse, guides), None]
    assert [result(job)["settings"].get("guide") for job in jobs] == [*guides, None]
    out = write(tmp_path / "out.jsonl", *map(result, jobs))
    assert len(read_results(out, jobs).seeds) == 5
    other = [replace(jobs[0], sampling=replace(jobs[0].sampling, guide=Guide.regex("a"))), *jobs[1:]]
    with pytest.raises(OutputError, match="guide"):
        read_results(out, other)
    with pytest.raises(InputFileError, match='line 1: a guide must be like {"regex": '):
        read_jobs(write(tmp_path / "bad.jsonl", {"prompt": "a", "guide": "[0-9]"}), BASE)


def test_a_mode_of_log_probabilities_comes_with_them(tmp_path):
    tempered = {"prompt": "a", "logprobs_mode": "tempered"}
    (one,) = read_jobs(write(tmp_path / "in.jsonl", tempered | {"logprobs": 0}), BASE)
    assert one.sampling == replace(BASE, logprobs=0, logprobs_mode="tempered")
    with pytest.raises(InputFileError, match="line 1: logprobs_mode tempered .* none are asked for: give logprobs=0"):
        read_jobs(write(tmp_path / "in.jsonl", tempered), BASE)


def test_files_of_windows_are_read(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(b'\xef\xbb\xbf\r\n\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b\\r\\n"}\r\n')
    jobs = read_jobs(tmp_path / "in.jsonl", SamplingParams())
    assert [(job.index, job.given["prompt"]) for job in jobs] == [(1, "a"), (2, "b\r\n")]


def test_nth_seed():
    assert nth_seed(None, 5) is None
    assert [nth_seed(7, i) for i in range(3)] == [7, 8, 9]


BROKEN = {
    "not json": (b"{prompt}", "not JSON"),
    "cut off": (b'{"prompt": "a"', "not JSON"),
    "not utf-8": (b'{"prompt": "\xff"}', "UTF-8"),
    "deep": (b"[" * 200_000, "not JSON"),
    "not an object": ([1, 2], "must be a JSON object, not [1, 2]"),
    "no prompt": ({"id": 1}, 'needs either "prompt" or "messages"'),
    "both": ({"prompt": "a", "messages": []}, 'needs either "prompt" or "messages"'),
    "prompt number": ({"prompt": 5}, "text or a list of token ids, not 5"),
    "prompt null": ({"prompt": None}, "text or a list of token ids, not null"),
    "prompt floats": ({"prompt": [1.5]}, "text or a list of token ids, not [1.5]"),
    "prompt bools": ({"prompt": [True]}, "text or a list of token ids"),
    "messages null": ({"messages": None}, "messages must be a non-empty list"),
    "no role": ({"messages": [{"content": "x"}]}, "messages[0].role is missing"),
    "content null": ({"messages": [{"role": "user", "content": None}]}, "messages[0].content must be text, not null"),
    "unknown key": ({"prompt": "a", "temprature": 1}, "unknown key 'temprature'"),
    "bad value": ({"prompt": "a", "top_p": 0}, "top_p must be in (0, 1]"),
    "text for number": ({"prompt": "a", "temperature": "hot"}, "temperature must be a finite number >= 0, not 'hot'"),
    "null": (
        {"prompt": "a", "repetition_penalty": None},
        "repetition_penalty must be a finite number > 0 (1 is off), not None",
    ),
    "bool for number": ({"prompt": "a", "top_k": True}, "top_k must not be true or false"),
    "number for bool": ({"prompt": "a", "ignore_eos": 1}, "ignore_eos must be true or false: 1"),
    "bias keys": ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias: keys must be token ids, not 'x'"),
    "bias twice": ({"prompt": "a", "logit_bias": {"5": 1, "05": 2}}, "logit_bias: token id 5 occurs twice"),
    "stop": ({"prompt": "a", "stop": [""]}, "stop must be non-empty strings"),
    "nan": (b'{"prompt": "a", "temperature": NaN}', "temperature must be a finite number"),
    "nan id": (b'{"prompt": "a", "id": [NaN]}', "holds NaN or Infinity, which JSON does not know"),
    "twice": (b'{"prompt": "a", "id": 1, "prompt": "b"}', "key 'prompt' occurs more than once"),
    "twice within": (b'{"prompt": "a", "id": {"x": 1, "x": 1}}', "key 'x' occurs more than once"),
}


@pytest.mark.parametrize(("line", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_line_is_named(tmp_path, line, message):
    path = write(tmp_path / "in.jsonl", {"prompt": "fine"}, b"", line, {"prompt": "fine"})
    with pytest.raises(InputFileError) as error:
        read_jobs(path, BASE)
    assert f"{path}, line 3: " in str(error.value)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_no_input(tmp_path):
    with pytest.raises(InputFileError, match="cannot read .*No such file"):
        read_jobs(tmp_path / "none.jsonl", BASE)
    with pytest.raises(InputFileError, match="holds no prompts"):
        read_jobs(write(tmp_path / "in.jsonl", b"", b""), BASE)


def test_record():
    logprobs = (TokenLogprob(3, -0.5, ((3, -0.5), (4, -1.0))),)
    done = Completion((3,), None, "length", logprobs, (-2.0,), Timings(None, 0.2, 5, 1), 9, versions=(0, 0, 2))
    made = json.loads(to_json(record(job(2, n=2, id=None, prompt=[7, 8]), 1, done)))
    assert made == {
        "index": 2,
        "id": None,
        "prompt": [7, 8],
        "sample": 1,
        "text": None,
        "token_ids": [3],
        "finish_reason": "length",
        "seed": 9,
        "settings": {"temperature": 0.5, "max_new_tokens": 7},
        "logprobs": [{"token_id": 3, "logprob": -0.5, "top": [[3, -0.5], [4, -1.0]]}],
        "prompt_logprobs": [-2.0],
        "versions": [[0, 2], [2, 1]],
        "timings": {"first_token": None, "total": 0.2, "prompt_tokens": 5, "output_tokens": 1},
    }
    assert to_json(result(job())).startswith(jsonl.RECORD_START.decode())


def test_results_are_json_whatever_the_numbers():
    logprobs = (TokenLogprob(3, math.nan, ((3, -0.5), (4, -math.inf))),)
    done = Completion((3,), None, "length", logprobs, (-math.inf,), Timings(None, 0.2, 5, 1), 9)
    banned = replace(BASE, logit_bias={3: -math.inf, 4: 1.5}, logprobs=2)

    def refuse(constant):
        raise AssertionError(constant)

    made = json.loads(to_json(record(Job(0, {"prompt": "a"}, banned), 0, done)), parse_constant=refuse)
    assert made["logprobs"] == [{"token_id": 3, "logprob": None, "top": [[3, -0.5], [4, None]]}]
    assert made["prompt_logprobs"] == [None]
    assert made["settings"]["logit_bias"] == {"3": None, "4": 1.5}


def test_resume(tmp_path):
    path, jobs = tmp_path / "out.jsonl", [job(0), job(1), job(4, n=3), job(5)]
    assert read_results(path, jobs) == Done({}, 0)  # no file yet
    lines = [to_json(result(jobs[3])), to_json(result(jobs[0])), to_json(result(jobs[2], sample=1, seed=77))]
    whole = "".join(lines).encode()
    for torn in (b"", b"{", b'{"index": 1, "prom', to_json(result(jobs[1])).encode()[:-1]):
        path.write_bytes(whole + torn)
        done = read_results(path, jobs)
        assert done == Done({(5, 0): 11, (0, 0): 11, (4, 1): 77}, len(whole))
        one, many = done.missing(jobs)
        assert one == jobs[1]
        assert many == replace(jobs[2], sampling=replace(jobs[2].sampling, seed=77))  # its samples belong together
        file = ResultsFile(path)
        file.begin(done.size)
        file.write(to_json(result(jobs[1])))
        file.close()
        assert path.read_bytes() == whole + to_json(result(jobs[1])).encode()


FOREIGN = {
    "index": (to_json(result(job(9))), "index 9 is not a prompt"),
    "prompt": (to_json(result(job(0, prompt="other"))), "its prompt is not that of line 1"),
    "id": (to_json(result(job(0, prompt="p0", id=1))), "its id is not that of line 1"),
    "messages": (to_json(result(job(0, messages=[]))), "its prompt is not that of line 1"),
    "sample": (to_json(result(job(0, n=2), sample=1)), "sample 1 is not one of 1"),
    "twice": (to_json(result(job(0))) * 2, "line 2: a second result for index 0"),
    "other json": ('{"a": 1}\n', "line 1: not a result"),
    "true index": ('{"index": true, "prompt": "p0", "seed": 1}\n', "line 1: not a result"),
    "text seed": ('{"index": 0, "prompt": "p0", "seed": "abc"}\n', "line 1: not a result"),
    "no settings": ('{"index": 0, "prompt": "p0", "seed": 1}\n', "line 1: lacks the settings"),
    "list index": ('{"index": [0], "seed": 1}\n', "line 1: not a result"),
    "no json": ("dear diary\n", "line 1: not a result"),
    "no json, no newline": ("dear diary", "line 1: not a result"),
}


@pytest.mark.parametrize(("text", "message"), FOREIGN.values(), ids=FOREIGN)
def test_foreign_output_is_left_alone(tmp_path, text, message):
    path = tmp_path / "out.jsonl"
    path.write_text(text)
    with pytest.raises(OutputError) as error:
        read_results(path, [job(0)])
    assert message in str(error.value)
    assert "choose another --output" in str(error.value)
    assert path.read_text() == text


def test_other_settings_are_not_mixed(tmp_path):
    """Only what was made as this run would make it is taken over; a seed counts where one is asked for."""
    path, made_with = tmp_path / "out.jsonl", {"model": "m", "kv_cache": "int8-g8"}
    sampling = replace(BASE, stop=("x",), logit_bias={5: -math.inf}, stop_token_ids=(4,))
    job = Job(0, {"prompt": "a"}, sampling, "line 1", made_with)
    path.write_text(to_json(result(job)))
    same = [job, replace(job, sampling=replace(sampling, seed=11)), replace(job, sampling=replace(sampling, n=3))]
    for again in same:
        assert read_results(path, [again]).seeds == {(0, 0): 11}
    others = {
        "seed 11, and now it is 12": {"seed": 12},
        "temperature 0.5, and now it is the default": {"temperature": 1.0},
        "max_new_tokens 7, and now it is 8": {"max_new_tokens": 8},
        "top_k the default, and now it is 5": {"top_k": 5},
        'stop ["x"], and now it is the default': {"stop": ()},
        "logit_bias": {"logit_bias": {5: -1.0}},
        "logprobs": {"logprobs": 0},
    }
    changed = {words: replace(job, sampling=replace(sampling, **change)) for words, change in others.items()}
    changed['model "m", and now it is "other"'] = replace(job, made_with=made_with | {"model": "other"})
    changed['kv_cache "int8-g8", and now it is the default'] = replace(job, made_with={"model": "m"})
    for words, other in changed.items():
        with pytest.raises(OutputError) as error:
            read_results(path, [other])
        assert f"{path}, line 1: was made with {words}" in str(error.value)


def test_what_names_stand_for_decides(tmp_path):
    """Other names of the same are the same; under the same names, contents are compared, and named by what differs."""
    path = tmp_path / "out.jsonl"
    run = {"weights": "w1", "scheme": "s1", "tokenizer": "t1", "jax": "0.1"}
    made = replace(job(), made_with={"model": "m", "quantize": "a.toml"}, run=run)
    path.write_text(to_json(result(made)))
    moved = replace(made, made_with={"model": "/m", "quantize": "b.toml"})
    assert read_results(path, [moved]).seeds == {(0, 0): 11}
    for name, other in (("weights", "w2"), ("scheme", "s2"), ("tokenizer", "t2"), ("jax", "0.2")):
        with pytest.raises(OutputError, match=f'was made with {name} "{run[name]}", and now it is "{other}"'):
            read_results(path, [replace(made, run=run | {name: other})])
    with pytest.raises(
        OutputError, match='was made with model "m", and now it is "/m"; choose another --output, or rem'
    ):
        read_results(path, [replace(moved, run=run | {"weights": "w2"})])
    with pytest.raises(OutputError, match="was made with temperature 0.5, and now it is 0.7"):
        read_results(path, [replace(moved, sampling=replace(BASE, temperature=0.7))])
    path.write_text(to_json(result(replace(made, run={}))))
    with pytest.raises(OutputError, match="lacks the settings and weights it was made with; it is not an"):
        read_results(path, [made])


def test_output_folder_must_exist(tmp_path):
    with pytest.raises(OutputError, match="there is no directory"):
        ResultsFile(tmp_path / "none" / "out.jsonl")


def test_a_file_has_one_writer_and_none_that_was_made_for_nothing_stays(tmp_path):
    path = tmp_path / "out.jsonl"
    first = ResultsFile(path)
    with pytest.raises(
        OutputError, match=r"another process is writing .*out\.jsonl: wait for its end, or choose another"
    ):
        ResultsFile(path)
    first.write("x\n")
    first.close()
    second = ResultsFile(path)
    second.begin(0)
    second.close()
    assert path.read_text() == ""
    path.unlink()
    ResultsFile(path).close()
    assert not path.exists()
    null = ResultsFile(jsonl.Path("/dev/null"))  # has room for all
    ResultsFile(jsonl.Path("/dev/null")).close()
    null.close()


class FullDisk(io.FileIO):
    """Takes a number of bytes and no more."""

    room = 100

    def write(self, data) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = min(self.room, len(data))
        self.room -= taken
        return super().write(bytes(data[:taken]))


def test_full_disk_leaves_whole_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(one_writer, "open", lambda path, mode, buffering: FullDisk(path, mode), raising=False)
    file = ResultsFile(tmp_path / "out.jsonl")
    file.write("x" * 59 + "\n")
    with pytest.raises(OutputError, match="No space left on device; what was written before is kept"):
        file.write("y" * 59 + "\n")
    assert (tmp_path / "out.jsonl").read_text() == "x" * 59 + "\n"
    file.close()


def test_dev_full():
    file = ResultsFile(jsonl.Path("/dev/full"))
    with pytest.raises(OutputError, match="cannot write /dev/full: No space left"):
        file.write("x\n")
    file.close()


def test_lone_surrogates_stay_json(tmp_path):
    file = ResultsFile(tmp_path / "out.jsonl")
    file.write(to_json({"id": "\ud800 ä"}))
    file.close()
    assert json.loads((tmp_path / "out.jsonl").read_bytes()) == {"id": "\ud800 ä"}
    assert "ä".encode() in (tmp_path / "out.jsonl").read_bytes()
