"""How long decode_attention takes on the device, next to cuDNN on contiguous keys and values, and to XLA.

    python -m pallas_kernels.decode_attention.bench [--json] [--formats bf16 int8-g8] [--results experiments/results]

Each figure is of several layers with pages of their own, so that no cache holds them, in one jit, each layer's queries
being the results of the one before. Bytes are those of K and V, scales included. The ceiling is the best rate of the
run, cuDNN's included.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench_command import make_parser, record
from pallas_kernels.cases import random_tables
from pallas_kernels.decode_attention import decode_attention, make_work
from pallas_kernels.decode_attention.cases import BENCH_CASES, SKEWED, UNIFORM, Case
from pallas_kernels.kv_pages import KVPages, allocate, bytes_per_token, parse_format
from pallas_kernels.measure import copy_bandwidth, device_us

# FlashInfer's microseconds in bf16, pages of 16, on an H200: (H, K, rows, length).
PEERS = {
    (32, 32, 1, 1024): 9.3, (32, 32, 1, 16384): 69.1, (32, 32, 16, 1024): 65.6, (32, 32, 64, 1024): 249.8,
    (32, 32, 128, 2048): 966.0, (32, 32, 256, 512): 488.6, (32, 8, 1, 1024): 8.9, (32, 8, 1, 16384): 26.6,
    (32, 8, 16, 1024): 22.6, (32, 8, 64, 1024): 73.3, (32, 8, 128, 2048): 256.4, (32, 8, 256, 512): 142.0,
}  # fmt: skip
SLACK = {"fp8": 1.15, "int8": 1.15, "int4": 1.4}  # time over bf16's, at most this times the ratio of bytes


def moved_bytes(case: Case) -> int:
    formats = [parse_format(name, case.head_dim) for name in (case.k_format, case.v_format)]
    return sum(case.lengths) * bytes_per_token(case.head_dim, case.heads[1], *formats)


def layers_for(case: Case) -> int:
    """Layers that read more than caches hold, within reason."""
    return max(2, min(32, -(-(256 << 20) // moved_bytes(case))))


def random_pages(key: jax.Array, num_pages: int, case: Case) -> KVPages:
    """Pages of random bits: any integers, and floats of both signs below 2."""
    formats = (parse_format(name, case.head_dim) for name in (case.k_format, case.v_format))
    types = jax.eval_shape(lambda: allocate(num_pages, case.heads[1], case.page_size, case.head_dim, *formats))
    leaves, tree = jax.tree.flatten(types)

    def fill(key: jax.Array, leaf: Any) -> jax.Array:
        if leaf.dtype == jnp.uint8:
            return jax.random.bits(key, leaf.shape, jnp.uint8) & jnp.uint8(0xBF)  # e4m3 below 2: no NaN
        if leaf.dtype == jnp.int8:
            return jax.random.randint(key, leaf.shape, -127, 128, jnp.int8)
        return jax.random.uniform(key, leaf.shape, leaf.dtype, -2, 2)

    return jax.tree.unflatten(tree, [fill(k, leaf) for k, leaf in zip(jax.random.split(key, len(leaves)), leaves)])


def paged(case: Case, backend: str) -> float:
    """Microseconds of one layer of decode_attention."""
    layers, rows = layers_for(case), len(case.lengths)
    num_pages = sum(-(-length // case.page_size) for length in case.lengths)
    keys = jax.random.split(jax.random.key(0), layers + 1)
    make = jax.jit(partial(random_pages, num_pages=num_pages, case=case))
    cache = [make(key) for key in keys[:layers]]
    shuffled = (random_tables(np.random.default_rng(i), num_pages, case.lengths, case.page_size) for i in range(layers))
    tables = [jnp.asarray(table) for table in shuffled]
    q = jax.random.normal(keys[-1], (rows, case.heads[0], case.head_dim), jnp.dtype(case.dtype))
    lengths = jnp.asarray(case.lengths, jnp.int32)
    work = make_work(lengths, *case.heads, case.head_dim)  # once a step: not in a layer's time

    @jax.jit
    def step(q: jax.Array, cache: list[KVPages], tables: list[jax.Array], lengths: jax.Array, work: Any) -> jax.Array:
        for pages, table in zip(cache, tables):
            q = decode_attention(q, pages, table, lengths, scale=case.scale, work=work, backend=backend)
        return q

    return device_us(lambda: step(q, cache, tables, lengths, work)) / layers


def cudnn(case: Case) -> float:
    """Microseconds of one layer of cuDNN's attention over contiguous K and V of equal lengths."""
    layers, (heads, kv_heads), dim = layers_for(case), case.heads, case.head_dim
    rows, length, dtype = len(case.lengths), case.lengths[0], jnp.dtype(case.dtype)
    keys = jax.random.split(jax.random.key(0), 2 * layers + 1)
    make = jax.jit(lambda key: jax.random.normal(key, (rows, length, kv_heads, dim), dtype))
    cache = [(make(k), make(v)) for k, v in zip(keys[:layers], keys[layers:])]
    q = jax.random.normal(keys[-1], (rows, 1, heads, dim), dtype)

    @jax.jit
    def step(q: jax.Array, cache: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
        for k, v in cache:
            q = jax.nn.dot_product_attention(q, k, v, scale=case.scale, implementation="cudnn")
        return q

    return device_us(lambda: step(q, cache)) / layers


def variants(case: Case, peers: bool) -> dict[str, Callable[[Case], float]]:
    runs: dict[str, Callable[[Case], float]] = {"mosaic": partial(paged, backend="mosaic")}
    if peers and case.k_format == "bf16" and len(set(case.lengths)) == 1:
        runs |= {"cudnn, contiguous": cudnn, "xla": partial(paged, backend="xla")}
    return runs


def table(formats: list[str], peers: bool) -> Iterator[dict[str, Any]]:
    """One row a case and variant; one that fails says why."""
    yield {"kernel": "copy", "gb_s": round(copy_bandwidth() / 1e9)}
    names = {case: name for name, case in SKEWED.items()}
    for case in (case for case in (*BENCH_CASES, UNIFORM, *names) if case.k_format in formats):
        for name, run in variants(case, peers).items():
            length = names.get(case, case.lengths[0])
            row: dict[str, Any] = {
                "kernel": "decode_attention", "peer": name, "R": len(case.lengths), "length": length,
                "H": case.heads[0], "K": case.heads[1], "D": case.head_dim, "P": case.page_size, "dtype": case.dtype,
                "kv": case.k_format,
            }  # fmt: skip
            try:
                us, moved = run(case), moved_bytes(case)
                row |= {"us": round(us, 2), "gb_s": round(moved / us / 1e3)}
            except Exception as error:  # a peer that is missing costs its own rows only
                row |= {"error": str(error).splitlines()[0][:200]}
            yield row


def bars(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """FlashInfer's time in bf16; for other formats bf16's time by the ratio of bytes and the slack; for skewed lengths
    uniform ones' time and 15 %."""
    own = {
        (row["H"], row["K"], row["R"], row["length"], row["kv"]): row["us"]
        for row in rows
        if row.get("peer") == "mosaic" and "us" in row
    }
    for (heads, kv_heads, count, length, kv), us in own.items():
        bar = PEERS.get((heads, kv_heads, count, length)) if kv == "bf16" else None
        bf16 = own.get((heads, kv_heads, count, length, "bf16"))
        if kv != "bf16" and bf16 is not None:
            stored, plain = (
                bytes_per_token(128, kv_heads, fmt, fmt) for fmt in (parse_format(x, 128) for x in (kv, "bf16"))
            )
            bar = round(bf16 * stored / plain * SLACK[kv.split("-")[0]], 2)
        uniform = own.get((heads, kv_heads, len(UNIFORM.lengths), UNIFORM.lengths[0], kv))
        if isinstance(length, str) and uniform is not None:
            bar = round(1.15 * uniform, 2)
        if bar is not None:
            name = f"(R, length)=({count}, {length}) H/K={heads}/{kv_heads} {kv}"
            yield {"name": name, "value": us, "unit": "us", "bar": bar, "met": us <= bar}


def summarize(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Adds each row's share of the run's best bandwidth, and yields the bars."""
    ceiling = max((row["gb_s"] for row in rows if "gb_s" in row), default=0.0)
    for row in rows:
        if "us" in row:
            row["fraction"] = round(row["gb_s"] / ceiling, 3)
    return bars(rows)


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--formats", nargs="+", default=sorted({case.k_format for case in BENCH_CASES}))
    parser.add_argument("--mosaic-only", action="store_true", help="leave out cuDNN and XLA")
    args = parser.parse_args(argv)
    return record("decode_attention", args, argv, table(args.formats, not args.mosaic_only), summarize)


if __name__ == "__main__":
    sys.exit(main())
