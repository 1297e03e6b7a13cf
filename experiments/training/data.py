"""Turns text into training rows: paragraphs, their SentencePiece model, passages that end, and rows packed with
passages.

A corpus is UTF-8 text with one paragraph per line and a blank line between books.
"""

import bisect
import io
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jllm.errors import InputFileError, TokenizerError

# Quotes and dashes become one form each: books differ only in typesetting, and a small vocabulary is precious.
TYPOGRAPHY = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "—": "--", "\t": " "})
NOTE = re.compile(r" ?\[[^\]]{0,120}\]|\(\d+\)| ?\(\*\)")  # editors' glosses and footnote marks
HEADING = re.compile(r"(CHAPTER|Chapter|ADVENTURE|BOOK|PART) [IVXLC\d]|[^a-z]*$|.*Full page line-art")
CONTENTS = re.compile(r"(?:^|\s)(?:[IVXL]+|\d+)\.\s")
OPENING = re.compile(
    r"""["']*(Once (up)?on a time|Once there|(There|In \w+( \w+)?,? there) (once )?(lived|dwelt|reigned)\b|There once"""
    r"""|There (was|were) (once|upon)|(A )?([Ll]ong|great many|many|hundred)[ ,a-z]* ago,? |In (the )?old(en)? )"""
)
SENTENCE_END = re.compile(r"""[.!?]["')]*$""")

Book = list[str]  # paragraphs; "" marks the end of a chapter


def read_books(file: str | Path) -> list[Book]:
    """Returns the books of a corpus without headings, tables of contents and editors' notes. Raises InputFileError."""
    try:
        text = Path(file).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputFileError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputFileError(f"{file}: not UTF-8 at byte {error.start}; a corpus is plain text in UTF-8") from None
    text = re.sub(" +", " ", NOTE.sub("", text.translate(TYPOGRAPHY)))
    books = [[_paragraph(line) for line in book.splitlines()] for book in re.split(r"\n\s*\n", text)]
    books = [book for book in books if any(book)]
    if not books:
        raise InputFileError(f"{file}: holds no text; a corpus has one paragraph a line, a blank line between books")
    return books


def _paragraph(line: str) -> str:
    line = line.strip()
    return "" if HEADING.match(line) or len(CONTENTS.findall(line)) > 3 else line


def train_tokenizer(books: Sequence[Book], vocab_size: int) -> bytes:
    """Returns a serialized SentencePiece model with LLaMA's settings. It is BPE with split digits, bytes for unknown
    text, and unchanged text; unk is 0, BOS 1, EOS 2. Raises TokenizerError."""
    import sentencepiece

    model = io.BytesIO()
    paragraphs = (paragraph for book in books for paragraph in book if paragraph)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=paragraphs,
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            character_coverage=0.99995,
            byte_fallback=True,
            split_digits=True,
            allow_whitespace_only_pieces=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            max_sentence_length=1 << 14,
            minloglevel=3,
        )
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise TokenizerError(f"no vocabulary of {vocab_size} can be made of this corpus: {reason}") from None
    return model.getvalue()


def cut_passages(books: Sequence[Book], rng: np.random.Generator, longest: int) -> list[str]:
    """Returns runs of paragraphs, joined by newlines, of all lengths from longest / 16 to about `longest` characters.

    Lengths are log-uniform, so a text position is equally likely in passages of any length. A passage ends at the end
    of a chapter or before a new tale. Else it ends at the first paragraph past its length that closes a sentence.
    """
    passages = []
    for book in books:
        passage: list[str] = []
        target = size = 0.0
        for paragraph in [*book, ""]:
            if passage and (not paragraph or OPENING.match(paragraph) or _ends(passage[-1], size, target)):
                passages.append("\n".join(passage))
                passage = []
            if not passage:
                target, size = longest * 16 ** -rng.random(), 0
            if paragraph:
                passage.append(paragraph)
                size += len(paragraph)
    return passages


