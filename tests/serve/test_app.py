"""The application without sockets: answers, errors of one line, limits, back-pressure, clients that go."""

import asyncio
import json
import logging
import random
import re
import shutil
import threading
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jllm
from jllm.engine.request import Completion, Event, SamplingParams, Timings, TokenLogprob
from jllm.files.load import load
from jllm.files.safetensors_io import write_file
from jllm.files.save import save
from jllm.files.tokenizer import load_tokenizer
from jllm.serve import answers
from jllm.serve.requests import Served, Wanted
from jllm.serve.update import Updates
from tests.cli.cases import BANS
from tests.serve.conftest import Gone, answer, ask, serving
from tests.tiny import full_logits, log_softmax, serve

pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY = {"temperature": 0, "ignore_eos": True}
LINKS = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(5000)}
DEEP = {"$ref": "#/$defs/d0", "$defs": {**LINKS, "d5000": {"type": "integer"}}}


def run(model, work, **more):
    async def main():
        async with asyncio.timeout(120), serving(model, **more) as (engine, app):
            return await work(engine, app)

    return asyncio.run(main())


def served(model, body, path=COMPLETIONS, **more):
    return run(model, lambda engine, app: answer(app, path, body), **more)


def events(content: bytes) -> list:
    """The chunks of a stream, which ends as it should."""
    *chunks, done, rest = content.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


def one_line(found) -> str:
    """The message of an error in OpenAI's format."""
    assert found.keys() == {"error"}
    assert found["error"].keys() == {"message", "type", "param", "code"}
    assert "\n" not in found["error"]["message"]
    return found["error"]["message"]


def test_texts_are_those_of_the_engine(model):
    prompts = ["the wolf", "a girl and", "in the small house"]
    want = serve(model, prompts, [SamplingParams(temperature=0.7, seed=5, n=1, max_new_tokens=6)] * 3)
    body = {"prompt": prompts, "temperature": 0.7, "seed": 5, "max_tokens": 6, "model": "small"}
    status, found = served(model, body)
    assert status == 200
    assert [choice["text"] for choice in found["choices"]] == [completion.text for completion in want]
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2]
    counts = sum(c.timings.prompt_tokens for c in want), sum(len(c.token_ids) for c in want)
    assert list(found["usage"].values()) == [*counts, sum(counts)]


def test_ids_as_prompts_and_in_answers(model):
    ids = [model.tokenizer.encode(text) for text in ("the wolf", "a girl and")]

    async def work(engine, app):
        body = {"max_tokens": 5, "return_token_ids": True, **GREEDY}
        one = await answer(app, COMPLETIONS, {"prompt": ids[0], **body})
        two = await answer(app, COMPLETIONS, {"prompt": ids, "n": 2, **body})
        return one[1]["choices"], two[1]["choices"]

    one, two = run(model, work)
    want = serve(model, ids, [SamplingParams(temperature=0, ignore_eos=True, max_new_tokens=5)] * 2)
    assert [tuple(choice["token_ids"]) for choice in two] == [want[i].token_ids for i in (0, 0, 1, 1)]
    assert one[0]["token_ids"] == two[0]["token_ids"]


def test_a_request_names_its_arrays(model, tmp_path):
    ids = model.tokenizer.encode("the wolf")
    body = {"prompt": ids, "max_tokens": 4, "return_token_ids": True, **GREEDY}

    async def work(engine, app):
        _, plain = await answer(app, COMPLETIONS, body)
        first = plain["choices"][0]["token_ids"][0]
        write_file(tmp_path / "one.safetensors", {"token": np.asarray(first + 1, np.int32)})
        _, banned = await answer(app, COMPLETIONS, body | {"inputs": "one"})
        assert first not in banned["choices"][0]["token_ids"]
        status, found = await answer(app, COMPLETIONS, body | {"inputs": "two"})
        assert (status, found["error"]["param"]) == (400, "inputs")
        assert "'two' is not in" in found["error"]["message"]

    run(model, work, options={"hooks": BANS}, inputs=tmp_path)
    status, found = served(model, body | {"inputs": "one"})
    assert (status, found["error"]["param"]) == (400, "inputs")
    assert "start the server with --inputs DIR" in found["error"]["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_adds_up_to_the_whole(model, path):
    prompt = {"prompt": ["the wolf", "a girl"]} if path == COMPLETIONS else {"messages": [message("the wolf")]}
    logprobs = {"logprobs": 2} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 2}
    body = {**prompt, **logprobs, "n": 2, "seed": 3, "max_tokens": 7, "return_token_ids": True}

    async def work(engine, app):
        status, whole = await answer(app, path, body)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        (streamed, headers, content) = await ask(app, path, body | options)
        assert (status, streamed) == (200, 200)
        assert headers[b"content-type"].startswith(b"text/event-stream")
        return whole, events(content)

    whole, chunks = run(model, work)
    *chunks, last = chunks
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    for choice in whole["choices"]:
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert [part["finish_reason"] for part in mine] == [*[None] * (len(mine) - 1), choice["finish_reason"]]
        assert sum((part["token_ids"] for part in mine), []) == choice["token_ids"]
        if path == CHAT:
            assert [part["delta"].get("role") for part in mine] == ["assistant", *[None] * (len(mine) - 1)]
            assert "".join(part["delta"]["content"] for part in mine) == choice["message"]["content"]
            assert sum((part["logprobs"]["content"] for part in mine), []) == choice["logprobs"]["content"]
        else:
            assert "".join(part["text"] for part in mine) == choice["text"]
            for name, values in choice["logprobs"].items():
                assert sum((part["logprobs"][name] for part in mine), []) == values


def message(text, role="user"):
    return {"role": role, "content": text}


def test_an_error_in_the_middle_of_a_stream_is_its_last_event_and_is_logged(model, monkeypatch, caplog):
    """Whatever raises it: a client that sees no end takes what it has for the whole."""
    chunks = answers.Answer.chunks

    def fails(self, event):
        if event.completion is not None:
            raise ZeroDivisionError("nobody expects this")
        return chunks(self, event)

    monkeypatch.setattr(answers.Answer, "chunks", fails)
    body = {"prompt": "the wolf", "max_tokens": 30, "ignore_eos": True, "stream": True, **GREEDY}
    status, _, content = run(model, lambda engine, app: ask(app, COMPLETIONS, body))
    assert status == 200
    first, *_, last, _ = content.decode().split("\n\n")
    assert json.loads(first.removeprefix("data: "))["choices"]
    found = json.loads(last.removeprefix("data: "))
    assert one_line(found) == "the server failed: ZeroDivisionError"
    assert "nobody expects this" in caplog.text


