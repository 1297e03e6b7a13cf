"""Measures weight_only_matmul on the device, next to XLA's bf16 matmul of the same shape.

    python -m pallas_kernels.weight_only_matmul.bench [--json] [--rows 1 16] [--formats nf4 w8a16:1,16] [--tune nf4]
        [--peers mosaic xla triton]

Each figure is of several layers in one jit, with weights of their own, more than L2 holds. `bf16` is XLA's matmul of
weights that were never quantized. `xla` decodes the quantized ones and multiplies. `mosaic` is the kernel, for the
formats after --tune in every candidate configuration. A bar is held against the fastest of its cell. Bytes are those of
the weight as stored, its scales and zeros included, of x and of the result. The ceiling is the rate of a large copy in
the same run.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.bench.bars import bar
from pallas_kernels.bench.command import make_parser, record
from pallas_kernels.bench.measure import copy_bandwidth, device_us
from pallas_kernels.bench.numbers import positive
from pallas_kernels.formats.block_floats import encode_e8m0
from pallas_kernels.formats.quantized_weights import QuantizedWeight
from pallas_kernels.formats.weight_formats import parse_weight_format
from pallas_kernels.matmul import matmul
from pallas_kernels.weight_only_matmul import mosaic_sm90, weight_only_matmul
from pallas_kernels.weight_only_matmul.cases import BENCH_FORMATS, BENCH_ROWS, BENCH_SHAPES
from pallas_kernels.weight_only_matmul.config import AnyConfig, candidates

ROTATED = 160_000_000  # bytes of weights in one jit, at least
LARGE = 45_000_000  # K N of the bars
# Speed over bf16's, at least: (format, large, rows) -> ratio.
BARS = {
    ("w4a16-g128", True, 1): 2.8, ("w4a16-g128", True, 16): 2.3, ("w4a16-g128", True, 64): 1.3,
    ("w4a16-g128", True, 512): 1 / 1.1, ("w4a16-g128", True, 1024): 1 / 1.1, ("w4a16-g128", True, 4096): 1 / 1.1,
    ("w4a16-g128", False, 1): 2.0, ("nf4", True, 1): 2.4,
}  # fmt: skip
DECODED = 512  # rows from which decoding once may pay
PEERS = ("mosaic", "xla")


def random_weight(key: jax.Array, name: str, n: int, k: int) -> QuantizedWeight:
    """Returns codes of any kind, and scales such that the product of standard normal inputs is near one."""
    fmt = parse_weight_format(name)
    codes, scales, zeros = jax.random.split(key, 3)
    if fmt.packed:
        values = jax.random.bits(codes, (n, k // 2), jnp.uint8)
    elif fmt.codes == "int8":
        values = jax.random.randint(codes, (n, k), -127, 128, jnp.int8)
    else:
        values = jax.random.normal(codes, (n, k)).astype(jnp.float8_e4m3fn)
    shape = (n,) if fmt.group is None else (k // fmt.group, n)
    size = {"int4": 4.6, "int8": 73, "nf4": 0.6, "fp8": 1, "e2m1": 2.9}[fmt.codes] * k**0.5
    drawn = jax.random.uniform(scales, shape, jnp.float32, 0.5, 1.5) / size
    return QuantizedWeight(
        values=values,
        scales=encode_e8m0(drawn) if fmt.scale_codes == "e8m0" else drawn.astype(fmt.scale_dtype),
        zeros=jax.random.randint(zeros, shape, -4, 4, jnp.int8) if fmt.zero_point else None,
        scale_steps=None,
        columns=None,
        shape=(n, k),
        format=fmt,
    )


def weights_for(name: str, n: int, k: int) -> list[Any]:
    """Returns as many weights as the caches don't hold; bf16 ones for the name "bf16"."""
    if name == "bf16":
        make = jax.jit(lambda key: jax.random.normal(key, (n, k), jnp.bfloat16) * jnp.bfloat16(k**-0.5))
    else:
        make = jax.jit(partial(random_weight, name=name, n=n, k=k))
    first = make(jax.random.key(0))
    count = max(3, -(-ROTATED // sum(leaf.nbytes for leaf in jax.tree.leaves(first))))
    return [first, *(make(jax.random.key(i)) for i in range(1, count))]


def variants(
    name: str, m: int, n: int, k: int, tune: bool, peers: Sequence[str] = PEERS
) -> list[tuple[str, AnyConfig | None]]:
    """Yields backends, and configurations of the kernel, to be measured."""
    if name == "bf16":
        return [("bf16", None)]
    configs = candidates(m, n, k, parse_weight_format(name))
    made: dict[str, list[tuple[str, AnyConfig | None]]] = {
        "mosaic": [("mosaic", config) for config in (configs if tune else configs[:1])],
        "xla": [("xla", None)] if m >= DECODED else [],
        "triton": [("triton", None)],
    }
    return [variant for peer in peers for variant in made[peer]]


def compiled(
    weights: list[Any], m: int, k: int, backend: str, config: AnyConfig | None
) -> Callable[[], list[jax.Array]]:
    x = jax.random.normal(jax.random.key(1), (m, k), jnp.bfloat16)

    def multiply(x: jax.Array, w: Any) -> jax.Array:
        if backend == "bf16":
            return matmul(x, w, backend="xla")
        if config is not None:
            return mosaic_sm90.weight_only_matmul(x, w, None, None, x.dtype, config=config)
        return weight_only_matmul(x, w, backend=backend)

    run = jax.jit(lambda x, weights: [multiply(x, w) for w in weights]).lower(x, weights).compile()
    return lambda: run(x, weights)


def measure_shape(
    n: int, k: int, rows: dict[str, list[int]], tuned: list[str], peers: list[str], pool: ThreadPoolExecutor
) -> Iterator[dict[str, Any]]:
    """Yields rows of one shape, of each format's numbers of rows of x; one that fails says why."""
    weights = {name: weights_for(name, n, k) for name in rows}
    cells = [
        (name, m, *variant)
        for name in rows
        for m in rows[name]
        for variant in variants(name, m, n, k, tune=name in tuned, peers=peers)
    ]
    runs = [pool.submit(compiled, weights[name], m, k, backend, config) for name, m, backend, config in cells]
    wait(runs)  # compiling may run things on the device
    for (name, m, backend, config), run in zip(cells, runs):
        row: dict[str, Any] = {"kernel": "weight_only_matmul", "peer": backend, "scheme": name, "M": m, "K": k, "N": n}
        if config is not None:
            row["config"] = describe(config)
        try:
            us = device_us(run.result(), repeats=3) / len(weights[name])
            moved = sum(leaf.nbytes for leaf in jax.tree.leaves(weights[name][0])) + 2 * m * (n + k)
            row |= {"us": round(us, 2), "gb_s": round(moved / us / 1e3), "tflop_s": round(2 * m * n * k / us / 1e6, 1)}
        except Exception as error:  # costs its own row only
            row |= {"error": str(error).splitlines()[0][:200]}
        yield row


def describe(config: AnyConfig) -> str:
    """Returns the kernel's kind of configuration with what differs from the defaults."""
    changed = (f"{name}={value}" for name, value in asdict(config).items() if value != getattr(type(config), name))
    return f"{type(config).__name__}({', '.join(changed)})"


def table(rows: dict[str, list[int]], tuned: list[str], peers: list[str]) -> Iterator[dict[str, Any]]:
    """Yields all rows, after a copy's."""
    yield {"kernel": "copy", "gb_s": round(copy_bandwidth() / 1e9)}
    with ThreadPoolExecutor(8) as pool:
        for k, n in BENCH_SHAPES:
            yield from measure_shape(n, k, rows, tuned, peers, pool)


def bars(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Adds each row's share of the run's bandwidth and its speed over bf16, and yields the bars."""
    ceiling = max((row["gb_s"] for row in rows if "gb_s" in row), default=0.0)
    plain = {(row["M"], row["K"], row["N"]): row["us"] for row in rows if row.get("peer") == "bf16" and "us" in row}
    fastest: dict[tuple[Any, ...], float] = {}
    for row in rows:
        if "us" not in row:
            continue
        row["fraction"] = round(row["gb_s"] / ceiling, 3)
        shape = row["M"], row["K"], row["N"]
        if row["peer"] != "bf16" and shape in plain:
            row["over_bf16"] = round(plain[shape] / row["us"], 3)
            cell = row["scheme"], *shape
            fastest[cell] = max(fastest.get(cell, 0.0), row["over_bf16"])
    for (scheme, m, k, n), value in fastest.items():
        least = BARS.get((scheme, k * n >= LARGE, m))
        if least is not None:
            yield bar(f"{scheme} (M, K, N)=({m}, {k}, {n}): speed over bf16's", value, "times", round(least, 3))


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", nargs="+", type=positive, default=list(BENCH_ROWS), help="of x")
    parser.add_argument("--formats", nargs="+", default=list(BENCH_FORMATS), help="each with rows of its own: NAME:M,M")
    parser.add_argument("--tune", nargs="+", default=[], help="formats whose every candidate configuration is measured")
    parser.add_argument("--peers", nargs="+", choices=(*PEERS, "triton"), default=list(PEERS), help="beside bf16")
    args = parser.parse_args(argv)
    rows = {"bf16": args.rows}
    for name, _, own in (option.partition(":") for option in args.formats):
        parse_weight_format(name)
        rows[name] = [int(m) for m in own.split(",")] if own else args.rows
    return record("weight_only_matmul", args, argv, table(rows, args.tune, args.peers), bars)


if __name__ == "__main__":
    sys.exit(main())
