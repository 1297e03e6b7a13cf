"""Shares what the claims about accuracy need: a model on a text, and one row an evaluation."""

from dataclasses import dataclass
from pathlib import Path

import jllm
from experiments.accuracy.rows import scheme_found
from experiments.claims.claim import Row
from experiments.texts.read import BUNDLED_TEXT, read_documents
from jllm.analysis.evaluate import Evaluation, Recorded, record
from jllm.files.load import BUNDLED
from jllm.model.model import Model

DOCUMENTS, TOY_DOCUMENTS = 16, 2  # of a text, from its beginning
CHARACTERS, TOY_CHARACTERS = 30_000, 4_000  # of a text that is one document
KEPT = ("added", "added_95", "kl", "kl_95", "top1")


@dataclass(frozen=True)
class Subject:
    """Which model, on which text."""

    model: str | Path = BUNDLED  # directory or Hub id
    text: Path = BUNDLED_TEXT

    @property
    def name(self) -> str:
        """Returns the model's name, as lines say it; of a directory its own, without the folders above it."""
        return "the bundled model" if self.model == BUNDLED else f"the model {Path(self.model).name}"


BUNDLED_SUBJECT = Subject()


def subject_of(rows: list[Row]) -> str:
    """Returns the model that rows are about: the bundled one, unless they say another."""
    return rows[0].get("subject", BUNDLED_SUBJECT.name)


@dataclass(frozen=True)
class Judge:
    """A model, texts, how they are read, and what the unquantized model makes of them."""

    model: Model
    texts: tuple[str, ...]
    protocol: str
    reference: Recorded

    def row(self, scheme: str = "bf16", kv: str = "model") -> Row:
        """Returns how much worse weights and a KV format are: perplexity added, divergence, agreement, with
        intervals."""
        return self.found(scheme, kv)[0]

    def found(self, scheme: str, kv: str = "model") -> tuple[Row, Evaluation]:
        """Returns the row, and its evaluation, to be compared with another's."""
        row, found = scheme_found(self.model, self.texts, self.protocol, self.reference, scheme, kv)
        return {key: row[key] for key in ("protocol", "perplexity", *KEPT) if key in row}, found


def judge_of(toy: bool, subject: Subject = BUNDLED_SUBJECT) -> Judge:
    """Reads the first documents one by one, or the beginning of a text that is one document, in windows."""
    texts, protocol = tuple(read_documents(subject.text)), "document"
    if len(texts) > 1:
        texts = texts[: TOY_DOCUMENTS if toy else DOCUMENTS]
    else:
        texts, protocol = (texts[0][: TOY_CHARACTERS if toy else CHARACTERS],), "windows-512"
    model = jllm.load(subject.model)
    return Judge(model, texts, protocol, record(model, texts, protocol))


def of_subject(rows: list[Row]) -> str:
    """Returns what a line says behind its words of a model that is not the bundled one."""
    return "" if (name := subject_of(rows)) == BUNDLED_SUBJECT.name else f" ({name})"


def kept(row: Row, most: float) -> bool | None:
    """Returns whether at most so much is added to perplexity; None where its interval, if there is one, has room for
    both."""
    low, high = row.get("added_95", (row["added"],) * 2)
    return True if high <= most else False if low > most else None


def percent(value: float) -> str:
    return f"{100 * value:+.2f} %"
