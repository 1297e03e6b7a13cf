"""Tries real clients on a server of jllm: python -m tests.clients.trial --url http://127.0.0.1:8000/v1.

Each client does what its users do by default. Nothing here is collected by pytest."""

import argparse
import asyncio
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

MODEL, KEY = "small", "none"
ASK = [{"role": "system", "content": "be short"}, {"role": "user", "content": "the wolf"}]
CITIES = ["Oslo", "Rome"]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": CITIES, "type": "string"}, "days": {"enum": [1, 2, 3], "type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "it rains", "parameters": SCHEMA}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}


def check_trip(found: dict[str, Any]) -> None:
    assert set(found) == {"city", "days"}, found
    assert found["city"] in CITIES, found
    assert found["days"] in (1, 2, 3), found


def trip() -> Any:
    """Returns the class that clients make of SCHEMA."""
    from pydantic import BaseModel

    class Trip(BaseModel):
        city: Literal["Oslo", "Rome"]
        days: Literal[1, 2, 3]

    return Trip


def check_completion(found: Any, finish: tuple[str, ...] = ("stop", "length")) -> None:
    (choice,) = found.choices
    assert choice.message.role == "assistant", choice
    assert choice.message.content, choice
    assert choice.finish_reason in finish, choice
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens > 0, found.usage


def check_calls(found: Any) -> None:
    (choice,) = found.choices
    assert choice.finish_reason == "tool_calls", choice
    assert choice.message.tool_calls, choice
    for call in choice.message.tool_calls:
        assert call.function.name == "weather", call
        check_trip(json.loads(call.function.arguments))


def check_streamed(chunks: list[Any], text: str) -> None:
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text, chunks
    assert sum(bool(chunk.choices) for chunk in chunks) > 2, chunks


def openai(url: str) -> None:
    from openai import OpenAI

    with OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        _openai_chats(client)
        _openai_responses(client)
        completion = client.completions.create(model=MODEL, prompt="the wolf", max_tokens=8)
        assert completion.choices[0].text, completion


def _openai_chats(client: Any) -> None:
    ask = {"model": MODEL, "messages": ASK}
    found = client.chat.completions.create(**ask, max_tokens=12)
    check_completion(found)
    streamed = client.chat.completions.create(**ask, max_tokens=12, stream=True, stream_options={"include_usage": True})
    chunks = list(streamed)
    check_streamed(chunks, found.choices[0].message.content)
    assert chunks[-1].usage == found.usage, chunks[-1]
    called = client.chat.completions.create(**ask, tools=[TOOL], tool_choice="required")
    check_calls(called)
    message = called.choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in message.tool_calls]
    more = {"tools": [TOOL], "max_tokens": 12}
    check_completion(client.chat.completions.create(model=MODEL, messages=[*ASK, message, *results], **more))
    with client.chat.completions.stream(**ask, tools=[TOOL], tool_choice="required") as stream:
        check_calls(stream.get_final_completion())
    check_trip(client.chat.completions.parse(**ask, response_format=trip()).choices[0].message.parsed.model_dump())


def _openai_responses(client: Any) -> None:
    ask = {"model": MODEL, "instructions": "be short", "input": "the wolf"}
    found = client.responses.create(**ask, max_output_tokens=16)
    assert found.output_text, found
    with client.responses.stream(**ask, max_output_tokens=16) as stream:
        events = list(stream)
    assert events[0].type == "response.created", events[0]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == found.output_text
    check_trip(client.responses.parse(**ask, text_format=trip()).output_parsed.model_dump())
    tool = {"type": "function", **TOOL["function"], "strict": True}
    called = client.responses.create(**ask, tools=[tool], tool_choice="required")
    calls = [item for item in called.output if item.type == "function_call"]
    assert calls, called
    for call in calls:
        check_trip(json.loads(call.arguments))
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in calls]
    again = [{"role": "user", "content": "the wolf"}, *called.output, *results]
    assert client.responses.create(model=MODEL, input=again, tools=[tool], max_output_tokens=16).output, again


