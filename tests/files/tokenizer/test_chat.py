"""Chat templates: where they are found, what they see, and how they fail."""

import json

import pytest

from jllm.errors import TokenizerError
from jllm.files.tokenizer import Tokenizer, load_tokenizer
from tests.files.tokenizer.cases import write_json

TEMPLATE = """{{ bos_token }}{% for message in messages %}
    {%- if message.role == 'system' %}{{ raise_exception('no role ' + message.role) }}{% endif %}
[INST]{{ message.role }}: {{ message.content | trim }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}
assistant:{% endif %}"""
USER = [{"role": "user", "content": "  the girl <b>\n"}]


@pytest.fixture
def chatty(folders, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes((folders["sentencepiece"] / "tokenizer.model").read_bytes())

    def load(template=None, **files) -> Tokenizer:
        if template is not None:
            write_json(tmp_path / "tokenizer_config.json", {"chat_template": template})
        for name, content in files.items():
            (tmp_path / name.replace("__", ".")).write_text(content)
        return load_tokenizer(tmp_path)

    return load


def test_chat_text_and_ids(chatty):
    tokenizer = chatty(TEMPLATE)
    text = tokenizer.chat(USER)
    assert text == "<s>[INST]user: the girl <b></s>\nassistant:"
    ids = tokenizer.encode(text, add_bos=False)
    assert ids == tokenizer.encode(text)  # no second BOS
    assert ids.count(tokenizer.bos_id) == ids.count(tokenizer.eos_ids[0]) == 1
    assert ids[:2] == [tokenizer.bos_id, tokenizer.vocabulary.id("[INST]")]
    assert tokenizer.decode(ids) == "user: the girl <b>\nassistant:"


def test_where_chat_templates_are_found(chatty):
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert chatty(named).chat(USER) == "D"
    assert chatty("C").chat(USER) == "C"
    assert chatty(chat_template__json=json.dumps({"chat_template": "J"})).chat(USER) == "J"
    assert chatty(chat_template__jinja="F").chat(USER) == "F"


def test_chat_environment(chatty):
    year = chatty("{{ strftime_now('%Y') }}").chat(USER)
    assert year.isdigit()
    assert chatty("{{ {'é': '<&>'} | tojson }}").chat(USER) == '{"é": "<&>"}'
    assert chatty("{% generation %}a{% endgeneration %}{% for i in [1, 2] %}{% break %}{% endfor %}").chat(USER) == "a"
    assert chatty("{{ tools is none }}{{ unknown is defined }}").chat(USER) == "TrueFalse"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (TEMPLATE, "no role system"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages"),
        ("{{ messages.append(1) }}", "refuses these messages"),
        ("{{ nothing.at.all }}", "refuses these messages"),
        ("{% if %}", "broken at line 1"),
        ([{"name": "tool_use", "template": "T"}], "no chat template: looked for chat_template.jinja"),
        (None, "no chat template: looked for chat_template.jinja"),
    ],
)
def test_chat_errors(chatty, template, message):
    with pytest.raises(TokenizerError, match=message) as caught:
        chatty(template).chat([{"role": "system", "content": "x"}])
    assert "\n" not in str(caught.value)


def user(content, **more):
    return {"role": "user", "content": content, **more}


def assistant(calls, content=None):
    return {"role": "assistant", "content": content, "tool_calls": calls}


def called(arguments, **more):
    return {"type": "function", "function": {"name": "f", "arguments": arguments}, **more}


