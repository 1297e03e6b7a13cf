"""Measures prefill_attention on the device, next to cuDNN on contiguous K and V and to the xla backend.

    python -m pallas_kernels.prefill_attention.bench [--json] [--kv bf16 ...] [--triton] [--triton-stages 2 5]
        [--parts 1024 2048] [--peers] [--record]

Each figure is over several sets of inputs, so that no cache holds them, in one jit. The work list is made outside, once
a step as the engine does. FLOPs are those of visible keys. cuDNN does the same work where all chunks start their
sequences. For a chunk that continues one it attends to all keys without a mask, and its rate is over all of them.
FlashInfer runs first with --peers (pallas_kernels/bench/peers.py).
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.backends import on_hopper
from pallas_kernels.bench import peers
from pallas_kernels.bench.bars import bar
from pallas_kernels.bench.command import add_triton, make_parser, record, triton_changes, triton_name
from pallas_kernels.bench.measure import device_us
from pallas_kernels.bench.numbers import positive
from pallas_kernels.formats.kv_formats import KVFormat, encode, parse_format
from pallas_kernels.formats.kv_pages import KVPages, Pages
from pallas_kernels.prefill_attention import make_work, prefill_attention
from pallas_kernels.prefill_attention.cases import BENCH_CASES, Case
from pallas_kernels.prefill_attention.config import PART, WARPGROUP_ROWS, TritonConfig, choose_config, triton_config

TRITON_RATE = 0.65  # of mosaic's, that backend triton must have
CUDNN_RATE = 0.8  # of it, for 2048 tokens after 6144
XLA_FLOPS = 1e12  # of a case: the xla backend does some 10 TFLOP/s


def inputs(case: Case, seed: int) -> tuple[Any, ...]:
    """Returns standard normal q and pages, made on the device; shuffled pages."""
    keys = iter(jax.random.split(jax.random.key(seed), 4))
    num_heads, num_kv_heads = case.heads
    chunks, most = len(case.q_lens), -(-max(case.kv_lens) // case.page_size)

    def pool(fmt: KVFormat) -> Pages:
        shape = (chunks * most, num_kv_heads, case.page_size, case.head_dim)
        values, scales = encode(jax.random.normal(next(keys), shape, jnp.dtype(case.dtype)), fmt)
        return Pages(values, None if scales is None else scales.reshape(*shape[:2], -1), fmt)

    pages = KVPages(*(pool(parse_format(name, case.head_dim)) for name in (case.k_format, case.v_format)))
    q = jax.random.normal(next(keys), (sum(case.q_lens), num_heads, case.head_dim), jnp.dtype(case.dtype))
    table = jax.random.permutation(next(keys), chunks * most).reshape(chunks, most).astype(jnp.int32)
    cu_q_lens = jnp.cumsum(jnp.asarray([0, *case.q_lens], jnp.int32), dtype=jnp.int32)
    return q, pages, table, cu_q_lens, jnp.asarray(case.kv_lens, jnp.int32)


def sets_for(case: Case) -> int:
    """Returns how many sets of inputs are more than caches hold."""
    row = case.head_dim * jnp.dtype(case.dtype).itemsize
    moved = 2 * row * (sum(case.q_lens) * case.heads[0] + sum(case.kv_lens) * case.heads[1])
    return max(1, min(4, -(-(256 << 20) // moved)))


@dataclass(frozen=True)
class Contender:
    """Holds one implementation on one case: attend(*make(seed)), over several sets of inputs."""

    make: Callable[[int], tuple[Any, ...]]
    attend: Callable[..., jax.Array]
    flops: int
    sets: int


def mosaic(case: Case, pack: bool | None = None, part: int | None = None) -> Contender:
    """Returns the kernel; `pack` forces whether short chunks share a warpgroup, and `part` cuts rows into parts."""

    def make(seed: int) -> tuple[Any, ...]:
        q, pages, table, *lengths = inputs(case, seed)
        config = choose_config(q, pages, len(case.kv_lens))
        config = replace(config, pack=config.pack if pack is None else pack, part=part)
        return q, pages, table, *lengths, make_work(q, pages, *lengths, window=case.window, config=config)

    def attend(*arguments: Any) -> jax.Array:
        *rest, work = arguments
        return prefill_attention(*rest, scale=case.scale, window=case.window, work=work, backend="mosaic")

    return Contender(make, attend, case.flops, sets_for(case))


def triton(case: Case, changes: dict[str, int]) -> Contender:
    """Returns backend triton, with a work list made outside too, and `changes` to its configuration."""

    def make(seed: int) -> tuple[Any, ...]:
        q, pages, table, *lengths = inputs(case, seed)
        config = replace(triton_config(q, pages, table.shape[0], on_hopper()), **changes)
        return q, pages, table, *lengths, make_work(q, pages, *lengths, window=case.window, config=config)

    def attend(*arguments: Any) -> jax.Array:
        *rest, work = arguments
        return prefill_attention(*rest, scale=case.scale, window=case.window, work=work, backend="triton")

    return Contender(make, attend, case.flops, sets_for(case))


def xla(case: Case) -> Contender:
    attend = partial(prefill_attention, scale=case.scale, window=case.window, backend="xla")
    return Contender(partial(inputs, case), attend, case.flops, 1)  # far too slow for caches to matter


def cudnn(case: Case) -> Contender:
    """Returns cuDNN over contiguous K and V; for chunks of one length."""
    batch, rows, tokens = len(case.q_lens), case.q_lens[0], case.kv_lens[0]
    causal = rows == tokens
    dtype, dim = jnp.dtype(case.dtype), case.head_dim
    shapes = [(batch, rows, case.heads[0], dim), *[(batch, tokens, case.heads[1], dim)] * 2]

    def make(seed: int) -> tuple[Any, ...]:
        keys = jax.random.split(jax.random.key(seed), 3)
        return tuple(jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes))

    attend = partial(jax.nn.dot_product_attention, scale=case.scale, is_causal=causal, implementation="cudnn")
    flops = case.flops if causal else 4 * batch * rows * tokens * case.heads[0] * dim
    return Contender(make, attend, flops, sets_for(case))


def contenders(
    case: Case, others: bool, of_triton: list[dict[str, int]], parts: Sequence[int]
) -> dict[str, Callable[[Case], Contender]]:
    """Yields the implementations that a case has. Peers run in bf16, cuDNN where chunks have one length, XLA where it
    takes no seconds. Where all sequences are short the kernel also runs without packing, and where all have one row
    with `parts` of so many keys."""
    found: dict[str, Callable[[Case], Contender]] = {"mosaic": mosaic}
    found |= {triton_name(changes): partial(triton, changes=changes) for changes in of_triton}
    if max(case.kv_lens) <= WARPGROUP_ROWS:
        found["mosaic, unpacked"] = partial(mosaic, pack=False)
    if max(case.q_lens) == 1:
        found |= {f"mosaic, parts of {part}": partial(mosaic, part=part) for part in parts}
    if others and case.k_format == "bf16":
        if len({*zip(case.q_lens, case.kv_lens)}) == 1:
            found["cudnn"] = cudnn
        if case.flops < XLA_FLOPS:
            found["xla"] = xla
    return found


def compiled(function: Callable[..., Any], *shapes: Any) -> Callable[..., Any]:
    return jax.jit(function).lower(*shapes).compile()


def build(contender: Contender) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Compiles what makes all sets of inputs, and what attends over them."""

    def make() -> list[tuple[Any, ...]]:
        return [contender.make(seed) for seed in range(contender.sets)]

    def attend(sets: list[tuple[Any, ...]]) -> list[jax.Array]:
        return [contender.attend(*arguments) for arguments in sets]

    return compiled(make), compiled(attend, jax.eval_shape(make))


