"""Tests C29: grouped queries hardly cost quality.

Models that differ only in their KV heads (experiments.train_heads: same data, several seeds) are compared on held-out
text. `added` is the loss of a model in nats per token, over the model of its seed with all KV heads. The full size
comes from committed runs of that command. Toy size trains models of a few thousand weights here.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import MISSING, fields, replace
from typing import Any

from experiments.claims.claim import RESULTS, Answer, Claim, Interval, Row, in_most, interval_of
from experiments.claims.recorded import source_of
from jllm.config import LlamaConfig

HARDLY = 0.02  # nats per token at most: 2 % of perplexity
DEFAULTS = {field.name: field.default for field in fields(LlamaConfig) if field.default is not MISSING}
KEPT = ("heads", "kv_heads", "seed", "step", "parameters", "nats", "bits_per_byte", "file", "measured_on")


def measure(toy: bool) -> Iterator[Row]:
    if toy:
        yield from with_added(list(toy_rows()))
    elif found := recorded():
        yield from with_added(found)
    else:
        command = "python -m experiments.train_heads --record"
        yield {"error": f"not measured yet: {command} trains what this compares"}


def recorded() -> list[Row]:
    """Returns the rows of the newest complete run that trained models with all KV heads and with fewer. Several files
    may hold its runs, with the same model, recipe and text. A field that a file lacks has its default."""
    files = [(json.loads(path.read_text(encoding="utf-8")), path.name) for path in RESULTS.glob("train_heads-*.json")]
    runs: dict[str, dict[tuple[int, int], Row]] = {}
    for file, name in sorted(files, key=lambda found: (found[0]["date"], found[1]), reverse=True):
        of = json.dumps([DEFAULTS | file["model"], file["recipe"], file["valid_tokens"]], sort_keys=True)
        for row in file["rows"]:
            if row["step"] == file["recipe"]["steps"]:
                runs.setdefault(of, {}).setdefault((row["kv_heads"], row["seed"]), row | source_of(file, name))
    for run in runs.values():
        rows = sorted(run.values(), key=lambda row: (-row["kv_heads"], row["seed"]))
        if rows[0]["kv_heads"] == rows[0]["heads"] > rows[-1]["kv_heads"]:
            return rows
    return []


def toy_rows() -> Iterator[Row]:
    """Yields rows of two numbers of KV heads, two seeds and twenty steps, on the bundled model's text."""
    from experiments.texts.read import BUNDLED_TEXT, read_documents
    from experiments.train_heads import CONFIG, RECIPE, family
    from experiments.training.data import train_tokenizer
    from experiments.training.fit import make_validation

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 4, "head_dim": 8}
    config = replace(CONFIG, **sizes, num_kv_heads=4, vocab_size=400, context=64)
    recipe = replace(RECIPE, steps=20, rows=4, warmup=5, eval_every=20, lr=1e-2, compute="float32")
    books = [text.split("\n") for text in read_documents(BUNDLED_TEXT)[:8]]
    model = train_tokenizer(books, config.vocab_size)
    valid = make_validation(books[6:], model, config.context)
    yield from family(config, recipe, books[:6], model, valid, (4, 1), (0, 1))


def with_added(rows: list[Row]) -> Iterator[Row]:
    """Yields the rows of the last step, each compared with the model of its seed that has all KV heads."""
    last = max(row["step"] for row in rows)
    rows = [{key: row[key] for key in KEPT if key in row} for row in rows if row["step"] == last]
    whole = {row["seed"]: row["nats"] for row in rows if row["kv_heads"] == row["heads"]}
    for row in rows:
        yield row | {"added": round(row["nats"] - whole[row["seed"]], 5)}


def by_heads(rows: list[Row]) -> dict[int, Interval]:
    counts = sorted({row["kv_heads"] for row in rows if row["kv_heads"] < row["heads"]}, reverse=True)
    return {count: interval_of([row["added"] for row in rows if row["kv_heads"] == count]) for count in counts}


def quarter(rows: list[Row]) -> int:
    """Returns a quarter of the heads, or the trained number nearest to it."""
    return min(by_heads(rows), key=lambda count: abs(count - rows[0]["heads"] / 4))


def holds(rows: list[Row]) -> Answer:
    """Decides by a quarter of the heads. The whole interval over seeds must be below the limit."""
    found = by_heads(rows)
    return in_most([found[quarter(rows)].within(-math.inf, HARDLY)] if found else []), ""


def words(rows: list[Row]) -> tuple[str, str]:
    heads, added = quarter(rows), by_heads(rows)[quarter(rows)]
    side = "worse" if added.mean > 0 else "better"
    line = f"With {heads} of {rows[0]['heads']} KV heads a model is {abs(added.mean):.3f} nats a token {side}."
    return added.shown("{:+.3f}", 1, " nats a token"), line


CLAIM = Claim(
    id="C29",
    stated="grouped queries hardly cost quality",
    measure=measure,
    holds=holds,
    words=words,
    computed=True,
)
