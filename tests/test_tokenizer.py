"""Tokenizers against the libraries that made their files, and the incremental decoder against whole decoding."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

import jllm.errors
from jllm.errors import TokenizerError
from jllm.tokenizer import StreamDecoder, Tokenizer, load_tokenizer

TEXT = [
    "Once upon a time there was a little girl who lived in a small house near the forest.",
    "The wolf said: how big your eyes are! And the girl ran away, and ran, and ran.",
    "Größe, naïve café, cafe\u0301, e\u0301tude; Привет, мир; 你好世界 你好; こんにちは; 👋🏽 hello 👩‍👩‍👧 world 😀😀",
    "def f(x):\n    return x + 1\n\n\ttabs  and   spaces 1234567890",
] * 5
BROKEN = "\ufffd"


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def train_sentencepiece(directory: Path, **options) -> Path:
    options = {
        "model_type": "bpe",
        "vocab_size": 420,
        "byte_fallback": True,
        "character_coverage": 0.98,  # so that rare characters are written in bytes
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "control_symbols": ["[INST]"],
        "user_defined_symbols": ["<user>"],
        "minloglevel": 2,
    } | options
    with open(directory / "tokenizer.model", "wb") as file:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXT), model_writer=file, **options)
    return directory


def byte_level() -> tokenizers.Tokenizer:
    """As LLaMA 3 and Qwen: bytes all the way."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|begin|>", "<|end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens(["<tool>", "naïve 你", "soft\xadhyphen"])  # the last are not in the byte alphabet
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """As LLaMA 2's tokenizer.json: BPE over characters, bytes for those that it lacks."""
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>"]
    options = {"vocab_size": 120, "limit_alphabet": 40, "special_tokens": special, "show_progress": False}
    trained.train_from_iterator(TEXT, trainers.BpeTrainer(**options))
    state = json.loads(trained.to_str())
    vocab = state["model"]["vocab"]
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    merges = [tuple(pair) for pair in state["model"]["merges"]]
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.add_special_tokens(special)
    tokenizer.normalizer = trained.normalizer
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    made = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    train_sentencepiece(made["sentencepiece"])
    byte_level().save(str(made["byte_level"] / "tokenizer.json"))
    byte_fallback().save(str(made["byte_fallback"] / "tokenizer.json"))
    return made


KINDS = ("sentencepiece", "byte_level", "byte_fallback")


@pytest.fixture(scope="session")
def loaded(folders) -> dict[str, Tokenizer]:
    return {kind: load_tokenizer(folder) for kind, folder in folders.items()}


each_kind = pytest.mark.parametrize("kind", KINDS)
modest = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
# "▁" is how SentencePiece writes a space, so it cannot come back; names of special tokens are not plain text.
texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=30),
    st.lists(st.sampled_from([*"aé你😀\u0301 \n\0", "  ", "the girl", "👩‍👩‍👧", "\u0430"]), max_size=20).map("".join),
)
numbers = st.lists(st.integers(0, 10**6), max_size=40)  # taken modulo the vocabulary


def random_ids(tokenizer: Tokenizer, numbers: list[int]) -> list[int]:
    """Random ids, every third drawn from those that show a single byte: broken UTF-8 is the hard case."""
    single = [id for id in range(tokenizer.vocab_size) if len(tokenizer.vocabulary.piece(id)) == 1]
    return [single[n % len(single)] if n % 3 == 0 else n % tokenizer.vocab_size for n in numbers]


def streamed(decoder: StreamDecoder, ids) -> str:
    return "".join([decoder.push(id) for id in ids]) + decoder.finish()


# Whole decoding, against the libraries


@given(numbers=numbers)
@modest
def test_decode_equals_sentencepiece(folders, loaded, numbers):
    sp = sentencepiece.SentencePieceProcessor(model_file=str(folders["sentencepiece"] / "tokenizer.model"))
    ids = random_ids(loaded["sentencepiece"], numbers)
    # sentencepiece keeps a space at the very start when a byte token wrote it
    ids = [id for id in ids if id != sp.piece_to_id("<0x20>")]
    # and special tokens go before decoding, as in transformers: it would end a run of bytes at them, and show <unk>
    visible = [id for id in ids if not (sp.is_control(id) or sp.is_unknown(id))]
    assert loaded["sentencepiece"].decode(ids) == sp.decode(visible)


