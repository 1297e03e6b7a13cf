"""How long prefill_attention takes on the device, next to cuDNN on contiguous K and V and to the xla backend.

    python -m pallas_kernels.prefill_attention.bench [--json] [--kv bf16 ...] [--results experiments/results]

Each figure is over several sets of inputs, so that no cache holds them, in one jit; the work list is made outside, once
a step as the engine does. FLOPs are those of visible keys. cuDNN does the same work where all chunks start their
sequences; for a chunk that continues one it attends to all keys without a mask, and its rate is over all of them.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.bench_command import make_parser, record
from pallas_kernels.kv_pages import KVFormat, KVPages, Pages, encode, parse_format
from pallas_kernels.measure import device_us
from pallas_kernels.prefill_attention import make_work, prefill_attention
from pallas_kernels.prefill_attention.cases import BENCH_CASES, Case

FLASHINFER = {((2048,), (2048,)): 93.6, ((1024,) * 8, (1024,) * 8): 191.0, ((16384,), (16384,)): 3904.0}  # us
CUDNN_RATE = 0.8  # of it, for 2048 tokens after 6144


def inputs(case: Case, seed: int) -> tuple[Any, ...]:
    """Standard normal q and pages, made on the device; shuffled pages."""
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


def measure(attend: Callable[..., jax.Array], sets: list[tuple[Any, ...]]) -> float:
    """Microseconds of one attend(*set)."""
    run = jax.jit(lambda sets: [attend(*arguments) for arguments in sets])
    return device_us(lambda: run(sets)) / len(sets)


def sets_for(case: Case) -> int:
    """Sets of inputs that are more than caches hold."""
    row = case.head_dim * jnp.dtype(case.dtype).itemsize
    moved = 2 * row * (sum(case.q_lens) * case.heads[0] + sum(case.kv_lens) * case.heads[1])
    return max(1, min(4, -(-(256 << 20) // moved)))


def measure_mosaic(case: Case) -> float:
    sets = []
    for seed in range(sets_for(case)):
        q, pages, table, *lengths = inputs(case, seed)
        sets.append((q, pages, table, *lengths, make_work(q, pages, *lengths, window=case.window)))

    def attend(*arguments: Any) -> jax.Array:
        *rest, work = arguments
        return prefill_attention(*rest, scale=case.scale, window=case.window, work=work, backend="mosaic")

    return measure(attend, sets)


def measure_xla(case: Case) -> float:
    attend = partial(prefill_attention, scale=case.scale, window=case.window, backend="xla")
    return measure(attend, [inputs(case, seed) for seed in range(sets_for(case))])


def measure_cudnn(case: Case) -> tuple[float, int] | None:
    """Microseconds and FLOPs of cuDNN on contiguous K and V of this case; None where chunks differ in length."""
    if len({*zip(case.q_lens, case.kv_lens)}) > 1:
        return None
    batch, rows, tokens = len(case.q_lens), case.q_lens[0], case.kv_lens[0]
    causal = rows == tokens
    dtype, dim = jnp.dtype(case.dtype), case.head_dim
    shapes = [(batch, rows, case.heads[0], dim), *[(batch, tokens, case.heads[1], dim)] * 2]
    keys = [jax.random.split(jax.random.key(seed), 3) for seed in range(sets_for(case))]
    sets = [tuple(jax.random.normal(key, shape, dtype) for key, shape in zip(of_set, shapes)) for of_set in keys]
    attend = partial(jax.nn.dot_product_attention, scale=case.scale, is_causal=causal, implementation="cudnn")
    flops = case.flops if causal else 4 * batch * rows * tokens * case.heads[0] * dim
    return measure(attend, sets), flops


def matmul_ceiling(size: int = 8192) -> float:
    """FLOP/s of a large bf16 product through XLA."""
    x, y = (jax.random.normal(jax.random.key(seed), (size, size), jnp.bfloat16) for seed in range(2))
    multiply = jax.jit(jnp.matmul)
    return 2 * size**3 / (device_us(lambda: multiply(x, y)) * 1e-6)


def table(cases: list[Case], peers: bool) -> Iterator[dict[str, Any]]:
    """One row a case and implementation, the run's ceiling first."""
    ceiling = matmul_ceiling()
    yield {"kernel": "matmul", "tflop_s": round(ceiling / 1e12)}
    for case in cases:
        found: dict[str, tuple[float, int] | None] = {"mosaic": (measure_mosaic(case), case.flops)}
        if peers:
            found["cudnn"] = measure_cudnn(case) if case.k_format == "bf16" else None
            found["xla"] = (measure_xla(case), case.flops)
        for peer, figures in found.items():
            if figures is None:
                continue
            us, flops = figures
            yield {
                "kernel": "prefill_attention", "peer": peer, "q_lens": list(case.q_lens), "kv_lens": list(case.kv_lens),
                "H": case.heads[0], "K": case.heads[1], "D": case.head_dim, "P": case.page_size, "dtype": case.dtype,
                "kv": case.k_format, "us": round(us, 1), "tflop_s": round(flops / us / 1e6),
                "fraction": round(flops / us * 1e6 / ceiling, 3),
            }  # fmt: skip


def bars(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The bars of bf16 with 32 heads each: FlashInfer's times, and cuDNN's rate for a continued chunk."""
    found = {
        (row["peer"], tuple(row["q_lens"]), tuple(row["kv_lens"])): row
        for row in rows
        if row["kernel"] == "prefill_attention" and (row["kv"], row["K"]) == ("bf16", 32)
    }
    for lengths, bar in FLASHINFER.items():
        if row := found.get(("mosaic", *lengths)):
            name = f"{len(lengths[0])}x{lengths[0][0]} causal"
            yield {"name": name, "value": row["us"], "unit": "us", "bar": bar, "met": row["us"] <= bar}
    continued = (2048,), (8192,)
    if (row := found.get(("mosaic", *continued))) and (peer := found.get(("cudnn", *continued))):
        rate = round(row["tflop_s"] / peer["tflop_s"], 3)
        met = rate >= CUDNN_RATE
        yield {"name": "2048 after 6144, of cuDNN's rate", "value": rate, "unit": "1", "bar": CUDNN_RATE, "met": met}


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--kv", nargs="+", default=sorted({case.k_format for case in BENCH_CASES}), metavar="FORMAT")
    parser.add_argument("--mosaic-only", action="store_true", help="leave out cuDNN and XLA")
    args = parser.parse_args(argv)
    cases = [case for case in BENCH_CASES if case.k_format in args.kv]
    return record("prefill_attention", args, argv, table(cases, not args.mosaic_only), bars)


if __name__ == "__main__":
    sys.exit(main())