def test_an_error_of_who_watches_the_client_is_answered(model, caplog):
    async def work(engine, app):
        sent, body = [], json.dumps({"prompt": "the wolf", "max_tokens": 90, **GREEDY}).encode()
        given = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": given}
        parts = [{"type": "http.request", "body": body}]

        async def receive():
            if not parts:
                raise ZeroDivisionError("nobody expects this")
            return parts.pop()

        async def send(message):
            sent.append(message)

        await app(scope, receive, send)
        return sent[0]["status"]

    assert run(model, work) == 500
    assert "nobody expects this" in caplog.text


def test_a_stream_decodes_its_prompt_once(model, monkeypatch):
    """Not for each of its chunks, of which a second has thousands."""
    made = []

    class Counted(answers.Offsets):
        def __init__(self, *args):
            made.append(args)
            super().__init__(*args)

    monkeypatch.setattr(answers, "Offsets", Counted)

    async def work(engine, app):
        body = {"prompt": "the wolf", "n": 2, **GREEDY, "max_tokens": 12, "stream": True}
        return events((await ask(app, COMPLETIONS, body))[2])

    assert len(run(model, work)) > 4
    assert len(made) == 2


def test_echo_scores_the_prompt(model):
    """As lm-eval asks for it: log-probabilities of the prompt's tokens, and whether each is the likeliest."""
    ids = model.tokenizer.encode("the wolf and the girl")
    body = {"prompt": ids, "echo": True, "logprobs": 1, "temperature": 0}

    async def work(engine, app):
        return [(await answer(app, COMPLETIONS, {**body, "max_tokens": n}))[1] for n in (0, 1)]

    none, one = run(model, work)
    want = log_softmax(full_logits(model, ids).astype(np.float64))
    for found in (none, one):
        scores = found["choices"][0]["logprobs"]
        assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
        mine = scores["token_logprobs"][1 : len(ids)]
        np.testing.assert_allclose(mine, [want[i, t] for i, t in enumerate(ids[1:])], atol=1e-4)
        best = [max(top.values()) for top in scores["top_logprobs"][1 : len(ids)]]
        np.testing.assert_allclose(best, want[: len(ids) - 1].max(axis=1), atol=1e-4)
        text = "".join(scores["tokens"][1 : len(ids)])
        assert text == "the wolf and the girl"
        assert found["choices"][0]["text"].startswith(text)
        assert scores["text_offset"][1:4] == [0, *np.cumsum([len(t) for t in scores["tokens"][1:3]])]
    assert len(none["choices"][0]["logprobs"]["tokens"]) == len(ids)
    assert len(one["choices"][0]["logprobs"]["tokens"]) == len(ids) + 1
    assert none["usage"]["completion_tokens"] == 0


def test_offsets_are_of_the_text_where_a_tokenizer_puts_a_space_before_it(tmp_path):
    """SentencePiece's: the space of the first token is not in the text, that of the prompt or of what follows it."""
    from tests.files.tokenizer.cases import train_sentencepiece

    tokenizer = load_tokenizer(train_sentencepiece(tmp_path))
    ids, made = tokenizer.encode("the girl"), tokenizer.encode("and the wolf", add_bos=False)
    for echo in (True, False):
        text = tokenizer.decode([*ids, *made])[0 if echo else len("the girl") :]
        new = tuple(TokenLogprob(id, -1.0) for id in made)
        known = tuple(-1.0 for _ in ids[1:])
        best = tuple((id, -1.0) for id in ids[1:])
        timings = Timings(None, 0.0, len(ids), len(made))
        decoder = tokenizer.stream_decoder(ids)
        rest = "".join(map(decoder.push, made))
        done = Completion(tuple(made), rest, "length", new, known if echo else None, timings, 0, None, best)
        sampling = SamplingParams(logprobs=0, prompt_logprobs=echo)
        answer = answers.Answer(Wanted((ids,), sampling, False, echo=echo), Served("small", tokenizer, 99, 4, None))
        answer.add(Event(0, 0, "", (), done))
        (choice,) = answer.whole()["choices"]
        assert choice["text"] == text
        tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
        first = next(i for i, token in enumerate(tokens) if token.startswith(" "))
        for i, (token, at, end) in enumerate(zip(tokens, offsets, [*offsets[1:], len(text)])):
            shown = token.removeprefix(" ") if echo and i == first else "" if token.startswith("token_id:") else token
            assert text[at:end] == shown


def test_a_stream_with_echo_adds_up_to_the_whole(small_app, small_stream):
    body = {"prompt": ["the wolf", "a girl and"], "echo": True, "return_token_ids": True, **GREEDY}
    for more in (
        {"max_tokens": 6},
        {"max_tokens": 0},
        {"max_tokens": 4, "logprobs": 1},
        {"max_tokens": 0, "logprobs": 0},
    ):
        whole = small_app(COMPLETIONS, body | more)[1]["choices"]
        chunks = small_stream(COMPLETIONS, body | more)
        for choice in whole:
            mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
            assert "".join(part["text"] for part in mine) == choice["text"]
            assert sum((part["token_ids"] for part in mine), []) == choice["token_ids"]
            assert mine[-1]["finish_reason"] == choice["finish_reason"] == "length"
            if "logprobs" in more:
                assert [part["logprobs"] for part in mine] == [choice["logprobs"]]


def test_nothing_is_asked_for_and_the_token_that_is_dropped_is_a_stop(small_app):
    body = {"prompt": "the wolf", "echo": True, "max_tokens": 0, "logprobs": 1, "temperature": 0}
    first = small_app(COMPLETIONS, {**body, "max_tokens": 1, "return_token_ids": True})[1]["choices"][0]["token_ids"][
        -1
    ]
    plain, stopped = (small_app(COMPLETIONS, body | more)[1] for more in ({}, {"stop_token_ids": [first]}))
    assert stopped["choices"] == plain["choices"]
    assert stopped["usage"] == plain["usage"]


def test_usage_of_each_chunk_grows_to_the_whole(small_stream):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": ["the wolf", "a girl"], "n": 2, "max_tokens": 5, "stream_options": options, **GREEDY}
    counts = [chunk["usage"]["completion_tokens"] for chunk in small_stream(COMPLETIONS, body)]
    assert counts == sorted(counts)
    assert (counts[0] < 20, counts[-2:]) == (True, [20, 20])