@given(numbers=numbers)
@modest
def test_decode_equals_tokenizers_on_bytes(folders, loaded, numbers):
    library = tokenizers.Tokenizer.from_file(str(folders["byte_level"] / "tokenizer.json"))
    ids = random_ids(loaded["byte_level"], numbers)
    assert loaded["byte_level"].decode(ids) == library.decode(ids)


@given(numbers=numbers)
@modest
def test_decode_equals_tokenizers_with_byte_fallback(folders, loaded, numbers):
    library = tokenizers.Tokenizer.from_file(str(folders["byte_fallback"] / "tokenizer.json"))
    ids = random_ids(loaded["byte_fallback"], numbers)
    expected, found = library.decode(ids), loaded["byte_fallback"].decode(ids)
    # The library breaks every byte of a run that has one broken byte: more than we do, and not incremental.
    assert expected == found if BROKEN not in expected else BROKEN in found


@each_kind
@given(text=texts)
@modest
def test_text_round_trip(loaded, kind, text):
    tokenizer = loaded[kind]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    decoder = tokenizer.stream_decoder()
    pushed = [decoder.push(id) for id in ids]
    assert not any(BROKEN in part for part in pushed) or BROKEN in text
    assert "".join(pushed) == text
    assert decoder.finish() == ""


@pytest.mark.parametrize("rule", ["identity", "nmt_nfkc"])
@pytest.mark.parametrize("dummy", [True, False])
@pytest.mark.parametrize("remove", [True, False])
def test_leading_spaces_follow_the_model(tmp_path, rule, dummy, remove):
    options = {"add_dummy_prefix": dummy, "remove_extra_whitespaces": remove, "normalization_rule_name": rule}
    tokenizer = load_tokenizer(train_sentencepiece(tmp_path, **options))
    sp = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    space = sp.piece_to_id("▁")
    girl, spaces = sp.encode("girl"), [space] * 4
    for ids in [sp.encode("  the  girl"), [*spaces, *girl], [*girl, *spaces, *girl], [1, space, 1, *spaces, *girl]]:
        assert tokenizer.decode(ids) == sp.decode(ids)
        for at in range(len(ids)):
            rest = sp.decode(ids)[len(sp.decode(ids[:at])) :]
            assert streamed(tokenizer.stream_decoder(ids[:at]), ids[at:]) == rest


def test_each_token_alone(folders, loaded):
    library = tokenizers.Tokenizer.from_file(str(folders["byte_level"] / "tokenizer.json"))
    for id in range(library.get_vocab_size()):
        assert loaded["byte_level"].decode([id]) == library.decode([id])


# The incremental decoder


@each_kind
@given(numbers=numbers, at=st.integers(0, 40))
@modest
def test_stream_equals_decode(loaded, kind, numbers, at):
    tokenizer = loaded[kind]
    ids = random_ids(tokenizer, numbers)
    whole = tokenizer.decode(ids)
    assert streamed(tokenizer.stream_decoder(), ids) == whole
    decoder, shown = tokenizer.stream_decoder(), ""
    for id in ids:
        shown += decoder.push(id)
        assert whole.startswith(shown)
    before = tokenizer.decode(ids[:at])
    if whole.startswith(before):
        assert streamed(tokenizer.stream_decoder(ids[:at]), ids[at:]) == whole[len(before) :]


@each_kind
@given(prompt=texts, answer=texts)
@modest
def test_stream_continues_a_prompt(loaded, kind, prompt, answer):
    tokenizer = loaded[kind]
    ids, start = tokenizer.encode(prompt + answer), tokenizer.encode(prompt)
    if ids[: len(start)] == start:
        assert streamed(tokenizer.stream_decoder(start), ids[len(start) :]) == answer


