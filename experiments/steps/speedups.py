"""Computes a weight format's speed over bf16 in whole steps, batch by batch, from rows of experiments.quant_steps.

A measured row has scheme, batch, kv, T (tokens of the step), tokens_s, floor_ms, floor_fraction and weights_gib.
over_bf16 is its speed over bf16 in the same stage, if that was measured. It also has decode_ms and context, or
prefill_ms and input. Since 2026-11-25 it has each round's times, decode_ms_runs or prefill_ms_runs. A row with an
"error" was not measured.
"""

import json
from pathlib import Path
from typing import Any

from experiments.report.svg import svg
from experiments.steps.timer import KINDS

Row = dict[str, Any]


def read_document(path: Path) -> Row:
    """Returns a run's file. Raises OSError, or ValueError for any other file."""
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict) or document.get("experiment") != "quant_steps" or "rows" not in document:
        raise ValueError(f"{path} is not a result of quant_steps")
    return document


def speedups(rows: list[Row], scheme: str, kind: str) -> dict[int, float]:
    """Returns batch -> speed over bf16, with a 16-bit cache."""
    return {
        r["batch"]: r["over_bf16"]
        for r in rows
        if r.get("scheme") == scheme and f"{kind}_ms" in r and "over_bf16" in r and r["kv"] == "bf16"
    }


def speedups_in_turn(rows: list[Row], scheme: str, kind: str) -> dict[int, list[float]]:
    """Returns batch -> speed over bf16 in each round, with a 16-bit cache. Files must have rounds."""
    key = f"{kind}_ms_runs"
    runs = {(r["scheme"], r["batch"]): r[key] for r in rows if key in r and r["kv"] == "bf16"}
    of_batch = [batch for name, batch in runs if name == scheme and ("bf16", batch) in runs]
    return {batch: [a / b for a, b in zip(runs["bf16", batch], runs[scheme, batch])] for batch in of_batch}


def draw(document: Row, path: Path) -> None:
    """Draws the speed over bf16 by batch: the crossover."""
    kinds = [kind for kind in KINDS if any(f"{kind}_ms" in r for r in document["rows"])]
    if not kinds:
        raise ValueError(f"{path.stem}.json: there is nothing to draw, since no step was measured")
    title = f"7B step by weight format, KV bf16 ({document['device']})"
    with svg(path, (3.6 * len(kinds), 3.6), "quant_steps", title=title) as figure:
        for axes, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds):
            for scheme in dict.fromkeys(r["scheme"] for r in document["rows"] if "scheme" in r):
                found = speedups(document["rows"], scheme, kind)
                axes.semilogx(list(found), list(found.values()), "o-", base=2, markersize=3, label=scheme)
            axes.set_xlabel("batch")
            axes.set_ylabel(f"times as fast as bf16, {kind}")
            axes.set_xticks(list(found), [str(batch) for batch in found])
        axes.legend()
