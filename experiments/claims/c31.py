"""Tests C31: a library's attention behind a separate dequantizing pass is pointless.

There is one query per sequence. `fused` is our kernel, which reads quantized pages and dequantizes in registers.
`separate` writes a layer's K and V as contiguous bfloat16 in its own pass, then calls cuDNN's attention on them.
`library` is cuDNN over K and V that were never quantized; the pass must beat it to gain time.

Rows by bytes run anywhere. `fused` reads codes and scales. `separate` reads them, writes 16-bit values and reads these,
unless they stay in the caches. `library` reads 16-bit values. A Hopper GPU also times all three, and the pass alone.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from experiments.claims.claim import Answer, Claim, Row, in_all, in_most, spread
from experiments.claims.decoding import Run, compiled, contiguous, moved_bytes, paged, size
from pallas_kernels.backends import on_hopper
from pallas_kernels.decode_attention.cases import BENCH_CASES, Case
from pallas_kernels.formats.kv_pages import KVPages, gather

CELLS = ((1, 1024), (16, 1024), (64, 1024), (128, 2048))
FORMATS = ("int8-g8", "int4-g32")
PLAIN = "bf16"
CACHES = 50 << 20  # bytes of an H100's and an H200's L2


def cases(toy: bool) -> list[Case]:
    shapes = {(case.heads, case.k_format): case for case in BENCH_CASES if case.k_format in FORMATS}
    return [replace(case, lengths=(n,) * rows) for case in shapes.values() for rows, n in CELLS[: 1 if toy else None]]


def measure(toy: bool) -> Iterator[Row]:
    found = cases(toy)
    for case in found:
        yield {"part": "bytes", **size(case), "kv": case.k_format} | by_bytes(case)
    if on_hopper():
        yield from timed(found)


def unquantized(case: Case) -> Case:
    return replace(case, k_format=PLAIN, v_format=PLAIN)


def by_bytes(case: Case) -> Row:
    """Returns the millions of bytes that each must move for K and V of a layer."""
    fused, plain = moved_bytes(case), moved_bytes(unquantized(case))
    separate = fused if plain <= CACHES else fused + 2 * plain
    fused_mb, separate_mb, plain_mb = (round(moved / 1e6, 3) for moved in (fused, separate, plain))
    return ratios(fused_mb, separate_mb, plain_mb, "mb")


def ratios(fused: float, separate: float, library: float, unit: str) -> Row:
    row: Row = {f"fused_{unit}": fused, f"separate_{unit}": separate, f"library_{unit}": library}
    return row | {"over_fused": round(separate / fused, 3), "over_library": round(separate / library, 3)}


def timed(found: list[Case]) -> Iterator[Row]:
    makers = (paged, separate, lambda case: contiguous(unquantized(case)), dequantize)
    runs = iter(compiled([make(case) for case in found for make in makers]))
    for case in found:
        fused, of_library, library, alone = (next(runs) for _ in makers)
        us = [round(run.timed()[0], 2) for run in (fused, of_library, library)]
        row = {"part": "time", **size(case), "kv": case.k_format} | ratios(us[0], us[1], us[2], "us")
        yield row | {"dequantize_us": round(alone.timed()[0], 2)}


def values(pages: KVPages, table: jax.Array, case: Case) -> list[jax.Array]:
    """Returns K and V [R, T, K, D] in the case's type, of sequences of one length."""
    held = (gather(each, table, jnp.dtype(case.dtype)) for each in (pages.k, pages.v))
    return [jnp.swapaxes(each, 1, 2)[:, : case.lengths[0]] for each in held]


def dequantize(case: Case) -> Run:
    """Returns a run of the pass alone."""

    def attend(q: jax.Array, cache: list[KVPages], tables: list[jax.Array], *_: Any) -> Any:
        return [values(pages, table, case) for pages, table in zip(cache, tables)]

    return replace(paged(case), attend=attend)


def separate(case: Case, library: str = "cudnn") -> Run:
    """Returns a run of the pass and a library's attention, layer after layer, without fusion between them."""
    attention = partial(jax.nn.dot_product_attention, scale=case.scale, implementation=library)

    def attend(q: jax.Array, cache: list[KVPages], tables: list[jax.Array], *_: Any) -> jax.Array:
        for pages, table in zip(cache, tables):
            k, v = jax.lax.optimization_barrier(values(pages, table, case))
            q = attention(q[:, None], k, v)[:, 0]
        return q

    return replace(paged(case), attend=attend)


def deciding(rows: list[Row]) -> list[Row]:
    """Returns the rows by time if there are any, else by bytes."""
    return [row for row in rows if row["part"] == "time"] or rows


def pointless(row: Row) -> bool:
    """Returns whether it is slower than the fused kernel, and no faster than unquantized K and V."""
    return row["over_fused"] > 1 and row["over_library"] >= 1


def holds(rows: list[Row]) -> Answer:
    sides = list(map(pointless, deciding(rows)))
    return in_most(sides), in_all(sides)


def words(rows: list[Row]) -> tuple[str, str]:
    found = deciding(rows)
    times, by = spread(row["over_fused"] for row in found), found[0]["part"]
    vain = f"pointless in {sum(map(pointless, found))} of {len(found)}"
    line = f"A separate pass takes {times} times the fused kernel's {by}, and is {vain} cases."
    return f"{times} times the fused kernel's {by}", line


CLAIM = Claim(
    id="C31",
    stated="a separate dequantization pass is pointless",
    measure=measure,
    holds=holds,
    words=words,
    computed=True,
)
