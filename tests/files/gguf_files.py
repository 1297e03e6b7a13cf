"""GGUF files of small models, by the writer and the quantizers of the package gguf (llama.cpp's own).

Its quantizers lack the K types and IQ4_NL. Their blocks are random bytes, with scales that keep values small.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jllm.model.model import Model
from jllm.model.param_specs import param_specs

gguf = pytest.importorskip("gguf")
TYPE = gguf.GGMLQuantizationType
ARCHITECTURES = {
    "LlamaForCausalLM": "llama", "MixtralForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3moe",
}  # fmt: skip
SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,)}  # where a block has float16
NAMES = {
    "model.embed_tokens": "token_embd", "lm_head": "output", "model.norm": "output_norm", "model.layers.": "blk.",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate.": "ffn_gate_inp.",
    "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}  # fmt: skip


@dataclass(frozen=True)
class Written:
    """A written file, and what its tensors stand for: float32 by Hugging Face's names, rows in that order."""

    path: Path
    values: dict[str, np.ndarray] = field(default_factory=dict)


def blocks(x: np.ndarray, kind: str, rng: np.random.Generator) -> np.ndarray:
    """x [N, K] as rows of blocks uint8 [N, bytes]; random blocks where the package cannot quantize."""
    if kind not in SCALES:
        return np.ascontiguousarray(gguf.quants.quantize(x, TYPE[kind])).view(np.uint8)
    values, size = gguf.GGML_QUANT_SIZES[TYPE[kind]]
    octets = rng.integers(0, 256, (x.size // values, size), dtype=np.uint8)
    for at in SCALES[kind]:
        octets[:, at : at + 2] = rng.normal(size=(len(octets), 1)).astype(np.float16).view(np.uint8)
    return octets.reshape(len(x), -1)


def interleaved(x: np.ndarray, heads: int) -> np.ndarray:
    """LlamaModel.permute of llama.cpp's convert_hf_to_gguf.py."""
    return x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def add(writer: Any, name: str, octets: np.ndarray, kind: str) -> None:
    if kind in ("F32", "F16"):
        writer.add_tensor(name, np.ascontiguousarray(octets).view(np.float32 if kind == "F32" else np.float16))
    else:
        writer.add_tensor(name, np.ascontiguousarray(octets), raw_dtype=TYPE[kind])


def write(path: Path, model: Model, kinds: Any = "F32", more: Any = None, split: int = 0, drop: str = "") -> Written:
    """Writes a model; `kinds` is a type, or a function of a matrix' name that returns one. `more` is further metadata,
    or other values of it. `drop` is a key to leave out. `split` is the most tensors of a part."""
    c, arch, rng = model.config, ARCHITECTURES[model.config.architecture], np.random.default_rng(0)
    metadata = {
        f"{arch}.context_length": c.context, f"{arch}.embedding_length": c.hidden_size,
        f"{arch}.block_count": c.num_layers, f"{arch}.feed_forward_length": c.intermediate_size,
        f"{arch}.attention.head_count": c.num_heads, f"{arch}.attention.head_count_kv": c.num_kv_heads,
        f"{arch}.attention.key_length": c.head_dim, f"{arch}.attention.layer_norm_rms_epsilon": c.norm_eps,
        f"{arch}.rope.freq_base": c.rope_theta, f"{arch}.rope.dimension_count": c.head_dim,
        "tokenizer.ggml.bos_token_id": c.bos_id, "tokenizer.ggml.eos_token_id": next(iter(c.eos_ids), None),
    }  # fmt: skip
    if c.experts is not None:
        metadata |= {f"{arch}.expert_count": c.experts.count, f"{arch}.expert_used_count": c.experts.chosen}
        metadata[f"{arch}.{'expert_' * (arch != 'llama')}feed_forward_length"] = c.experts.ffn
    metadata |= more or {}
    writer = gguf.GGUFWriter(path, metadata.pop("general.architecture", arch), split_max_tensors=split)
    for key, value in metadata.items():
        if isinstance(value, np.ndarray):
            writer.add_tensor(key, value)
        elif value is not None and key != drop:
            kind = gguf.GGUFValueType.FLOAT32 if isinstance(value, float) else None
            numbers = gguf.GGUFValueType.UINT32 if type(value) is int else gguf.GGUFValueType.get_type(value)
            writer.add_key_value(key, value, kind or numbers)
    found, experts = Written(path), dict[tuple[str, str], list[np.ndarray]]()
    specs, leaves = jax.tree.leaves(param_specs(c)), jax.tree.leaves(model.params)
    for spec, leaf in zip(specs, leaves, strict=True):
        starts = np.cumsum([0, *(rows for _, rows in spec.parts)])
        for (name, _), start, end in zip(spec.parts, starts, starts[1:]):
            x = np.asarray(leaf[start:end], np.float32)
            kind = "F32" if x.ndim == 1 else kinds if isinstance(kinds, str) else kinds(name)
            octets = x if x.ndim == 1 else blocks(x, kind, rng)
            found.values[name] = x if x.ndim == 1 else gguf.quants.dequantize(octets, TYPE[kind]).reshape(x.shape)
            heads = {"q_proj": c.num_heads, "k_proj": c.num_kv_heads}.get(name.split(".")[-2])
            octets = interleaved(octets, heads) if heads and arch == "llama" else octets
            own = re.sub(r"\.experts\.\d+", ".experts", name)
            for theirs, ours in NAMES.items():
                own = own.replace(theirs, ours)
            if own != name and ".experts." in name:
                experts.setdefault((own, kind), []).append(octets)
            else:
                add(writer, own, octets, kind)
    for (own, kind), matrices in experts.items():
        add(writer, own, np.stack(matrices), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found
