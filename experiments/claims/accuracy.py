"""Holds what claims about accuracy share: a model on a text, and one row per evaluation."""

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
    """The model of a claim, and its text."""

    model: str | Path = BUNDLED  # directory or Hub id
    text: Path = BUNDLED_TEXT

    @property
    def name(self) -> str:
        """Returns the model's name for output lines. A directory gives its own name, without its parents."""
        return "the bundled model" if self.model == BUNDLED else f"the model {Path(self.model).name}"


BUNDLED_SUBJECT = Subject()


def subject_of(rows: list[Row]) -> str:
    """Returns the model of the rows. It is the bundled model, unless they name another."""
    return rows[0].get("subject", BUNDLED_SUBJECT.name)


@dataclass(frozen=True)
class Judge:
    """A model, its texts and protocol, and the recorded results of the unquantized model."""

    model: Model
    texts: tuple[str, ...]
    protocol: str
    reference: Recorded

    def row(self, scheme: str = "bf16", kv: str = "model") -> Row:
        """Returns the loss by weights and a KV format: added perplexity, divergence and agreement, with intervals."""
        return self.found(scheme, kv)[0]

    def found(self, scheme: str, kv: str = "model") -> tuple[Row, Evaluation]:
        """Returns the row with its evaluation, for comparisons."""
        row, found = scheme_found(self.model, self.texts, self.protocol, self.reference, scheme, kv)
        return {key: row[key] for key in ("protocol", "perplexity", *KEPT) if key in row}, found


def judge_of(toy: bool, subject: Subject = BUNDLED_SUBJECT) -> Judge:
    """Returns the judge of the first documents, one by one, or of the beginning of a single document, in windows."""
    texts, protocol = tuple(read_documents(subject.text)), "document"
    if len(texts) > 1:
        texts = texts[: TOY_DOCUMENTS if toy else DOCUMENTS]
    else:
        texts, protocol = (texts[0][: TOY_CHARACTERS if toy else CHARACTERS],), "windows-512"
    model = jllm.load(subject.model)
    return Judge(model, texts, protocol, record(model, texts, protocol))


def of_subject(rows: list[Row]) -> str:
    """Returns the end of an output line that names a model other than the bundled one."""
    return "" if (name := subject_of(rows)) == BUNDLED_SUBJECT.name else f" ({name})"


def kept(row: Row, most: float) -> bool | None:
    """Returns whether at most this much is added to perplexity, or None if the interval allows both."""
    low, high = row.get("added_95", (row["added"],) * 2)
    return True if high <= most else False if low > most else None


def percent(value: float) -> str:
    return f"{100 * value:+.2f} %"
