"""Measures the host memory that loading takes beyond the params: `python -m tests.load_memory DTYPE [SCHEME]`.

It generates a bfloat16 checkpoint of 192 MiB, loads it in this process, and prints MiB as JSON: params, the largest
fused tensor, and the peak resident set over baseline and params (`overhead_mib`). The scheme "naive" loads a whole file
first, which shows that the measure works. It runs on Linux only (/proc).
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file

from jllm.config import LlamaConfig
from jllm.files.hf_config import to_hf
from jllm.files.load_params import load_params
from jllm.files.safetensors_io import DTYPES, encode_header
from jllm.model.param_specs import abstract_params, param_specs
from jllm.quant.schemes import find_scheme

MIB, HIDDEN, LAYERS = 1 << 20, 512, 22
CONFIG = LlamaConfig(
    "LlamaForCausalLM", 16 * HIDDEN, HIDDEN, 4 * HIDDEN, num_layers=LAYERS, num_heads=8, num_kv_heads=8, head_dim=64,
    context=2048, dtype="bfloat16",
)  # fmt: skip


def measured(dtype: str, *scheme: str) -> dict[str, float]:
    """Returns the figures of a process of its own."""
    command = [sys.executable, "-m", "tests.load_memory", dtype, *scheme]
    env = {"JAX_PLATFORMS": "cpu"} | os.environ
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def generate(directory: Path) -> None:
    specs = jax.tree.leaves(param_specs(CONFIG))
    tensors = [(name, DTYPES["BF16"], spec.part_shape(rows)) for spec in specs for name, rows in spec.parts]
    block = np.random.default_rng(0).standard_normal(MIB // 4, np.float32).astype(DTYPES["BF16"]).tobytes()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(encode_header(tensors))
        for _, dtype, shape in tensors:
            size = math.prod(shape) * dtype.itemsize
            for start in range(0, size, len(block)):
                file.write(block[: min(len(block), size - start)])
    (directory / "config.json").write_text(json.dumps(to_hf(CONFIG)))


def memory(field: str) -> float:
    """Returns MiB from /proc: VmRSS is resident now, VmHWM is the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field + ":"))


def load(directory: Path, dtype: str, scheme: str | None) -> Any:
    if scheme == "naive":
        tensors = load_file(directory / "model.safetensors")
        return [jax.device_put(tensor.astype(dtype)) for tensor in tensors.values()]
    return load_params(directory, CONFIG, dtype, None if scheme is None else find_scheme(scheme))


def main(dtype: str, scheme: str | None = None) -> None:
    jax.block_until_ready(jax.device_put(np.zeros(1, np.float32)))  # the backend is up before the baseline
    with tempfile.TemporaryDirectory() as directory:
        generate(Path(directory))
        baseline = memory("VmRSS")
        params = load(Path(directory), dtype, scheme)
        peak = memory("VmHWM")
    params_mib = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / MIB
    leaves = jax.tree.leaves(abstract_params(CONFIG, dtype))
    largest = max(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves) / MIB
    figures = {"params_mib": params_mib, "largest_leaf_mib": largest, "baseline_mib": baseline, "peak_mib": peak}
    print(json.dumps(figures | {"overhead_mib": peak - baseline - params_mib}))


if __name__ == "__main__":
    main(*sys.argv[1:])
