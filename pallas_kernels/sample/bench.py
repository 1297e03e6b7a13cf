"""Measures sample on the device, next to the same in plain jnp and to sorting each row.

    python -m pallas_kernels.sample.bench [--json] [--rows 1 64 512] [--triton] [--record]

Bytes are what must move: the logits in, once. Times are of kernels and copies, without the gaps in which the host waits
for what plain jnp asks it: `wall_us` has these.
"""

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.bench.bars import H200, bar
from pallas_kernels.bench.command import add_rows, make_parser, record
from pallas_kernels.bench.measure import device_us
from pallas_kernels.sample.api import sample
from pallas_kernels.sample.cases import ASKED, BENCH_CASES, Case, arguments

PEERS = ("mosaic", "xla", "sort")
BARS = {  # R, V, asked: us
    (1, 32000, "greedy"): 6.0,
    (512, 32000, "greedy"): 60.0,
    (512, 32000, "top-k, top-p"): 300.0,
    (1, 128256, "temperature"): 25.0,
    (512, 128256, "temperature"): 250.0,
    (1, 128256, "top-k, top-p"): 60.0,
    (512, 128256, "top-k, top-p"): 450.0,
}
COPIES = 4  # of the logits, in turn, where they are few: so that a call's are in L2 at most
CALLS = 20  # for the wall clock


def by_sorting(logits: jax.Array, temperature: Any, top_k: Any, top_p: Any, min_p: Any, keys: Any) -> jax.Array:
    """Draws from the same distribution as one would first write it, in the order of ranks rather than of tokens."""
    values, ids = jax.lax.sort_key_val(-logits, jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1))
    rank = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    p = jax.nn.softmax(-values / jnp.maximum(temperature, 1e-6)[:, None], axis=1)
    p = jnp.where((top_k <= 0)[:, None] | (rank < top_k[:, None]), p, 0)
    below = jnp.cumsum(p, axis=1) - p
    p = jnp.where(below < (top_p * p.sum(axis=1))[:, None], p, 0)
    p = jnp.where(p >= min_p[:, None] * p[:, :1], p, 0)
    cdf = jnp.cumsum(p, axis=1)
    uniform = (keys[:, 0] >> 8).astype(jnp.float32) * 2.0**-24
    at = jnp.argmax(cdf > (uniform * cdf[:, -1])[:, None], axis=1)
    return jnp.take_along_axis(ids, jnp.where(temperature > 0, at, 0)[:, None], axis=1)[:, 0]


def measure(case: Case, peer: str) -> dict[str, float]:
    rows = arguments([ASKED[case.asked]] * case.rows)
    run = jax.jit(by_sorting if peer == "sort" else partial(sample, backend=peer))
    keys = jax.random.split(jax.random.key(0), COPIES)
    logits = [3 * jax.random.normal(key, (case.rows, case.vocabulary), jnp.float32) for key in keys]

    def all_copies() -> list[Any]:
        return [run(x, *rows) for x in logits]

    us = device_us(all_copies) / COPIES
    start = time.perf_counter()
    jax.block_until_ready([all_copies() for _ in range(CALLS)][-1])
    return {"us": us, "wall_us": (time.perf_counter() - start) * 1e6 / (CALLS * COPIES)}


def table(
    cases: list[Case], measured: Callable[[Case, str], dict[str, float]], peers: tuple[str, ...] = PEERS
) -> Iterator[dict[str, Any]]:
    for case in cases:
        for peer in peers:
            times = {name: round(value, 2) for name, value in measured(case, peer).items()}
            gb_s = round(case.moved_bytes / times["us"] / 1e3)
            yield {"kernel": "sample", "peer": peer, **case.labels, "dtype": case.dtype, **times, "gb_s": gb_s}


def bars(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the targets of the peer "mosaic", and XLA's time everywhere."""
    xla = {(row["R"], row["V"], row["asked"]): row["us"] for row in rows if row["peer"] == "xla"}
    for row in (row for row in rows if row["peer"] == "mosaic"):
        name, us = f"R={row['R']} V={row['V']} {row['asked']}", row["us"]
        target = BARS.get((row["R"], row["V"], row["asked"]))
        for suffix, limit in (("", target), (": XLA", xla.get((row["R"], row["V"], row["asked"])))):
            if limit is not None:
                yield bar(name + suffix, us, "us", limit, most=True, of=None if suffix else H200)


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    add_rows(parser, BENCH_CASES)
    parser.add_argument("--triton", action="store_true", help="backend triton too")
    args = parser.parse_args(argv)
    peers = ("triton", *PEERS) if args.triton else PEERS
    cases = [case for case in BENCH_CASES if case.rows in args.rows]
    return record("sample", args, argv, table(cases, measure, peers), bars)


if __name__ == "__main__":
    sys.exit(main())
