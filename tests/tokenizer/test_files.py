"""What the files of a tokenizer say: special tokens, BOS, settings; and files that are broken."""

import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, processors

import jllm.errors
from jllm.errors import TokenizerError
from jllm.tokenizer import load_tokenizer
from tests.tokenizer.cases import KINDS, byte_fallback, byte_level, write_json

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
    code = f"{bare}; import jllm.tokenizer; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
