"""C31: a library's attention behind a pass that dequantizes K and V is pointless.

One query a sequence. `fused` is ours, which reads quantized pages and dequantizes in registers. `separate` writes K and
V of a layer as contiguous bfloat16 in a pass of its own and calls a library's attention, cuDNN's, on them. `library` is
cuDNN over K and V that were never quantized, which is what the pass must beat to gain time.

By bytes, anywhere: `fused` reads codes and scales; `separate` reads them, writes 16-bit values and reads these, unless
they stay in the caches; `library` reads 16-bit values. On a Hopper GPU all three are timed, too, and the pass alone.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from experiments.claims.claim import Claim, Row, Verdict, by_case, verdict_of
from experiments.claims.decoding import Run, compiled, contiguous, moved_bytes, paged, size
from pallas_kernels.backends import on_hopper
from pallas_kernels.decode_attention.cases import BENCH_CASES, Case
from pallas_kernels.kv_pages import KVPages, gather

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
    """Millions of bytes that each has to move of K and V of a layer."""
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
    """K and V [R, T, K, D] of the case's type, of sequences of one length."""
    held = (gather(each, table, jnp.dtype(case.dtype)) for each in (pages.k, pages.v))
    return [jnp.swapaxes(each, 1, 2)[:, : case.lengths[0]] for each in held]


def dequantize(case: Case) -> Run:
    """The pass alone."""

    def attend(q: jax.Array, cache: list[KVPages], tables: list[jax.Array], *_: Any) -> Any:
        return [values(pages, table, case) for pages, table in zip(cache, tables)]

    return replace(paged(case), attend=attend)


def separate(case: Case, library: str = "cudnn") -> Run:
    """The pass and a library's attention, layer after layer, nothing fused across."""
    attention = partial(jax.nn.dot_product_attention, scale=case.scale, implementation=library)

    def attend(q: jax.Array, cache: list[KVPages], tables: list[jax.Array], *_: Any) -> jax.Array:
        for pages, table in zip(cache, tables):
            k, v = jax.lax.optimization_barrier(values(pages, table, case))
            q = attention(q[:, None], k, v)[:, 0]
        return q

    return replace(paged(case), attend=attend)


def judge(rows: list[Row]) -> Verdict:
    """By time where there is any, else by bytes. Pointless is what is slower than the fused kernel and gains nothing
    over K and V that were never quantized."""
    parts, figures = [], []
    for part in dict.fromkeys(row["part"] for row in rows):
        found = [row for row in rows if row["part"] == part]
        over = ", ".join(
            f"{min(row[name] for row in found):.2f} to {max(row[name] for row in found):.2f} times {what}"
            for name, what in (("over_fused", "the fused kernel's"), ("over_library", "unquantized K and V's"))
        )
        pointless = {
            f"{row['kv']} {row['R']} x {row['length']} {row['H']}/{row['K']}": row["over_fused"] > 1
            and row["over_library"] >= 1
            for row in found
        }
        parts = by_case(f"pointless by {part}", pointless)  # what comes last, time, decides
        figures.append(f"by {part} the pass takes {over}")
    return verdict_of(parts, *reversed(figures))


def draw(figure: Any, rows: list[Row]) -> None:
    part = rows[-1]["part"]
    found, unit = [row for row in rows if row["part"] == part], "us" if part == "time" else "mb"
    axes = figure.subplots()
    for i, name in enumerate(("fused", "separate", "library")):
        at = [x + 0.27 * (i - 1) for x in range(len(found))]
        axes.bar(at, [row[f"{name}_{unit}"] for row in found], 0.25, label=name)
    names = [f"{row['R']} x {row['length']}\n{row['H']}/{row['K']}\n{row['kv']}" for row in found]
    axes.set_xticks(range(len(found)), names, fontsize=5)
    axes.set_yscale("log")
    axes.set_ylabel("us" if part == "time" else "MB of K and V")
    axes.legend(fontsize=7)


CLAIM = Claim(
    id="C31",
    rule=(
        "In each case the pass and the library take longer than the fused kernel, and as long as the library "
        "on K and V that were never quantized, or longer: by time where they were timed, else by the bytes that each "
        "has to move, of which the pass writes none where they stay in a cache of "
        f"{CACHES >> 20} MiB."
    ),
    stated="a separate dequantization pass is pointless",
    measure=measure,
    judge=judge,
    draw=draw,
    computed=True,
)
