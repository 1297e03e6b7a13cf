"""C6: an int8 KV cache holds more requests in the same memory, and keeps accuracy.

Requests are counted, not measured: LLaMA-2-7B's K and V of 1024 tokens in pages of 16, scales included, in 40 GiB. So
the gain does not depend on a device. Accuracy is measured on the bundled model and the text that it wrote, whose heads
have 64 values where the 7B model's have 128: groups of 128 have no figure.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from experiments.claims.accuracy import BUNDLED_SUBJECT, Subject, judge_of, percent, subject_of
from experiments.claims.claim import Claim, Part, Row, Verdict, verdict_of
from jllm.cache import parse_kv_cache
from jllm.config import load_config
from jllm.errors import ConfigError
from pallas_kernels.bench.bars import bar
from pallas_kernels.kv_formats import bytes_per_token

CONFIG = Path(__file__).parents[2] / "configs" / "llama-2-7b.json"
MEMORY, TOKENS, PAGE = 40 << 30, 1024, 16
WIDE = "bf16"
FORMATS = (
    WIDE, "fp8", "int8-g8", "int8-g16", "int8-g32", "int8-g64", "int8-g128", "int4-g8", "int4-g32", "int4-g128",
    "k=int8-g8,v=int4-g8",
)  # fmt: skip
STATED, KEPT = 2.0, 0.002  # times the requests; perplexity that may be added


def measure(toy: bool, subject: Subject = BUNDLED_SUBJECT) -> Iterator[Row]:
    judge = judge_of(toy, subject)
    wide = requests(WIDE)
    for kv in FORMATS[:3] if toy else FORMATS:
        count = requests(kv)
        row: Row = {"kv": kv, "bytes_per_value": bytes_each(kv), "requests": count, "times": round(count / wide, 4)}
        try:
            parse_kv_cache(kv, judge.model.config, jnp.float32)
        except ConfigError:
            yield row  # a group beyond the bundled model's heads
            continue
        yield row | judge.row(kv="model" if kv == WIDE else kv)


def token_bytes(kv: str) -> int:
    """Bytes of K and V of one token in all layers of the 7B model."""
    c = load_config(CONFIG)
    return c.num_layers * bytes_per_token(c.head_dim, c.num_kv_heads, *parse_kv_cache(kv, c, jnp.bfloat16))


def requests(kv: str) -> int:
    """How many sequences of TOKENS tokens fit."""
    pages = -(-TOKENS // PAGE)
    return MEMORY // (pages * PAGE * token_bytes(kv))


def bytes_each(kv: str) -> float:
    c = load_config(CONFIG)
    return round(token_bytes(kv) / (2 * c.num_layers * c.num_kv_heads * c.head_dim), 4)


def judge(rows: list[Row]) -> Verdict:
    found = {row["kv"]: row for row in rows}
    more = {kv: row["times"] - 1 for kv, row in found.items() if kv.startswith("int8")}
    main = found["int8-g8"]
    low, high = map(percent, main.get("added_95", (main["added"],) * 2))
    kept = bar("perplexity added by int8-g8", main["added"], "1", KEPT, most=True)
    accuracy = f"int8-g8 adds {percent(main['added'])} to perplexity [{low}, {high}], KL {main['kl']:.2g}"
    parts = [
        Part(f"accuracy kept on {subject_of(rows)}: {accuracy}", kept["met"]),
        Part(f"{STATED - 1:+.0%} requests, {CONFIG.stem}: int8-g8 {more['int8-g8']:+.0%}", main["times"] >= STATED),
    ]
    others = [f"{kv} {gain:+.0%}" for kv, gain in more.items() if kv != "int8-g8"]
    return verdict_of(parts, f"requests by larger groups: {', '.join(others)}" if others else "", bars=[kept])


def draw(figure: Any, rows: list[Row]) -> None:
    axes = figure.subplots()
    points = [row for row in rows if row.get("kl")]
    for row in points:
        low, high = row.get("kl_95", (row["kl"],) * 2)
        spread = [[row["kl"] - low], [high - row["kl"]]]
        axes.errorbar(row["times"], row["kl"], yerr=spread, fmt="o", markersize=4, capsize=2, color="C0")
        axes.annotate(row["kv"], (row["times"], row["kl"]), (6, 4), textcoords="offset points", fontsize=8)
    axes.axvline(STATED, color="black", linestyle="--", linewidth=1, label="as stated")
    axes.axvline(1, color="gray", linewidth=1)
    axes.set_yscale("log")
    axes.margins(x=0.2, y=0.1)
    axes.set_xlabel("requests in the same memory, times those with 16 bits")
    axes.set_ylabel("KL, nats a token")
    axes.legend()


CLAIM = Claim(
    id="C6",
    rule=(
        f"Accuracy is kept where perplexity rises by at most {KEPT:.1%}; requests are the sequences of "
        f"{TOKENS:,} tokens that {MEMORY >> 30} GiB hold."
    ),
    stated="requests +100 %, accuracy kept",
    measure=measure,
    judge=judge,
    draw=draw,
    computed=True,
    chosen=True,
)
