"""How long one decode step takes, and what share of the memory floor that is.

    python -m experiments.decode_step --config configs/llama-2-7b.json --batch 1 32 128 --backend xla

Random weights, every slot at --context tokens of KV, greedy. Steps are dispatched one after the other, each fed by the
tokens that the one before left on the device, and timed together on the host's clock; the best of --repeats counts, all
of which start at --context. The floor reads all weights once and each slot's KV once, at --bandwidth, as long as it is
on average over these steps.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from experiments.result_file import bar, record
from jllm.batch import Layout, Rung, pack_decode
from jllm.cache import cache_bytes, make_cache, parse_kv_cache
from jllm.checkpoint import init_params
from jllm.config import LlamaConfig, load_config
from jllm.params import Params
from jllm.step import Slots, State, jit_step, make_slots
from pallas_kernels.bench.command import add_result_options, interruptible

BARS = ((128, 0.75), (256, 0.80), (1 << 30, 0.85))  # bf16: up to this batch, at least this share of the floor
HBM = 4.41e12  # bytes a second that an H200 reads (row sums of 4 GiB)


def filled_slots(slots: int, pages_each: int, context: int) -> Slots:
    """Every slot running, with `context` tokens in pages of its own."""
    empty = make_slots(slots, pages_each)
    return Slots(
        **{
            **vars(empty),
            "token": jnp.arange(slots, dtype=jnp.int32),
            "length": jnp.full(slots, context, jnp.int32),
            "done": jnp.zeros(slots, bool),
            "pages": jnp.arange(slots * pages_each, dtype=jnp.int32).reshape(slots, pages_each),
            "max_length": jnp.full(slots, 1 << 30, jnp.int32),
        }
    )


def measure(
    params: Params, config: LlamaConfig, batch: int, args: argparse.Namespace, backend: str | None
) -> dict[str, Any]:
    """Milliseconds a decode step, and the bytes that it cannot avoid reading."""
    formats = parse_kv_cache(args.kv_cache, config, params.dtype)
    total = args.context + args.steps
    pages_each = -(-total // args.page_size)
    cache = make_cache(config, batch * pages_each, args.page_size, formats)
    token_bytes = cache_bytes(cache) / (batch * pages_each * args.page_size)
    state = State(cache, filled_slots(batch, pages_each, args.context))
    layout = Layout(Rung(batch, 0, 0), deltas=8)
    buffer = jax.device_put(pack_decode(layout, range(batch)))
    times = []
    for _ in range(args.repeats + 1):  # the first one compiles
        state = replace(state, slots=filled_slots(batch, pages_each, args.context))
        jax.block_until_ready(state)
        start = time.perf_counter()
        for _ in range(args.steps):
            state, outputs = jit_step(params, state, buffer, config=config, layout=layout, backend=backend)
        jax.block_until_ready(outputs.tokens)
        times.append((time.perf_counter() - start) / args.steps)
    if not (np.asarray(outputs.tokens) >= 0).all():
        raise AssertionError("a slot did not decode")
    unread = [] if params.head is None else jax.tree.leaves(params.embed)  # but for a row a slot
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) - sum(leaf.nbytes for leaf in unread)
    mean_length = args.context + (args.steps + 1) / 2
    floor = (weights + batch * mean_length * token_bytes) / args.bandwidth
    ms = 1e3 * min(times[1:])
    return {
        "batch": batch,
        "backend": backend or "default",
        "kv": args.kv_cache or str(params.dtype),
        "context": args.context,
        "decode_ms": round(ms, 3),
        "tokens_s": round(batch / ms * 1e3, 1),
        "floor_ms": round(1e3 * floor, 3),
        "floor_fraction": round(1e3 * floor / ms, 3),
    }


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/llama-2-7b.json", help="model shape (a config.json)")
    parser.add_argument("--layers", type=int, help="only so many layers, for a try")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 128], help="slots that decode")
    parser.add_argument("--context", type=int, default=256, help="KV tokens of each slot at the start")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--kv-cache", help="KV format (default: the weights' dtype)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--backend", nargs="+", default=["default"], help="xla, mosaic, or default")
    parser.add_argument("--steps", type=int, default=20, help="steps timed together")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bandwidth", type=float, default=HBM, help="bytes a second (default: an H200's, measured)")
    add_result_options(parser)
    return parser.parse_args(argv)


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    config = load_config(args.config)
    if args.layers:
        config = LlamaConfig(**{**vars(config), "num_layers": args.layers})
    params = init_params(config, jax.random.key(0), jnp.dtype(args.dtype))
    cases = [(batch, backend) for batch in args.batch for backend in args.backend]
    for batch, backend in tqdm(cases, delay=2):
        yield measure(params, config, batch, args, None if backend == "default" else backend)


def bars(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The kernels' rows against their bars. The floor is of bytes alone: at large batches arithmetic raises it."""
    for row in rows:
        if row["backend"] != "xla":
            least = next(least for batch, least in BARS if row["batch"] <= batch)
            name = f"{row['model']} batch {row['batch']} {row['kv']}, share of the floor"
            yield bar(name, row["floor_fraction"], "1", least)


@interruptible
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    command = ["python", "-m", "experiments.decode_step", *(sys.argv[1:] if argv is None else argv)]
    found = ({"model": Path(args.config).stem, **row} for row in rows(args))
    return record(args, "decode_step", command, found, bars=bars)


if __name__ == "__main__":
    sys.exit(main())