def test_a_token_inside_of_which_a_stop_begins_is_counted(model):
    """As it was computed: in usage, ids and log-probabilities, streamed and not."""
    (the,) = model.tokenizer.encode(" the", add_bos=False)
    body = {"prompt": "wolf", "max_tokens": 8, "logit_bias": {str(the): 100}, "stop": "he t", "logprobs": 1, **GREEDY}
    body["return_token_ids"] = True

    async def work(engine, app):
        whole = (await answer(app, COMPLETIONS, body))[1]
        streamed = events((await ask(app, COMPLETIONS, body | {"stream": True}))[2])
        return whole, [chunk["choices"][0] for chunk in streamed]

    whole, parts = run(model, work)
    (choice,) = whole["choices"]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == (" t", [the], "stop")
    assert whole["usage"]["completion_tokens"] == len(choice["logprobs"]["tokens"]) == 1
    assert sum((part["token_ids"] for part in parts), []) == choice["token_ids"]
    assert sum((part["logprobs"]["token_logprobs"] for part in parts), []) == choice["logprobs"]["token_logprobs"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("reason", ["deadline", "abort"])
def test_how_an_answer_was_cut_is_said_in_a_word_of_the_api(model, path, reason):
    """The true reason is beside it."""
    prompt = {"prompt": "the wolf"} if path == COMPLETIONS else {"messages": [message("a")]}
    body = {**prompt, "max_tokens": 30, **GREEDY}

    async def work(engine, app):
        def cut(events):
            for event in events:
                if event.completion is not None:
                    event = event._replace(completion=replace(event.completion, finish_reason=reason))
                yield event

        step = engine._engine.step
        engine._engine.step = lambda: list(cut(step()))
        whole = (await answer(app, path, body))[1]["choices"][0]
        last = events((await ask(app, path, body | {"stream": True}))[2])[-1]["choices"][0]
        return whole, last

    for choice in run(model, work):
        assert (choice["finish_reason"], choice["end_reason"]) == ("length", reason)


def test_a_priority_reaches_the_engine(model):
    async def work(engine, app):
        asked, submit = [], engine.submit_all
        engine.submit_all = lambda *args, **more: asked.append(more) or submit(*args, **more)
        body = {"prompt": "a", "max_tokens": 1, "priority": -2}
        statuses = [(await answer(app, COMPLETIONS, body | more))[0] for more in ({}, {"priority": "high"})]
        statuses.append((await answer(app, CHAT, {"messages": [message("hi")], "max_tokens": 1, "priority": 4}))[0])
        return statuses, [each["priority"] for each in asked]

    assert run(model, work) == ([200, 400, 200], [-2, 4])


def test_what_sampling_was_asked_for_is_what_is_done(model):
    """Each field reaches the engine: a stop string, a bias that bans, a penalty, top_k of vLLM."""
    free = serve(model, ["the wolf"], [SamplingParams(temperature=0, ignore_eos=True, max_new_tokens=8)])[0]
    body = {"prompt": "the wolf", "max_tokens": 8, "return_token_ids": True}

    async def work(engine, app):
        changes = [
            {**GREEDY},
            {**GREEDY, "stop": free.text[3:5]},
            {**GREEDY, "logit_bias": {str(free.token_ids[0]): -100}},
            {"top_k": 1, "ignore_eos": True},
            {**GREEDY, "stop_token_ids": [free.token_ids[4]]},
            {**GREEDY, "stop": ["</s>"], "logit_bias": {"1": 100}},
        ]
        return [(await answer(app, COMPLETIONS, body | change))[1]["choices"][0] for change in changes]

    plain, stopped, biased, first, by_id, special = run(model, work)
    assert plain["text"] == first["text"] == free.text
    assert (stopped["text"], stopped["finish_reason"]) == (free.text[: free.text.find(free.text[3:5])], "stop")
    assert biased["token_ids"][0] != free.token_ids[0]
    assert by_id["finish_reason"] == "stop"
    assert free.token_ids[4] not in by_id["token_ids"]
    assert (special["text"], special["finish_reason"]) == ("", "stop")


def test_messages_go_through_the_template(model):
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "wolf"}]
    body = {"messages": [message("be short", "system"), message(parts)], "max_completion_tokens": 4, **GREEDY}
    text = "<system> be short\n<user> the wolf\n<assistant>"
    ids = model.tokenizer.encode(text, add_bos=False)
    want = serve(model, [ids], [SamplingParams(temperature=0, ignore_eos=True, max_new_tokens=4)])[0]
    status, found = served(model, body, CHAT)
    assert status == 200
    assert found["choices"][0]["message"] == {"role": "assistant", "content": want.text, "refusal": None}
    assert found["usage"]["prompt_tokens"] == len(ids)
    rest = {name: value for name, value in body.items() if name != "max_completion_tokens"}
    assert served(model, rest, CHAT)[1]["usage"]["total_tokens"] == model.config.context


GUIDED = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a", 7]}}}}, '"a"|7'),
    ({"guided_json": {"type": "integer", "minimum": 3, "maximum": 5}}, "[345]"),
    ({"guided_regex": "[a-c]{3}"}, "[a-c]{3}"),
    ({"guided_choice": ["the wolf", "a girl"]}, "the wolf|a girl"),
    ({"guided_grammar": 'start: "(" start ")" | "x"'}, r"\(*x\)*"),
    ({"structured_outputs": {"choice": ["b", "d"]}}, "[bd]"),
]


@pytest.mark.parametrize(("asked", "fits"), GUIDED, ids=lambda x: None)
def test_structured_output(model, asked, fits):
    pytest.importorskip("llguidance")
    status, found = served(model, {"prompt": "the wolf", "seed": 3, "max_tokens": 40, "n": 2} | asked)
    assert status == 200
    for choice in found["choices"]:
        assert re.fullmatch(fits, choice["text"]) or choice["finish_reason"] == "length"
    assert "stop" in [choice["finish_reason"] for choice in found["choices"]]


