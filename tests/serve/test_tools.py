"""Tools: what bodies may ask, guides that hold calls to their schemas, and calls found in text however it is cut."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from jllm.engine.request import Completion, Event, Timings
from jllm.guides.matcher import Guides
from jllm.serve.answers import Answer
from jllm.serve.errors import HttpError
from jllm.serve.requests import Served, chat
from jllm.serve.tool_formats import HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS, calls_guide, format_of, hidden_tokens
from jllm.serve.tool_parser import CallParser, Nesting
from tests.serve.conftest import TOOL_TEMPLATE, answer, ask
from tests.serve.test_app import CHAT, events, message, one_line

pytest.importorskip("starlette")
pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "it rains", "parameters": SCHEMA}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
NAMES = ("weather", "clock")
HERE = '{"city": "Oslo", "days": 1}'
CALL = {
    HERMES: f'<tool_call>\n{{"name": "weather", "arguments": {HERE}}}\n</tool_call>',
    LLAMA3: f'{{"name": "weather", "parameters": {HERE}}}',
    MISTRAL: f'[TOOL_CALLS][{{"name": "weather", "arguments": {HERE}}}]',
    MISTRAL_ARGS: f"[TOOL_CALLS]weather[ARGS]{HERE}",
}


def parse(form, pieces, *, held=False):
    """The text of an answer that comes in pieces, and its calls."""
    parser = CallParser(form, NAMES, {}, held=held)
    text, calls = "", []
    for part in sum((parser.push(piece) for piece in pieces), []) + parser.push("", last=True):
        text += part.text
        if part.name is not None:
            assert part.call == len(calls)
            calls.append((part.name, ""))
        elif part.call is not None:
            assert part.call == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + part.arguments)
    return text, calls


ONE = [("weather", HERE)]
ODD = '{"a": "}</tool_call>\\"}"}'
CALLS = [  # format, text, what of it is text, and calls
    *((form, text, "", ONE) for form, text in CALL.items()),
    (HERMES, f"I look.\n{CALL[HERMES]}\n{CALL[HERMES]}\n", "I look.\n", ONE * 2),
    (HERMES, f"\n\n{CALL[HERMES]} so", " so", ONE),
    (
        HERMES,
        '<tool_call>{"arguments": {"a": "</tool_call>}"}, "name": "clock"}',
        "",
        [("clock", '{"a": "</tool_call>}"}')],
    ),
    (HERMES, '<tool_call><tool_call>{"name": "clock", "arguments": {}}</tool_call>', "<tool_call>", [("clock", "{}")]),
    (LLAMA3, f"\n{CALL[LLAMA3]}; {CALL[LLAMA3]}", "", ONE * 2),
    (LLAMA3, f"<|python_tag|>{CALL[LLAMA3]}", "", ONE),
    (LLAMA3, f"{CALL[LLAMA3]}; then", "; then", ONE),
    (MISTRAL, f"hm {CALL[MISTRAL][:-1]}, {CALL[MISTRAL][13:]}", "hm ", ONE * 2),
    (MISTRAL, f'{CALL[MISTRAL][:-1]}, {{"name": "sun"}}]', ', {"name": "sun"}]', ONE),
    (MISTRAL, '[TOOL_CALLS] [{"name": "clock", "arguments": {}, "id": "123456789"}]', "", [("clock", "{}")]),
    (MISTRAL_ARGS, f"[TOOL_CALLS]clock[CALL_ID]a1[ARGS]{{}}{CALL[MISTRAL_ARGS]}", "", [("clock", "{}"), *ONE]),
    (MISTRAL_ARGS, CALL[MISTRAL], "", ONE),
    (HERMES, CALL[HERMES].replace(HERE, json.dumps(HERE)), "", ONE),
    (LLAMA3, f"{CALL[LLAMA3]}\n{CALL[LLAMA3]}, {CALL[LLAMA3]}", "", ONE * 3),
    (LLAMA3, f'{CALL[LLAMA3]}\n{{"city": 1}}', '\n{"city": 1}', ONE),
    (MISTRAL_ARGS, f"[TOOL_CALLS]weather{HERE}", "", ONE),
]
TEXTS = [  # that only look like calls
    *((form, text[:-4]) for form, text in CALL.items() if form != HERMES),
    *((form, text.replace("weather", "sun")) for form, text in CALL.items()),
    *((form, text.replace(HERE, '{"city": }')) for form, text in CALL.items()),
    *((form, text.replace(HERE, '["Oslo"]')) for form, text in CALL.items() if form != MISTRAL_ARGS),
    *((form, text.replace("[TOOL_CALLS]", "").replace("<tool_call>", "")) for form, text in CALL.items() if form.mark),
    (HERMES, CALL[HERMES].removesuffix("</tool_call>") + "and so on"),
    (HERMES, '<tool_call>{"name": "clock", "name": "clock", "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "clock", "arguments": {"a": NaN}}</tool_call>'),
    (HERMES, f'<tool_call>{{"name": "clock", "arguments": {"[" * 100_000}'),
    (HERMES, "<tool_call>"),
    (HERMES, " \n"),
    (LLAMA3, f"I say {CALL[LLAMA3]}"),
    (LLAMA3, f"{CALL[LLAMA3]} it is"),
    (MISTRAL_ARGS, "[TOOL_CALLS]clock[CALL_ID]a b[ARGS]{}"),
]


@pytest.mark.parametrize(("form", "text", "said", "calls"), CALLS, ids=lambda x: None)
def test_calls_are_found(form, text, said, calls):
    assert parse(form, [text]) == parse(form, text) == (said, calls)


@pytest.mark.parametrize(("form", "text"), TEXTS, ids=lambda x: None)
def test_what_only_looks_like_a_call_stays_text(form, text):
    assert parse(form, [text]) == (text, [])
    if len(text) < 1000:
        assert parse(form, text) == (text, [])


def test_however_a_text_is_cut_the_same_is_found():
    """For calls that a guide holds too, whose arguments come as they are made."""
    hypothesis = pytest.importorskip("hypothesis")
    from hypothesis import strategies as st

    pieces = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", *'[]{},;"\\\n é']
    pieces += ["weather", '"name": "clock"', '"arguments": {}', *CALL.values(), *(call[13:] for call in CALL.values())]
    found = []

    def answers(form):
        some = st.sampled_from(pieces) | st.just(CALL[form]) | st.text(max_size=3)
        return st.tuples(st.just(form), st.lists(some, max_size=8).map("".join))

    @hypothesis.settings(max_examples=200, database=None, derandomize=True, deadline=None)
    @hypothesis.given(st.sampled_from([*CALL]).flatmap(answers), st.booleans(), st.data())
    def check(case, held, data):
        form, text = case
        places = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
        whole = parse(form, [text], held=held)
        assert parse(form, [text[a:b] for a, b in pairwise([0, *places, len(text)])], held=held) == whole
        assert whole[1] or whole[0] == text
        found.append(len(whole[1]))

    check()
    assert found.count(0) > 30
    assert sum(count > 0 for count in found) > 30


def test_a_doubled_backslash_escapes_no_quote():
    call = json.dumps({"path": "C:\\", "quote": '}"'})
    assert Nesting().read(f"{call} and more}}", 0) == len(call)


def test_arguments_that_a_guide_holds_come_as_they_are_made():
    parser = CallParser(HERMES, NAMES, {}, held=True)
    parts = [parser.push(letter) for letter in CALL[HERMES]]
    assert [part.arguments for some in parts for part in some if part.arguments] == list(HERE)
    cut = CALL[HERMES].index("Oslo")
    assert parse(HERMES, CALL[HERMES][:cut], held=True) == ("", [("weather", '{"city": "')])
    assert parse(HERMES, CALL[HERMES][:cut]) == (CALL[HERMES][:cut], [])


def test_a_further_call_that_is_cut_off_leaves_no_text():
    """Wherever a limit cuts an answer that a guide holds to calls; without a guide, what is no call stays text."""
    call = f"{HERMES.mark}{HERMES.head(NAMES[0])}{{}}{HERMES.tail}"
    for end in range(len(call), 2 * len(call) + 1):
        text = (call + HERMES.between + call)[:end]
        for pieces in ([text], list(text)):
            parser = CallParser(HERMES, NAMES, {}, held=True)
            parts = [part for i, piece in enumerate(pieces) for part in parser.push(piece, i + 1 == len(pieces))]
            assert "".join(part.text for part in parts) == ""
    parser = CallParser(HERMES, NAMES, {}, held=False)
    parts = parser.push(call + HERMES.between + HERMES.mark, True)
    assert "".join(part.text for part in parts).strip() == HERMES.mark


def test_the_format_is_that_of_the_template():
    llama = '{{ \'{"name": "\' + call.name + \'", "parameters": \' }}'
    assert format_of(TOOL_TEMPLATE, None) is HERMES
    assert format_of(llama, None) is LLAMA3
    assert format_of("[TOOL_CALLS] [", None) is MISTRAL
    assert format_of("[TOOL_CALLS]{{ name }}[ARGS]", None) is MISTRAL_ARGS
    assert format_of("<tool_call>\n<function=a>", None) is None
    assert format_of("{{ tools }}", None) is None
    assert format_of("{{ tools }}", "mistral") is MISTRAL
    assert format_of(llama, "hermes") is HERMES


@pytest.mark.parametrize("form", CALL)
@pytest.mark.parametrize("many", [True, False])
def test_guides_take_what_they_should(tool_model, form, many):
    tokenizer = tool_model.tokenizer
    hidden = hidden_tokens(form, tokenizer)
    assert bool(hidden) == (form is not HERMES)
    guides, whole = Guides(tokenizer, 128, [1]), json.dumps(SCHEMA)
    close = len(form.ends[1])
    one = CALL[form]
    two = one[: len(one) - close] + form.between + (one[len(form.mark + "[") :] if close else one)
    schema = json.dumps({"type": "object", "properties": {"name": {"type": "null"}}, "required": ["name"]})
    texts = (one, two, "hi", f"hi {one}", '{"name":null}', one.replace("Oslo", "Bonn"), "")
    wanted = {  # by what may stand in the place of calls
        None: (True, many, False, False, False, False, False),
        "": (True, many, True, form.mark is not None, form.mark is not None, False, True),
        schema: (True, many, False, False, True, False, False),
    }
    for other, want in wanted.items():
        guide = calls_guide(form, {"weather": whole, "clock": '{"type": "object"}'}, hidden, many=many, answer=other)
        if form is LLAMA3:  # calls are at the beginning of an answer only, and one beside a schema for answers
            want = (*want[:3], True, False, *want[5:]) if other == "" else want
            want = (True, False, *want[2:]) if other else want
        matchers = [guides.matcher(guide) for _ in texts]
        found = [m.feed(tokenizer.encode(t, add_bos=False)) and m.state.is_accepting() for m, t in zip(matchers, texts)]
        assert tuple(found) == want, other


# Over the application


@pytest.fixture(scope="module")
def tool_app(tool_server):
    app, run = tool_server

    def post(body, path=CHAT, **more):
        whole = {"messages": [message("hi")], "tools": [WEATHER, CLOCK], "max_tokens": 200, **body}
        if body.get("stream"):
            status, _, content = run(ask(app, path, whole))
            assert status == 200
            return events(content)
        return run(answer(app, path, whole, **more))

    return post


def streamed(chunks):
    """The message and finish reason that the chunks of one sample add up to."""
    text, calls = "", []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        text += choice["delta"].get("content") or ""
        for part in choice["delta"].get("tool_calls", ()):
            if part["index"] == len(calls):
                assert part["function"]["arguments"] == ""
                assert part["id"]
                assert part["type"] == "function"
                calls.append((part["function"]["name"], ""))
            assert part["index"] == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + part["function"]["arguments"])
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    return text or None, calls, chunks[-1]["choices"][0]["finish_reason"]


def whole(found):
    status, body = found
    assert status == 200, body
    said = body["choices"][0]
    calls = [tuple(call["function"].values()) for call in said["message"].get("tool_calls", ())]
    return said["message"]["content"] or None, calls, said["finish_reason"]


ENDS = {"seed": 1, "logit_bias": {"1": 50}}  # an answer ends where it may


def fits(name, arguments) -> bool:
    found = json.loads(arguments)
    return found == {} if name == "clock" else found["city"] in ("Oslo", "Rome") and 1 <= found["days"] <= 9


@pytest.mark.parametrize(
    "more", [{"tool_choice": "required"}, {"tool_choice": {"type": "function", "function": {"name": "weather"}}}]
)
def test_a_call_that_is_required(tool_app, more):
    text, calls, reason = whole(tool_app(more | ENDS))
    assert (text, reason) == (None, "tool_calls")
    assert all(fits(*call) for call in calls)
    assert calls
    assert more["tool_choice"] == "required" or [name for name, _ in calls] == ["weather"]
    chunks = tool_app(more | ENDS | {"stream": True})
    assert streamed(chunks) == (text, calls, reason)
    assert len(chunks) > 3  # arguments come as they are made


def test_a_required_call_that_is_cut_off(tool_app):
    body = {"tool_choice": {"type": "function", "function": {"name": "weather"}}, "max_tokens": 60, "seed": 1}
    text, calls, reason = whole(tool_app(body))
    assert (text, reason) == (None, "length")
    assert streamed(tool_app(body | {"stream": True})) == (text, calls, reason)


def says(text):
    """What makes the model say a text, as vLLM's field has it: no guide of ours holds the calls."""
    return {"guided_choice": [text]}


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (CALL[HERMES], (None, ONE, "tool_calls")),
        (f"I look.\n{CALL[HERMES]}\n{CALL[HERMES]}", ("I look.\n", ONE * 2, "tool_calls")),
        (CALL[HERMES].replace("weather", "sun"), (CALL[HERMES].replace("weather", "sun"), [], "stop")),
        (CALL[HERMES].replace('"days": 1', '"days": '), (CALL[HERMES].replace('"days": 1', '"days": '), [], "stop")),
        ("<tool_call", ("<tool_call", [], "stop")),
    ],
)
def test_a_model_may_call_where_it_need_not(tool_app, text, want):
    assert whole(tool_app(says(text))) == want
    assert streamed(tool_app(says(text) | {"stream": True})) == want
    assert whole(tool_app(says(text) | {"tool_choice": "none"})) == (text, [], "stop")