@each_kind
def test_a_character_comes_whole(loaded, kind):
    tokenizer = loaded[kind]
    ids = [next(i for i in range(tokenizer.vocab_size) if is_byte(tokenizer, i, byte)) for byte in "a🦊".encode()]
    decoder = tokenizer.stream_decoder()
    assert [decoder.push(id) for id in ids] == ["a", "", "", "", "🦊"]
    assert decoder.finish() == ""
    cut = tokenizer.stream_decoder()
    assert "".join(cut.push(id) for id in ids[:-1]) == "a"
    assert set(cut.finish()) == {BROKEN}
    for at in (2, 3, 4):  # a prompt may end inside a character
        decoder = tokenizer.stream_decoder(ids[:at])
        assert [decoder.push(id) for id in ids[at:]] == [""] * (4 - at) + ["🦊"]


def is_byte(tokenizer: Tokenizer, id: int, byte: int) -> bool:
    return tokenizer.vocabulary.piece(id) == bytes([byte])


@each_kind
def test_leading_space_of_a_continuation(loaded, kind):
    tokenizer = loaded[kind]
    the = tokenizer.encode("the", add_bos=False)
    rest = tokenizer.encode(" girl" if kind == "byte_level" else "girl", add_bos=False)  # the others put the space
    assert streamed(tokenizer.stream_decoder(the), rest) == " girl"
    assert streamed(tokenizer.stream_decoder([*tokenizer.prefix, *the]), rest) == " girl"
    starts = {"sentencepiece": "girl", "byte_fallback": "girl", "byte_level": " girl"}  # the dummy prefix goes
    assert streamed(tokenizer.stream_decoder(), rest) == starts[kind]


@each_kind
def test_work_is_bounded(loaded, kind):
    """Neither a long run of broken bytes nor a long prompt is looked at more than once a token."""
    tokenizer = loaded[kind]
    lead = next(id for id in range(tokenizer.vocab_size) if is_byte(tokenizer, id, 0xF0))
    decoder = tokenizer.stream_decoder()
    for _ in range(1000):
        decoder.push(lead)
        assert len(decoder._utf8.getstate()[0]) <= 3

    class Watched(list):
        reads = 0

        def __reversed__(self):
            for id in super().__reversed__():
                self.reads += 1
                yield id

    prompt = Watched(tokenizer.encode("the girl ran ") * 1000)
    tokenizer.stream_decoder(prompt)
    assert 0 < prompt.reads <= 4


@each_kind
def test_ids_outside_the_vocabulary(loaded, kind):
    tokenizer = loaded[kind]
    size = tokenizer.vocab_size
    for id in (size, -1, size + 1000):
        with pytest.raises(TokenizerError, match=rf"token id {id} is out of range: the vocabulary has {size} ids"):
            tokenizer.decode([5, id])
        assert tokenizer.stream_decoder().push(id) == ""  # a model's embedding may be padded
    with pytest.raises(TokenizerError, match="token ids must be integers, not str"):
        tokenizer.decode("12")
    assert tokenizer.decode([size - 1]) is not None
    assert tokenizer.decode([]) == ""


# Special tokens and BOS


def test_sentencepiece_special_tokens(loaded):
    tokenizer = loaded["sentencepiece"]
    bos, eos, inst = 1, 2, tokenizer.vocabulary.id("[INST]")
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (bos, (eos,), 420)
    girl = tokenizer.encode("girl", add_bos=False)
    assert tokenizer.encode("girl") == [bos, *girl]
    ids = tokenizer.encode("girl</s><s>[INST]girl", add_bos=False)
    assert ids[: len(girl) + 3] == [*girl, eos, bos, inst]
    assert tokenizer.decode(ids) == "girlgirl"
    user = tokenizer.encode("<user>", add_bos=False)  # user-defined: one token, and visible
    assert user[-1] == tokenizer.vocabulary.id("<user>")
    assert tokenizer.decode(user) == "<user>"
    assert tokenizer.encode("<s>girl") == [bos, *tokenizer.encode("<s>girl", add_bos=False)[1:]]  # once


