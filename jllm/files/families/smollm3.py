"""Reads and writes SmolLM3, some of whose layers have no rotary embeddings."""

from functools import partial
from typing import Any

from jllm.config import LlamaConfig
from jllm.errors import ConfigError
from jllm.files.families.family import (
    KINDS,
    Family,
    Fields,
    layer_types,
    one_window,
    read_biases,
    read_plain_rope,
    read_window,
    read_windows,
    words,
    write_biases,
)
from jllm.files.hf_fields import read_boolean, read_integer


def _read(raw: Fields, layers: int) -> dict[str, Any]:
    rotated = raw.get("no_rope_layers")  # 1 where a layer has them
    if rotated is None:
        interval = read_integer(raw, "no_rope_layer_interval", 4, least=1)
        rotated = [int((i + 1) % interval != 0) for i in range(layers)]
    if not isinstance(rotated, list) or len(rotated) != layers or any(each not in (0, 1) for each in rotated):
        raise ConfigError(f"no_rope_layers must list 0 or 1 for each of the {layers} layers")
    window = read_window(raw, None) if read_boolean(raw, "use_sliding_window") else None
    kinds = [KINDS[window is not None and not each] for each in rotated]
    return read_biases(raw) | {
        "mlp_bias": read_boolean(raw, "mlp_bias"),
        "unrotated": tuple(not each for each in rotated) if not all(rotated) else (),
        "windows": read_windows(raw, layers, window, kinds),
    }


def _write(config: LlamaConfig) -> dict[str, Any]:
    return write_biases(config) | {
        "mlp_bias": config.mlp_bias,
        "no_rope_layers": [int(config.rotation(i) != "none") for i in range(config.num_layers)],
        "sliding_window": one_window(config),
        "use_sliding_window": one_window(config) is not None,
        "layer_types": layer_types(config),
    }


SMOLLM3 = Family(
    "SmolLM3ForCausalLM",
    "smollm3",
    context=32768,
    bos=128000,
    eos=128001,
    kv_heads=4,
    tied=True,
    fields=words(
        "attention_bias mlp_bias no_rope_layers no_rope_layer_interval sliding_window use_sliding_window layer_types "
        "max_window_layers"
    ),
    rope=partial(read_plain_rope, theta=2_000_000.0),
    read=_read,
    write=_write,
)