def test_logprobs_and_token_ids_of_calls_are_all_streamed(tool_app):
    body = says(CALL[HERMES]) | {"logprobs": True, "return_token_ids": True}
    status, found = tool_app(body)
    assert status == 200
    choices = [chunk["choices"][0] for chunk in tool_app(body | {"stream": True})]
    assert sum((choice.get("token_ids", []) for choice in choices), []) == found["choices"][0]["token_ids"]
    logprobs = [entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
    assert logprobs == found["choices"][0]["logprobs"]["content"]


def test_promises_are_kept_where_no_call_is_required(tool_app):
    """Strict tools, one call at most, and a format of answers: a guide has room for both."""
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    for more in ({"tools": [strict, CLOCK]}, {"parallel_tool_calls": False}):
        status, found = tool_app(more | {"max_tokens": 4})
        assert (status, found["choices"][0]["finish_reason"] in ("length", "stop")) == (200, True)
    shape = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"], "additionalProperties": False}
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": shape}}}
    seen, seed = set(), 0
    while seen != {True, False} and seed < 20:
        text, calls, _ = whole(tool_app(form | ENDS | {"seed": (seed := seed + 1)}))
        assert all(fits(*call) for call in calls)
        assert bool(calls) != (text is not None and json.loads(text) == {"a": None})
        seen.add(bool(calls))
    assert seen == {True, False}


def test_answers_of_tools_are_sent_back(tool_app):
    _, found = tool_app(says(f"{CALL[HERMES]}\n{CALL[HERMES]}"))
    said = found["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "rain"} for call in said["tool_calls"]]
    assert tool_app({"messages": [message("hi"), said, *results], "max_tokens": 2})[0] == 200


def wanted_of(tool_model, template, **body):
    tokenizer = replace(tool_model.tokenizer, chat_template=template)
    served = Served("small", tokenizer, 4096, 4, lambda prompt, _: list(prompt))
    return chat({"messages": [message("hi")], "tools": [WEATHER, CLOCK], **body}, served), served


def test_calls_by_tokens_that_text_does_not_show(tool_model):
    """Mistral's mark is a special token: text alone, without the token, is no call."""
    wanted, served = wanted_of(tool_model, "{{ tools }}[TOOL_CALLS]{{ name }}[ARGS]")
    for text, found in ((f"so {CALL[MISTRAL_ARGS]}{CALL[MISTRAL_ARGS]}", 2), ("".join(f"[{c}]" for c in "ab"), 0)):
        ids = tuple(tool_model.tokenizer.encode(text, add_bos=False))
        decoder = tool_model.tokenizer.stream_decoder(wanted.prompts[0])
        pieces = [decoder.push(id) for id in ids]
        shown = "".join(pieces)
        done = Completion(ids, shown, "stop", None, None, Timings(None, 0.0, 1, len(ids)))
        one, many = Answer(wanted, served), Answer(wanted, served)
        one.add(Event(0, 0, "", (), done))
        late = [*pieces[-3:], *[""] * 3]  # text may lag behind its tokens
        steps = [Event(0, 0, piece, (id,)) for id, piece in zip(ids[:-3], pieces)]
        steps += [Event(0, 0, "", ids[-3:]), *(Event(0, 0, piece) for piece in late[:3]), Event(0, 0, "", (), done)]
        chunks = [chunk for event in steps for chunk in many.chunks(event)]
        want = ("so ", ONE * 2, "tool_calls") if found else (shown, [], "stop")
        assert whole((200, one.whole())) == streamed(chunks) == want
    calls = one.whole()["choices"][0]["message"].get("tool_calls", ())
    assert all(len(call["id"]) == 9 and call["id"].isalnum() for call in calls)


FUNCTION = {"type": "function", "function": {"name": "a"}}
WRONG = [
    ({"tools": 5}, "tools", "must be a list like"),
    ({"tools": [{"type": "web_search"}]}, "tools", "only tools of the type function are served"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools", "name must be 1 to 64 letters"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "name must be 1 to 64 letters"),
    ({"tools": [FUNCTION, FUNCTION]}, "tools", '"a" is there twice'),
    (
        {"tools": [{"type": "function", "function": {"name": "a", "x": 1}}]},
        "tools",
        "tools[0].function.x is not served",
    ),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools", "must be an object"),
    (
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}]},
        "tools",
        "must be of the type object",
    ),
    ({"tool_choice": "all"}, "tool_choice", "must be none, auto, required or like"),
    ({"tool_choice": {"type": "function", "function": {"name": "b"}}}, "tool_choice", 'names "b"'),
    ({"tool_choice": "required", "tools": []}, "tool_choice", "there are no tools"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "must be true or false"),
    ({"tool_choice": "required", "guided_regex": "a"}, "guided_regex", "cannot go with tools"),
    ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos", "has no meaning with a guide"),
]


