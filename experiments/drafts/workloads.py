"""Defines the workloads of drafters: beginnings of stories, and prompts after which a model repeats itself.

The bundled model learned only tales, so it cannot edit a text or continue code. But after a repetitive text its greedy
continuation repeats too; at higher temperature it does not. So "repetitive" is about temperature 0. A model that edits
finds more in its prompt than this one does.
"""

from collections.abc import Iterator

from experiments.texts.read import BUNDLED_TEXT, read_documents
from jllm.files.tokenizer import Tokenizer

BEGINNING = 24  # tokens of a story's prompt

EDITED = (
    "The old {} went to the well, and the well was dry. So she went to the river, and the river was frozen.",
    "'Give me the {},' said the king. 'I will not give you the {},' said the old woman.",
    "There was a {} in the wood, and the {} was very hungry, and it went up the hill and down the hill.",
    "'Who are you?' said the {}. 'I am the king's son,' said he. 'Then come in,' said the {}.",
)
LINES = (
    "'What have you got in your basket, {}?' said the king.\n'A loaf of bread,' said the {}.\n",
    "give(king, {});\ntake(king, {});\n",
    'print("{}")\n',
    '{"name": "{}", "age": "ten"}\n',
)
WORDS = ("cat", "dog", "hen", "cow", "fox", "wolf", "bear", "mouse")


def stories(tokenizer: Tokenizer, documents: int) -> list[list[int]]:
    """Returns the first tokens of documents that the bundled model wrote at temperature 1 (experiments/texts)."""
    return [tokenizer.encode(text)[:BEGINNING] for text in read_documents(BUNDLED_TEXT)[:documents]]


def repetitive(tokenizer: Tokenizer, documents: int) -> list[list[int]]:
    """Returns repetitive prompts. Some have versions of a text with one word changed, and the next version's beginning.
    Others have lists of lines, some of code, that differ by a word."""
    return [tokenizer.encode(text) for text, _ in zip(_repetitive(), range(documents))]


def _repetitive() -> Iterator[str]:
    for passage, line in zip(EDITED, LINES):
        versions = [passage.replace("{}", word) for word in WORDS]
        yield "\n".join(versions[:6]) + "\n" + passage.partition("{}")[0].rstrip()
        yield "".join(line.replace("{}", word) for word in WORDS)


WORKLOADS = {"stories": stories, "repetitive": repetitive}
