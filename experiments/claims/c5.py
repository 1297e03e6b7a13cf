"""Tests C5: Decoding Attention vs. flash attention for decode.

Both read K and V in bfloat16 for one query per sequence. Ours reads through a table of shuffled pages of 16.
FlashAttention-2 (torch's SDPA, its backend forced) and cuDNN (through JAX) read contiguous arrays, which is easier.
Times are of the kernels alone. Inputs rotate through more memory than caches hold. Cases with few keys do not decide;
they have one shape of heads.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from experiments.claims.claim import Answer, Claim, Row, in_all, in_most, interval_of, spread
from experiments.claims.decoding import compiled, contiguous, moved_bytes, paged, size
from experiments.claims.torch_attention import flash_attention
from pallas_kernels.decode_attention.bench_runs import layers_for
from pallas_kernels.decode_attention.cases import BENCH_CASES

STATED = 2.0
FASTER = 1.05  # least speed-up that counts
NOISE = 0.01  # variation of the same kernel's times between processes
MANY_KEYS = 1 << 16  # keys of a batch from which memory decides, not latency


def measure(toy: bool) -> Iterator[Row]:
    of_many = [case for case in BENCH_CASES if case.k_format == "bf16"]
    cases = [case for case in of_many if sum(case.lengths) >= MANY_KEYS or case.heads == of_many[0].heads]
    cases.sort(key=lambda case: -sum(case.lengths))  # the deciding cases come first
    with ThreadPoolExecutor(1) as pool:  # torch measures while JAX traces
        flash = pool.submit(flash_attention, [size(case) | {"sets": layers_for(case)} for case in cases])
        runs = compiled([run(case) for case in cases for run in (paged, contiguous)], flash.result)
        found = flash.result()
    for case, of_flash, ours, cudnn in zip(cases, found, runs[::2], runs[1::2]):
        row: Row = size(case) | {"P": case.page_size, "dtype": case.dtype}
        if "error" in of_flash:
            yield row | {"error": f"FlashAttention-2: {of_flash['error']}"}
            continue
        us, cudnn_us, flash_us = ours.timed()[0], cudnn.timed()[0], of_flash["us"]
        yield row | {
            "us": round(us, 2), "gb_s": round(moved_bytes(case) / us / 1e3),
            "flash_us": round(flash_us, 2), "over_flash": round(flash_us / us, 2),
            "cudnn_us": round(cudnn_us, 2), "over_cudnn": round(cudnn_us / us, 2),
        }  # fmt: skip


def holds(rows: list[Row]) -> Answer:
    """Decides by cases with many keys, if there are any. A speed-up of FASTER counts."""
    times = [times_of(row) for row in decisive(rows)]
    return in_most(surely(each, FASTER) for each in times), in_all(surely(each, STATED) for each in times)


def words(rows: list[Row]) -> tuple[str, str]:
    times = spread(map(times_of, decisive(rows)))
    return f"{times} times as fast", f"Decode attention is {times} times as fast as FlashAttention-2's."


def decisive(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["R"] * row["length"] >= MANY_KEYS] or rows


def times_of(row: Row) -> float:
    """Returns our speed over FlashAttention-2's, by the times, since a row's ratio is rounded."""
    return row["flash_us"] / row["us"]


def surely(times: float, least: float) -> bool | None:
    """Returns whether ours is `least` times as fast, or None if another process could disagree."""
    return interval_of([times], NOISE * least).reaches(least)


CLAIM = Claim(
    id="C5",
    stated="2 times as fast",
    measure=measure,
    holds=holds,
    words=words,
    hopper=True,
)