def test_sentencepiece_segments(folders, tmp_path):
    """Only the start of a text gets SentencePiece's space, unless tokenizer_config.json says legacy."""
    (tmp_path / "tokenizer.model").write_bytes((folders["sentencepiece"] / "tokenizer.model").read_bytes())
    sp = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    first, eos = sp.encode("the girl"), sp.eos_id()
    later = load_tokenizer(tmp_path).encode("the girl</s>the girl", add_bos=False)
    assert later[: len(first) + 1] == [*first, eos]
    assert "".join(sp.id_to_piece(id) for id in later[len(first) + 1 :]) == "the▁girl"
    write_json(tmp_path / "tokenizer_config.json", {"legacy": True})
    assert load_tokenizer(tmp_path).encode("the girl</s>the girl", add_bos=False) == [*first, eos, *first]
    write_json(tmp_path / "tokenizer_config.json", {"add_prefix_space": False})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("the girl", add_bos=False) == later[len(first) + 1 :]
    assert tokenizer.decode(tokenizer.encode(" the girl")) == " the girl"


def test_sentencepiece_added_tokens(folders, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes((folders["sentencepiece"] / "tokenizer.model").read_bytes())
    write_json(tmp_path / "added_tokens.json", {"<|im_start|>": 420, "<|im_end|>": 421, "<tool>": 422, "<tool>x": 423})
    decoder = {
        "430": {"content": "<|tail|>", "special": True, "lstrip": True, "rstrip": True},
        "440": {"content": "cat", "special": False, "single_word": True},
    }
    config = {"eos_token": {"content": "<|im_end|>"}, "additional_special_tokens": ["<|im_start|>"]}
    write_json(tmp_path / "tokenizer_config.json", config | {"added_tokens_decoder": decoder})
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.eos_ids, tokenizer.bos_id) == (441, (421,), 1)
    ids = tokenizer.encode("<|im_start|>a<tool><|im_end|>b \n <|tail|>  b")
    assert [id for id in ids if id >= 420] == [420, 422, 421, 430]
    assert ids[:2] == [1, 420]
    assert tokenizer.decode(ids) == "a<tool>bb"  # whitespace around <|tail|> is the token's
    words = tokenizer.encode("cat concat <tool>x<tool>y")
    assert [id for id in words if id >= 420] == [440, 423, 422]
    assert tokenizer.decode(words) == "cat concat <tool>x<tool>y"
    assert tokenizer.decode([425]) == ""  # a hole between added ids
    write_json(tmp_path / "added_tokens.json", {"<|im_start|>": "one"})
    with pytest.raises(TokenizerError, match="added_tokens.json"):
        load_tokenizer(tmp_path)


def bos_first(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[("<|begin|>", 0)]
    )
    return tokenizer


@pytest.mark.parametrize(
    ("post_processor", "config", "prefix"),
    [
        (False, {}, []),
        (False, {"bos_token": "<|begin|>"}, []),
        (False, {"bos_token": None, "add_bos_token": True}, []),
        (False, {"bos_token": "<|begin|>", "add_bos_token": True}, [0]),
        (True, {"bos_token": "<|begin|>"}, [0]),
        (True, {"bos_token": "<|begin|>", "add_bos_token": True}, [0]),
        (True, {"bos_token": "<|begin|>", "add_bos_token": False}, []),
    ],
)
def test_bos_of_tokenizer_json(tmp_path, post_processor, config, prefix):
    (bos_first(byte_level()) if post_processor else byte_level()).save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "tokenizer_config.json", config | {"eos_token": {"content": "<|end|>"}})
    tokenizer = load_tokenizer(tmp_path)
    plain = tokenizer.encode("the girl", add_bos=False)
    assert tokenizer.encode("the girl") == prefix + plain
    assert tokenizer.encode("") == prefix
    assert tokenizer.bos_id == (0 if config.get("bos_token") else None)
    assert tokenizer.eos_ids == (1,)
    assert tokenizer.encode("<|begin|>the girl") == [0, *plain]
    assert tokenizer.decode([0, *plain, 1]) == "the girl"


