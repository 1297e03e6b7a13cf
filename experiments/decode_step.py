"""How long one decode step takes, and what share of the memory floor that is.

    python -m experiments.decode_step --config configs/llama-2-7b.json --batch 1 32 128 --backend xla

Random weights, every slot at --context tokens of KV, greedy. Steps are dispatched one after the other, each fed by the
tokens that the one before left on the device, and timed together on the host's clock; the best of --repeats counts, all
of which start at --context. The floor reads all weights once and each slot's KV once, at --bandwidth, as long as it is
on average over these steps.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from experiments.arguments import add_model_options, add_timing_options, positive
from experiments.result_file import bar, record
from experiments.steps.floors import least_share
from experiments.steps.timer import StepTimer, model_config, page_bytes, pool_for, random_params, step_of
from jllm.config import LlamaConfig
from jllm.fit import tree_bytes
from jllm.params import Params
from pallas_kernels.backends import DETERMINISTIC
from pallas_kernels.bench.command import add_result_options, interruptible

TRITON = 1.25  # times the device's own step that backend triton may take


def measure(
    params: Params, config: LlamaConfig, batch: int, args: argparse.Namespace, backend: str | None
) -> dict[str, Any]:
    """Milliseconds a decode step, and the bytes that it cannot avoid reading."""
    timer = StepTimer(
        params, config, pool_for(batch, args.context + args.steps, args.page_size, args.kv_cache), backend
    )
    layout, buffer = step_of("decode", batch)
    step = timer.lower(layout).compile()
    timer.renew()
    timer.place(args.context)
    ms = 1e3 * timer.one(step, buffer, batch, args.steps, args.repeats)
    unread = [] if params.head is None else jax.tree.leaves(params.embed)  # but for a row a slot
    weights = tree_bytes(params) - sum(leaf.nbytes for leaf in unread)
    mean_length = args.context + (args.steps + 1) / 2
    token_bytes = page_bytes(config, params.dtype, args.page_size, args.kv_cache) / args.page_size
    floor = (weights + batch * mean_length * token_bytes) / args.bandwidth
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
    add_model_options(parser, scheme=False)
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 32, 128], help="slots that decode")
    parser.add_argument("--context", type=positive, default=256, help="KV tokens of each slot at the start")
    parser.add_argument(
        "--backend", nargs="+", default=["default"], help="xla, mosaic, triton, deterministic, or default"
    )
    add_timing_options(parser, steps=20, repeats=3)
    add_result_options(parser)
    return parser.parse_args(argv)


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    config = model_config(args.config, args.layers)
    params = random_params(config, args.dtype)
    cases = [(batch, backend) for batch in args.batch for backend in args.backend]
    for batch, backend in tqdm(cases, delay=2):
        yield measure(params, config, batch, args, None if backend == "default" else backend)


def bars(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The kernels' rows against their bars, Triton's against the device's own. The floor is of bytes alone: at large
    batches arithmetic raises it."""
    own = {row["batch"]: row.get("decode_ms") for row in rows if row["backend"] in ("default", "mosaic")}
    for row in rows:
        if row["backend"] == "triton" and row["batch"] in own:
            name = f"{row['model']} batch {row['batch']} {row['kv']}, triton over the default"
            yield bar(name, round(row["decode_ms"] / own[row["batch"]], 3), "times", TRITON, most=True)
        elif row["backend"] not in ("xla", "triton", DETERMINISTIC):
            name = f"{row['model']} batch {row['batch']} {row['kv']}, share of the floor"
            yield bar(name, row["floor_fraction"], "1", least_share("bf16", row["batch"]))


@interruptible
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    command = ["python", "-m", "experiments.decode_step", *(sys.argv[1:] if argv is None else argv)]
    found = ({"model": Path(args.config).stem, **row} for row in rows(args))
    return record(args, "decode_step", command, found, bars=bars)


if __name__ == "__main__":
    sys.exit(main())
