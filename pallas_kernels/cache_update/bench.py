"""Measures cache_update on the device, next to XLA's scatter and to slices of the fused projection.

    python -m pallas_kernels.cache_update.bench [--json] [--rows 1 128 8192] [--record]

Each figure is over several layers with pages of their own, so that no cache holds them, in one jit. Bytes are what must
move: Q in and out, K and V in, and what is stored of them. `fused` reads the projection's output where it is. `sliced`
gets q, k, v as slices of it. `xla` is the plain backend on the same slices.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.bench.bars import bar
from pallas_kernels.bench.command import add_rows, make_parser, record
from pallas_kernels.bench.measure import copy_bandwidth, device_us
from pallas_kernels.cache_update import cache_update, cache_update_fused, mosaic_sm90
from pallas_kernels.cache_update.cases import BENCH_CASES, Case
from pallas_kernels.cache_update.config import Config
from pallas_kernels.formats.kv_formats import bytes_per_token, parse_format
from pallas_kernels.formats.kv_pages import KVPages, allocate

BARS = {1: ("us", 3.0), 8192: ("fraction", 0.8)}  # of the fused entry: bound by the launch, by memory


def sliced(qkv: jax.Array, *rest: Any, heads: tuple[int, int], dim: int, backend: str) -> tuple[jax.Array, KVPages]:
    q, k, v = jnp.split(qkv.reshape(len(qkv), -1, dim), (heads[0], sum(heads)), axis=1)
    return cache_update(q, k, v, *rest, backend=backend)


def configured(
    qkv: jax.Array, *rest: Any, heads: tuple[int, int], dim: int, config: Config
) -> tuple[jax.Array, KVPages]:
    split = qkv.reshape(len(qkv), -1, dim)
    options: dict[str, Any] = {"first": (0, heads[0], sum(heads)), "num_heads": heads[0], "config": config}
    return mosaic_sm90.cache_update(split, split, split, *rest, **options)


def moved_bytes(case: Case) -> int:
    formats = [parse_format(name, case.head_dim) for name in (case.k_format, case.v_format)]
    loaded = (2 * case.heads[0] + 2 * case.heads[1]) * case.head_dim * jnp.dtype(case.dtype).itemsize
    return case.rows * (loaded + 4 * case.head_dim + bytes_per_token(case.head_dim, case.heads[1], *formats))


def layers_for(case: Case) -> int:
    """Returns how many layers move more than caches hold, within reason."""
    return max(2, min(16, -(-(256 << 20) // moved_bytes(case))))


def measure(case: Case, update: Callable[..., tuple[jax.Array, KVPages]]) -> float:
    """Returns the microseconds of one layer's update(qkv, cos, sin, pages, page, offset)."""
    layers, dim = layers_for(case), case.head_dim
    formats = [parse_format(name, dim) for name in (case.k_format, case.v_format)]
    keys = jax.random.split(jax.random.key(0), layers + 2)
    width = (case.heads[0] + 2 * case.heads[1]) * dim
    qkvs = [jax.random.normal(key, (case.rows, width), jnp.dtype(case.dtype)) for key in keys[2:]]
    angles = jax.random.uniform(keys[0], (case.rows, dim // 2), jnp.float32, 0, 6.28)
    order, row = jax.random.permutation(keys[1], case.num_pages), jnp.arange(case.rows)
    prompt = case.rows > case.num_pages // 8  # consecutive slots; below, each row is a sequence's next token
    page = order[row // case.page_size if prompt else row].astype(jnp.int32)
    where = page, ((row if prompt else 7 * row) % case.page_size).astype(jnp.int32)
    cache = [allocate(case.num_pages, case.heads[1], case.page_size, dim, *formats) for _ in range(layers)]

    def step(cache: list[KVPages], qkvs: list[jax.Array], *waves: jax.Array) -> tuple[list[jax.Array], list[KVPages]]:
        layer = jax.jit(update)  # one lowering for all layers
        outs = [layer(qkv, *waves[:2], pages, *waves[2:]) for qkv, pages in zip(qkvs, cache)]
        return [q for q, _ in outs], [pages for _, pages in outs]

    compiled = jax.jit(step, donate_argnums=0)
    waves = jnp.cos(angles), jnp.sin(angles)
    state = {"cache": cache}

    def run() -> list[jax.Array]:
        out, state["cache"] = compiled(state["cache"], qkvs, *waves, *where)
        return out

    return device_us(run) / layers


def variants(case: Case) -> dict[str, Callable[..., tuple[jax.Array, KVPages]]]:
    shape: dict[str, Any] = {"heads": case.heads, "dim": case.head_dim}
    return {
        "fused": partial(cache_update_fused, backend="mosaic"),
        "sliced": partial(sliced, **shape, backend="mosaic"),
        "xla": partial(sliced, **shape, backend="xla"),
    }


def table(rows: list[int], peers: bool) -> Iterator[dict[str, Any]]:
    """Yields one row a case and variant, the run's ceiling first."""
    ceiling = copy_bandwidth()
    yield {"kernel": "copy", "gb_s": round(ceiling / 1e9)}
    for case in (case for case in BENCH_CASES if case.rows in rows):
        for name, update in variants(case).items():
            if name != "fused" and not peers:
                continue
            us, moved = measure(case, update), moved_bytes(case)
            yield {
                "kernel": "cache_update", "peer": name, "T": case.rows, "H": case.heads[0], "K": case.heads[1],
                "D": case.head_dim, "P": case.page_size, "dtype": case.dtype, "kv": case.k_format, "us": round(us, 2),
                "gb_s": round(moved / us / 1e3), "fraction": round(moved / us * 1e6 / ceiling, 3),
            }  # fmt: skip


def bars(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        if row.get("peer") == "fused" and row["T"] in BARS:
            unit, limit = BARS[row["T"]]
            name = f"T={row['T']} H/K={row['H']}/{row['K']} {row['kv']}"
            yield bar(name, row[unit], unit, limit, most=unit == "us")


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    add_rows(parser, BENCH_CASES)
    parser.add_argument("--fused-only", action="store_true", help="leave out the slices and XLA")
    args = parser.parse_args(argv)
    return record("cache_update", args, argv, table(args.rows, not args.fused_only), bars)


if __name__ == "__main__":
    sys.exit(main())
