"""Tests C6: an int8 KV cache holds more requests in the same memory, and keeps accuracy.

Requests are counted, not measured: LLaMA-2-7B's K and V of 1024 tokens in pages of 16, scales included, in 40 GiB. So
the gain does not depend on a device. Accuracy is measured on the bundled model and its text. Its heads have 64 values
and the 7B model's have 128, so groups of 128 have no figure.
"""

from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp

from experiments.claims.accuracy import BUNDLED_SUBJECT, Subject, judge_of, kept, of_subject, percent
from experiments.claims.claim import Answer, Claim, Row, all_hold, in_all, in_most
from jllm.errors import ConfigError
from jllm.files.hf_config import load_config
from jllm.model.cache import parse_kv_cache
from pallas_kernels.formats.kv_formats import bytes_per_token

CONFIG = Path(__file__).parents[2] / "configs" / "llama-2-7b.json"
MEMORY, TOKENS, PAGE = 40 << 30, 1024, 16
WIDE = "bf16"
FORMATS = (
    WIDE, "fp8", "int8-g8", "int8-g16", "int8-g32", "int8-g64", "int8-g128", "int4-g8", "int4-g32", "int4-g128",
    "k=int8-g8,v=int4-g8",
)  # fmt: skip
STATED, KEPT = 2.0, 0.002  # multiple of requests; perplexity that may be added


def measure(toy: bool, subject: Subject = BUNDLED_SUBJECT) -> Iterator[Row]:
    judge = judge_of(toy, subject)
    wide = requests(WIDE)
    for kv in FORMATS[:3] if toy else FORMATS:
        count = requests(kv)
        row: Row = {"kv": kv, "bytes_per_value": bytes_each(kv), "requests": count, "times": round(count / wide, 4)}
        try:
            parse_kv_cache(kv, judge.model.config, jnp.float32)
        except ConfigError:
            yield row  # groups too large for the bundled model's heads
            continue
        yield row | judge.row(kv="model" if kv == WIDE else kv)


def token_bytes(kv: str) -> int:
    """Returns the bytes of K and V of one token in all layers of the 7B model."""
    c = load_config(CONFIG)
    return c.num_layers * bytes_per_token(c.head_dim, c.num_kv_heads, *parse_kv_cache(kv, c, jnp.bfloat16))


def requests(kv: str) -> int:
    """Returns the number of sequences that fit."""
    pages = -(-TOKENS // PAGE)
    return MEMORY // (pages * PAGE * token_bytes(kv))


def bytes_each(kv: str) -> float:
    c = load_config(CONFIG)
    return round(token_bytes(kv) / (2 * c.num_layers * c.num_kv_heads * c.head_dim), 4)


def headline(rows: list[Row]) -> Row:
    return next(row for row in rows if row["kv"] == "int8-g8")


def holds(rows: list[Row]) -> Answer:
    """Decides by groups of 8. A loss of accuracy cancels the gain."""
    row = headline(rows)
    return in_most([all_hold([row["times"] > 1, kept(row, KEPT)])]), in_all([row["times"] >= STATED])


def words(rows: list[Row]) -> tuple[str, str]:
    row = headline(rows)
    more, added = f"{100 * (row['times'] - 1):.0f} %", percent(row["added"])
    line = f"An int8 KV cache holds {more} more requests, and adds {added} to perplexity{of_subject(rows)}."
    return f"{more} more requests, {added} perplexity", line


CLAIM = Claim(
    id="C6",
    stated="+100 % requests, accuracy kept",
    measure=measure,
    holds=holds,
    words=words,
    computed=True,
    chosen=True,
)
