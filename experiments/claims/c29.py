"""C29: grouped queries hardly cost quality.

Models that differ in their KV heads alone (experiments.train_heads: same data, several seeds), by held-out text.
`added` is by how many nats a token a model is worse than the one of the same seed whose query heads all have KV heads
of their own. The full size is what committed runs of that command have; toy size trains models of a few thousand
weights here.
"""

import json
import statistics
from collections.abc import Iterator
from dataclasses import MISSING, fields, replace
from typing import Any

from experiments.accuracy.measured_speed import source_of
from experiments.claims.claim import Claim, Part, Row, Verdict, verdict_of
from experiments.report.documents import RESULTS
from jllm.config import LlamaConfig

HARDLY = 0.02  # nats a token at most: 2 % of perplexity
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
    """Of the newest run that trained models with all KV heads and with fewer to its last step. Its numbers of KV heads
    may be in several files: of one model (what a file does not say has its default), recipe and text."""
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
    """Two numbers of KV heads, two seeds and twenty steps, on the text that the bundled model wrote."""
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
    """The rows of the last step, each beside the model of its seed with all KV heads."""
    last = max(row["step"] for row in rows)
    rows = [{key: row[key] for key in KEPT if key in row} for row in rows if row["step"] == last]
    whole = {row["seed"]: row["nats"] for row in rows if row["kv_heads"] == row["heads"]}
    for row in rows:
        yield row | {"added": round(row["nats"] - whole[row["seed"]], 5)}


def interval(values: list[float]) -> tuple[float, float, float]:
    """Mean, and its 95 % interval by Student's t."""
    from scipy.stats import t

    mean = statistics.mean(values)
    half = float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    return mean, mean - half, mean + half


def seeds(rows: list[Row]) -> str:
    count = len({row["seed"] for row in rows})
    return f"{count} seed{'s' * (count > 1)}"


def by_heads(rows: list[Row]) -> dict[int, tuple[float, float, float]]:
    counts = sorted({row["kv_heads"] for row in rows if row["kv_heads"] < row["heads"]}, reverse=True)
    return {count: interval([row["added"] for row in rows if row["kv_heads"] == count]) for count in counts}


def judge(rows: list[Row]) -> Verdict:
    """By a quarter of the heads, or the share next to it that was trained."""
    found, heads = by_heads(rows), rows[0]["heads"]
    grouped = min(found, key=lambda count: abs(count - heads / 4))
    mean, _, high = found[grouped]
    texts = [f"{n} of {heads} KV heads: {m:+.4f} nats a token ({a:+.4f} to {b:+.4f})" for n, (m, a, b) in found.items()]
    if 1 not in found:
        texts.append(f"1 of {heads} KV heads: not trained yet")
    said = f"at most {HARDLY:g} nats a token with {grouped} of {heads} KV heads"
    sizes = [round(row["parameters"] / 1e6) for row in rows]
    how = f"On models of {min(sizes)} to {max(sizes)} million parameters, trained for this, {seeds(rows)} of each"
    parts = [
        Part(f"{said}: on average, {mean:+.4f}", mean <= HARDLY),
        Part(f"all of the interval, up to {high:+.4f}", high <= HARDLY),
    ]
    return verdict_of(parts, *texts, how=how)


def draw(figure: Any, rows: list[Row]) -> None:
    axes, found = figure.subplots(), by_heads(rows)
    at = range(len(found))
    for i, count in enumerate(found):
        added = [row["added"] for row in rows if row["kv_heads"] == count]
        axes.plot([i] * len(added), added, ".", color="gray")
    means = [mean for mean, *_ in found.values()]
    error = [[mean - low for mean, low, _ in found.values()], [high - mean for mean, _, high in found.values()]]
    axes.errorbar(at, means, yerr=error, fmt="o", capsize=4)
    axes.axhline(HARDLY, color="black", linestyle="--", linewidth=1)
    axes.set_xticks(at, [f"{count} of {rows[0]['heads']}" for count in found])
    axes.set_xlabel("KV heads")
    axes.set_ylabel("nats a token more than all KV heads")


CLAIM = Claim(
    id="C29",
    rule=(
        f"At most {HARDLY:g} nats a token lost with a quarter of the heads: the mean, and all of its interval "
        "over seeds."
    ),
    stated="grouped queries hardly cost quality",
    measure=measure,
    judge=judge,
    draw=draw,
    computed=True,
)
