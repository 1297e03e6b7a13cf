"""Reads a GGUF file's metadata as the fields of a Hugging Face config.json."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jllm.errors import ConfigError
from jllm.files.families import FAMILIES
from jllm.files.gguf.reader import ROPE_FACTORS, GGUFFile, read_gguf
from jllm.files.gguf.weights import read_values
from jllm.model.params import EMBED, HEAD, layer_prefix

ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}  # fmt: skip
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")  # at all of these llama.cpp ends an answer


def raw_config(path: str | Path) -> dict[str, Any]:
    """Returns the fields of config.json that a GGUF file implies. Raises ConfigError, in one line, for an unsupported
    architecture or missing metadata."""
    file = read_gguf(path)
    arch = file.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"{path}: architecture {arch!r} is not supported in GGUF; supported are {known}")
    own = {key.removeprefix(f"{arch}."): value for key, value in file.metadata.items() if key.startswith(f"{arch}.")}
    architecture, experts = ARCHITECTURES[arch], arch == "qwen3moe" or bool(own.get("expert_count"))
    if experts and arch == "llama":
        architecture = "MixtralForCausalLM"
    elif experts and arch != "qwen3moe":
        raise ConfigError(f"{path}: {arch}.expert_count is {own['expert_count']}: {arch} with experts is not supported")
    needed: tuple[str, ...] = ("embedding_length", "block_count", "feed_forward_length", "context_length")
    needed += ("attention.head_count",)
    needed += ("expert_count", "expert_used_count") * experts
    needed += ("expert_feed_forward_length",) * (arch == "qwen3moe")
    if missing := [key for key in needed if key not in own]:
        raise ConfigError(f"{path}: its metadata lacks {arch}.{missing[0]}")
    if f"{EMBED}.weight" not in file.tensors:
        raise ConfigError(f"{path}: has no tensor token_embd.weight")
    heads = own["attention.head_count"]
    raw = {
        "architectures": [architecture],
        "model_type": FAMILIES[architecture].model_type,
        "vocab_size": file.tensors[f"{EMBED}.weight"].shape[0],
        "hidden_size": own["embedding_length"],
        "intermediate_size": own["feed_forward_length"],
        "num_hidden_layers": own["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": own.get("attention.head_count_kv", heads),
        "max_position_embeddings": own["context_length"],
        "rms_norm_eps": _short(own.get("attention.layer_norm_rms_epsilon", 1e-6)),
        "rope_theta": _short(own.get("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(own, file, path),
        "tie_word_embeddings": f"{HEAD}.weight" not in file.tensors,
        "torch_dtype": _dtype(file),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(
            dict.fromkeys(i for key in _ENDS if (i := file.metadata.get(f"tokenizer.ggml.{key}")) is not None)
        ),
    }
    if isinstance(raw["hidden_size"], int) and isinstance(heads, int) and heads > 0:
        raw["head_dim"] = own.get("attention.key_length", raw["hidden_size"] // heads)
        rotated = own.get("rope.dimension_count", raw["head_dim"])
        if rotated != raw["head_dim"]:
            raw["partial_rotary_factor"] = rotated / raw["head_dim"]
    if experts:
        raw["num_local_experts"], raw["num_experts_per_tok"] = own["expert_count"], own["expert_used_count"]
    if arch == "qwen3moe":
        layers = range(own["block_count"])
        raw["moe_intermediate_size"], raw["norm_topk_prob"] = own["expert_feed_forward_length"], True
        raw["mlp_only_layers"] = [i for i in layers if f"{layer_prefix(i)}mlp.gate.weight" not in file.tensors]
    elif architecture == "LlamaForCausalLM":
        raw["attention_bias"] = f"{layer_prefix(0)}self_attn.o_proj.bias" in file.tensors
        raw["mlp_bias"] = f"{layer_prefix(0)}mlp.down_proj.bias" in file.tensors
    return raw


def _short(number: Any) -> Any:
    """Returns the shortest decimal of a float32, as the number was before it was stored."""
    return float(str(np.float32(number))) if isinstance(number, float) else number


def _rope_scaling(own: Mapping[str, Any], file: GGUFFile, path: str | Path) -> dict[str, Any] | None:
    """Returns rope_scaling. Llama 3's kind is stored as divisors of frequencies, which are LongRoPE's of any length."""
    if ROPE_FACTORS in file.tensors:
        tensor = file.tensors[ROPE_FACTORS]
        factors = np.empty(tensor.shape, np.float32)
        read_values(tensor, factors)
        both = [float(x) for x in factors]
        return {"rope_type": "longrope", "factor": 1.0, "short_factor": both, "long_factor": both}
    kind, factor = own.get("rope.scaling.type", "none"), _short(own.get("rope.scaling.factor", 1.0))
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"{path}: rope.scaling.type {kind!r} is not supported in GGUF; supported are linear, yarn")
    raw = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        raw["original_max_position_embeddings"] = own.get("rope.scaling.original_context_length")
        if "rope.scaling.attn_factor" in own:  # llama.cpp multiplies it by YaRN's own
            raw["attention_factor"] = _short(own["rope.scaling.attn_factor"]) * (0.1 * math.log(max(1, factor)) + 1)
    return raw


def _dtype(file: GGUFFile) -> str:
    """Returns the dtype of the matrices that are not quantized, or that quantized ones become. Routers are always
    F32."""
    kinds = {tensor.dtype for tensor in file.tensors.values() if len(tensor.shape) == 2}
    if "F16" in kinds and "BF16" not in kinds:
        return "float16"
    return "float32" if kinds == {"F32"} else "bfloat16"
