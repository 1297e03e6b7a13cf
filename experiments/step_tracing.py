"""Measures how long tracing and lowering a step for a Hopper GPU hold Python's lock, in processor seconds, without a
GPU.

    python -m experiments.step_tracing --scheme bf16 w8a8 w4a16-g128 --decodes 1 64 512
    python -m experiments.step_tracing --decodes 64 --chunks 64 --tokens 448

trace_s and lower_s are of this process. taken_in_s is also of this process, when another one traces and lowers the step
(jllm/programs/tracing.py). Each row has the number of Mosaic kernels in the module, and the size of its text in MB. A
first step does not count, as it imports and compiles what later ones share. Only shapes are needed, without weights.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.arguments import config_of, known_scheme, scheme_name
from experiments.result_file import command_line, record
from jllm.config import LlamaConfig
from jllm.model.cache import make_cache, make_tails, parse_kv_cache
from jllm.model.param_specs import abstract_params
from jllm.programs.packed_step import Layout, packed_step
from jllm.programs.tracing import Tracers, named
from jllm.quant.quantize import quantize
from jllm.step.buckets import Bucket
from jllm.step.state import State, make_slots
from pallas_kernels.backends import TARGET
from pallas_kernels.bench.command import Parser, add_result_options, interruptible
from pallas_kernels.bench.numbers import natural, positive

HOPPER = "9.0"
WARM = Bucket(2, 0, 0)  # the step that does not count


@contextmanager
def choosing_for(capability: str) -> Iterator[None]:
    """Makes kernels be chosen for such a GPU, here and in processes that start in the block."""
    before = os.environ.get(TARGET)
    os.environ[TARGET] = capability
    try:
        yield
    finally:
        os.environ.pop(TARGET)
        if before is not None:
            os.environ[TARGET] = before


def job(config: LlamaConfig, scheme: str, bucket: Bucket, args: argparse.Namespace) -> tuple[tuple[Any, ...], Any]:
    """Returns packed_step's arguments, by shape, and its static ones."""
    layout, formats = Layout(bucket, deltas=160), parse_kv_cache(args.kv_cache, config, jnp.bfloat16)

    def empty() -> State:
        tails = make_tails(config, formats, jnp.bfloat16, 512, 16)
        return State(make_cache(config, 4096, 16, formats), make_slots(512, 256), tails=tails)

    state = jax.eval_shape(empty)
    params = quantize(abstract_params(config, jnp.bfloat16), scheme)
    return (params, state, jax.ShapeDtypeStruct((layout.size,), np.int32)), {"config": config, "layout": layout}


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """Returns the result, and this process's processor seconds."""
    begin = time.process_time()
    return run(), time.process_time() - begin


def of_step(arguments: tuple[Any, ...], static: dict[str, Any], tracers: Tracers) -> dict[str, Any]:
    """Returns one step's times."""

    def lower(traced: Any) -> jax.stages.Lowered:
        return traced.lower(lowering_platforms=("cuda",))

    traced, trace_s = timed(lambda: packed_step.trace(*arguments, **static))
    lowered, lower_s = timed(lambda: lower(traced))
    _, taken_s = timed(lambda: lower(jax.jit(named(tracers.export(arguments, static))).trace(*arguments)))
    text = lowered.as_text()
    return {
        "kernels": text.count("@mosaic_gpu_v2"), "text_mb": round(len(text) / 1e6, 2), "trace_s": round(trace_s, 2),
        "lower_s": round(lower_s, 2), "taken_in_s": round(taken_s, 3),
    }  # fmt: skip


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    config, tracers = config_of(args), Tracers(1)
    try:
        with choosing_for(HOPPER):
            of_step(*job(config, args.scheme[0], WARM, args), tracers)
            for scheme in args.scheme:
                for decodes in args.decodes:
                    bucket = Bucket(decodes, args.tokens, args.chunks)
                    about = {"scheme": scheme_name(scheme), "layers": config.num_layers, "kv": args.kv_cache or "bf16"}
                    rows = {"decodes": decodes, "tokens": bucket.tokens}
                    yield about | rows | of_step(*job(config, scheme, bucket, args), tracers)
    finally:
        tracers.close()


@interruptible
def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument(
        "--config", default="configs/llama-2-7b.json", help="file with the model's shape (a config.json)"
    )
    parser.add_argument("--layers", type=positive, help="use only this many layers, for a trial")
    parser.add_argument("--scheme", type=known_scheme, nargs="+", default=["bf16"], help="schemes of the weights")
    parser.add_argument("--kv-cache", help="KV format (default: bf16)")
    parser.add_argument(
        "--decodes", type=positive, nargs="+", default=[1, 16, 64, 512], help="numbers of decoding rows"
    )
    parser.add_argument("--tokens", type=natural, default=0, help="prompt tokens of the step")
    parser.add_argument("--chunks", type=natural, default=0, help="most chunks of these tokens")
    add_result_options(parser)
    args = parser.parse_args(argv)
    if not bool(args.tokens) <= args.chunks <= args.tokens:
        parser.error("--tokens and --chunks belong together: a chunk has at least one token")
    command = command_line("step_tracing", argv)
    return record(args, "step_tracing", command, measure(args))


if __name__ == "__main__":
    sys.exit(main())
