"""Compiles programs for an H100 on a machine without one, and prints a JSON line for each: what XLA copies, what passes
it makes beside the kernels, and whose results share a place. `test_compiled_for_h100.py` runs it as a process of its
own, since it asks for a GPU's compiler. Autotuning is off, as it needs a device."""

import json
import os
import re
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"
os.environ |= {"JAX_PLATFORMS": "cpu", "JLLM_COMPUTE_CAPABILITY": "9.0"}

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import jllm
from jllm.files.hf_config import load_config
from jllm.model.cache import make_cache, parse_kv_cache
from jllm.model.layers import stack_layers
from jllm.model.param_specs import abstract_params
from jllm.programs.packed_step import Layout, compiler_options, packed_step
from jllm.quant.quantize import quantize
from jllm.step.buckets import Bucket
from jllm.step.state import State, make_slots

TARGET = """
gpu_device_info {
  name: "NVIDIA H100 80GB HBM3" device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability 9.0a"
  cuda_compute_capability { major: 9 } core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 device_memory_size: 84942979072 device_address_bits: 64
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } device_description_str: "NVIDIA H100 80GB HBM3"
"""
BYTES = {"f32": 4, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "s8": 1, "u8": 1, "f8e4m3fn": 1, "pred": 1}
CONFIGS, DECODES = Path(__file__).parents[2] / "configs", Bucket(64, 0, 0)
LARGE = 1e6  # bytes of a result that is worth a pass of its own
LINE = re.compile(
    r"\s*(?:ROOT )?%?(?P<name>\S+) = (?P<kind>\(.*?\)|\S+) (?P<what>[a-z-]+)\((?P<operands>.*?)\)(?P<rest>.*)"
)


def decodes(config: Any) -> Any:
    return step(config, "w8a8", "int8-g8", DECODES)


def normed(config: Any) -> Any:
    """Returns a step whose caches' updates norm heads, with gains that are slices of all layers'."""
    return step(replace(load_config(CONFIGS / "qwen3-8b.json"), num_layers=config.num_layers), "bf16", None, DECODES)


def prompts(config: Any) -> Any:
    return step(config, "bf16", None, Bucket(8, 8184, 8))


def scores(config: Any) -> Any:
    """Returns scores of rows that are no multiple of eight. Products pad such rows, and a slice follows."""

    def run(params: Any, tokens: jax.Array, lengths: jax.Array) -> Any:
        return jllm.token_logprobs(params, config, tokens, lengths, quantize="fp8", kv_cache="fp8")

    shapes = jax.ShapeDtypeStruct((7, 100), jnp.int32), jax.ShapeDtypeStruct((7,), jnp.int32)
    return jax.jit(run), (abstract_params(config, jnp.bfloat16), *shapes), {}, None


def step(config: Any, scheme: str, kv_cache: str | None, bucket: Bucket) -> Any:
    layout = Layout(bucket, deltas=160)
    formats = parse_kv_cache(kv_cache, config, jnp.bfloat16)
    arguments = (
        stack_layers(quantize(abstract_params(config, jnp.bfloat16), scheme), config),
        jax.eval_shape(lambda: State(make_cache(config, 4096, 16, formats), make_slots(512, 256))),
        jax.ShapeDtypeStruct((layout.size,), np.int32),
    )
    return packed_step, arguments, {"config": config, "layout": layout}, compiler_options(layout)


def size(kind: str) -> int:
    """Returns the bytes of a result, or of a tuple of them."""
    found = re.findall(r"(\w+)\[([\d,]*)\]", kind)
    return sum(BYTES.get(dtype, 4) * prod(int(n) for n in shape.split(",") if n) for dtype, shape in found)


def describe(text: str) -> dict[str, list[str]]:
    """Returns a compiled program's large copies and passes, and the kernels that have one place for two results."""
    found: dict[str, list[str]] = {"copies": [], "passes": [], "shared": []}
    entry = text[text.index("\nENTRY") :]
    for line in filter(None, map(LINE.match, text.splitlines())):
        places = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", line["rest"])
        operands = re.sub(r"/\*.*?\*/", "", line["operands"]).split(", ")
        taken = [operands[int(i)] for i in re.findall(r"\((\d+), ", places[1])] if places else []
        if len(set(taken)) < len(taken):
            found["shared"].append(line["name"])
    for line in filter(None, map(LINE.match, entry.splitlines())):
        if line["what"] in ("copy", "fusion") and size(line["kind"]) > LARGE and "__custom_fusion" not in line["rest"]:
            found["copies" if line["what"] == "copy" else "passes"].append(f"{line['name']} {line['kind']}")
    return found


def main() -> None:
    of_h100 = topologies.get_topology_desc(
        platform="cuda", topology_name="h100", topology="1x1x1", target_config=TARGET
    ).devices[0]
    whole = load_config(CONFIGS / "llama-2-7b.json")
    config = replace(whole, num_layers=2)
    for case in map(globals().__getitem__, sys.argv[1:]):
        run, arguments, static, options = case(config)
        there = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(of_h100)), arguments
        )
        compiled = run.trace(*there, **static).lower().compile(compiler_options=options)
        print(json.dumps(describe(compiled.as_text())), flush=True)


if __name__ == "__main__":
    main()
