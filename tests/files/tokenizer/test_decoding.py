"""Tokenizers against the libraries that made their files, and the incremental decoder against whole decoding."""

import pytest
import sentencepiece
import tokenizers

from jllm.errors import TokenizerError
from jllm.files.tokenizer import StreamDecoder, Tokenizer, load_tokenizer
from tests.files.tokenizer.cases import BROKEN, KINDS, train_sentencepiece

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

each_kind = pytest.mark.parametrize("kind", KINDS)
modest = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
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
