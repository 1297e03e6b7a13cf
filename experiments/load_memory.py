"""Measures the host memory that loading takes beyond the params: `python -m experiments.load_memory 2048` for a 2 GiB
checkpoint.

It generates a bfloat16 checkpoint of about that many MiB, and loads it in this process. It reports the MiB of params,
of the largest fused tensor, and of the peak resident set over baseline and params (`overhead_mib`). `--naive` loads a
whole file first, to show that the measure works. It runs on Linux only (/proc).
"""

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

from experiments.arguments import dtype_name
from experiments.result_file import Row, bar, command_line, record
from jllm.config import LlamaConfig
from jllm.files.hf_config import to_hf
from jllm.files.load_params import load_params
from jllm.files.safetensors_io import DTYPES, encode_header
from jllm.model.param_specs import abstract_params, param_specs
from jllm.quant.schemes import find_scheme
from pallas_kernels.bench.command import Parser, add_result_options, interruptible
from pallas_kernels.bench.numbers import positive

MIB = 1 << 20


def make_config(mib: int) -> LlamaConfig:
    hidden = 2048 if mib >= 1024 else 512
    layer = 2 * 16 * hidden * hidden  # bytes: 4 E^2 of attention, 12 E^2 of feed-forward
    return LlamaConfig(
        architecture="LlamaForCausalLM",
        vocab_size=16 * hidden,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_layers=max(1, (mib * MIB - 2 * 2 * 16 * hidden * hidden) // layer),
        num_heads=hidden // 64,
        num_kv_heads=hidden // 64,
        head_dim=64,
        context=2048,
        dtype="bfloat16",
    )


def generate(directory: Path, config: LlamaConfig) -> None:
    specs = jax.tree.leaves(param_specs(config))
    tensors = [(name, DTYPES["BF16"], spec.part_shape(rows)) for spec in specs for name, rows in spec.parts]
    block = np.random.default_rng(0).standard_normal(MIB // 4, np.float32).astype(DTYPES["BF16"]).tobytes()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(encode_header(tensors))
        for _, dtype, shape in tensors:
            size = math.prod(shape) * dtype.itemsize
            for start in range(0, size, len(block)):
                file.write(block[: min(len(block), size - start)])
    (directory / "config.json").write_text(json.dumps(to_hf(config)))


def memory(field: str) -> float:
    """Returns MiB from /proc: VmRSS is resident now, VmHWM is the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field + ":"))


def load_naively(directory: Path, config: LlamaConfig, dtype: str) -> Any:
    from safetensors.numpy import load_file

    tensors = load_file(directory / "model.safetensors")
    return [jax.device_put(tensor.astype(dtype)) for tensor in tensors.values()]


def measure(args: argparse.Namespace) -> Iterator[Row]:
    config = make_config(args.mib)
    jax.block_until_ready(jax.device_put(np.zeros(1, np.float32)))  # the backend is up before the baseline
    with tempfile.TemporaryDirectory() as directory:
        generate(Path(directory), config)
        baseline, start = memory("VmRSS"), time.perf_counter()
        if args.naive:
            params = load_naively(Path(directory), config, args.dtype)
        else:
            scheme = None if args.quantize is None else find_scheme(args.quantize)
            params = load_params(Path(directory), config, args.dtype, scheme)
        seconds, peak = time.perf_counter() - start, memory("VmHWM")
    params_mib = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / MIB
    leaves = jax.tree.leaves(abstract_params(config, args.dtype))
    yield {
        "dtype": args.dtype,
        "scheme": "bf16" if args.quantize is None else find_scheme(args.quantize).name,
        "params_mib": round(params_mib, 1),
        "largest_leaf_mib": round(max(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves) / MIB, 1),
        "baseline_mib": round(baseline, 1),
        "peak_mib": round(peak, 1),
        "overhead_mib": round(peak - baseline - params_mib, 1),
        "seconds": round(seconds, 2),
    }


def bars(rows: list[Row]) -> Iterator[Row]:
    for row in rows:
        most = row["largest_leaf_mib"] + 1024
        yield bar("peak resident memory less the params", row["overhead_mib"], "MiB", most, most=True)


@interruptible
def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("mib", type=positive, help="size in MiB of the checkpoint to make and load")
    parser.add_argument(
        "--dtype", type=dtype_name, default="bfloat16", help="dtype of the loaded params (the file has bfloat16)"
    )
    parser.add_argument("--naive", action="store_true", help="load the whole file to the host first, for comparison")
    parser.add_argument("--quantize", metavar="SCHEME", help="scheme to quantize to while loading")
    add_result_options(parser)
    args = parser.parse_args(argv)
    command = command_line("load_memory", argv)
    return record(args, "load_memory", command, measure(args), bars=bars)


if __name__ == "__main__":
    sys.exit(main())