WRONG_MESSAGES = [
    *((none, "messages must be a non-empty list like") for none in ([], "hello", b"x", None, {}, user("x"))),
    (["x"], "messages[0] must be an object like"),
    ([{"content": "x"}], "messages[0].role is missing: it must be system, developer, user"),
    ([user("x"), {"role": "king", "content": "x"}], "messages[1].role must be system, developer, user"),
    (
        [{"role": ["user"], "content": "x"}],
        'messages[0].role must be system, developer, user, assistant or tool, not ["user"]',
    ),
    ([{"role": "user"}], "messages[0].content must be text, not null"),
    ([user(None)], "messages[0].content must be text, not null"),
    ([{"role": "assistant", "content": None}], "messages[0].content must be text, not null"),
    ([user(b"")], "messages[0].content must be text, not bytes"),
    ([user({"text": "x"})], 'messages[0].content must be text, not {"text": "x"}'),
    ([user([])], "messages[0].content has no part"),
    ([user(["x"])], "messages[0].content[0] must be a part like"),
    ([user([{"type": "text", "text": None}])], "messages[0].content[0].text must be text, not null"),
    ([user([{"type": "text", "text": "a"}, {"type": "image_url"}])], 'messages[0].content[1] has the type "image_url"'),
    ([user([{"type": "text", "text": "a", "speed": 2}])], "messages[0].content[0].speed is not served"),
    ([user("x", name=5)], "messages[0].name must be text, not 5"),
    ([user("x", weight=1)], "messages[0].weight is not served"),
    ([user("x", refusal="no")], "messages[0].refusal is not served"),
    ([user("x", tool_calls=[1])], "messages[0].tool_calls is not served there: tools are called by the assistant"),
    ([user("x", tool_call_id="a")], "messages[0].tool_call_id is not served there: it belongs to the role tool"),
    ([user("x", function_call={"name": "f"})], "messages[0].function_call is not served: tool_calls are"),
    ([assistant({"name": "f"})], "messages[0].tool_calls must be a list like"),
    ([assistant([1])], "messages[0].tool_calls[0] must be an object like"),
    ([assistant([{"type": "custom", "function": {}}])], "messages[0].tool_calls[0] must be an object like"),
    ([assistant([{"function": {"name": 5}}])], "messages[0].tool_calls[0].function.name must be text, not 5"),
    ([assistant([called("[1]")])], "messages[0].tool_calls[0].function.arguments must be a JSON object in a string"),
    ([assistant([called("{")])], "messages[0].tool_calls[0].function.arguments must be a JSON object in a string"),
    ([assistant([called("{}") | {"weight": 1}])], "messages[0].tool_calls[0].weight is not served"),
    ([{"role": "tool", "tool_call_id": "a"}], "messages[0].content must be text, not null"),
]


@pytest.mark.parametrize(("messages", "message"), WRONG_MESSAGES, ids=lambda x: None)
def test_messages_that_are_refused(chatty, messages, message):
    with pytest.raises(TokenizerError) as caught:
        chatty("{{ messages }}").chat(messages)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_what_a_template_sees_of_messages(chatty):
    """Parts are one text, a name is kept, and what asks for nothing is left out."""
    seen = "{% for m in messages %}{{ m | tojson(sort_keys=true) }}{% endfor %}"
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "wolf", "annotations": [], "x": None}]
    back = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    messages = [user(parts, name="ann"), {"role": "assistant", "content": "", "parsed": {"a": 1}, **back}]
    want = [user("the wolf", name="ann"), {"role": "assistant", "content": ""}]
    assert chatty(seen).chat(messages) == "".join(json.dumps(one, sort_keys=True) for one in want)


def test_what_a_template_sees_of_tools(chatty):
    """Arguments are objects, whatever clients send, a message of calls needs no content, and tools are as given."""
    seen = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m | tojson }}{% endfor %}"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    sent = [called('{"a": 1}', id="c", index=0), called({"a": 2}), called("")]
    messages = [
        user("x"),
        assistant(sent),
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "r"}]},
    ]
    calls = [{"id": "c"} | called({"a": 1}), called({"a": 2}), called({})]
    want = [user("x"), assistant(calls, ""), {"role": "tool", "content": "r", "tool_call_id": "c"}]
    text = "".join(map(json.dumps, want))
    assert chatty(seen).chat(messages) == text
    assert chatty(seen).chat(messages, tools) == json.dumps(tools) + text


def test_the_template_of_chats_with_tools(chatty, tmp_path):
    """As transformers chooses it: by the name tool_use, where there is one."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert (chatty(named).chat(USER), chatty(named).chat(USER, tools)) == ("D", "T")
    assert chatty("C").chat(USER, tools) == "C"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("F")
    assert (chatty("C").chat(USER), chatty("C").chat(USER, tools)) == ("C", "F")


def test_a_developer_is_the_system_of_templates_that_do_not_know_him(chatty):
    said = [{"role": "developer", "content": "x"}]
    assert chatty("{{ messages[0].role }}").chat(said) == "system"
    assert chatty("{% if 'developer' %}{% endif %}{{ messages[0].role }}").chat(said) == "developer"


def test_chat_messages_too_deep(chatty):
    deep = []
    for _ in range(100_000):
        deep = [deep]
    for content in (deep, {"x": deep}):
        with pytest.raises(TokenizerError, match=r"^messages\[0\].content"):
            chatty(TEMPLATE).chat([user(content)])
    content.clear()
    while deep:  # or its deallocation would be as deep
        deep = deep[0]


def test_chat_template_of_a_wrong_type(chatty):
    with pytest.raises(TokenizerError, match="chat_template in .* must be a string or a list"):
        chatty(3)
