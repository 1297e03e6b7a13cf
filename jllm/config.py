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
    shared_ffn: int = 0  # F of an expert that computes every token; 0: there is none
    biases: bool = False  # of router and experts, whose gates and ups are clamped: gpt-oss
    layers: tuple[bool, ...] = ()  # whether each layer has experts; () means all have

    def __post_init__(self) -> None:
        for name, most in (("count", MOST_SIZE), ("ffn", MOST_SIZE), ("chosen", self.count)):
            if not 1 <= getattr(self, name) <= most:
                raise ConfigError(f"experts.{name} is {getattr(self, name)}, but must be at least 1 and at most {most}")
        if not 0 <= self.shared_ffn <= MOST_SIZE or (self.shared_ffn and self.biases):
            raise ConfigError(
                f"experts.shared_ffn is {self.shared_ffn}, but must be 0 if biases, and at most {MOST_SIZE}"
            )
        if all(self.layers):  # one form of "all layers", so that equal models compare equal
            object.__setattr__(self, "layers", ())

    @property
    def axes(self) -> dict[str, int]:
        """Returns the size of each axis of experts' weights."""
        return {"experts": self.count, "expert_ffn": self.ffn, "shared_ffn": self.shared_ffn}


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
    qk_norm_whole: bool = False  # these norms are over all heads of a token, not over each
    norms: str = "before"  # where a block's norms are: "before" it, "after" it, or "around" it, which is both
    norm_offset: float = 0.0  # added to the weights of all norms
    activation: str = "silu"  # of the gates: or "gelu_tanh"
    rotary_dim: int | None = None  # the first dims of a head, which are rotated; None: all
    unrotated: tuple[bool, ...] = ()  # whether each layer is without rotary embeddings; () means none is
    window_theta: float | None = None  # rope_theta of layers with a window, which are unscaled; None: as all layers
    attention_scale: float | None = None  # None: head_dim**-0.5
    attention_softcap: float | None = None  # bounds attention's logits x: cap * tanh(x / cap)
    logit_softcap: float | None = None  # bounds the model's logits likewise
    logit_divisor: float = 1.0  # of the model's logits
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of what a block adds to the residual stream
    sinks: bool = False  # each head has a logit that takes a part of attention and has no value
    experts: Experts | None = None  # None: every layer has one MLP
    dtype: str = "bfloat16"  # of the checkpoint
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    # The inputs of o and down are quantized in this number of parts, as on that number of devices.
    activation_parts: int = field(default=1, repr=False)
    # The devices that share each layer (jllm.parallel); None: one device.
    mesh: "Mesh | None" = field(default=None, repr=False)
    # Whether each device of a mesh has whole experts, or columns of all; None: whole if their number divides.
    expert_parallel: bool | None = field(default=None, repr=False)
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
        if self.rotary_dim is not None and (self.rotary_dim % 2 or not 2 <= self.rotary_dim < self.head_dim):
            raise ConfigError(f"rotary_dim is {self.rotary_dim}, but must be even and less than head_dim")
        if self.rope_scaling is not None and self.rope_scaling.kind == "longrope":
            for factors in (self.rope_scaling.short_factors, self.rope_scaling.long_factors):
                if len(factors) != self.rotated_dims // 2:
                    wanted = f"one for each of the {self.rotated_dims // 2} pairs of a head"
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
        elif self.expert_parallel is not None:
            raise ConfigError(f"expert_parallel={self.expert_parallel} is for a mixture of experts, not for one MLP")
        if odd := [window for window in self.windows if window is not None and not 1 <= window <= MOST]:
            raise ConfigError(f"a sliding window must be at least 1 and at most {MOST}, not {odd[0]}")
        for name, known in (("norms", ("before", "after", "around")), ("activation", ("silu", "gelu_tanh"))):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, but must be one of {', '.join(known)}")
        if self.norm_after and (self.experts is not None or self.mlp_bias or self.sinks):
            raise ConfigError(f"norms {self.norms!r} are for models without experts, sinks and biases of the MLP")
        if self.experts is not None and self.residual_multiplier != 1:
            raise ConfigError("residual_multiplier is for models without experts")
        if (self.activation != "silu" or self.norm_offset) and not self.norm_after:
            raise ConfigError("norm_offset, and activations other than silu, are for norms after blocks")
        if self.unrotated and len(self.unrotated) != self.num_layers:
            raise ConfigError(f"unrotated has {len(self.unrotated)} entries for {self.num_layers} layers")
        if not any(self.unrotated):
            object.__setattr__(self, "unrotated", ())
        if not any(self.windows):  # one form of "no windows", so that equal models compare equal
            object.__setattr__(self, "windows", ())

    def window(self, layer: int) -> int | None:
        """Returns the sliding window of a layer. Key j is visible to query i iff 0 <= i - j < window. If it is None,
        all keys up to i are visible."""
        return self.windows[layer] if self.windows else None

    def rotation(self, layer: int) -> str:
        """Returns how a layer rotates queries and keys: "scaled" as rope_theta and rope_scaling say, "window" by
        window_theta, or "none"."""
        if self.unrotated and self.unrotated[layer]:
            return "none"
        return "scaled" if self.window_theta is None or self.window(layer) is None else "window"

    def has_experts(self, layer: int) -> bool:
        """Returns whether a layer has a Mixture of Experts in place of its MLP."""
        return self.experts is not None and (not self.experts.layers or self.experts.layers[layer])

    def one_layer(self, layer: int) -> "LlamaConfig":
        """Returns the config of a model that has this layer alone. Its embedding is the stream before the layer."""
        experts = self.experts
        if experts is not None:
            experts = replace(experts, layers=()) if self.has_experts(layer) else None
        own = slice(layer, layer + 1)
        kinds: dict[str, Any] = {"windows": self.windows[own], "unrotated": self.unrotated[own], "experts": experts}
        kinds["expert_parallel"] = None if experts is None else self.expert_parallel
        return replace(self, num_layers=1, embedding_multiplier=1.0, **kinds)

    @property
    def all_experts(self) -> bool:
        """Returns whether every layer has experts, so that none has columns of an MLP."""
        return self.experts is not None and not self.experts.layers

    @property
    def rotated_dims(self) -> int:
        """Returns the number of a head's first dims that are rotated."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def norm_before(self) -> bool:
        """Returns whether a block begins with a norm."""
        return self.norms != "after"

    @property
    def norm_after(self) -> bool:
        """Returns whether a block ends with a norm."""
        return self.norms != "before"

    @property
    def query_scale(self) -> float:
        """Returns the factor of attention's logits."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

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
            "q_norm": self.num_heads if self.qk_norm_whole else 1,
            "k_norm": self.num_kv_heads if self.qk_norm_whole else 1,
        } | ({} if self.experts is None else self.experts.axes)

    @staticmethod
    def from_hf(*_: Any, **__: Any) -> NoReturn:
        """Raises AttributeError that names the successor: the function has moved."""
        raise AttributeError("LlamaConfig.from_hf is gone: use jllm.files.hf_config.from_hf")
