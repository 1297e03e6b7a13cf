"""Tells in a row each what the trainer's bits, updates, adapters, steering and experts cost on a device."""

import re
from collections.abc import Iterator

from experiments.report.documents import Row, short
from experiments.report.figures import H200, Results
from experiments.report.markdown import markdown

DECODE, LONG, PREFILL = "decode", "long", "prefill"
BITS = "engine_costs-7b", "engine_costs-8b"
UPDATE, TRAINING = "engine_costs-update", "engine_costs-training"
MIXTURES = {
    "decode_step-qwen3-30b": "Qwen3-30B-A3B",
    "decode_step-qwen3-30b-w8a8": "in w8a8",
    "decode_step-qwen3-30b-w4a16": "in w4a16-g128",
    "decode_step-gpt-oss-20b": "gpt-oss-20b in mxfp4",
}


def costs(results: Results) -> Iterator[str]:
    """Yields a table with a row a promise. Each figure is beside the same step, or engine, without the promise."""
    here = results.on(H200)
    rows = [row for row in (bits(here), weights(here), own_arrays(here), experts(here)) if row]
    if rows:
        yield markdown([f"on one {short(H200)}", "what it costs", "from"], rows)


def bits(results: Results) -> list[str]:
    """Returns the row of determinism, by model, kind of step and format of K and V."""
    told = []
    for experiment in BITS:
        found = {(row["kind"], row["context"], row["kv"]): row for row in results.rows(experiment, cost="determinism")}
        parts = []
        for (kind, context, kv), row in found.items():
            of = {DECODE: f"{row['batch']} decodes at {context:,} tokens", LONG: f"one at {context:,}"}
            said = of.get(kind, "prompts" if kind == PREFILL else "scoring prompts")
            parts.append(f"{said}{'' if kv == 'model' else f' in {kv}'} {_share(row['added'])}")
        told += [f"{row['model']}: {', '.join(parts)}" for row in [*found.values()][:1]]
    return _row("`deterministic=True`: the trainer's bits", told, *BITS, of=results)


def weights(results: Results) -> list[str]:
    """Returns the row of other weights, and of a loop that trains them."""
    told, found = [], Row()
    for row in results.rows(UPDATE, cost="update"):
        found |= row
    said = {"update_ms": "an update", "wake_ms": "waking", "quantize_ms": "an update that rounds to 8 bits"}
    if found:
        parts = [f"{what} {_figure(found[name])} ms" for name, what in said.items() if name in found]
        told.append(f"{found['model']}: {', '.join(parts)}")
    for row in results.rows(TRAINING, cost="training"):
        told.append(
            f"{row['model']} with Adam in float32: {row['trained_tokens_s']:,} tokens a second trained, "
            f"{row['drawn_tokens_s']:,} sampled, {_figure(row['between_ms'])} ms to switch, "
            f"{row['peak_gb']:.0f} GB at the peak"
        )
    return _row("other weights", told, UPDATE, TRAINING, of=results)


def own_arrays(results: Results) -> list[str]:
    """Returns the row of low-rank adapters, by the backend that is the default, and of steering vectors."""
    found = {(row["step"], row["adapters"]): row for row in results.rows("adapter_steps", backend="default")}
    parts = []
    for (step, of), row in found.items():
        if of in ("one", "each"):
            what = f"{row['requests']} {'decodes' if step == DECODE else 'prompts'}, rank {row['rank']}"
            times = f" ({row['bytes']:.1f} times its bytes)" if (step, of) == (DECODE, "each") else ""
            parts.append(f"{what}, {'one for all' if of == 'one' else 'each its own'} {_share(row['added'])}{times}")
    told = []
    if entry := results.entry("adapter_steps"):
        few = re.search(r"--layers (\d+)", entry.document["command"])
        size = f", a model of {few[1]} layers" if few else ""
        told.append(f"adapters on all linear layers{size}: {', '.join(parts)}")
    for row in results.rows("engine_costs", cost="steering"):
        told.append(f"steering {row['batch']} requests, each by its own vector {_share(row['added'])}")
    return _row("adapters and steering by request", told, "adapter_steps", "engine_costs", of=results)


def experts(results: Results) -> list[str]:
    """Returns the row of mixtures' decode steps, as shares of their floors."""
    told = []
    for label, name in MIXTURES.items():
        if rows := results.rows(label):
            shares = sorted((row["batch"], row["floor_fraction"]) for row in rows)
            told.append(f"{name} {', '.join(f'{share:.0%} at batch {batch}' for batch, share in shares)}")
    return _row("experts: shares of their floors", told, *MIXTURES, of=results)


def _figure(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def _share(added: float) -> str:
    return f"{100 * added:+.1f} %"


def _row(name: str, told: list[str], *labels: str, of: Results) -> list[str]:
    """Returns a row with links to the files of these labels; nothing if there is nothing to tell."""
    entries = [entry for label in labels if (entry := of.entry(label))]
    links = [
        f"[{'file' if entry.document['complete'] else 'part of a run'}](results/{entry.path.name})" for entry in entries
    ]
    return [name, "; ".join(told), ", ".join(links)] if told else []
