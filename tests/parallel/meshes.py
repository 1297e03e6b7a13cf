"""A tiny model on meshes of virtual devices."""

from typing import Any

from jllm.config import LlamaConfig
from jllm.model.model import Model
from jllm.model.shards import share_params
from jllm.parallel.mesh import make_mesh, spread
from tests.tiny import tiny_model

SIZES: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "intermediate_size": 512, "hidden_size": 64}


def model_of(dtype: str = "float64", **changes: Any) -> Model:
    """Eight heads and two KV heads, so that 4 and 8 devices keep some alike; 97 tokens, which no mesh divides."""
    return tiny_model(dtype, **{**SIZES, **changes})


def on_mesh(model: Model, devices: int) -> Model:
    config: LlamaConfig = spread(model.config, make_mesh(devices))
    return Model(config, share_params(model.params, config), model.tokenizer)
