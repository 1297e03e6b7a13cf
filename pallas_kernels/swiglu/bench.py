"""Measures gate, up and their SiLU product on the device in one kernel, next to two.

    python -m pallas_kernels.swiglu.bench [--json] [--rows 1 16 64] [--tune] [--record]

"mosaic" is the one kernel; "default" is the faster matmul for these shapes and a pass after it; "xla" is both by XLA.
Each figure is of several layers with weights of their own, so that no cache holds them, in one jit. Times are the
profiler's, of the kernels alone: a launch less is saved on top. The ceiling is the best rate of the run. --tune tries
other tiles too, as rows of peer "mosaic ROWSxCOLUMNSxSTEP".
"""

import sys
from collections.abc import Iterator
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp

from pallas_kernels.bench.bars import bar
from pallas_kernels.bench.command import Row, make_parser, record
from pallas_kernels.bench.layers import Subject, add_fractions, table
from pallas_kernels.bench.numbers import positive
from pallas_kernels.hopper.gemm_sm90.skinny_config import Config, choose_config, estimate, most_stages
from pallas_kernels.swiglu import swiglu
from pallas_kernels.swiglu.cases import BENCH_ROWS, BENCH_SHAPES, Case

PEERS = {"mosaic": "mosaic", "default": None, "xla": "xla"}  # and the backend that each is
TILES = tuple(product((64, 128, 256), (64, 96, 128, 160, 176, 192, 256), (128, 256)))  # that --tune tries
SLOWER = 1.33  # up to which factor of the best estimate a tile is worth a try


def rows_of(case: Case) -> int:
    return case.leading[0]


def moved_bytes(case: Case) -> int:
    size, rows = jnp.dtype(case.dtype).itemsize, rows_of(case)
    return size * (case.k * (2 * case.width + rows) + rows * case.width)


def subjects(case: Case, tune: bool) -> Iterator[Subject]:
    """Yields what is timed of a case."""
    for peer, backend in PEERS.items():
        yield subject(case, peer, partial(swiglu, backend=backend))
    for config in candidates(case) if tune else ():
        name = f"mosaic {config.rows}x{config.columns}x{config.step}"
        yield subject(case, name, partial(_tiled, config=config))


def candidates(case: Case) -> Iterator[Config]:
    """Yields tiles that may be as good as the chosen one."""
    size = jnp.dtype(case.dtype).itemsize
    sizes = (rows_of(case), 2 * case.width, case.k, size)
    chosen = choose_config(*sizes)
    for rows, columns, step in TILES:
        if rows * columns > 256 * 192:
            continue
        config = Config(rows, columns, step)
        fits = most_stages(config, size, size, step // size) >= 2
        if fits and config != chosen and estimate(config, *sizes)[1] <= SLOWER * estimate(chosen, *sizes)[1]:
            yield config


def _tiled(x: jax.Array, w: jax.Array, *, config: Config) -> jax.Array:
    from pallas_kernels.swiglu import mosaic_sm90  # imports all of Pallas

    return mosaic_sm90.swiglu(x, w, config)


def subject(case: Case, peer: str, run) -> Subject:
    m, dtype = rows_of(case), jnp.dtype(case.dtype)
    return Subject(
        labels={"kernel": "swiglu", "peer": peer, "M": m, "K": case.k, "F": case.width, "dtype": case.dtype},
        x=jax.ShapeDtypeStruct((m, case.k), dtype),
        w=jax.ShapeDtypeStruct((2 * case.width, case.k), dtype),
        run=run,
        moved_bytes=moved_bytes(case),
        flops=4 * m * case.k * case.width,
    )


def bars(rows: list[Row]) -> Iterator[Row]:
    """Completes the rows; yields the bars: the time of two kernels."""
    measured = add_fractions(rows)
    us = {(row["peer"], row["M"], row["K"], row["F"]): row["us"] for row in measured}
    for row in measured:
        size = row["M"], row["K"], row["F"]
        limit = min((us[peer, *size] for peer in ("default", "xla") if (peer, *size) in us), default=None)
        if row["peer"] == "mosaic" and limit is not None:
            yield bar(f"(M, K, F)={size} two kernels", row["us"], "us", limit, most=True)


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=positive, nargs="+", default=BENCH_ROWS, metavar="M", help="of x")
    parser.add_argument(
        "--widths",
        type=positive,
        nargs="+",
        default=[f for f, _ in BENCH_SHAPES],
        metavar="F",
        help="MLP dims F of the shapes that are timed",
    )
    parser.add_argument("--tune", action="store_true", help="other tiles too")
    args = parser.parse_args(argv)
    shapes = [shape for shape in BENCH_SHAPES if shape[0] in args.widths]
    cases = [Case((m,), *shape, "bfloat16") for shape in shapes for m in args.rows]
    found = [one for case in cases for one in subjects(case, args.tune)]
    return record("swiglu", args, argv, table(found), bars)


if __name__ == "__main__":
    sys.exit(main())