def _ends(paragraph: str, size: float, target: float) -> bool:
    return size >= target and SENTENCE_END.search(paragraph) is not None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """Packed passages (numpy or jax), perhaps with more leading axes. A passage begins with BOS, and its last target is
    EOS."""

    tokens: Any  # i32[B, L]
    targets: Any  # i32[B, L], the next token; -1 without one to learn
    positions: Any  # i32[B, L], from 0 in each passage
    segments: Any  # i32[B, L], number of the passage within its row; -1 if unused


def encode(model: bytes, passages: list[str], length: int, dropout: float, seed: int) -> list[np.ndarray]:
    """Returns BOS, ids, EOS of each passage, cut at `length` + 1 ids (then without EOS).

    With dropout > 0 each merge is left out with that probability (BPE-dropout, Provilkov et al., arXiv 1910.13267).
    """
    import sentencepiece

    sentencepiece.set_random_generator_seed(seed)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    # One thread samples: each thread has its own generator, so runs would differ.
    sampling: dict[str, Any] = {"enable_sampling": True, "alpha": dropout, "num_threads": 1} if dropout > 0 else {}
    ids = processor.encode(passages, add_bos=True, add_eos=True, **sampling)
    return [np.asarray(passage[: length + 1], np.int32) for passage in ids]


def pack(passages: Sequence[np.ndarray], length: int, rng: np.random.Generator) -> Rows:
    """Returns rows of `length` by best fit, longest first, in random order."""
    room: list[tuple[int, int]] = []  # (free places, row), sorted
    rows: list[list[np.ndarray]] = []
    for i in np.argsort([-len(passage) for passage in passages], kind="stable"):
        need = len(passages[i]) - 1
        at = bisect.bisect_left(room, (need, -1))
        if at == len(room):
            rows.append([])
            room.append((length, len(rows) - 1))
        free, row = room.pop(at)
        rows[row].append(passages[i])
        bisect.insort(room, (free - need, row))
    tokens, positions = np.zeros((2, len(rows), length), np.int32)
    targets, segments = np.full((2, len(rows), length), -1, np.int32)
    for r, row in enumerate(rng.permutation(len(rows))):
        start = 0
        for segment, passage in enumerate(rows[row]):
            end = start + len(passage) - 1
            tokens[r, start:end], targets[r, start:end] = passage[:-1], passage[1:]
            positions[r, start:end], segments[r, start:end] = np.arange(end - start), segment
            start = end
    return Rows(tokens, targets, positions, segments)


def batches(
    books: Sequence[Book], model: bytes, shape: tuple[int, int, int], dropout: float, seed: int
) -> Generator[tuple[int, Rows], None, None]:
    """Yields (epoch, Rows of [steps, B, L] = shape) without end. Every epoch cuts, splits and packs the text again."""
    from concurrent.futures import ThreadPoolExecutor

    steps, B, L = shape
    count = steps * B

    def make(epoch: int) -> Rows:
        rng = np.random.default_rng((seed, epoch))
        passages = cut_passages(books, rng, longest=3 * L)
        return pack(encode(model, passages, L, dropout, seed=int(rng.integers(1 << 31))), L, rng)

    left: list[np.ndarray] | None = None
    with ThreadPoolExecutor(1) as pool:  # makes the next epoch while this one trains
        coming = pool.submit(make, 0)
        epoch = 0
        while True:
            fresh = jax.tree.leaves(coming.result())
            coming = pool.submit(make, epoch + 1)
            rows = fresh if left is None else [np.concatenate(pair) for pair in zip(left, fresh)]
            for start in range(0, len(rows[0]) - count + 1, count):
                yield epoch, Rows(*(leaf[start : start + count].reshape(shape) for leaf in rows))
            left = [leaf[len(leaf) - len(leaf) % count :] for leaf in rows]
            epoch += 1
