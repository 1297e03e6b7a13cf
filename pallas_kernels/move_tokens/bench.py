"""Measures move_tokens on the device for all layers of a step, with moves in each sequence and without any.

    python -m pallas_kernels.move_tokens.bench [--json] [--rows 1 16 64] [--record]

Bytes are what must move: what is stored of each moved token, read and written.
"""

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench.bars import bar
from pallas_kernels.bench.command import add_rows, make_parser, record
from pallas_kernels.bench.measure import copy_bandwidth, device_us
from pallas_kernels.formats.kv_formats import bytes_per_token, parse_format
from pallas_kernels.formats.kv_pages import allocate
from pallas_kernels.move_tokens import move_tokens
from pallas_kernels.move_tokens.cases import BENCH_CASES, Case

IDLE_US = 5.0  # at most, for a step in which nothing moves
MANY, LEAST = 64, 0.5  # from that many sequences on, the least share of a copy's bandwidth


def moved_bytes(case: Case, moves: int) -> int:
    formats = [parse_format(name, case.head_dim) for name in (case.k_format, case.v_format)]
    return 2 * moves * case.layers * bytes_per_token(case.head_dim, case.num_kv_heads, *formats)


def measure(case: Case, source: np.ndarray, backend: str) -> float:
    """Returns the microseconds of a call with the case's pools, page tables and targets."""
    table, _, target = case.indices()
    indices = [jnp.asarray(x) for x in (table, source, target)]
    formats = [parse_format(name, case.head_dim) for name in (case.k_format, case.v_format)]
    sizes = case.num_pages, case.num_kv_heads, case.page_size, case.head_dim
    state = {"pools": (allocate(*sizes, *formats, layers=case.layers),)}
    move = jax.jit(partial(move_tokens, backend=backend), donate_argnums=0)

    def run() -> Any:
        state["pools"] = move(state["pools"], *indices)
        return state["pools"]

    return device_us(run)


def table(rows: list[int], backends: list[str]) -> Iterator[dict[str, Any]]:
    """Yields one row a case, backend, and whether anything moves, the run's ceiling first."""
    ceiling = copy_bandwidth()
    yield {"kernel": "copy", "gb_s": round(ceiling / 1e9)}
    for case in (case for case in BENCH_CASES if case.rows in rows):
        _, source, target = case.indices()
        for backend in backends:
            for kind, sources in (("moves", source), ("idle", target)):
                moves = int(((sources >= 0) & (sources != target)).sum())
                us, moved = measure(case, sources, backend), moved_bytes(case, moves)
                yield {
                    "kernel": "move_tokens", "peer": backend, "step": kind, "R": case.rows, "Q": case.moves,
                    "L": case.layers, "K": case.num_kv_heads, "D": case.head_dim, "P": case.page_size,
                    "kv": case.k_format, "us": round(us, 2), "gb_s": round(moved / us / 1e3),
                    "fraction": round(moved / us * 1e6 / ceiling, 3),
                }  # fmt: skip


def bars(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        if row.get("peer") == "mosaic":
            name = f"R={row['R']} K={row['K']} {row['kv']} {row['step']}"
            if row["step"] == "idle":
                yield bar(name, row["us"], "us", IDLE_US, most=True)
            elif row["R"] >= MANY:
                yield bar(name, row["fraction"], "fraction", LEAST)


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    add_rows(parser, BENCH_CASES)
    parser.add_argument("--mosaic-only", action="store_true", help="leave out XLA")
    args = parser.parse_args(argv)
    backends = ["mosaic"] if args.mosaic_only else ["mosaic", "xla"]
    return record("move_tokens", args, argv, table(args.rows, backends), bars)


if __name__ == "__main__":
    sys.exit(main())