def measure(job: Future[tuple[Callable[[], Any], Callable[[Any], Any]]], contender: Contender) -> dict[str, Any]:
    """Returns the figures of a row, or why there are none."""
    try:
        make, attend = job.result()
        sets = make()
        us = device_us(lambda: attend(sets)) / contender.sets
    except Exception as error:  # a peer that is missing costs its own rows only
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    return {"us": round(us, 1), "tflop_s": round(contender.flops / us / 1e6)}


def matmul_ceiling(size: int = 8192) -> float:
    """Returns FLOP/s of a large bf16 matmul through XLA."""
    x, y = (jax.random.normal(jax.random.key(seed), (size, size), jnp.bfloat16) for seed in range(2))
    multiply = jax.jit(jnp.matmul)
    return 2 * size**3 / (device_us(lambda: multiply(x, y)) * 1e-6)


def table(
    cases: list[Case], others: bool, of_triton: list[dict[str, int]], parts: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yields one row a case and implementation, the run's ceiling first."""
    ceiling = round(matmul_ceiling() / 1e12)
    yield {"kernel": "matmul", "tflop_s": ceiling}
    runs = [
        (case, peer, make(case)) for case in cases for peer, make in contenders(case, others, of_triton, parts).items()
    ]
    with ThreadPoolExecutor(8) as pool:  # compiling takes most of the time
        jobs = [pool.submit(build, contender) for _, _, contender in runs]
        wait(jobs)  # and is over before anything is timed
    for (case, peer, contender), job in zip(runs, jobs):
        row: dict[str, Any] = {
            "kernel": "prefill_attention", "peer": peer, "q_lens": list(case.q_lens), "kv_lens": list(case.kv_lens),
            "H": case.heads[0], "K": case.heads[1], "D": case.head_dim, "P": case.page_size, "dtype": case.dtype,
            "kv": case.k_format,
        }  # fmt: skip
        row |= measure(job, contender)
        if "us" in row:
            row["fraction"] = round(row["tflop_s"] / ceiling, 3)
        yield row


def bars(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the bars of bf16 with 32 heads each, and of backend triton mosaic's rate. They are FlashInfer's times
    where it ran, and cuDNN's rate for a continued chunk."""
    found = {
        (row["peer"], tuple(row["q_lens"]), tuple(row["kv_lens"])): row
        for row in rows
        if "us" in row and row["kernel"] == "prefill_attention" and (row["kv"], row["K"]) == ("bf16", 32)
    }
    for (*lengths, kv_heads), limit in peers.best(rows, peers.FLASHINFER, ("q_lens", "kv_lens", "K")).items():
        if kv_heads == 32 and (row := found.get(("mosaic", *lengths))):
            yield bar(f"{len(lengths[0])}x{lengths[0][0]} causal", row["us"], "us", limit, most=True)
    continued = (2048,), (8192,)
    if (row := found.get(("mosaic", *continued))) and (peer := found.get(("cudnn", *continued))):
        rate = round(row["tflop_s"] / peer["tflop_s"], 3)
        yield bar("2048 after 6144, of cuDNN's rate", rate, "1", CUDNN_RATE)
    for (peer, q_lens, kv_lens), row in found.items():
        if peer == "triton" and (own := found.get(("mosaic", q_lens, kv_lens))):
            name = f"triton, {len(q_lens)}x{q_lens[0]} of {kv_lens[0]}: of mosaic's rate"
            yield bar(name, round(own["us"] / row["us"], 3), "1", TRITON_RATE)


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    formats = sorted({case.k_format for case in BENCH_CASES})
    parser.add_argument("--kv", nargs="+", choices=formats, default=formats, help="formats of K and V")
    add_triton(parser, TritonConfig)
    parser.add_argument("--mosaic-only", action="store_true", help="leave out cuDNN and XLA")
    parser.add_argument("--parts", nargs="+", type=positive, default=[PART], help="keys of a part of a decoded row")
    peers.add_options(parser, "FlashInfer's paged attention", 40)
    args = parser.parse_args(argv)
    beside = list(peers.prefill_attention(args.peers, args.peer_seconds)) if peers.asked(parser, args) else []
    cases = [case for case in BENCH_CASES if case.k_format in args.kv]
    rows = chain(beside, table(cases, not args.mosaic_only, triton_changes(args, TritonConfig), args.parts))
    return record("prefill_attention", args, argv, rows, bars)


if __name__ == "__main__":
    sys.exit(main())
