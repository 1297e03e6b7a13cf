"""What the files of a tokenizer say: special tokens, BOS, settings; and files that are broken."""

import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, normalizers, processors

import jllm.errors
from jllm.errors import TokenizerError
from jllm.files.tokenizer import load_tokenizer
from tests.files.tokenizer.cases import KINDS, byte_fallback, byte_level, write_json

each_kind = pytest.mark.parametrize("kind", KINDS)

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


# Tokens of several files; numbers are those of transformers where it reads such files

IM_END = "a \n<|im_end|> \n b"
ENDS = {"content": "<|im_end|>", "rstrip": True, "special": True}


def added(folder: Path, *tokens: tokenizers.AddedToken, rows: int | None = None, **files) -> Path:
    """A folder with the 403 ids of byte_level, these tokens, and files by name; rows are those of a model."""
    made = byte_level()
    made.add_tokens(list(tokens))
    made.save(str(folder / "tokenizer.json"))
    for name, value in (files | ({"config": {"vocab_size": rows}} if rows else {})).items():
        write_json(folder / f"{name}.json", value)
    return folder


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({}, [66, 403, 67]),
        ({"tokenizer_config": {"eos_token": "<|im_end|>"}}, [66, 403, 67]),
        ({"tokenizer_config": {"eos_token": {"__type": "AddedToken", **ENDS}}}, [66, 403, 67]),
        ({"tokenizer_config": {"additional_special_tokens": ["<|im_end|>"]}}, [66, 403, 67]),
        ({"tokenizer_config": {"extra_special_tokens": {"turn_token": "<|im_end|>"}}}, [66, 403, 67]),
        ({"special_tokens_map": {"eos_token": "<|im_end|>"}}, [66, 403, 67]),
        ({"added_tokens": {"<|im_end|>": 403}}, [66, 403, 67]),
        ({"tokenizer_config": {"added_tokens_decoder": {"403": ENDS}, "pad_token": "<|im_end|>"}},
         [66, 222, 200, 403, 67]),
    ],
)  # fmt: skip
def test_flags_of_an_added_token_are_kept(tmp_path, files, ids):
    """Whoever names it again; added_tokens_decoder may say others."""
    token = tokenizers.AddedToken("<|im_end|>", lstrip=True, rstrip=True, special=True)
    tokenizer = load_tokenizer(added(tmp_path, token, **files))
    assert tokenizer.encode(IM_END) == ids
    assert tokenizer.decode(ids) == ("ab" if len(ids) == 3 else "a \nb")


@pytest.mark.parametrize(
    ("flags", "text", "times"),
    [
        ({"single_word": True}, "cats cat", 1),
        ({"single_word": False}, "cats cat", 2),
        ({"normalized": False}, "CAT cat", 1),
        ({"normalized": True}, "CAT cat", 2),
    ],
)
def test_whole_words_and_normalized_text(tmp_path, flags, text, times):
    """As tokenizer.json says of a token that a role names, too."""
    made = byte_level()
    made.normalizer = normalizers.Lowercase()
    made.add_tokens([tokenizers.AddedToken("cat", **flags)])
    made.save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": "cat"})
    assert load_tokenizer(tmp_path).encode(text).count(403) == times


