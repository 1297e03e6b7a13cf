"""How long decode_attention takes on the device, next to cuDNN on contiguous keys and values, and to XLA.

    python -m pallas_kernels.decode_attention.bench [--json] [--parts bf16 formats skewed segments] [--heads 32/32 32/8]
        [--triton] [--triton-split 256 512] [--triton-warps 2 4] [--triton-stages 2 5]
        [--formats bf16 fp8 int8-g8 int8-g128 int4-g32 | int4-g128-zp int4-g32-h ..] [--consecutive]
        [--peers DIR] [--cells 128x136 64x1024] [--computing 2] [--per-sm 1] [--split TOKENS] [--stages 8]

Each figure is of several layers with pages of their own, so that no cache holds them, in one jit, each layer's queries
being the results of the one before; all are compiled ahead, side by side. Bytes are those of K and V, scales included.
The ceiling is the best rate of the run, cuDNN's and a copy's included. FlashInfer runs first, all its variants, where
--peers names the folder of its script (pallas_kernels/bench/peers.py).
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench import peers
from pallas_kernels.bench.bars import bar
from pallas_kernels.bench.cases import random_tables
from pallas_kernels.bench.command import add_triton, make_parser, record, triton_changes, triton_name
from pallas_kernels.bench.measure import copy_bandwidth, device_us
from pallas_kernels.decode_attention import decode_attention, make_work
from pallas_kernels.decode_attention.cases import (
    BENCH_CASES,
    SEGMENT_CASES,
    SHORT_CELLS,
    SKEWED,
    UNIFORM,
    VARIANT_CASES,
    VARIANTS,
    Case,
)
from pallas_kernels.decode_attention.config import TritonConfig, choose_config, triton_config
from pallas_kernels.kv_pages import KVPages, allocate, bytes_per_token, parse_format

SEGMENT_BARS = {(32, 32): 4, (32, 8): 2}  # H, K: rows of a segment that may take 5 % longer than one
TRITON = 1 / 0.85  # of mosaic's time, at (64, 1024) and above: the most that backend triton may take
ZEROS = 1.25  # time of formats with a zero a token and head, at most this times their bytes at the run's best rate
SLACK = {"fp8": 1.15, "int8": 1.15, "int4": 1.4}  # time over bf16's, at most this times the ratio of bytes


def moved_bytes(case: Case) -> int:
    formats = [parse_format(name, case.head_dim) for name in (case.k_format, case.v_format)]
    return sum(case.lengths) * bytes_per_token(case.head_dim, case.heads[1], *formats)


def layers_for(case: Case) -> int:
    """Layers that read more than caches hold, within reason."""
    return max(2, min(32, -(-(256 << 20) // moved_bytes(case))))


@partial(jax.jit, static_argnums=(1, 2))
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


@partial(jax.jit, static_argnums=(1, 2))
def random_normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.normal(key, shape, dtype)


def random_key() -> jax.Array:
    """A key of a generator that compiles in no time."""
    return jax.random.key(0, impl="rbg")


@dataclass(frozen=True)
class Run:
    """attend(*make(key)) is what is timed: the layers of a case. Each layer's arrays are made by a call of their own:
    compiled together they would take as long as all kernels."""

    make: Callable[[jax.Array], tuple[Any, ...]]
    attend: Callable[..., jax.Array]
    layers: int

    def compiled(self) -> "Run":
        attend = jax.jit(self.attend).lower(*jax.eval_shape(self.make, random_key())).compile()
        return Run(self.make, attend, self.layers)

    def microseconds(self) -> float:
        """Microseconds of one layer."""
        return device_us(partial(self.attend, *self.make(random_key()))) / self.layers


def consecutive_tables(lengths: tuple[int, ...], page_size: int) -> np.ndarray:
    """Page tables i32[len(lengths), M] in which each sequence's pages, and the sequences, follow one another."""
    needed = [-(-length // page_size) for length in lengths]
    ends = np.cumsum(needed)
    numbers = (ends - needed)[:, None] + np.arange(max(needed))
    return np.where(numbers < ends[:, None], numbers, -7).astype(np.int32)


def paged(
    case: Case, backend: str, consecutive: bool = False, tuned: dict[str, int] | None = None, **changes: Any
) -> Run:
    """decode_attention over shuffled pages, or consecutive ones, with `changes` to its configuration, or those in
    `tuned` to that of backend triton; the work list, of the backend that has one, is made once, as in
    a step."""
    layers, rows = layers_for(case), len(case.lengths)
    num_pages = sum(-(-length // case.page_size) for length in case.lengths)
    generators = [np.random.default_rng(i) for i in range(layers)]
    tables = [random_tables(rng, num_pages, case.lengths, case.page_size) for rng in generators]
    if consecutive:
        tables = [consecutive_tables(case.lengths, case.page_size)] * layers

    def make(key: jax.Array) -> tuple[Any, ...]:
        keys = jax.random.split(key, layers + 1)
        q = random_normal(keys[0], (rows * case.width, case.heads[0], case.head_dim), jnp.dtype(case.dtype))
        lengths = jnp.asarray(case.lengths, jnp.int32)
        narrow = jax.eval_shape(partial(random_pages, random_key(), num_pages, case)).narrow
        queries = case.heads[0] // case.heads[1] * case.width
        config = replace(choose_config(case.head_dim, queries, case.heads[1], narrow), **changes)
        listed = jax.jit(make_work, static_argnums=(1, 2, 3), static_argnames=("config", "width"))
        options: dict[str, Any] = {"width": case.width, "config": config}
        work = listed(lengths, *case.heads, case.head_dim, **options) if backend == "mosaic" else None
        cache = [random_pages(key, num_pages, case) for key in keys[1:]]
        return q, cache, [jnp.asarray(table) for table in tables], lengths, work

    def attend(q: jax.Array, cache: list[KVPages], tables: list[jax.Array], lengths: jax.Array, work: Any) -> jax.Array:
        run = partial(decode_attention, scale=case.scale, work=work, backend=backend)
        if tuned is not None:
            from pallas_kernels.decode_attention import triton

            config = triton_config(case.head_dim, case.heads[0] // case.heads[1] * case.width, cache[0])
            run = partial(triton.decode_attention, scale=case.scale, window=None, config=replace(config, **tuned))
        for pages, table in zip(cache, tables):
            q = run(q, pages, table, lengths)
        return q

    return Run(make, attend, layers)


def cudnn(case: Case) -> Run:
    """cuDNN's attention over contiguous K and V of equal lengths."""
    layers, dtype = layers_for(case), jnp.dtype(case.dtype)
    shape = (len(case.lengths), case.lengths[0], case.heads[1], case.head_dim)

    def make(key: jax.Array) -> tuple[Any, ...]:
        keys = jax.random.split(key, 2 * layers + 1)
        q = random_normal(keys[0], (shape[0], 1, case.heads[0], case.head_dim), dtype)
        arrays = [random_normal(each, shape, dtype) for each in keys[1:]]
        return q, list(zip(arrays[::2], arrays[1::2]))

    def attend(q: jax.Array, cache: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
        for k, v in cache:
            q = jax.nn.dot_product_attention(q, k, v, scale=case.scale, implementation="cudnn")
        return q

    return Run(make, attend, layers)


def runs(
    parts: list[str],
    heads: list[str],
    formats: list[str],
    cells: list[tuple[int, int]],
    triton: list[dict[str, int]],
    **changes: Any,
) -> Iterator[tuple[Case, str, str | int, Run]]:
    """(case, who, length, run), what decides first: this kernel, then Triton's with each of these changes, then cuDNN,
    then XLA. `cells` (rows, length) are asked for besides what the parts have."""
    cases: dict[Case, str | int] = {}
    for one in {(case.heads, case.k_format): case for case in (*BENCH_CASES, *VARIANT_CASES)}.values():
        cases |= {replace(one, lengths=(length,) * rows): length for rows, length in cells}
    if "bf16" in parts:
        cases |= {case: case.lengths[0] for case in BENCH_CASES if case.k_format == "bf16"}
    if "formats" in parts:
        sizes = {case: (len(case.lengths), case.lengths[0]) for case in (*BENCH_CASES, *VARIANT_CASES)}
        cases |= {case: size[1] for case, size in sizes.items() if size in SHORT_CELLS}
    if "skewed" in parts:
        cases |= {UNIFORM: UNIFORM.lengths[0]} | {case: name for name, case in SKEWED.items()}
    if "segments" in parts:
        cases |= {case: case.lengths[0] for case in SEGMENT_CASES}
    asked = [case for case in cases if "{}/{}".format(*case.heads) in heads and case.k_format in formats]
    cases = {case: cases[case] for case in asked}
    for case, length in cases.items():
        yield case, "mosaic", length, paged(case, "mosaic", **changes)
    for (case, length), tuned in product(cases.items(), triton):
        yield case, triton_name(tuned), length, paged(case, "triton", tuned=tuned)
    if "bf16" in parts:
        equal = {case: x for case, x in cases.items() if case.k_format == "bf16" and case in BENCH_CASES}
        for case, length in equal.items():
            yield case, "cudnn, contiguous", length, cudnn(case)
        for case, length in equal.items():
            if (len(case.lengths), length) == SHORT_CELLS[0]:
                yield case, "xla", length, paged(case, "xla")


def table(
    parts: list[str],
    heads: list[str],
    formats: list[str],
    cells: list[tuple[int, int]],
    triton: list[dict[str, int]],
    **changes: Any,
) -> Iterator[dict[str, Any]]:
    """One row a run; one that fails says why."""
    with ThreadPoolExecutor(8) as pool:
        found: list[tuple[Case, str, str | int, Future[Run]]] = [
            (case, who, length, pool.submit(run.compiled))
            for case, who, length, run in runs(parts, heads, formats, cells, triton, **changes)
        ]
    yield {"kernel": "copy", "gb_s": round(copy_bandwidth() / 1e9)}
    for case, who, length, future in found:
        row: dict[str, Any] = {
            "kernel": "decode_attention", "peer": who, "R": len(case.lengths), "Q": case.width,
            "length": length, "H": case.heads[0], "K": case.heads[1], "D": case.head_dim, "P": case.page_size,
            "dtype": case.dtype, "kv": case.k_format,
        }  # fmt: skip
        try:
            us, moved = future.result().microseconds(), moved_bytes(case)
            row |= {"us": round(us, 2), "gb_s": round(moved / us / 1e3)}
        except Exception as error:  # a peer that is missing costs its own rows only
            row |= {"error": str(error).splitlines()[0][:200]}
        yield row


def bars(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """In bf16 the time of FlashInfer's fastest variant, where it ran; for other formats bf16's time by the ratio of
    bytes and the slack; for skewed lengths uniform ones' time and 15 %; for segments one row's time and 5 %; for
    backend triton mosaic's."""
    found, triton = (
        {
            (row["H"], row["K"], row["R"], row["length"], row["kv"], row.get("Q", 1)): row["us"]
            for row in rows
            if row.get("peer") == who and "us" in row
        }
        for who in ("mosaic", "triton")
    )
    flashinfer = peers.best(rows, peers.FLASHINFER, ("H", "K", "R", "length"))
    own = {(*case,): us for (*case, width), us in found.items() if width == 1}
    for (heads, kv_heads, count, length, kv), us in own.items():
        limit = flashinfer.get((heads, kv_heads, count, length)) if kv == "bf16" else None
        bf16 = own.get((heads, kv_heads, count, length, "bf16"))
        if kv != "bf16" and bf16 is not None:
            stored, plain = (
                bytes_per_token(128, kv_heads, fmt, fmt) for fmt in (parse_format(x, 128) for x in (kv, "bf16"))
            )
            limit = round(bf16 * stored / plain * SLACK[kv.split("-")[0]], 2)
        if kv.endswith("g128-zp"):
            fmt = parse_format(kv, 128)
            moved = count * length * bytes_per_token(128, kv_heads, fmt, fmt)
            limit = round(ZEROS * moved / _ceiling(rows) / 1e3, 2)
        uniform = own.get((heads, kv_heads, len(UNIFORM.lengths), UNIFORM.lengths[0], kv))
        if isinstance(length, str) and uniform is not None:
            limit = round(1.15 * uniform, 2)
        if limit is not None:
            yield bar(f"(R, length)=({count}, {length}) H/K={heads}/{kv_heads} {kv}", us, "us", limit, most=True)
    for (heads, kv_heads, count, length, kv, width), us in found.items():
        one = own.get((heads, kv_heads, count, length, kv))
        if one is not None and SEGMENT_BARS.get((heads, kv_heads)) == width:
            name = f"(R, length)=({count}, {length}) H/K={heads}/{kv_heads} {kv} Q={width}"
            yield bar(name, us, "us", round(1.05 * one, 2), most=True)
    for (heads, kv_heads, count, length, kv, width), us in triton.items():
        mosaic = own.get((heads, kv_heads, count, length, kv))
        if mosaic is not None and isinstance(length, int) and count * length >= 64 * 1024 and width == 1:
            limit = round(mosaic * TRITON, 2)
            yield bar(f"triton (R, length)=({count}, {length}) H/K={heads}/{kv_heads} {kv}", us, "us", limit, most=True)


def summarize(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Adds each row's share of the run's best bandwidth, and yields the bars."""
    ceiling = _ceiling(rows)
    for row in rows:
        if "us" in row:
            row["fraction"] = round(row["gb_s"] / ceiling, 3)
    return bars(rows)


def _ceiling(rows: list[dict[str, Any]]) -> float:
    """The run's best rate, in GB/s."""
    return max((row["gb_s"] for row in rows if "gb_s" in row), default=0.0)


def parse_cell(text: str) -> tuple[int, int]:
    """128x136 -> (128, 136). Raises argparse's error for another form."""
    rows, _, length = text.partition("x")
    if not (rows.isdigit() and length.isdigit() and int(rows) and int(length)):
        raise argparse.ArgumentTypeError(f"{text!r} is not ROWSxLENGTH, such as 128x136")
    return int(rows), int(length)


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parts = ["bf16", "formats", "skewed", "segments"]
    parser.add_argument("--parts", nargs="*", choices=parts, default=parts[:3], help="(--parts alone: none of them)")
    parser.add_argument(
        "--cells", type=parse_cell, nargs="+", default=[], metavar="ROWSxLENGTH", help="besides, in all formats"
    )
    parser.add_argument("--heads", nargs="+", choices=["32/32", "32/8"], default=["32/32", "32/8"], metavar="H/K")
    formats = sorted({case.k_format for case in BENCH_CASES})
    known = [*formats, *VARIANTS]
    parser.add_argument("--formats", nargs="+", choices=known, default=formats, help="of K and V, among the parts'")
    add_triton(parser, TritonConfig)
    parser.add_argument("--stages", type=int, default=8, help="tiles in flight, at most")
    parser.add_argument("--computing", type=int, choices=[1, 2], help="warpgroups, of a head each")
    parser.add_argument("--split", type=int, help="tokens of a work item: with --computing 1 twice as many are usual")
    parser.add_argument("--per-sm", type=int, help="workers that share a multiprocessor (these three: as configured)")
    parser.add_argument("--consecutive", action="store_true", help="pages with consecutive numbers, not shuffled ones")
    peers.add_options(parser, "FlashInfer's paged attention", 60)
    args = parser.parse_args(argv)
    beside = list(peers.decode_attention(args.peers, args.peer_seconds)) if peers.asked(parser, args) else []
    changes = {"stages": args.stages, "consecutive": args.consecutive}
    tuned = {name: getattr(args, name) for name in ("computing", "per_sm", "split")}
    changes |= {name: value for name, value in tuned.items() if value is not None}
    triton = triton_changes(args, TritonConfig)
    rows = table(args.parts, args.heads, args.formats, args.cells, triton, **changes)
    return record("decode_attention", args, argv, chain(beside, rows), summarize)


if __name__ == "__main__":
    sys.exit(main())
