"""/v1/responses: what its bodies ask for, and its answers as the official client reads them."""

import json

import pytest

from tests.serve.conftest import answer, ask
from tests.serve.test_app import CHAT, one_line
from tests.serve.test_tools import CALL, ENDS, HERE, SCHEMA, WEATHER

openai = pytest.importorskip("openai")
pytest.importorskip("starlette")
pytest.importorskip("llguidance")

PATH = "/v1/responses"
TOOL = {"type": "function", **WEATHER["function"], "strict": None}
FEW = {"max_output_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def post(tool_server):
    app, run = tool_server
    return lambda body, path=PATH, **more: run(answer(app, path, body, **more))


@pytest.fixture(scope="module")
def client(tool_server):
    """The official client, over the application, and what runs its coroutines."""
    import httpx

    app, run = tool_server
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
    yield openai.AsyncOpenAI(base_url="http://small/v1", api_key="any", max_retries=0, http_client=http).responses, run
    run(http.aclose())


def chat_text(post, messages, **more):
    body = {"messages": messages, "max_tokens": 6, "temperature": 0, **more}
    return post(body, CHAT)[1]["choices"][0]["message"]["content"]


def items_text(found) -> str:
    return "".join(part["text"] for item in found["output"] for part in item["content"])


def test_a_response_says_what_the_chat_does(post):
    """Instructions are the system's, and items of an earlier answer are one message."""
    user = {"role": "user", "content": [{"type": "input_text", "text": "the "}, {"type": "input_text", "text": "wolf"}]}
    said = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant"}
    said["content"] = [{"type": "output_text", "text": "I look", "annotations": [], "logprobs": []}]
    call = {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "weather", "arguments": HERE, "status": None}
    result = {"type": "function_call_output", "call_id": "c", "output": "rain"}
    tool_call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": HERE}}
    cases = [
        ({"input": "the wolf"}, [{"role": "user", "content": "the wolf"}]),
        (
            {"input": [user, said, call, result], "instructions": "be short"},
            [
                {"role": "system", "content": "be short"},
                {"role": "user", "content": "the wolf"},
                {"role": "assistant", "content": "I look", "tool_calls": [tool_call]},
                {"role": "tool", "tool_call_id": "c", "content": "rain"},
            ],
        ),
    ]
    for body, messages in cases:
        status, found = post(body | FEW)
        assert status == 200, found
        assert items_text(found) == chat_text(post, messages)
        assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert found["usage"]["output_tokens"] == 6
        assert found["instructions"] == body.get("instructions")


def test_fields_that_ask_for_nothing_more_are_taken(post):
    more = {"store": True, "metadata": {"a": "b"}, "truncation": "disabled", "background": False, "include": []}
    more |= {"user": "me", "service_tier": "auto", "reasoning": {"effort": None}, "parallel_tool_calls": True}
    more |= {
        "text": {"format": {"type": "text"}},
        "tools": [],
        "tool_choice": "auto",
        "previous_response_id": None,
        "prompt_cache_options": {},
    }
    status, found = post({"input": "the wolf", "model": "small"} | FEW | more)
    assert status == 200
    assert items_text(found) == items_text(post({"input": "the wolf"} | FEW)[1])
    assert found["metadata"] == {"a": "b"}
    assert found["store"] is False


CALL_ITEM = {"type": "function_call", "name": "f", "arguments": "{}"}
WRONG = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored"),
    ({"background": True}, "background", "must be false, not true"),
    ({"conversation": "c"}, "conversation", "is not a field"),
    ({"messages": []}, "messages", "is not a field"),
    ({"include": ["file_search_call.results"]}, "include", "must be []"),
    ({"input": []}, "input", "must be text, or a list of items"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input", "input[0] must be an item of the type message"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input",
        "input[0].content[0] must be a part",
    ),
    ({"input": [{"role": "king", "content": "x"}], "instructions": "x"}, "input", "input[0].role must be"),
    (
        {"input": [{"role": "user", "content": "x", "weight": 1}]},
        "input",
        "input[0].weight is not served; type, role and content are",
    ),
    (
        {"input": [CALL_ITEM, CALL_ITEM | {"arguments": "{"}], "instructions": "x"},
        "input",
        "input[1].arguments must be a JSON object",
    ),
    ({"input": [CALL_ITEM | {"call_id": 5}]}, "input", "input[0].call_id must be text"),
    (
        {"input": [{"type": "function_call_output", "call_id": 5, "output": ""}]},
        "input",
        "input[0].call_id must be text",
    ),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": 5}]}, "input", "input[0].output must be"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools", "tools[0].name must be"),
    ({"reasoning": {"effort": ["low"]}}, "reasoning", "must be without effort"),
    ({"instructions": 5}, "instructions", "must be text, not 5"),
    ({"max_output_tokens": 0}, "max_output_tokens", "must be an integer >= 1, not 0"),
    ({"temperature": "a"}, "temperature", "must be a number"),
    ({"text": {"format": {"type": "xml"}}}, "text", "type must be text, json_object or json_schema"),
    ({"text": {"verbosity": "high"}}, "text", '"verbosity" is not served'),
    ({"tools": [{"type": "web_search"}]}, "tools", "only tools of the type function"),
    ({"tool_choice": {"type": "function", "name": "a"}, "tools": [TOOL]}, "tool_choice", 'names "a"'),
    ({"input": "a" * 1100}, "input", "is too long"),
]