@pytest.mark.parametrize(
    ("files", "eos", "ids"),
    [
        ({"tokenizer_config": {"added_tokens_decoder": {"403": ENDS}}}, None, [403]),
        ({"added_tokens": {"<|x|>": 404, "<|im_end|>": 403}, "special_tokens_map": {"eos_token": "<|im_end|>"}},
         403, [403, 404]),
        ({"tokenizer_config": {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|x|>"], "bos_token": "<b>"}},
         404, [404, 405, 403]),
        ({"tokenizer_config": {"additional_special_tokens": ["<|x|>"], "image_token": {"content": "<b>"}}},
         None, [404, 403]),
        ({"tokenizer_config": {"eos_token": "<|end|>"}, "special_tokens_map": {"eos_token": {**ENDS}}}, 403, [403]),
        ({"tokenizer_config": {"eos_token": "<|end|>", "added_tokens_decoder": {"403": ENDS}},
          "special_tokens_map": {"eos_token": "<|im_end|>"}}, 1, [403]),
    ],
)  # fmt: skip
def test_tokens_that_other_files_name(tmp_path, files, eos, ids):
    tokenizer = load_tokenizer(added(tmp_path, **files))
    assert tokenizer.eos_ids == (() if eos is None else (eos,))
    assert [id for id in tokenizer.encode("<|im_end|>a<|x|>b<b>") if id >= 403] == ids
    hidden = {"<|im_end|>", "<|x|>", "<b>"} - ({"<|x|>"} if "added_tokens" in files else set())
    assert not any(token in tokenizer.decode(ids) for token in hidden)


@pytest.mark.parametrize("file", ["tokenizer_config", "special_tokens_map"])
@pytest.mark.parametrize("name", ["additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens"])
@pytest.mark.parametrize("tokens", [["<tool>"], [{"content": "<tool>"}], {"tool_token": "<tool>"}])
def test_special_in_one_file_is_special(tmp_path, file, name, tokens):
    tokenizer = load_tokenizer(added(tmp_path, **{file: {name: tokens}}))
    assert tokenizer.encode("a<tool>b") == [66, 400, 67]
    assert tokenizer.decode([66, 400, 67]) == "ab"
    assert tokenizer.special_tokens == (tokens if isinstance(tokens, dict) else {})  # for chat templates


def test_ids_that_files_disagree_on(tmp_path):
    """tokenizer.json decides, as in transformers; the token of a stale added_tokens.json is left out."""
    config = {"added_tokens_decoder": {"450": ENDS}}
    stale = {"<|gone|>": 450}
    with pytest.warns(UserWarning, match=r"<\|im_end\|> the id 450, but it is 403 as in transformers"):
        tokenizer = load_tokenizer(added(tmp_path, tokenizer_config=config, added_tokens=stale))
    assert tokenizer.encode("<|im_end|>") == [403]
    assert tokenizer.vocabulary.id("<|gone|>") is None


@pytest.mark.parametrize("kind", ["sentencepiece", "byte_level"])
def test_new_ids_need_rows_of_the_embedding(folders, tmp_path, kind):
    """What has no id in any file gets the next ones, but none that the model has no row for."""
    name = "tokenizer.model" if kind == "sentencepiece" else "tokenizer.json"
    (tmp_path / name).write_bytes((folders[kind] / name).read_bytes())
    size = load_tokenizer(tmp_path).vocab_size
    roles = {"eos_token": ENDS, "additional_special_tokens": ["<|x|>", "<|y|>"]}
    write_json(tmp_path / "special_tokens_map.json", roles)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_ids == (size,)
    assert [id for id in tokenizer.encode("a<|y|><|im_end|> \n<|x|>b") if id >= size] == [size + 2, size, size + 1]
    assert tokenizer.decode(tokenizer.encode("a<|y|><|im_end|> \n<|x|>b")) == "ab"
    write_json(tmp_path / "config.json", {"vocab_size": size + 1})
    with pytest.warns(UserWarning, match=rf"<\|x\|>, <\|y\|> without an id, .* {size + 1} rows has no room"):
        tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_ids == (size,)
    assert max(tokenizer.encode("a<|y|><|im_end|><|x|>b")) == size
    assert tokenizer.decode(tokenizer.encode("a<|y|>b")) == "a<|y|>b"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"eos_token": 2}, "eos_token must be a token's text"),
        ({"eos_token": {"text": "<s>"}}, "eos_token must be a token's text"),
        ({"additional_special_tokens": [3]}, "additional_special_tokens must be a token's text"),
        ({"extra_special_tokens": "<s>"}, "extra_special_tokens must be a list of tokens"),
        ({"added_tokens_decoder": {"403": {}}}, "added_tokens_decoder must map tokens to ids"),
        ({"added_tokens_decoder": {"x": ENDS}}, "added_tokens_decoder must map tokens to ids"),
    ],
)
def test_what_can_be_no_token(tmp_path, config, message):
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(added(tmp_path, tokenizer_config=config))


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
@pytest.mark.parametrize(
    "content", [b"", b"junk", b"\xff\xfe\x00", b"[1, 2]", b"[" * 100_000], ids=lambda content: repr(content[:9])
)
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
def test_the_id_of_a_special_token(loaded, kind):
    """A text that the vocabulary cannot spell is no special token, though it is encoded as one of an unknown piece."""
    tokenizer = loaded[kind]
    for role, text in tokenizer.special_tokens.items():
        id = tokenizer.special_id(text)
        assert id is not None, role
        assert tokenizer.decode([id]) == ""
        assert tokenizer.special_id(f" {text}") is None
    for text in ("###", "\n\n", "\u20ac", "girl", ""):
        assert tokenizer.special_id(text) is None


@each_kind
def test_text_that_is_no_text(loaded, kind):
    for text in (None, 3, b"bytes", ["list"]):
        with pytest.raises(TokenizerError, match=f"must be a string, not {type(text).__name__}"):
            loaded[kind].encode(text)
    with pytest.raises(TokenizerError, match="lone surrogate at character 2"):
        loaded[kind].encode("ab\ud800")


def test_import_is_light():
    """Beside a bare package, as jllm/__init__.py itself imports more."""
    package = str(Path(jllm.errors.__file__).parent)
    bare = f"import sys, types; package = types.ModuleType('jllm'); package.__path__ = [{package!r}]"
    bare += "; sys.modules['jllm'] = package"
    heavy = {"sentencepiece", "tokenizers", "jinja2"}
    code = f"{bare}; import jllm.files.tokenizer; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
