"""Chat templates: where they are found, what they see, and how they fail."""

import json

import pytest

from jllm.errors import TokenizerError
from jllm.tokenizer import Tokenizer, load_tokenizer
from tests.tokenizer.cases import write_json

TEMPLATE = """{{ bos_token }}{% for message in messages %}
    {%- if message.role == 'king' %}{{ raise_exception('unknown role ' + message.role) }}{% endif %}
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
        (TEMPLATE, "unknown role king"),
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
        chatty(template).chat([{"role": "king", "content": "x"}])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("messages", [[], "hello", None, [{"content": "x"}], ["x"], [{"role": "user", "content": b""}]])
def test_chat_messages_that_are_none(chatty, messages):
    with pytest.raises(TokenizerError, match="^messages must"):
        chatty(TEMPLATE).chat(messages)


def test_chat_messages_too_deep(chatty):
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(TokenizerError, match="^messages must hold JSON values only"):
        chatty(TEMPLATE).chat([{"role": "user", "content": deep}])
    while deep:  # or its deallocation would be as deep
        deep = deep[0]


def test_chat_template_of_a_wrong_type(chatty):
    with pytest.raises(TokenizerError, match="chat_template in .* must be a string or a list"):
        chatty(3)
