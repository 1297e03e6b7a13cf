"""Tokenizers in GGUF metadata: the ids are those of the tokenizer that was written into it."""

import json

import pytest
import tokenizers

import jllm
from jllm.errors import TokenizerError
from jllm.files.load import BUNDLED
from jllm.files.save import save
from jllm.files.tokenizer import Tokenizer, load_tokenizer
from tests.files.gguf_files import write
from tests.files.tokenizer.cases import TEXT, byte_level
from tests.tiny import tiny_model

TEXTS = [*TEXT[:4], "", " ", "  two", "<user> x [INST] y", "a<|end|>b <tool>", "1234567 I'LL 12\n\n 3"]
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"


def of_sentencepiece(tokenizer: Tokenizer) -> dict:
    """The metadata of convert_hf_to_gguf.py's _create_vocab_sentencepiece."""
    sp = tokenizer.vocabulary._sp

    def kind(i: int) -> int:
        flags = {2: sp.is_unknown(i), 3: sp.is_control(i), 5: sp.is_unused(i), 6: sp.is_byte(i)}
        user = sp.id_to_piece(i) == "<user>"
        return next((kind for kind, flag in flags.items() if flag), 4 if user else 1)

    ids = range(sp.get_piece_size())
    own = {
        "model": "llama",
        "tokens": [sp.id_to_piece(i) for i in ids],
        "scores": [sp.get_score(i) for i in ids],
        "token_type": [kind(i) for i in ids],
        "bos_token_id": sp.bos_id(),
        "eos_token_id": sp.eos_id(),
        "unknown_token_id": sp.unk_id(),
    }
    return {f"tokenizer.ggml.{key}": value for key, value in own.items()}


def of_byte_level(tokenizer: tokenizers.Tokenizer, **more) -> dict:
    """The metadata of convert_hf_to_gguf.py's _set_vocab_gpt2."""
    model, added = json.loads(tokenizer.to_str())["model"], tokenizer.get_added_tokens_decoder()
    size = tokenizer.get_vocab_size()
    kinds = [1 if i not in added else 3 if added[i].special else 4 for i in range(size)]
    own = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [tokenizer.id_to_token(i) for i in range(size)],
        "merges": [" ".join(pair) for pair in model["merges"]],
        "token_type": kinds,
        "bos_token_id": tokenizer.token_to_id("<|begin|>"),
        "eos_token_id": tokenizer.token_to_id("<|end|>"),
    } | more
    return {f"tokenizer.ggml.{key}": value for key, value in own.items()}


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_layers=1)


@pytest.mark.parametrize("kind", ["sentencepiece", "byte_level", "bundled"])
def test_ids_and_text_are_those_of_the_original(kind, loaded, folders, model, tmp_path):
    wanted = load_tokenizer(BUNDLED) if kind == "bundled" else loaded[kind]
    if kind == "byte_level":
        more = of_byte_level(tokenizers.Tokenizer.from_file(str(folders[kind] / "tokenizer.json")))
    else:
        more = of_sentencepiece(wanted)
    path = write(tmp_path / "m.gguf", model, more=more).path
    found = load_tokenizer(path)
    assert found.vocab_size == wanted.vocab_size
    for text in TEXTS:
        ids = found.encode(text, add_bos=False)
        assert ids == wanted.encode(text, add_bos=False)
        assert found.decode(ids) == wanted.decode(ids)
        assert found.encode(text) == [*([found.bos_id] if kind != "byte_level" else []), *ids]
    whole = jllm.load(path)
    assert whole.tokenizer.special_tokens == found.special_tokens
    save(tmp_path / "saved", whole.params, whole.config, tokenizer=whole.tokenizer)
    again = load_tokenizer(tmp_path / "saved")
    assert [again.encode(text) for text in TEXTS] == [found.encode(text) for text in TEXTS]


def test_templates_and_end_tokens_are_read(model, tmp_path):
    tokenizer = byte_level()
    own = of_byte_level(tokenizer, add_bos_token=True, eot_token_id=7)
    templates = {"tokenizer.chat_template": TEMPLATE, "tokenizer.chat_template.tool_use": "tools"}
    names = {"tokenizer.chat_templates": ["tool_use"]}
    loaded = jllm.load(write(tmp_path / "m.gguf", model, more=own | templates | names).path)
    found = loaded.tokenizer
    assert found.chat([{"role": "user", "content": "hi"}]) == "[user] hi<|end|>"
    assert found.tool_template == "tools"
    begin, end = (tokenizer.token_to_id(token) for token in ("<|begin|>", "<|end|>"))
    assert found.encode("x")[0] == begin
    assert (loaded.config.bos_id, loaded.config.eos_ids) == (begin, (end, 7))


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("llama-bpe", ["I", "'LL", " pay", "\n\n", " ", " ", "123", "456", "7", "."]),
        ("qwen2", ["I", "'LL", " pay", "\n\n", " ", " ", "1", "2", "3", "4", "5", "6", "7", "."]),
        ("smollm", ["I", "'", "LL", " pay", "\n\n  ", "1", "2", "3", "4", "5", "6", "7", "."]),
    ],
)
def test_texts_are_cut_as_the_pre_tokenizer_says(pre, pieces, model, tmp_path):
    path = write(tmp_path / "m.gguf", model, more=of_byte_level(byte_level(), pre=pre)).path
    made = tokenizers.Tokenizer.from_str(load_tokenizer(path).files["tokenizer.json"].decode())
    text = "I'LL pay\n\n  1234567."
    found = [text[a:b] for _, (a, b) in made.pre_tokenizer.pre_tokenize_str(text)]
    assert found == pieces


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model 'bert' is not supported; supported are llama, gpt2"),
        ({"pre": "deepseek-v3"}, "tokenizer.ggml.pre 'deepseek-v3' is not supported; supported are llama-bpe"),
        ({"merges": None}, "lacks tokenizer.ggml.merges"),
        ({"token_type": [1, 1]}, "tokens, but 2 of tokenizer.ggml.token_type"),
        ({"eos_token_id": 100_000}, "the id of eos_token is 100000"),
        ({"model": "llama", "scores": [0.5]}, "tokens, but 1 of tokenizer.ggml.scores"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(own, message, model, tmp_path):
    path = write(tmp_path / "m.gguf", model, more=of_byte_level(byte_level(), **own)).path
    with pytest.raises(TokenizerError, match=message) as error:
        jllm.load(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_a_file_without_a_tokenizer_takes_token_ids(model, tmp_path):
    assert (
        jllm.load(
            write(
                tmp_path / "m.gguf",
                model,
            ).path
        ).tokenizer
        is None
    )