def litellm(url: str) -> None:
    import litellm

    ask = {"model": f"openai/{MODEL}", "api_base": url, "api_key": KEY, "messages": ASK}
    found = litellm.completion(**ask, max_tokens=12)
    check_completion(found)
    check_streamed(list(litellm.completion(**ask, max_tokens=12, stream=True)), found.choices[0].message.content)
    check_completion(litellm.completion(**ask, max_tokens=12, tools=[TOOL]))
    check_calls(litellm.completion(**ask, tools=[TOOL], tool_choice="required"))
    check_trip(json.loads(litellm.completion(**ask, response_format=FORMAT).choices[0].message.content))
    given = {name: ask[name] for name in ("model", "api_base", "api_key")}
    response = litellm.responses(**given, input="the wolf", max_output_tokens=16)
    assert response.output[0].content[0].text, response
    assert litellm.text_completion(**given, prompt="the wolf", max_tokens=8).choices[0].text


def langchain_openai(url: str) -> None:
    from langchain_openai import ChatOpenAI

    make = {"model": MODEL, "base_url": url, "api_key": KEY, "max_retries": 0}
    for more in ({}, {"use_responses_api": True}):
        chat = ChatOpenAI(**make, max_tokens=16, **more)
        found = chat.invoke("the wolf")
        assert found.text, found
        assert found.usage_metadata["output_tokens"] > 0, found
        assert "".join(chunk.text for chunk in chat.stream("the wolf")) == found.text
        assert chat.bind_tools([TOOL]).invoke("the wolf").text
        chat = ChatOpenAI(**make, **more)
        called = chat.bind_tools([TOOL], tool_choice="required").invoke("the wolf")
        for call in called.tool_calls:
            check_trip(call["args"])
        assert called.tool_calls, called
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "rain"} for call in called.tool_calls]
        again = [{"role": "user", "content": "the wolf"}, called, *results]
        ChatOpenAI(**make, max_tokens=16, **more).bind_tools([TOOL]).invoke(again)
        for method in ("json_schema", "function_calling"):
            check_trip(chat.with_structured_output(trip(), method=method).invoke("the wolf").model_dump())


def instructor(url: str) -> None:
    import instructor
    from openai import OpenAI

    with OpenAI(base_url=url, api_key=KEY, max_retries=0) as inner:
        for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.RESPONSES_TOOLS):
            client = instructor.from_openai(inner, mode=mode)
            found = client.create(model=MODEL, messages=ASK, response_model=trip(), max_retries=0)
            check_trip(found.model_dump())
        client = instructor.from_openai(inner)
        parts = client.create_partial(model=MODEL, messages=ASK, response_model=trip(), max_retries=0)
        check_trip(list(parts)[-1].model_dump())


def pydantic_ai(url: str) -> None:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=url, api_key=KEY)

    async def run(kind: Any) -> None:
        model = kind(MODEL, provider=provider)
        agent = Agent(model, instructions="be short", model_settings={"max_tokens": 16})
        found = await agent.run("the wolf")
        assert found.output, found
        assert (await agent.run("and then?", message_history=found.all_messages())).output
        async with agent.run_stream("the wolf") as stream:
            assert [part async for part in stream.stream_text(delta=True)]
        for output in (trip(), NativeOutput(trip())):
            check_trip((await Agent(model, output_type=output).run("the wolf")).output.model_dump())
        plain = Agent(model, output_type=str, model_settings={"max_tokens": 16})
        plain.tool_plain(lambda city: "rain", name="weather")
        assert (await plain.run("the wolf")).output

    async def both() -> None:
        await run(OpenAIChatModel)
        await run(OpenAIResponsesModel)

    asyncio.run(both())


def autogen(url: str) -> None:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_core.models import UserMessage
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    about = {"vision": False, "function_calling": True, "json_output": True, "family": "unknown"}
    about["structured_output"] = True
    make = {"model": MODEL, "base_url": url, "api_key": KEY, "model_info": about}

    def weather(city: Literal["Oslo", "Rome"]) -> str:
        """Says that it rains."""
        return f"rain in {city}"

    async def run() -> None:
        client = OpenAIChatCompletionClient(**make, max_tokens=16)
        found = await client.create([UserMessage(content="the wolf", source="user")])
        assert found.content, found
        assert found.finish_reason in ("stop", "length"), found
        streamed = [part async for part in client.create_stream([UserMessage(content="the wolf", source="user")])]
        assert streamed[-1].content == found.content, streamed
        agent = AssistantAgent("small", model_client=client, tools=[weather])
        assert (await agent.run(task="the wolf")).messages[-1].content
        await client.close()
        whole = OpenAIChatCompletionClient(**make)
        form = await whole.create([UserMessage(content="the wolf", source="user")], json_output=trip())
        check_trip(json.loads(form.content))
        agent = AssistantAgent("trips", model_client=whole, output_content_type=trip())
        check_trip((await agent.run(task="the wolf")).messages[-1].content.model_dump())
        await whole.close()

    asyncio.run(run())


