"""Describes the shape of a LLaMA-like model as one frozen, hashable value (static under jit).

jllm.files.hf_config reads it from a Hugging Face config.json and writes it as one. A field of that file is supported,
ignored because it changes nothing at inference, or refused unless it is neutral. An unknown field gives a warning that
names it.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

from jllm.errors import ConfigError

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from pallas_kernels.all_reduce import MeshAxis

MOST = (1 << 31) - 1  # the largest integer: the device has 32 bits for it
MAX_LOGIT_BIAS = 512  # the most entries of a request
MOST_LAYERS = 10_000
MOST_SIZE = 1 << 24  # the largest of every other size: more than any model has
DTYPES = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class RopeScaling:
    """Holds the frequency scaling of rotary embeddings (jllm.model.rope). Kinds are "linear", "dynamic", "llama3",
    "yarn" and "longrope". Fields that a kind does not read keep their defaults."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_context: int = 8192  # all but linear: the positions of the first training
    attention_factor: float = 1.0  # yarn, longrope: multiplies cos and sin
    beta_fast: float = 32.0  # yarn: turns from which a pair keeps its frequency
    beta_slow: float = 1.0  # yarn: turns up to which a pair is slowed by the whole factor
    truncate: bool = True  # yarn: the ramp begins and ends at whole pairs
    short_factors: tuple[float, ...] = ()  # longrope: divisors of D/2 frequencies, for a context up to the original
    long_factors: tuple[float, ...] = ()  # longrope: divisors for a longer one


@dataclass(frozen=True)
class Experts:
    """Describes the Mixture of Experts of a model. Raises ConfigError for more chosen experts than there are."""

    count: int  # X
    chosen: int  # k, of each token
    ffn: int  # F of one expert
    normalize: bool = True  # the shares of a token's experts are divided by their sum
    layers: tuple[bool, ...] = ()  # whether each layer has experts; () means all have

    def __post_init__(self) -> None:
        for name, most in (("count", MOST_SIZE), ("ffn", MOST_SIZE), ("chosen", self.count)):
            if not 1 <= getattr(self, name) <= most:
                raise ConfigError(f"experts.{name} is {getattr(self, name)}, but must be at least 1 and at most {most}")
        if all(self.layers):  # one form of "all layers", so that equal models compare equal
            object.__setattr__(self, "layers", ())


@dataclass(frozen=True)
class LlamaConfig:
    """Holds the sizes and switches of one model. The README's table explains the letters of axes.

    Raises ConfigError for sizes that fit no model (heads not a multiple of KV heads, odd head dim, ...).
    """

    architecture: str  # Hugging Face class name, e.g. "LlamaForCausalLM"; decides the names in a saved checkpoint
    vocab_size: int  # V
    hidden_size: int  # E
    intermediate_size: int  # F
    num_layers: int
    num_heads: int  # H
    num_kv_heads: int  # K
    head_dim: int  # D
    context: int  # the most positions of the model (max_position_embeddings)
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    windows: tuple[int | None, ...] = ()  # sliding window of each layer; () means none anywhere
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: Experts | None = None  # None: every layer has one MLP
    dtype: str = "bfloat16"  # of the checkpoint
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    # The inputs of o and down are quantized in this number of parts, as on that number of devices.
    activation_parts: int = field(default=1, repr=False)
    # The devices that share each layer (jllm.parallel); None: one device.
    mesh: "Mesh | None" = field(default=None, repr=False)
    # The mesh's axis, in the config of one device's share.
    axis: "MeshAxis | None" = field(default=None, repr=False)
    kv_copies: int = field(default=1, repr=False)  # devices that have the same KV heads, in the same config

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
        for name, most in (*((size, MOST_SIZE) for size in sizes), ("num_layers", MOST_LAYERS), ("context", MOST)):
            if not 1 <= getattr(self, name) <= most:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be at least 1 and at most {most}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"{self.num_heads} query heads are not a multiple of {self.num_kv_heads} KV heads")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}, but rotary embeddings need an even one")
        if self.rope_scaling is not None and self.rope_scaling.kind == "longrope":
            for factors in (self.rope_scaling.short_factors, self.rope_scaling.long_factors):
                if len(factors) != self.head_dim // 2:
                    wanted = f"one for each of the {self.head_dim // 2} pairs of a head"
                    raise ConfigError(f"longrope has {len(factors)} factors; give {wanted}")
        for name in ("num_heads", "intermediate_size"):
            if self.activation_parts < 1 or getattr(self, name) % self.activation_parts:
                raise ConfigError(f"activation_parts is {self.activation_parts}, but must divide {name}")
        if self.windows and len(self.windows) != self.num_layers:
            raise ConfigError(
                f"{len(self.windows)} sliding windows for {self.num_layers} layers; give one for each layer"
            )
        if self.experts is not None:
            if self.experts.layers and len(self.experts.layers) != self.num_layers:
                raise ConfigError(f"experts.layers has {len(self.experts.layers)} entries for {self.num_layers} layers")
            if self.activation_parts > 1:
                raise ConfigError("activation_parts are for models without experts")
        if odd := [window for window in self.windows if window is not None and not 1 <= window <= MOST]:
            raise ConfigError(f"a sliding window must be at least 1 and at most {MOST}, not {odd[0]}")
        if not any(self.windows):  # one form of "no windows", so that equal models compare equal
            object.__setattr__(self, "windows", ())

    def window(self, layer: int) -> int | None:
        """Returns the sliding window of a layer. Key j is visible to query i iff 0 <= i - j < window. If it is None,
        all keys up to i are visible."""
        return self.windows[layer] if self.windows else None

    def has_experts(self, layer: int) -> bool:
        """Returns whether a layer has a Mixture of Experts in place of its MLP."""
        return self.experts is not None and (not self.experts.layers or self.experts.layers[layer])

    def one_layer(self, layer: int) -> "LlamaConfig":
        """Returns the config of a model that has this layer alone."""
        experts = self.experts
        if experts is not None:
            experts = replace(experts, layers=()) if self.has_experts(layer) else None
        return replace(self, num_layers=1, windows=self.windows[layer : layer + 1], experts=experts)

    @property
    def axes(self) -> dict[str, int]:
        """Returns the size of each axis that the table of weights (params.py) names."""
        return {
            "embed": self.hidden_size,
            "vocab": self.vocab_size,
            "heads": self.num_heads,
            "kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "ffn": self.intermediate_size,
        } | ({} if self.experts is None else {"experts": self.experts.count, "expert_ffn": self.experts.ffn})

    @staticmethod
    def from_hf(*_: Any, **__: Any) -> NoReturn:
        """Raises AttributeError that names the successor: the function has moved."""
        raise AttributeError("LlamaConfig.from_hf is gone: use jllm.files.hf_config.from_hf")