@pytest.mark.parametrize(("config", "bos"), [({}, [1]), ({"add_bos_token": False}, []), ({"bos_token": None}, [])])
def test_bos_of_sentencepiece(folders, tmp_path, config, bos):
    (tmp_path / "tokenizer.model").write_bytes((folders["sentencepiece"] / "tokenizer.model").read_bytes())
    write_json(tmp_path / "tokenizer_config.json", config)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("girl") == bos + tokenizer.encode("girl", add_bos=False)


def test_tokenizer_json_settings_of_training_do_not_count(tmp_path):
    """Truncation and padding saved in the file would cut prompts; names in the config make ordinary tokens special."""
    tokenizer = byte_level()
    tokenizer.enable_truncation(max_length=3)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "special_tokens_map.json", {"eos_token": "<tool>"})
    tokenizer = load_tokenizer(tmp_path)
    text = "the girl ran and the wolf ran"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) < 64
    assert tokenizer.decode(tokenizer.encode("a<tool>b")) == "ab"
    assert tokenizer.eos_ids == (tokenizer.encode("<tool>")[0],)


def test_tokenizer_json_wins(folders, loaded, tmp_path):
    for kind, name in [("sentencepiece", "tokenizer.model"), ("byte_level", "tokenizer.json")]:
        (tmp_path / name).write_bytes((folders[kind] / name).read_bytes())
    assert load_tokenizer(tmp_path).encode("the girl") == loaded["byte_level"].encode("the girl")


def test_metaspace_decoder(tmp_path):
    tokenizer = byte_fallback()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode("the girl ran").ids
    assert load_tokenizer(tmp_path).decode(ids) == tokenizer.decode(ids) == "the girl ran"


# Errors


def test_no_tokenizer(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(TokenizerError, match="no tokenizer in .*: looked for tokenizer.json and tokenizer.model"):
            load_tokenizer(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.json"])
@pytest.mark.parametrize("content", [b"", b"junk", b"\xff\xfe\x00", b"[1, 2]"])
def test_corrupt_files(folders, tmp_path, name, content):
    if name not in ("tokenizer.json", "tokenizer.model"):
        (tmp_path / "tokenizer.model").write_bytes((folders["sentencepiece"] / "tokenizer.model").read_bytes())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=name) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("kind", "name"), [("sentencepiece", "tokenizer.model"), ("byte_level", "tokenizer.json")])
def test_truncated_files(folders, tmp_path, kind, name):
    content = (folders[kind] / name).read_bytes()
    (tmp_path / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(TokenizerError, match=name):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Strip("x", 1, 0), decoders.BPEDecoder()])
def test_decoders_that_are_not_token_by_token(tmp_path, decoder):
    tokenizer = byte_fallback()
    tokenizer.decoder = decoder
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="not supported here"):
        load_tokenizer(tmp_path)


@each_kind
def test_text_that_is_no_text(loaded, kind):
    for text in (None, 3, b"bytes", ["list"]):
        with pytest.raises(TokenizerError, match=f"must be a string, not {type(text).__name__}"):
            loaded[kind].encode(text)
    with pytest.raises(TokenizerError, match="lone surrogate at character 2"):
        loaded[kind].encode("ab\ud800")


# Chat templates

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


def test_chat_template_of_a_wrong_type(chatty):
    with pytest.raises(TokenizerError, match="chat_template in .* must be a string or a list"):
        chatty(3)


def test_import_is_light():
    """Beside a bare package, as jllm/__init__.py itself imports more."""
    package = str(Path(jllm.errors.__file__).parent)
    bare = f"import sys, types; package = types.ModuleType('jllm'); package.__path__ = [{package!r}]"
    bare += "; sys.modules['jllm'] = package"
    heavy = {"sentencepiece", "tokenizers", "jinja2"}
    code = f"{bare}; import jllm.tokenizer; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