WRONG = [
    ({"prompt": "a", "suffix": "b"}, "suffix", 'suffix: must be "", not "b"'),
    ({"prompt": "a", "temprature": []}, "temprature", '"temprature" is not a field that this server serves'),
    ({"prompt": "a", "best_of": 2}, "best_of", "must be n, 1, not 2"),
    ({"prompt": "a", "user": 5}, "user", "must be text, not 5"),
    ({"prompt": "a", "temperature": -1}, "temperature", "temperature must be a finite number >= 0, not -1"),
    ({"prompt": "a", "top_p": 2}, "top_p", "top_p must be in (0, 1]"),
    (
        {"prompt": "a", "response_format": {"type": "text", "strict": True}},
        "response_format",
        "response_format.strict is not served; type is",
    ),
    (
        {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strikt": True}}},
        "response_format",
        "json_schema.strikt is not served",
    ),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens", "max_tokens: must be an integer >= 1, not 0"),
    ({"prompt": "a", "max_tokens": "5"}, "max_tokens", 'max_tokens: must be an integer, not "5"'),
    ({"prompt": "a", "temperature": True}, "temperature", "temperature: must be a number, not true"),
    ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format", "type must be text, json_object or json_"),
    ({"prompt": "a", "response_format": {"type": "json_schema"}}, "response_format", "json_schema must be an object"),
    ({"prompt": "a", "guided_regex": "(("}, "guided_regex", "the guide (regex) is not valid"),
    ({"prompt": "a", "guided_json": "{"}, "guided_json", "the JSON schema is not JSON"),
    ({"prompt": "a", "guided_choice": "a"}, "guided_choice", "must be a list"),
    ({"prompt": "a", "guided_regex": r"[^\s\S]"}, "guided_regex", "allows no text that the model's tokens can write"),
    ({"prompt": "a", "guided_regex": "(a{1000}){1000}"}, "guided_regex", "the guide (regex) is "),
    ({"prompt": "a", "guided_json": {"$ref": "#"}}, "guided_json", "allows no text that the model's tokens can write"),
    ({"prompt": "a", "guided_json": '{"items": ' * 300 + "true" + "}" * 300}, "guided_json", "is nested deeper than"),
    (
        {"prompt": "a", "guided_json": {"const": 2**53 + 1}},
        "guided_json",
        "const of a JSON schema cannot be 90071992547",
    ),
    ({"prompt": "a", "guided_json": DEEP}, "guided_json", "compiling it went deeper than a stack holds"),
    ({"prompt": "a", "structured_outputs": {"json": {"not": {}}}}, "structured_outputs", "Unimplemented keys"),
    (
        {"prompt": "a", "guided_regex": "a", "guided_choice": ["a"]},
        "guided_choice",
        "and guided_regex cannot go together",
    ),
    ({"prompt": "a", "structured_outputs": {"xml": "a"}}, "structured_outputs", '"xml" is not served'),
    ({"prompt": "a", "structured_outputs": {"regex": 5}}, "structured_outputs", "regex must be text"),
    ({"prompt": "a", "guided_regex": "a", "ignore_eos": True}, "ignore_eos", "ignore_eos has no meaning with a guide"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "needs stream to be true"),
    ({"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options", '"x" is not served'),
    (
        {"prompt": "a", "stream": True, "stream_options": {"include_usage": 1}},
        "stream_options",
        "must be true or false",
    ),
    ({"prompt": "a", "stream_options": {"continuous_usage_stats": True}}, "stream_options", "needs stream to be true"),
    ({"prompt": "a", "stop_token_ids": [10**6]}, "stop_token_ids", "token id 1000000 is not in"),
    ({"prompt": "a", "logit_bias": {"999999": 1}}, "logit_bias", "token id 999999 is not in"),
    ({"prompt": "a", "seed": 2**64}, "seed", "must be an integer of 64 bits"),
    ({"prompt": "a", "seed": -(2**63) - 1}, "seed", "must be an integer of 64 bits"),
    ({"prompt": "a", "service_tier": "flex"}, "service_tier", 'must be "auto" or "default", not "flex"'),
    ({"prompt": "a", "min_tokens": False}, "min_tokens", "must be 0, not false"),
    ({"prompt": "a", "echo": True, "logprobs": 3}, "logprobs", "must be 0 or 1 with echo"),
    ({"prompt": "a", "logprobs": 21}, "logprobs", "logprobs must be None or an integer in [0, 20], not 21"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "keys must be token ids, not 'x'"),
    ({"prompt": "a", "logit_bias": {"5": 1, "05": 2}}, "logit_bias", "token id 5 occurs twice"),
    ({"prompt": "a", "stop": ["x"] * 17}, "stop", "at most 16 strings, not 17"),
    ({"prompt": "a", "n": 261}, "prompt", "1 prompts with n = 261 are too many samples"),
    ({"prompt": [[1], "a", {}]}, "prompt", "one is {}"),
    ({"prompt": []}, "prompt", "non-empty"),
    ({"prompt": [True]}, "prompt", "one is true"),
    ({"prompt": [1000]}, "prompt", "token id 1000 is not in"),
    ({}, "prompt", "is missing"),
    ({"prompt": "\ud800"}, "prompt", "lone surrogate"),
]


@pytest.mark.parametrize(("body", "param", "text"), WRONG, ids=lambda x: None)
def test_what_is_wrong_is_said_in_one_line(small_app, body, param, text):
    status, found = small_app(COMPLETIONS, body)
    assert status == 400
    assert text in one_line(found)
    assert found["error"]["param"] == param
    assert found["error"]["type"] == "invalid_request_error"


WRONG_CHATS = [
    ({}, "messages", "are missing"),
    ({"messages": []}, "messages", "messages must be a non-empty list like"),
    ({"messages": [{"content": "x"}]}, "messages", "messages[0].role is missing"),
    ({"messages": [message("\ud800")]}, "messages", "lone surrogate"),
    ({"messages": [message("a")], "top_logprobs": 2}, "top_logprobs", "needs logprobs to be true"),
    ({"messages": [message("a")], "logprobs": 2}, "logprobs", "must be true or false, not 2"),
    ({"messages": [message("a")], "tools": [{}]}, "tools", "only tools of the type function"),
    ({"messages": [message("a")], "tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"messages": [message("a")], "functions": [{}]}, "functions", "tools take their place"),
    ({"messages": [message("a")], "modalities": ["text", "audio"]}, "modalities", 'must be ["text"]'),
    ({"messages": [message("a")], "audio": {}}, "audio", "not a field that this server serves"),
    ({"messages": [message("a")], "reasoning_effort": "high"}, "reasoning_effort", 'must be "none", not "high"'),
    ({"messages": [message("a")], "max_tokens": 2, "max_completion_tokens": 3}, "max_tokens", "give one"),
    ({"messages": [message("a")], "max_completion_tokens": -1}, "max_completion_tokens", "must be an integer >= 1"),
    ({"messages": [message("a")], "n": 1000}, "n", "must be at most 260"),
]


@pytest.mark.parametrize(("body", "param", "text"), WRONG_CHATS, ids=lambda x: None)
def test_what_is_wrong_with_a_chat_is_said_in_one_line(small_app, body, param, text):
    status, found = small_app(CHAT, body)
    assert status == 400
    assert text in one_line(found)
    assert found["error"]["param"] == param


@pytest.fixture(scope="module")
def small_ask(model):
    """One application for many questions: status, headers and body of each answer."""
    with asyncio.Runner() as runner:
        context = serving(model)
        _, app = runner.run(context.__aenter__())
        yield lambda path, body=None, **more: runner.run(ask(app, path, body, **more))
        runner.run(context.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def small_app(small_ask):
    def found(path, body=None, **more):
        status, _, content = small_ask(path, body, **more)
        return status, json.loads(content)

    return found


@pytest.fixture(scope="module")
def small_stream(small_ask):
    return lambda path, body: events(small_ask(path, body | {"stream": True})[2])


def test_bodies_that_hypothesis_makes_get_4xx_and_one_line(small_app):
    """Whatever is in the fields; what is right by chance is answered."""
    hypothesis = pytest.importorskip("hypothesis")
    from hypothesis import strategies as st

    from jllm.serve.requests import CHAT as CHAT_FIELDS
    from jllm.serve.requests import COMPLETION

    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    values = st.recursive(
        leaves, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=4), x, max_size=3)
    )
    few = st.sampled_from([0, 1, -1, 0.5, True, "the wolf", [5, 6], ["a", "b"], [message("a")], {"type": "text"}, None])
    right = {
        COMPLETIONS: (COMPLETION, {"prompt": "the wolf", "max_tokens": 1}),
        CHAT: (CHAT_FIELDS, {"messages": [message("a")], "max_completion_tokens": 1}),
    }

    def bodies(path):
        fields, whole = right[path]
        names = st.sampled_from(sorted(fields)) | st.text(max_size=6)
        changes = st.dictionaries(names, few | values, min_size=1, max_size=3)
        return st.tuples(st.just(path), changes.map(lambda change: whole | change))

    cases = st.sampled_from(sorted(right)).flatmap(bodies)
    statuses = []

    @hypothesis.settings(max_examples=300, database=None, derandomize=True)
    @hypothesis.given(cases)
    def check(case):
        path, body = case
        if body.get("logprobs") or body.get("stream"):  # events, and steps of their own: other tests
            body = body | {"logprobs": None, "stream": None, "top_logprobs": None, "stream_options": None}
        status, found = small_app(path, body)
        statuses.append(status)
        assert status == 200 or (400 <= status < 500 and one_line(found))

    check()
    assert statuses.count(200) > 5
    assert statuses.count(400) > 50


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"nul", b"\xff\xfe", b'{"prompt": NaN}', b"[" * 100_000, b"1" * 5000]
)
def test_a_body_that_is_no_object_is_refused(small_app, data):
    status, found = small_app(COMPLETIONS, data)
    assert status == 400
    assert "the body" in one_line(found)


@pytest.mark.parametrize(
    "data", [b'{"prompt": "a", "n": 1, "n": 2}', b'{"prompt": "a", "guided_json": {"n": 1, "n": 2}}']
)
def test_a_name_that_is_there_twice_is_refused(small_app, data):
    status, found = small_app(COMPLETIONS, data)
    assert (status, found["error"]["param"]) == (400, "n")
    assert one_line(found) == '"n" occurs twice in one object of the body'


NOTHING = {  # what clients send that asks for nothing
    **{"user": "me", "safety_identifier": "me", "prompt_cache_key": "k", "metadata": {"job": "5"}, "store": True},
    **{"service_tier": "auto", "stream_options": {"include_usage": False}, "response_format": {"type": "text"}},
    **{"n": 1, "logit_bias": {}, "stop": [], "stop_token_ids": [], "top_k": -1, "min_p": 0.0, "presence_penalty": 0},
    **{"detokenize": True, "bad_words": [], "return_tokens_as_token_ids": False, "request_id": "r"},
    **{"skip_special_tokens": True, "min_tokens": 0, "length_penalty": 1.0, "frequency_penalty": None},
}
NOTHING_OF_CHATS = {
    **{"tools": [], "tool_choice": "none", "functions": [], "function_call": "auto", "parallel_tool_calls": True},
    **{"modalities": ["text"], "reasoning_effort": "none", "verbosity": "medium", "audio": None, "prediction": None},
    **{"logprobs": False, "top_logprobs": 0, "chat_template_kwargs": {}, "prompt_cache_retention": "in_memory"},
}


@pytest.mark.parametrize(
    ("path", "body", "nothing"),
    [
        (COMPLETIONS, {"prompt": "the wolf"}, NOTHING | {"suffix": "", "echo": False, "best_of": 1}),
        (CHAT, {"messages": [message("a")]}, NOTHING | NOTHING_OF_CHATS),
    ],
    ids=["completions", "chats"],
)
def test_fields_that_ask_for_nothing_change_nothing(small_app, path, body, nothing):
    plain = small_app(path, body | {"max_tokens": 3, **GREEDY})
    assert plain[0] == 200
    found = small_app(path, body | {"max_tokens": 3, **GREEDY} | nothing)
    assert (found[0], found[1].get("choices")) == (200, plain[1]["choices"])


def test_every_field_of_the_api_is_known_or_refused_by_its_name(small_app):
    """What the official client can send; a field that it gains is decided on here."""
    pytest.importorskip("openai")
    from openai.types.chat.completion_create_params import CompletionCreateParamsBase as Chats
    from openai.types.completion_create_params import CompletionCreateParamsBase as Completions

    from jllm.serve import fields, requests

    lacking = {"audio", "moderation", "prediction", "web_search_options"}
    assert set(Completions.__annotations__) <= requests.COMPLETION | set(fields.COMPLETION)
    assert set(Chats.__annotations__) - requests.CHAT - set(fields.CHAT) == lacking
    for name in lacking:
        status, found = small_app(CHAT, {"messages": [message("a")], name: {"x": 1}})
        assert (status, found["error"]["param"]) == (400, name)


def test_seeds_of_64_bits(small_app):
    body = {"prompt": "the wolf", "max_tokens": 12, "ignore_eos": True}
    texts = {}
    for seed in (7, 7 + 2**32, 7 - 2**32, 8, 2**64 - 1, -1, -(2**63)):
        status, found = small_app(COMPLETIONS, body | {"seed": seed})
        assert status == 200
        texts[seed] = found["choices"][0]["text"]
    assert texts[7] == texts[7 + 2**32] == texts[7 - 2**32] != texts[8]
    assert texts[-1] == texts[2**64 - 1]


TOO_LONG = [
    (COMPLETIONS, {"prompt": [5] * 48}, "prompt", "a prompt of 48 tokens is too long: the model's context leaves"),
    (CHAT, {"messages": [message("wolf " * 60)]}, "messages", "is too long: the model's context leaves room for 47"),
]
TOO_LONG_FOR_PAGES = [
    (
        COMPLETIONS,
        {"prompt": [5] * 48},
        "prompt",
        "a prompt of 48 tokens is too long: the page pool leaves room for 32",
    ),
    (COMPLETIONS, {"prompt": [5] * 40}, "prompt", "the page pool has 4"),
    (COMPLETIONS, {"prompt": [5] * 9, "max_tokens": 30}, "max_tokens", "9 prompt tokens and 30 new ones need 5 pages"),
    (CHAT, {"messages": [message("a")], "max_tokens": 30}, "max_tokens", "the page pool has 4"),
    (CHAT, {"messages": [message("a")], "max_completion_tokens": 30}, "max_completion_tokens", "the page pool has 4"),
]


@pytest.mark.parametrize(("cases", "options"), [(TOO_LONG, {}), (TOO_LONG_FOR_PAGES, {"num_pages": 4})])
def test_what_is_too_long_has_the_code_that_clients_look_for(model, cases, options):
    async def work(engine, app):
        for path, body, param, text in cases:
            status, found = await answer(app, path, body)
            assert (status, found["error"]["param"]) == (400, param)
            assert found["error"]["code"] == "context_length_exceeded"
            assert text in one_line(found)
        assert engine.unfinished == 0

    run(model, work, options=options)


def test_more_tokens_than_the_context_has_room_for_are_cut(small_app):
    status, found = small_app(COMPLETIONS, {"prompt": [5] * 40, "max_tokens": 1000, "ignore_eos": True})
    assert (status, found["usage"]["completion_tokens"]) == (200, 8)
    assert found["choices"][0]["finish_reason"] == "length"


def test_adapters_are_models_of_their_own_name(model):
    adapter = jllm.init_adapter(model.config, jax.random.key(0), 2)
    adapter = {name: replace(each, b=jnp.ones_like(each.b)) for name, each in adapter.items()}

    async def work(engine, app):
        listed = (await answer(app, "/v1/models"))[1]["data"]
        assert [(each["id"], each.get("parent")) for each in listed] == [("small", None), ("small:loud", "small")]
        assert await answer(app, "/v1/models/small:loud") == (200, listed[1])
        texts = {}
        for name in ("small", "small:loud"):
            body = {"model": name, "prompt": [5, 6, 7], "max_tokens": 6, "return_token_ids": True, **GREEDY}
            status, found = await answer(app, COMPLETIONS, body)
            assert (status, found["model"]) == (200, name)
            texts[name] = found["choices"][0]["token_ids"]
        assert texts["small"] != texts["small:loud"]
        status, found = await answer(app, COMPLETIONS, {"model": "small:soft", "prompt": [5]})
        assert (status, found["error"]["code"]) == (404, "model_not_found")
        assert "with adapters loud after a colon" in found["error"]["message"]

    run(model, work, options={"adapters": {"loud": adapter}})


@pytest.mark.parametrize("policy", ["paged", "reserve"])
def test_answers_are_as_long_as_a_small_pool_has_room_for(model, policy):
    """And that is the limit that clients are told."""
    most = 4 * 8 + 1  # 4 pages; the last token of all needs no room

    async def work(engine, app):
        (listed,) = (await answer(app, "/v1/models"))[1]["data"]
        assert listed["max_model_len"] == (await answer(app, "/tokenize", {"prompt": "a"}))[1]["max_model_len"] == most
        status, chats = await answer(app, CHAT, {"messages": [message("a")], "n": 2, **GREEDY})
        assert status == 200
        assert {choice["finish_reason"] for choice in chats["choices"]} == {"length"}
        length = chats["usage"]["prompt_tokens"]
        assert chats["usage"]["completion_tokens"] == 2 * (most - length)
        body = {"prompt": [[5] * 25, [5] * 2], "return_token_ids": True, **GREEDY}
        status, found = await answer(app, COMPLETIONS, body)
        assert status == 200
        assert [len(choice["token_ids"]) for choice in found["choices"]] == [most - 25, 16]

    run(model, work, options={"num_pages": 4, "kv_policy": policy})


@pytest.mark.parametrize("number", ["0.12345678901234567890", "1e400", "1e-400", "-1e999999999999999999999"])
def test_a_number_is_refused_as_it_was_written(small_app, number):
    """What a double makes of it is another one, and the client is told of its own."""
    pytest.importorskip("llguidance")
    for schema in (f'{{"const": {number}}}', f'{{"items": {{"maximum": {number}}}}}'):
        status, found = small_app(COMPLETIONS, f'{{"prompt": "a", "guided_json": {schema}}}'.encode())
        assert (status, found["error"]["param"]) == (400, "guided_json")
        assert f"cannot be {number}" in one_line(found)


def test_a_body_nested_too_deep_is_refused(small_app):
    status, found = small_app(COMPLETIONS, b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    assert (status, one_line(found)) == (400, "the body is nested too deeply")


def test_guides_that_are_compiled_hold_up_no_other_request(model, monkeypatch):
    """More of them than any pool has threads; those that are known wait for none of them either."""
    pytest.importorskip("llguidance")
    from jllm.guides.matcher import Guides

    compile_, go_on = Guides._compile, threading.Event()

    def slow(self, guide):
        assert guide.text == "[a-c]{3}" or go_on.wait(120)
        return compile_(self, guide)

    def body(i):
        return {"prompt": "a", "max_tokens": 1, "guided_regex": f"[a-c]{{{i}}}"}

    async def work(engine, app):
        first = await answer(app, COMPLETIONS, body(3))
        waiting = [asyncio.create_task(answer(app, COMPLETIONS, body(10 + i))) for i in range(40)]
        try:
            while len(engine._guides._threads) < 2:  # both are compiling
                await asyncio.sleep(0.01)
            plain = await answer(app, COMPLETIONS, {"prompt": "a", "max_tokens": 1})
            known = await answer(app, COMPLETIONS, body(3))
            ids = await answer(app, "/tokenize", {"prompt": "a"})
            assert not any(task.done() for task in waiting)
        finally:
            go_on.set()
        return [first, plain, known, ids, *await asyncio.gather(*waiting)]

    monkeypatch.setattr(Guides, "_compile", slow)
    assert {status for status, _ in run(model, work)} == {200}


def test_guides_that_wait_at_the_end_are_told(model, monkeypatch):
    pytest.importorskip("llguidance")
    from jllm.guides.matcher import Guides

    go_on = threading.Event()
    monkeypatch.setattr(Guides, "_compile", lambda self, guide: go_on.wait(120) and "too late")

    async def work(engine, app):
        body = {"prompt": "a", "max_tokens": 1}
        some = [asyncio.create_task(answer(app, COMPLETIONS, {**body, "guided_regex": f"b{i}"})) for i in range(5)]
        while engine._guides_waiting < 5:
            await asyncio.sleep(0.01)
        engine.limit = 5
        full = await answer(app, COMPLETIONS, {**body, "guided_regex": "c"})
        await engine.close()
        go_on.set()
        late = await answer(app, COMPLETIONS, {**body, "guided_regex": "d"})
        return full[0], late[0], sorted(status for status, _ in await asyncio.gather(*some))

    assert run(model, work) == (429, 503, [400, 400, 503, 503, 503])


def test_the_model_by_its_name(small_app, model):
    (listed,) = small_app("/v1/models")[1]["data"]
    assert (listed["max_model_len"], listed["vocab_size"]) == (model.config.context, model.config.vocab_size)
    assert small_app("/v1/models/small") == (200, listed)
    assert small_app("/v1/models/large")[0] == 404


def test_other_weights_come_from_a_directory_where_that_is_asked_for(model, checkpoint, tmp_path):
    """Texts are then theirs. All else is refused in one line, and changes nothing."""
    params, root, path = replace(model.params, norm=-model.params.norm), tmp_path / "root", "/v1/update"
    stored = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), params)  # read in the served dtype again
    params = jax.tree.map(lambda leaf: leaf.astype(model.params.dtype), stored)
    save(root / "step-1", stored, model.config)
    save(root / "turned", params, replace(model.config, rope_theta=5.0))
    (root / "empty").mkdir()
    shutil.copytree(checkpoint, tmp_path / "outside")
    sampling = SamplingParams(temperature=0, ignore_eos=True, max_new_tokens=6)
    models = model, replace(model, params=params)
    want = [serve(one, ["the wolf"], [sampling])[0].text for one in models]
    engines, go_on, full = [], threading.Event(), []

    def read(folder):
        assert go_on.wait(60)
        if full:
            raise full.pop()
        found = load(folder)
        return found.config, found.params

    async def work(engine, app):
        async def text():
            _, found = await answer(app, COMPLETIONS, {"prompt": "the wolf", "max_tokens": 6, **GREEDY})
            return found["choices"][0]["text"]

        engines.append(engine)
        found = [await text()]
        first = asyncio.create_task(answer(app, path, {"model": "step-1"}))
        status = 400
        while status == 400:  # until the first has begun
            status, refused = await answer(app, path, {"model": "step-1" if updates._busy.locked() else "step-9"})
        assert (status, one_line(refused)) == (409, "another update is under way: try again later")
        go_on.set()
        assert await first == (200, {"version": 1})
        for given, says in (
            ({"model": "../outside"}, 'model: there is no directory "../outside"'),
            *(({"model": name}, "model: there is no directory") for name in ("step-9", "\0", "\ud800", "x" * 300)),
            ({"model": 3}, "model: must be the name of a directory"),
            ({}, "model: must be the name of a directory"),
            ({"model": "empty"}, "model: "),
            ({"model": "turned"}, "model: its config has another rope_theta than the served model's"),
            ({"model": "step-1", "running": "stop"}, "running: must be one of recompute, keep, finish"),
            ({"model": "step-1", "weights": 1}, "weights: is not known; known are model, running"),
        ):
            status, refused = await answer(app, path, given)
            assert (status, one_line(refused).startswith(says)) == (400, True), refused
        full.append(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory"))
        status, refused = await answer(app, path, {"model": "step-1"})
        assert (status, one_line(refused)) == (503, "there is no room for a second set of weights")
        assert engine.metrics()["version"] == 1
        return [*found, await text()]

    updates = Updates(root, model.config, read, lambda *given, **more: engines[0].update(*given, **more))
    assert run(model, work, updates=updates) == want
    assert want[0] != want[1]
    assert run(model, lambda engine, app: answer(app, path, {"model": "step-1"}))[0] == 404


def test_a_long_request_line_is_refused(model):
    from jllm.serve.http import Limits

    async def work(engine, app):
        for path, status in (("/health", 200), ("/" + "a" * 300, 431)):
            assert (await answer(app, path))[0] == status

    run(model, work, limits=Limits(header=250))


def test_a_guide_without_a_way_on_is_named(model):
    from jllm.guides.guide import Guide
    from jllm.serve.answers import Answer
    from jllm.serve.errors import HttpError

    failed = Event(0, 0, "", (), Completion((), "", "error", None, None, Timings(None, 0.0, 1, 0)))
    plain = Wanted(([1],), SamplingParams(), chat=False)
    served = Served("small", model.tokenizer, 8, 4, lambda *_: [1])
    for wanted, guide in ((plain, False), (replace(plain, sampling=SamplingParams(guide=Guide.regex("a"))), True)):
        with pytest.raises(HttpError) as found:
            Answer(wanted, served).add(failed)
        assert ("its guide had no way on" in str(found.value)) == guide


def test_other_answers_than_what_was_asked_for(model):
    from jllm.serve.http import Limits

    async def work(engine, app):
        body = {"prompt": "a"}
        plain = {b"content-type": b"text/plain"}
        cases = [
            (404, "nothing at '/v1/embeddings'", answer(app, "/v1/embeddings", body)),
            (404, 'the model "gpt-5" is not served here', answer(app, COMPLETIONS, body | {"model": "gpt-5"})),
            (405, "GET is not served here", answer(app, COMPLETIONS)),
            (405, "POST is not served here", answer(app, "/v1/models", body)),
            (413, "at most 1000 bytes", answer(app, COMPLETIONS, {"prompt": "a" * 1000})),
            (413, "at most 1000 bytes", answer(app, COMPLETIONS, b"", chunks=[b"a" * 600, b"a" * 600])),
            (413, "at most 1000 bytes", answer(app, COMPLETIONS, body, headers={b"content-length": b"1001"})),
            (415, "Content-Type: application/json", answer(app, COMPLETIONS, body, headers=plain)),
            (408, "took more than 0.05 s", answer(app, COMPLETIONS, body, chunks=[])),
        ]
        for status, text, asked in cases:
            found = await asked
            assert found[0] == status
            assert text in one_line(found[1])

    run(model, work, limits=Limits(body=1000, body_seconds=0.05))


def test_a_key_is_asked_for_everywhere_but_for_health(model):
    async def work(engine, app):
        for path in (COMPLETIONS, CHAT, "/v1/models", "/metrics", "/tokenize", "/nothing"):
            for key in (None, b"Bearer wrong", b"secret", b"Bearer secre", b"Bearer secret "):
                status, found = await answer(app, path, headers={b"authorization": key})
                assert (status, one_line(found)) == (401, "the API key is missing or wrong")
        assert (await answer(app, "/health"))[0] == 200
        right = {b"authorization": b"Bearer secret"}
        assert (await answer(app, "/v1/models", headers=right))[1]["data"][0]["id"] == "small"

    run(model, work, key="secret")


def test_a_full_queue_says_when_to_come_again(model):
    async def work(engine, app):
        body = {"prompt": "the wolf", "max_tokens": 40, "n": 5, **GREEDY}
        first = asyncio.create_task(answer(app, COMPLETIONS, body))
        while engine.unfinished < 5:
            await asyncio.sleep(0.001)
        status, headers, content = await ask(app, COMPLETIONS, {"prompt": ["a", "b"]})
        assert (status, headers[b"retry-after"]) == (429, b"1")
        assert "5 samples run or wait, of at most 6" in one_line(json.loads(content))
        assert (await first)[0] == 200
        assert (await answer(app, COMPLETIONS, {"prompt": ["a", "b"]}))[0] == 200

    run(model, work, max_waiting=2)


def test_a_client_that_leaves_ends_all_of_its_prompts(model):
    async def work(engine, app):
        body = {"prompt": ["the wolf", "a girl", "in the"], "max_tokens": 40, **GREEDY}
        submitted = asyncio.Event()
        submit = engine.submit_all
        engine.submit_all = lambda *args, **more: submitted.set() or submit(*args, **more)
        client = asyncio.create_task(ask(app, COMPLETIONS, body, leave=submitted))
        with pytest.raises(Gone):
            await client
        while engine.unfinished or engine._engine.has_work:
            await asyncio.sleep(0.001)
        return engine.metrics()

    metrics = run(model, work)
    assert (metrics["requests"], metrics["requests_aborted"], metrics["requests_finished"]) == (3, 3, 0)


def test_hundreds_of_clients_of_whom_many_go_leave_no_page(model):
    """While their bodies are read, while they wait, between two events, and at the end."""
    draw, answered, gone = random.Random(4), [], []

    async def one(app, i):
        path = draw.choice([COMPLETIONS, CHAT])
        prompt = {"prompt": "the wolf and"} if path == COMPLETIONS else {"messages": [message("a")]}
        body = {**prompt, "max_tokens": draw.choice([1, 2, 6, 25]), "n": draw.choice([1, 1, 2]), "seed": i}
        body["stream"] = draw.random() < 0.5
        leave = draw.choice([None, 0.0, draw.random() * 0.2])
        try:
            answered.append((await ask(app, path, body, leave=leave))[0])
        except Gone:
            gone.append(i)

    async def work(engine, app):
        clients = iter(range(700))

        async def some():
            for i in clients:
                await one(app, i)

        await asyncio.gather(*(some() for _ in range(60)))
        while engine.unfinished or engine._engine.has_work:
            await asyncio.sleep(0.01)
        return engine.metrics(), engine

    metrics, engine = run(model, work)
    assert (metrics["pages_used"], metrics["running"], metrics["waiting"]) == (0, 0, 0)
    assert not engine._ids
    assert not engine._requests
    assert set(answered) == {200}
    assert len(answered) > 200
    assert metrics["requests_aborted"] > 100
    assert len(gone) > 100


def test_metrics_count_what_was_answered(model):
    async def work(engine, app):
        await answer(app, COMPLETIONS, {"prompt": "the wolf", "max_tokens": 3, **GREEDY})
        await answer(app, COMPLETIONS, {"prompt": 5})
        await answer(app, "/secret/path")
        _, headers, content = await ask(app, "/metrics")
        assert headers[b"content-type"].startswith(b"text/plain; version=")
        return content.decode()

    from prometheus_client.parser import text_string_to_metric_families

    families = text_string_to_metric_families(run(model, work))
    found = {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}
    assert found["jllm_http_requests_total", COMPLETIONS, "200"] == 1
    assert found["jllm_http_requests_total", COMPLETIONS, "400"] == 1
    assert found["jllm_http_requests_total", "other", "404"] == 1
    assert found[("jllm_output_tokens_total",)] == 3
    assert found[("jllm_pages_used",)] == 0
    assert found[("jllm_first_token_seconds_count",)] == 1
    assert found["jllm_first_token_seconds", "0.5"] > 0
    assert not [name for name, *_ in found if "secret" in name]


def test_the_access_log_has_no_prompt(model, caplog):
    caplog.set_level(logging.INFO, "jllm.serve")
    served(model, {"prompt": "secret words", "max_tokens": 2})
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("- POST /v1/completions 200 ")
    assert "secret" not in line


def test_a_broken_engine_is_503_and_says_so(model):
    async def work(engine, app):
        def fail(*args):
            raise ZeroDivisionError("no")

        engine._engine._device.run = fail
        body = {"prompt": "the wolf", "stream": True}
        found = [await answer(app, COMPLETIONS, each) for each in (body, {"prompt": "a"})]
        assert [status for status, _ in found] == [503, 503]
        assert {"ZeroDivisionError" in one_line(error) for _, error in found} == {True}
        assert (await answer(app, "/health"))[0] == 503

    run(model, work)


def test_tokens_of_texts(small_app):
    status, found = small_app("/tokenize", {"prompt": "the wolf"})
    assert (status, found["count"]) == (200, len(found["tokens"]))
    assert small_app("/detokenize", {"tokens": found["tokens"]}) == (200, {"prompt": "the wolf"})
    bare = small_app("/tokenize", {"prompt": "the wolf", "add_special_tokens": False})[1]["tokens"]
    assert found["tokens"] == [0, *bare]
    assert small_app("/tokenizer_info")[1]["eos_token"] == "</s>"
    assert small_app("/detokenize", {"tokens": [10**6]})[0] == 400
    assert small_app("/detokenize", {"tokens": ["a"]})[0] == 400
    assert small_app("/tokenize", {})[0] == 400
