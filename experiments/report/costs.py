"""Tells in a row each what the trainer's bits, updates, adapters, steering and experts cost on a device."""

import re
from collections.abc import Iterator

from experiments.report.documents import Entry, Row, short
from experiments.report.figures import H200, Results
from experiments.report.markdown import markdown

DECODE, LONG, PREFILL = "decode", "long", "prefill"
UPDATE = "engine_costs-update"


def costs(results: Results) -> Iterator[str]:
    """Yields a table with a row a promise. Each figure is beside the same step, or engine, without the promise."""
    here = results.on(H200)
    rows = [row for row in (bits(here), update(here), adapters(here), steering(here), experts(here)) if row]
    if rows:
        yield markdown([f"on one {short(H200)}", "what it costs", "from"], rows)


def bits(results: Results) -> list[str]:
    """Returns the row of determinism, by model, kind of step and format of K and V."""
    told, files = [], []
    for experiment in ("engine_costs", "engine_costs-8b"):
        found = {(row["kind"], row["context"], row["kv"]): row for row in results.rows(experiment, cost="determinism")}
        parts = []
        for (kind, context, kv), row in found.items():
            of = {DECODE: f"{row['batch']} decodes at {context:,} tokens", LONG: f"one at {context:,}"}
            said = of.get(kind, "prompts" if kind == PREFILL else "scoring prompts")
            parts.append(f"{said}{'' if kv == 'model' else f' in {kv}'} {_share(row['added'])}")
        for row in [*found.values()][:1]:
            told.append(f"{row['model']}: {', '.join(parts)}")
            files.append(_link(results.entry(experiment)))
    return ["the trainer's bits", "; ".join(told), ", ".join(files)] if told else []


def update(results: Results) -> list[str]:
    """Returns the row of other weights."""
    found: Row = {}
    for row in results.rows(UPDATE, cost="update"):
        found |= row
    said = {"update_ms": "an update", "wake_ms": "waking", "quantize_ms": "an update that rounds to 8 bits"}
    parts = [f"{what} {_figure(found[name])} ms" for name, what in said.items() if name in found]
    return _row(f"other weights, {found.get('model', '')}", parts, results.entry(UPDATE))


def adapters(results: Results) -> list[str]:
    """Returns the row of low-rank adapters, by the backend that is the default."""
    found = {(row["step"], row["adapters"]): row for row in results.rows("adapter_steps", backend="default")}
    parts = []
    for (step, of), row in found.items():
        if of in ("one", "each"):
            what = f"{row['requests']} {'decodes' if step == DECODE else 'prompts'}, rank {row['rank']}"
            times = f" ({row['bytes']:.1f} times its bytes)" if (step, of) == (DECODE, "each") else ""
            parts.append(f"{what}, {'one for all' if of == 'one' else 'each its own'} {_share(row['added'])}{times}")
    entry = results.entry("adapter_steps")
    few = re.search(r"--layers (\d+)", entry.document["command"]) if entry else None
    return _row(f"adapters on all linear layers{f', a model of {few[1]} layers' if few else ''}", parts, entry)


def steering(results: Results) -> list[str]:
    """Returns the row of steering vectors."""
    parts = [
        f"{row['batch']} requests, each its own vector, layer and scale {_share(row['added'])}"
        for row in results.rows("engine_costs", cost="steering")
    ]
    return _row("steering", parts, results.entry("engine_costs"))


def experts(results: Results) -> list[str]:
    """Returns the row of a mixture's decode steps, as shares of their floors."""
    entry = results.entry("decode_step-qwen3-30b")
    shares = {} if entry is None else {row["batch"]: row["floor_fraction"] for row in entry.rows}
    parts = [f"{share:.0%} of the floor at batch {batch}" for batch, share in sorted(shares.items())]
    return _row("experts, Qwen3-30B-A3B", parts, entry)


def _figure(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def _share(added: float) -> str:
    return f"{100 * added:+.1f} %"


def _row(name: str, parts: list[str], entry: Entry | None) -> list[str]:
    return [name, ", ".join(parts), _link(entry)] if entry is not None and parts else []


def _link(entry: Entry | None) -> str:
    if entry is None:
        return ""
    return f"[{'file' if entry.document['complete'] else 'part of a run'}](results/{entry.path.name})"
