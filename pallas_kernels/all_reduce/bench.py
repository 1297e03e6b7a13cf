"""Measures how long an exchange takes between GPUs of one host, and checks its bits.

    python -m pallas_kernels.all_reduce.bench [--devices 2] [--rows 1 64 4096] [--record]

Each backend and number of rows goes through three parts:

- Compares the sum of random parts, on every device, with a sum in the order of ranks (peer: to the bit).
- Compares many steps of exchanges with the same arithmetic on one device. Each step is fed by the one before, through a
  donated buffer that moves about.
- Times exchanges in a chain inside one jit, on the host's clock.

Each backend has a process of its own, so that one that hangs costs its own rows. `us` is that of the shorter chain, the
host's work for a call included. `us_longer_chain` is what each further exchange adds, as in a model's step, which has
many. The bar is of that.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.all_reduce import MeshAxis, all_reduce, peer
from pallas_kernels.bench.bars import bar
from pallas_kernels.bench.command import make_parser, record
from pallas_kernels.bench.numbers import positive, positive_number

AXIS = "model"
CHAINS = (64, 256)  # exchanges in one jit; the difference leaves out the host's work for a call
REPLAYED_ROWS = 128  # the most
LINKS = 8  # exchanges in a step of the replays
SMALL, SMALL_US = 64 * 4096, 6.0  # the bar: a sum of so many values between two ranks, and its most microseconds
DTYPES = ("bfloat16", "float16", "float32")
VARIANTS = ("peer", "two-shot", "xla")  # two-shot: peer, of any size


def on_ranks(function: Callable[[jax.Array], jax.Array], mesh: Mesh, **options: Any) -> Callable:
    """Runs `function` of a rank's part [M, E], on all ranks' [ranks, M, E]."""
    own = lambda x: function(x[0])[None]  # noqa: E731
    return jax.jit(jax.shard_map(own, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False), **options)


def check_sum(run: Callable, mesh: Mesh, rows: int, columns: int, dtype: Any) -> dict[str, Any]:
    """Returns the largest distance to the sum in the order of ranks, relative to the norm, and whether bits are
    equal."""
    given = jnp.asarray(np.random.default_rng(rows).normal(size=(mesh.size + 1, rows, columns)), dtype)
    parts, residual = given[:-1], given[-1]
    both = spread(jnp.stack([parts, jnp.broadcast_to(residual, parts.shape)], axis=1), mesh)  # [ranks, 2, M, E]
    found = np.asarray(on_ranks(lambda x: run(x[0], bias=x[1, 0], residual=x[1]), mesh)(both))
    total = np.asarray(parts[0], np.float32)
    for each in (*parts[1:], residual[:1], residual):
        total = total + np.asarray(each, np.float32)
    wanted = np.asarray(jnp.asarray(total, dtype))
    distance = np.linalg.norm(found[0].astype(np.float64) - wanted.astype(np.float64)) / np.linalg.norm(total)
    alike = all(x.tobytes() == found[0].tobytes() for x in found)
    return {"alike": alike, "bits": found[0].tobytes() == wanted.tobytes(), "distance": float(f"{distance:.3g}")}


def spread(x: jax.Array, mesh: Mesh) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh, P(AXIS)))


def replay_weights(ranks: int, columns: int, dtype: Any) -> jax.Array:
    """Returns [ranks, 1, columns]; a column sums to about 1 or -1, so that many steps neither grow nor fade."""
    rng = np.random.default_rng(7)
    parts = rng.uniform(0.2, 0.8, (ranks, 1, columns))
    parts[-1] = rng.choice([-1.0, 1.0], (1, columns)) - parts[:-1].sum(axis=0)
    return jnp.asarray(parts, dtype)


def check_replays(run: Callable, mesh: Mesh, rows: int, columns: int, dtype: Any, steps: int) -> bool:
    """Returns whether steps of LINKS exchanges give the same bits as one device that adds in the order of ranks.
    Columns move on by one, so that what an earlier exchange left would be seen."""
    n = mesh.size
    weights = replay_weights(n, columns, dtype)

    def links(x: jax.Array) -> jax.Array:
        for _ in range(LINKS):
            x = jnp.roll(run(lax.optimization_barrier(x * weights[lax.axis_index(AXIS)])), 1, axis=1)
        return x

    def alone(x: jax.Array) -> jax.Array:
        for _ in range(LINKS):
            parts = lax.optimization_barrier([x * w for w in weights])
            total = parts[0].astype(jnp.float32)
            for part in parts[1:]:
                total = total + part.astype(jnp.float32)
            x = jnp.roll(lax.optimization_barrier(total.astype(dtype)), 1, axis=1)
        return x

    first = jnp.asarray(np.random.default_rng(8).normal(size=(rows, columns)), dtype)
    x, y = spread(jnp.stack([first] * n), mesh), first
    step, other = on_ranks(links, mesh, donate_argnums=0), jax.jit(alone)
    kept: list[jax.Array] = []
    for i in range(steps):
        x, y = step(x), other(y)
        if i % 50 == 0:  # buffers of other sizes come and go, so that x lies elsewhere
            kept = [*kept[-3:], spread(jnp.zeros((n, rows + i, columns), dtype), mesh), x + 0]
            x = kept.pop()
    found = np.asarray(x)
    return all(part.tobytes() == np.asarray(y).tobytes() for part in found)


def chain_us(run: Callable, mesh: Mesh, rows: int, columns: int, dtype: Any, length: int, repeats: int = 7) -> float:
    """Returns the microseconds of an exchange in a chain, the best of several."""

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(length):
            x = run(x)
        return x

    compiled = on_ranks(chain, mesh)
    x = spread(jnp.zeros((mesh.size, rows, columns), dtype), mesh)
    jax.block_until_ready([compiled(x) for _ in range(3)])
    times = []
    for _ in range(repeats):
        calls, start = 10, time.perf_counter()
        jax.block_until_ready([compiled(x) for _ in range(calls)])
        times.append((time.perf_counter() - start) / calls)
    return 1e6 * min(times) / length


def measure(variant: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    devices = jax.devices()[: args.devices]
    mesh = Mesh(np.asarray(devices), (AXIS,))
    axis = MeshAxis(AXIS, tuple(device.local_hardware_id for device in devices))
    run: Callable[..., jax.Array] = partial(all_reduce, axis=axis, backend=variant)
    if variant == "two-shot":
        run = lambda x, bias=None, residual=None: peer.all_reduce(x, axis, bias, residual, once=False)  # noqa: E731
    for rows in args.rows:
        columns, dtype = args.columns, jnp.dtype(args.dtype)
        row = {"backend": variant, "ranks": mesh.size, "M": rows, "E": args.columns, "dtype": args.dtype}
        row |= check_sum(run, mesh, rows, columns, dtype)
        row["replays"] = args.replays * LINKS if variant != "xla" and rows <= REPLAYED_ROWS else 0
        if row["replays"]:
            row["replayed_bits"] = check_replays(run, mesh, rows, columns, dtype, args.replays)
        each = [chain_us(run, mesh, rows, columns, dtype, length) for length in CHAINS]
        rest = (each[1] * CHAINS[1] - each[0] * CHAINS[0]) / (CHAINS[1] - CHAINS[0])
        yield row | {"us": round(each[0], 2), "us_longer_chain": round(rest, 2)}


def table(args: argparse.Namespace, argv: list[str]) -> Iterator[dict[str, Any]]:
    """Yields all rows, each backend's from a process of its own, with an "error" where it fails or takes too long."""
    for variant in args.backends:
        command = [sys.executable, "-m", "pallas_kernels.all_reduce.bench", *argv, "--only", variant]
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as log:
            with subprocess.Popen(command, stdout=out, stderr=log) as process:
                try:
                    failed = f"ended with {code}" if (code := process.wait(args.limit)) else ""
                except subprocess.TimeoutExpired:
                    process.kill()
                    failed = f"took more than {args.limit} s"
            out.seek(0), log.seek(0)
            yield from (json.loads(line) for line in out if line.startswith("{"))
            if failed:
                lines = [line.strip() for line in log if line.strip()]
                print(*lines[-12:], sep="\n", file=sys.stderr, flush=True)
                why = next((line for line in reversed(lines) if "Error" in line), "")
                yield {"backend": variant, "error": f"{failed}: {why[:300]}"}


def bars(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        if row["backend"] == "peer" and "error" not in row and row["ranks"] == 2 and row["M"] * row["E"] <= SMALL:
            name = f"{row['ranks']} ranks, {row['M']} x {row['E']} {row['dtype']}"
            yield bar(name, row["us_longer_chain"], "us", SMALL_US, most=True)


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--devices", type=positive, default=2, help="ranks")
    parser.add_argument(
        "--rows", type=positive, nargs="+", default=[1, 16, 64, 128, 512, 4096], help="of what is summed"
    )
    parser.add_argument("--columns", type=positive, default=4096, help="of what is summed")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of what is summed")
    parser.add_argument("--replays", type=positive, default=1000, help="steps that are replayed")
    parser.add_argument("--backends", nargs="+", choices=VARIANTS, default=VARIANTS, help="one after another")
    parser.add_argument("--limit", type=positive_number, default=60, help="seconds for a backend")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # a process beside this one measures
    if args.only is None:
        given = sys.argv[1:] if argv is None else argv
        return record("all_reduce", args, argv, table(args, given), bars)
    for row in measure(args.only, args):
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
