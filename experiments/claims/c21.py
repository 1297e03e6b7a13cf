"""C21: KV dequantization hides behind memory even at ten times its arithmetic.

Decode attention over int8 pages in groups of 8, the costliest there are, whose dequantization (codes and scales to
floats, products, rounding) is done 1 to 20 times over in registers. The result is the same to the bit, and a barrier
keeps the compiler from seeing that it is the same work again. Work that hides costs nothing: then time is that of the
bytes, at the rate at which the same kernel reads pages of bfloat16, which need no such work.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp

from experiments.claims.claim import Claim, Row, Verdict, microseconds
from pallas_kernels.decode_attention import Work, bench, make_work
from pallas_kernels.decode_attention.cases import BENCH_CASES, Case
from pallas_kernels.kv_pages import KVPages

REPEATS = (1, 2, 4, 10, 20)
STATED = 10
HIDDEN = 1.15  # times the time of the bytes: what counts as hidden
KV, PLAIN = "int8-g8", "bf16"


def measure(toy: bool) -> Iterator[Row]:
    cases = [case for case in BENCH_CASES if case.k_format == KV]
    plain = {case: replace(case, k_format=PLAIN, v_format=PLAIN) for case in cases}
    jobs = [*product(cases, REPEATS), *((case, 1) for case in plain.values())]
    with ThreadPoolExecutor(8) as pool:  # compiling takes most of the time
        compiled = dict(zip(jobs, pool.map(lambda job: build(*job), jobs)))
    for case in cases:
        size = {"R": len(case.lengths), "length": case.lengths[0], "H": case.heads[0], "K": case.heads[1]}
        us, _ = timed(compiled[plain[case], 1], plain[case])
        rate = bench.moved_bytes(plain[case]) / us / 1e3
        yield size | {"kv": PLAIN, "dequantized": 0, "us": round(us, 2), "gb_s": round(rate), "over_bytes": 1.0}
        hidden, bits = bench.moved_bytes(case) / rate / 1e3, None
        for times in REPEATS:
            us, out = timed(compiled[case, times], case)
            row: Row = size | {"kv": KV, "dequantized": times}
            bits = out if bits is None else bits
            if not jnp.array_equal(out, bits):
                yield row | {"error": "the result is not the same as of dequantizing once"}
                continue
            rate_now = round(bench.moved_bytes(case) / us / 1e3)
            yield row | {"us": round(us, 2), "gb_s": rate_now, "over_bytes": round(us / hidden, 3)}


def timed(step: Any, case: Case) -> tuple[float, jax.Array]:
    """Microseconds of one layer, and the result of the last."""
    arguments = jax.jit(make_arguments, static_argnums=0)(case, jax.random.key(0))
    return microseconds(partial(step, *arguments)) / bench.layers_for(case), step(*arguments)


def make_arguments(case: Case, key: jax.Array) -> tuple[Any, ...]:
    """q, the pages of several layers, more than caches hold, a page table, lengths and the work list."""
    rows, dim = len(case.lengths), case.head_dim
    pages_each = -(-max(case.lengths) // case.page_size)
    keys = jax.random.split(key, bench.layers_for(case) + 2)
    q = jax.random.normal(keys[0], (rows, case.heads[0], dim), jnp.dtype(case.dtype))
    table = jax.random.permutation(keys[1], rows * pages_each).reshape(rows, pages_each).astype(jnp.int32)
    cache = [bench.random_pages(each, rows * pages_each, case) for each in keys[2:]]
    lengths = jnp.asarray(case.lengths, jnp.int32)
    return q, cache, table, lengths, make_work(lengths, case.heads[0], case.heads[1], dim)


def build(case: Case, times: int) -> Any:
    """The compiled layers, each one's queries being the results of the one before."""
    from pallas_kernels.decode_attention.mosaic_sm90 import decode_attention  # imports all of Pallas

    def step(q: jax.Array, cache: list[KVPages], table: jax.Array, lengths: jax.Array, work: Work) -> jax.Array:
        work = replace(work, config=replace(work.config, dequantize=times))
        for pages in cache:
            q = decode_attention(q, pages, table, lengths, case.scale, None, work)
        return q

    return jax.jit(step).lower(*jax.eval_shape(partial(make_arguments, case), jax.random.key(0))).compile()


def judge(rows: list[Row]) -> Verdict:
    found = {times: [row["over_bytes"] for row in rows if row["dequantized"] == times] for times in REPEATS}
    parts = [f"{times} times: {min(ratios):.2f} to {max(ratios):.2f}" for times, ratios in found.items() if ratios]
    ratios = found[STATED]
    verdict = "yes" if ratios and max(ratios) <= HIDDEN else "partly" if ratios and min(ratios) <= HIDDEN else "no"
    return Verdict(verdict, "time over that of the bytes, dequantized " + ", ".join(parts))


def draw(figure: Any, rows: list[Row]) -> None:
    axes = figure.subplots()
    for cell in dict.fromkeys((row["R"], row["length"], row["H"], row["K"]) for row in rows):
        of_cell = [row for row in rows if (row["R"], row["length"], row["H"], row["K"]) == cell and row["dequantized"]]
        label = f"{cell[0]} x {cell[1]}, H/K {cell[2]}/{cell[3]}"
        axes.plot([row["dequantized"] for row in of_cell], [row["over_bytes"] for row in of_cell], "o-", label=label)
    axes.axhline(HIDDEN, color="gray", linewidth=1, label="hidden")
    axes.axvline(STATED, color="black", linestyle="--", linewidth=1, label="as stated")
    axes.set_xscale("log")
    axes.set_xticks(REPEATS, [str(times) for times in REPEATS])
    axes.set_xlabel("times that K and V are dequantized")
    axes.set_ylabel("time over that of the bytes")
    axes.set_ylim(bottom=0)
    axes.legend()


CLAIM = Claim(
    id="C21",
    stated=f"hidden at {STATED}x",
    measure=measure,
    judge=judge,
    draw=draw,
    hopper=True,
)
