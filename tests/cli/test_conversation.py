"""A conversation as token ids: what the model has seen keeps its ids, and the text is the template's."""

from dataclasses import replace

import pytest

from jllm.cli.chat.conversation import Conversation, Message, as_text, from_json, keep_seen, prompt_ids
from jllm.errors import RequestError, SnapshotError
from tests.cli.cases import TALE

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402


def test_a_conversation_is_a_value():
    start = Conversation((Message("system", "be brief"),))
    one = start.ask("who?").answer(" a king", [1, 2, 3])
    two = one.ask("why?").answer(" so", [1, 2, 3, 4])
    assert two.asked == ("who?", "why?")
    assert two.take_back() == replace(one, ids=(1, 2, 3, 4))  # a beginning of them is still in the cache
    assert start.ids == ()
    assert from_json(two.to_json(), two.ids) == two
    assert as_text(two.messages) == "be brief\n\nUser: who?\nAssistant: a king\nUser: why?\nAssistant: so\nAssistant:"
    with pytest.raises(RequestError, match="no message to edit"):
        start.take_back()


DEVELOPER = '[{"role": "developer", "content": ""}]'


@pytest.mark.parametrize(
    "text", ["{", "[1]", '{"role": "user"}', '[{"role": "user"}]', '[{"role": 1, "content": ""}]', DEVELOPER]
)
def test_a_garbled_conversation(text):
    with pytest.raises(SnapshotError, match="garbled"):
        from_json(text, ())


def letter_by_letter(tokenizer, text: str) -> list[int]:
    """A way to cut a text that no tokenizer takes: each byte by itself."""
    vocabulary = tokenizer.vocabulary
    return [next(id for id in range(vocabulary.size) if vocabulary.piece(id) == bytes([b])) for b in text.encode()]


def test_an_answer_keeps_its_ids(model):
    tokenizer = model.tokenizer
    first = Conversation().ask("who?")
    prompt = prompt_ids(first, tokenizer)
    assert prompt == tokenizer.encode("<user> who?\n<assistant>", add_bos=False)
    seen = [*prompt, *letter_by_letter(tokenizer, " old king")]
    talk = first.answer(" old king", seen).ask("why?")
    again = prompt_ids(talk, tokenizer)
    plain = tokenizer.encode("<user> who?\n<assistant>  old king\n<user> why?\n<assistant>", add_bos=False)
    assert again[: len(seen)] == seen
    assert plain[: len(seen)] != seen
    assert tokenizer.decode(again) == tokenizer.decode(plain)
    edited = prompt_ids(talk.take_back().ask("how?"), tokenizer)
    assert edited[: len(seen)] == seen


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_the_text_is_that_of_the_new_ids(model, data):
    """Whatever the model has seen, and however it was cut: the text is the new one, and no common token is lost."""
    tokenizer = model.tokenizer
    text = data.draw(st.text("aeking ♥<\n", max_size=20)) + TALE[: data.draw(st.integers(0, 30))]
    seen = letter_by_letter(tokenizer, text) if data.draw(st.booleans()) else tokenizer.encode(text, add_bos=False)
    specials = data.draw(st.lists(st.sampled_from([1, 2]), max_size=2))  # begin and end tokens, which show nothing
    seen = [*seen, *specials, *data.draw(st.lists(st.integers(3, tokenizer.vocab_size - 1), max_size=3))]
    ids = tokenizer.encode(text + data.draw(st.text("aeking ♥\n", max_size=10)), add_bos=False)
    ids = [*ids[: data.draw(st.integers(0, len(ids)))], *specials, *ids]
    kept = keep_seen(seen, ids, tokenizer)
    assert tokenizer.decode(kept) == tokenizer.decode(ids)
    assert [id for id in kept if id in (1, 2)] == [id for id in ids if id in (1, 2)]
    assert keep_seen(ids, ids, tokenizer) == ids
    assert keep_seen(kept, ids, tokenizer) == kept
