"""The shape of a LLaMA-like model as one frozen, hashable value (so that it can be static under jit)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """Frequency scaling of rotary embeddings: kind "linear" uses factor alone, "llama3" all fields."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and switches of one model. Letters are those of the README's axis table."""

    architecture: str  # Hugging Face class name, e.g. "LlamaForCausalLM"; decides the names in a saved checkpoint
    vocab_size: int  # V
    hidden_size: int  # E
    intermediate_size: int  # F
    num_layers: int
    num_heads: int  # H
    num_kv_heads: int  # K
    head_dim: int  # D
    context: int  # most positions that the model was made for (max_position_embeddings)
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    windows: tuple[int | None, ...] = ()  # sliding window of each layer; () means none anywhere
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dtype: str = "bfloat16"  # what the checkpoint stores
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer: key j is visible to query i iff 0 <= i - j < window."""
        return self.windows[layer] if self.windows else None
