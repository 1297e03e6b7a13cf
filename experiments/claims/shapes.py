"""Makes the models of claims: LLaMA-2-7B with random weights, or a toy of the same kind."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jllm.config import LlamaConfig
from jllm.files.hf_config import load_config
from jllm.model.param_specs import init_params
from jllm.model.params import Params

CONFIGS = Path(__file__).parents[2] / "configs"
TOY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "num_kv_heads": 4, "head_dim": 16, "vocab_size": 256,
    "context": 256, "num_layers": 2,
}  # fmt: skip


def config_of(toy: bool, name: str = "llama-2-7b") -> LlamaConfig:
    config = load_config(CONFIGS / f"{name}.json")
    return replace(config, **TOY, windows=config.windows[: TOY["num_layers"]]) if toy else config


def random_params(config: LlamaConfig, toy: bool) -> Params:
    """Returns weights in bfloat16, or for a toy in float32, which CPUs compute natively."""
    return init_params(config, jax.random.key(0), jnp.float32 if toy else jnp.bfloat16)