@pytest.mark.parametrize(("body", "param", "text"), WRONG, ids=lambda x: None)
def test_what_is_wrong_with_tools_is_said_in_one_line(tool_app, body, param, text):
    status, found = tool_app(body)
    assert status == 400
    assert text in one_line(found)
    assert found["error"]["param"] == param


def test_a_schema_that_the_guide_cannot_hold_is_the_tools(tool_app):
    odd = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)"}}}
    tool = {"type": "function", "function": {"name": "a", "parameters": odd}}
    status, found = tool_app({"tools": [tool], "tool_choice": "required"})
    assert (status, found["error"]["param"]) == (400, "tools")
    assert tool_app({"tools": [tool], "max_tokens": 1})[0] == 200  # nothing is promised


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages[0].content }} <tool_call>", "its chat template takes no tools"),
        ("{{ tools }}", "--tool-call-parser hermes, llama3 or mistral"),
    ],
)
def test_templates_that_do_not_speak_of_tools(tool_model, template, text):
    for more in ({}, {"tool_choice": "required"}):
        with pytest.raises(HttpError, match=text) as found:
            wanted_of(tool_model, template, **more)
        assert (found.value.status, found.value.param) == (400, "tools")
    for more in ({"tool_choice": "none"}, {"tools": []}):
        assert wanted_of(tool_model, template, **more)[0].tools is None
