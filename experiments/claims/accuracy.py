"""What the claims about accuracy share: the bundled model on the text that it wrote, and one row an evaluation."""

from dataclasses import dataclass

import jllm
from experiments.accuracy.rows import scheme_row
from experiments.claims.claim import Row
from experiments.texts.read import BUNDLED_TEXT, read_documents
from jllm.analysis.evaluate import Recorded, record
from jllm.pretrained import Model

PROTOCOL = "document"
DOCUMENTS, TOY_DOCUMENTS = 16, 2  # of the bundled text, from its beginning
KEPT = ("added", "added_95", "kl", "kl_95", "top1")


@dataclass(frozen=True)
class Judge:
    """A model, texts, and what the unquantized model makes of them."""

    model: Model
    texts: tuple[str, ...]
    reference: Recorded

    def row(self, scheme: str = "bf16", kv: str = "model") -> Row:
        """How much worse weights and a KV format are: perplexity added, divergence, agreement, with intervals."""
        (found,) = scheme_row(self.model, self.texts, PROTOCOL, self.reference, scheme, kv)
        return {key: found[key] for key in ("protocol", "perplexity", *KEPT) if key in found}


def bundled(toy: bool) -> Judge:
    model = jllm.load()
    texts = tuple(read_documents(BUNDLED_TEXT)[: TOY_DOCUMENTS if toy else DOCUMENTS])
    return Judge(model, texts, record(model, texts, PROTOCOL))


def percent(value: float) -> str:
    return f"{100 * value:+.2f} %"