def llm(url: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        about = {"model_id": MODEL, "model_name": MODEL, "api_base": url, "supports_schema": True}
        about |= {"supports_tools": True, "can_stream": True}
        (Path(folder) / "extra-openai-models.yaml").write_text(json.dumps([about]))  # which is YAML
        command = [sys.executable, "-m", "llm", "-m", MODEL, "the wolf"]
        environment = os.environ | {"LLM_USER_PATH": folder}

        def say(*more: str) -> str:
            done = subprocess.run([*command, *more], env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr.strip()
            return done.stdout.strip()

        text = say("--option", "max_tokens", "12")
        assert text
        assert say("--option", "max_tokens", "12", "--no-stream") == text
        check_trip(json.loads(say("--schema", json.dumps(SCHEMA))))
        assert say("--option", "max_tokens", "12", "--tool", "llm_version")


def lm_eval(url: str) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    from tests.lm_eval_cases import write_tasks

    with tempfile.TemporaryDirectory() as folder:
        write_tasks(Path(folder))
        for model, path, tasks in (
            ("local-completions", "completions", ["small_choice", "small_answer"]),
            ("local-chat-completions", "chat/completions", ["small_answer"]),
        ):
            about = {"model": MODEL, "base_url": f"{url}/{path}", "max_retries": 1, "max_length": 1024}
            about |= {"tokenizer_backend": "remote"} if path == "completions" else {}
            results = lm_eval.simple_evaluate(
                model=model,
                model_args=about,
                tasks=tasks,
                task_manager=TaskManager(include_path=folder, include_defaults=False),
                apply_chat_template=path != "completions",
                bootstrap_iters=0,
            )
            assert set(results["results"]) == set(tasks), results["results"]
            assert all(results["samples"][task] for task in tasks)


def guidellm(url: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data, report = Path(folder) / "prompts.jsonl", Path(folder) / "report.json"
        data.write_text("".join(json.dumps({"prompt": f"the wolf {i}"}) + "\n" for i in range(4)))
        options = {"target": url.removesuffix("/v1"), "model": MODEL, "rate-type": "synchronous", "max-requests": "4"}
        options |= {"data": str(data), "data-args": '{"prompt_column": "prompt"}', "output-path": str(report)}
        command = [str(Path(sys.executable).parent / "guidellm"), "benchmark", "run"]
        command += [part for name, value in options.items() for part in (f"--{name}", value)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, (done.stderr or done.stdout).strip()[-600:]
        (benchmark,) = json.loads(report.read_text())["benchmarks"]
        assert benchmark["run_stats"]["requests_made"]["successful"] == 4, benchmark["run_stats"]


CLIENTS: dict[str, tuple[str, Callable[[str], None]]] = {  # by name: its package, and what it does
    "openai": ("openai", openai),
    "litellm": ("litellm", litellm),
    "langchain-openai": ("langchain-openai", langchain_openai),
    "instructor": ("instructor", instructor),
    "pydantic-ai": ("pydantic-ai-slim", pydantic_ai),
    "autogen": ("autogen-agentchat", autogen),
    "llm": ("llm", llm),
    "lm-eval": ("lm-eval", lm_eval),
    "guidellm": ("guidellm", guidellm),
}


def tried(name: str, url: str) -> bool:
    """Prints how the client did in one line; returns whether it did not fail."""
    package, trial = CLIENTS[name]
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        print(f"{name}: skipped: {package} is not installed", flush=True)
        return True
    try:
        trial(url)
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == __file__]
        why = f"line {lines[-1]}: {type(error).__name__}: {' '.join(str(error).split())[:600]}"
        print(f"{name} {version}: failed: {why}", flush=True)
        return False
    print(f"{name} {version}: passed", flush=True)
    return True


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients.trial", description="Try clients on a server.")
    parser.add_argument("--url", required=True, help="of the API, as http://127.0.0.1:8000/v1")
    parser.add_argument("--only", nargs="+", choices=CLIENTS, default=list(CLIENTS), metavar="NAME")
    args = parser.parse_args(argv)
    found = [tried(name, args.url.rstrip("/")) for name in args.only]
    return 0 if all(found) else 1


if __name__ == "__main__":
    os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1"}  # no network
    sys.exit(main())