@pytest.mark.parametrize(("body", "param", "text"), WRONG, ids=lambda x: None)
def test_what_is_wrong_is_said_in_one_line_with_the_names_of_this_body(post, body, param, text):
    status, found = post({"input": "the wolf"} | body)
    assert status == 400
    assert text in one_line(found)
    assert found["error"]["param"] == param


def test_routes_that_are_not_there_say_which_are(post):
    for path in ("/v1/embeddings", "/v1/files", "/v1/batches", "/v1"):
        status, found = post({"input": "a"}, path)
        assert (status, found["error"]["type"]) == (404, "not_found_error")
        for there in ("/v1/chat/completions", "/v1/completions", "/v1/models", PATH):
            assert there in one_line(found)


def strict_events(stream):
    """Numbers in order, and each event of its own type with all that the type must have."""
    for number, event in enumerate(stream):
        assert event.sequence_number == number
        type(event).model_validate(event.model_dump(), strict=True)
    return [event.type.removeprefix("response.") for event in stream]


async def collect(stream):
    return [event async for event in stream]


TEXT_EVENTS = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done"]
TEXT_EVENTS += ["content_part.done", "output_item.done"]
CALL_EVENTS = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]


def once(kinds):
    """Event types without repetitions of deltas."""
    return [kind for i, kind in enumerate(kinds) if not (i and kind.endswith("delta") and kinds[i - 1] == kind)]


def test_the_official_client_reads_texts(client):
    responses, run = client
    found = run(responses.create(model="small", input="the wolf", **FEW))
    assert found.status == "incomplete"
    assert len(found.output_text) > 3
    type(found).model_validate(found.model_dump(), strict=True)
    stream = run(collect(run(responses.create(model="small", input="the wolf", stream=True, **FEW))))
    kinds = strict_events(stream)
    assert once(kinds) == ["created", "in_progress", *TEXT_EVENTS, "incomplete"]
    assert "".join(event.delta for event in stream if event.type.endswith("text.delta")) == found.output_text
    assert stream[-1].response.output_text == found.output_text
    assert stream[-1].response.usage == found.usage


def test_the_official_client_reads_calls(client):
    responses, run = client
    ask = {"model": "small", "input": "hi", "tools": [TOOL], "tool_choice": {"type": "function", "name": "weather"}}
    ask |= {"extra_body": ENDS, "max_output_tokens": 200}
    (call,) = run(responses.create(**ask)).output
    assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
    assert json.loads(call.arguments).keys() == {"city", "days"}
    stream = run(collect(run(responses.create(stream=True, **ask))))
    assert once(strict_events(stream)) == ["created", "in_progress", *CALL_EVENTS, "completed"]
    assert "".join(event.delta for event in stream if event.type.endswith("arguments.delta")) == call.arguments
    back = {"input": [{"role": "user", "content": "hi"}, call.model_dump()], "tools": [TOOL]}
    back["input"].append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
    assert run(responses.create(model="small", **back, **FEW)).output_text


def test_text_and_calls_of_one_answer(tool_server):
    app, run = tool_server
    body = {"input": "hi", "tools": [TOOL], "guided_choice": [f"I look.\n{CALL[next(iter(CALL))]}"]}
    assert run(answer(app, PATH, body))[0] == 400  # a field of chats
    body = {"input": "hi", "tools": [TOOL], "max_output_tokens": 4, "stream": True}
    status, headers, content = run(ask(app, PATH, body))
    assert (status, headers[b"content-type"]) == (200, b"text/event-stream; charset=utf-8")
    for frame in content.decode().removesuffix("\n\n").split("\n\n"):
        event, data = frame.split("\n")
        assert event == f"event: {json.loads(data.removeprefix('data: '))['type']}"


def test_the_official_client_parses(client):
    pydantic = pytest.importorskip("pydantic")
    responses, run = client

    class Trip(pydantic.BaseModel):
        city: str = pydantic.Field(pattern="^(Oslo|Rome)$")
        days: int = pydantic.Field(ge=1, le=9)

    more = {"model": "small", "input": "hi", "text_format": Trip, "max_output_tokens": 200, "extra_body": ENDS}
    assert run(responses.parse(**more)).output_parsed.city in ("Oslo", "Rome")

    async def stream():
        async with responses.stream(**more) as events:
            kinds = [event.type async for event in events]
            return kinds, (await events.get_final_response()).output_parsed

    kinds, parsed = run(stream())
    assert kinds[-1] == "response.completed"
    assert 1 <= parsed.days <= 9
    assert SCHEMA["required"] == ["city", "days"]
