"""Figures that README.md, docs/ and the documents beside results quote are those of the committed results.

`QUOTES` (tests/quotes) has each sentence with figures, and what the newest files say: a sentence whose figures are
others fails, with what it should say. A measured figure of these pages that is in none of the sentences fails too.
"""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from experiments import train_card
from experiments.accuracy import report as accuracy_report
from experiments.report.documents import RESULTS, read_result
from experiments.texts.read import BUNDLED_TEXT, read_documents
from tests.quotes import accuracy, simulated, speed
from tests.quotes.files import ROOT, only

CARD = ROOT / "jllm" / "assets" / "fairytale" / "README.md"

QUOTES: dict[str, Callable[[], Any]] = {
    "The shapes of {} published models are in": lambda: [len(list((ROOT / "configs").glob("*.json")))],
    **accuracy.QUOTES,
    **speed.QUOTES,
    **simulated.QUOTES,
}
BATCHES = ("| M | 1 | 16 | 64 | 512 | 4096 |", "| batch | 1 | 16 | 64 | 512 |")  # heads of tables
UNITS = r" ?(?:%|ms|us|s|times|nats|GiB|MiB)(?!\w)| (?:a second|of rounding|of the rate)"
MEASURED = re.compile(  # a number and its unit, one of many digits, or one that is a cell of a table
    rf"\d(?:[\d.,]*\d)?(?:{UNITS})|(?<![\w.])(?<!vLLM )0\.\d\d+|\| (?:\d[\d ]*[.,/][\d.,/ ]*|\d{{3,}})(?= \|)"
)


def prose(text: str) -> str:
    """Words in a row, without blocks of code."""
    return " ".join(re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL).split())


PAGES = {path: prose(path.read_text(encoding="utf-8")) for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))}


@pytest.mark.parametrize(("sentence", "figures"), QUOTES.items(), ids=range(len(QUOTES)))
def test_a_page_quotes_what_the_files_say(sentence, figures):
    assert any(sentence.format(*figures()) in page for page in PAGES.values())


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_measured_figure_of_a_page_is_held_to_a_file(path):
    """Nothing but the sentences of QUOTES has a number and a unit, or a number alone in a cell."""
    left = PAGES[path]
    for heads in BATCHES:
        left = left.replace(heads, "")
    for sentence, figures in QUOTES.items():
        left = left.replace(sentence.format(*figures()), "")
    assert MEASURED.findall(re.sub("`[^`]*`", "", left)) == []


def test_a_card_is_of_the_training_beside_its_model(tmp_path, capsys):
    assert train_card.main(["--model", str(tmp_path)]) == 2
    assert f"{tmp_path / 'training.json'}: not a readable results file" in capsys.readouterr().err


def test_the_card_of_the_bundled_model_quotes_its_training():
    """All but the samples, which a test of GPUs and the card's own command draw again."""
    card = CARD.read_text(encoding="utf-8")
    figures = train_card.figures(json.loads((CARD.parent / "training.json").read_text(encoding="utf-8")))
    before, after = train_card.TEMPLATE.read_text(encoding="utf-8").split("{samples}")
    assert card.startswith(before.format(length=train_card.LENGTH, **figures))
    assert card.endswith(after.format(length=train_card.LENGTH, **figures))


def test_the_bundled_text_is_as_long_as_its_page_says():
    page = (BUNDLED_TEXT.parent / "README.md").read_text(encoding="utf-8")
    count, size = len(read_documents(BUNDLED_TEXT)), BUNDLED_TEXT.stat().st_size
    tokens = count + only("quant_accuracy", "cpu", scheme="bf16", kv="model")["tokens"]  # each begins with one unscored
    assert f"{count} documents, {tokens:,} tokens, {size / 1e3:.0f} kB" in page


def test_tables_of_accuracy_have_the_speeds_of_today(tmp_path, monkeypatch):
    monkeypatch.setattr(accuracy_report, "draw_all", lambda *_: [])
    for path in sorted(RESULTS.glob("quant_accuracy*.md")):
        accuracy_report.write_report(read_result(path.with_suffix(".json")), tmp_path / f"{path.stem}.json")
        made = (tmp_path / path.name).read_text(encoding="utf-8").rstrip()
        draw = f"python -m experiments.quant_accuracy --draw {path.with_suffix('.json')}"
        assert path.read_text(encoding="utf-8").startswith(made), draw
