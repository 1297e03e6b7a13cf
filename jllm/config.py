"""The shape of a LLaMA-like model as one frozen, hashable value (static under jit), read from and written as a
Hugging Face config.json.

A field of the file is either understood, known to change nothing at inference, refused unless it is neutral, or
unknown: then a warning names it.
"""

import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jllm.errors import ConfigError

DTYPES = ("float64", "float32", "float16", "bfloat16")


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
    """Sizes and switches of one model. Letters are those of the README's axis table.

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

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        for name in (*sizes, "context"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"{self.num_heads} query heads are not a multiple of {self.num_kv_heads} KV heads")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}, but rotary embeddings need an even one")
        if self.windows and len(self.windows) != self.num_layers:
            raise ConfigError(f"{len(self.windows)} sliding windows for {self.num_layers} layers; give one a layer")
        if any(window is not None and window < 1 for window in self.windows):
            raise ConfigError(f"sliding windows {self.windows} must be at least 1")

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer: key j is visible to query i iff 0 <= i - j < window."""
        return self.windows[layer] if self.windows else None

    @staticmethod
    def from_hf(raw: Mapping[str, Any], *, source: str = "config.json") -> "LlamaConfig":
        """`from_hf`, as a constructor."""
        return from_hf(raw, source=source)


@dataclass(frozen=True)
class _Family:
    """What transformers assumes for an architecture when config.json leaves it out."""

    model_type: str
    context: int
    bos: int | None = None
    eos: int | None = None
    kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden size / heads


FAMILIES = {
    "LlamaForCausalLM": _Family("llama", context=2048, bos=1, eos=2),
    "MistralForCausalLM": _Family("mistral", context=4096 * 32, bos=1, eos=2, kv_heads=8),
    "Qwen2ForCausalLM": _Family("qwen2", context=32768, kv_heads=32),
    "Qwen3ForCausalLM": _Family("qwen3", context=32768, kv_heads=32, head_dim=128),
}

ROPE_KINDS = ("default", "linear", "llama3")

_UNDERSTOOD = set(
    "architectures model_type dtype torch_dtype vocab_size hidden_size intermediate_size num_hidden_layers "
    "num_attention_heads num_key_value_heads head_dim max_position_embeddings original_max_position_embeddings "
    "rms_norm_eps rope_theta rope_scaling rope_parameters tie_word_embeddings bos_token_id eos_token_id".split()
)
_UNDERSTOOD_BY = {
    "LlamaForCausalLM": {"attention_bias", "mlp_bias"},
    "MistralForCausalLM": {"sliding_window"},
    "Qwen2ForCausalLM": {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"},
    "Qwen3ForCausalLM": {"attention_bias", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types"},
}

# Training, bookkeeping, and sampling defaults of old files: nothing of it changes a forward pass.
_HARMLESS = set(
    "_name_or_path name_or_path transformers_version use_cache pad_token_id unk_token_id sep_token_id initializer_range "
    "attention_dropout attn_dropout attn_pdrop resid_pdrop embd_pdrop hidden_dropout hidden_dropout_prob resid_dropout "
    "classifier_dropout pretraining_tp output_attentions output_hidden_states output_scores return_dict id2label "
    "label2id num_labels problem_type chunk_size_feed_forward task_specific_params tokenizer_class prefix "
    "finetuning_task torchscript use_bfloat16 pruned_heads tf_legacy_loss is_decoder cross_attention_hidden_size "
    "tie_encoder_decoder decoder_start_token_id max_length min_length max_new_tokens do_sample early_stopping "
    "num_beams num_beam_groups diversity_penalty temperature top_k top_p min_p typical_p repetition_penalty "
    "length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences "
    "return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values suppress_tokens "
    "begin_suppress_tokens exponential_decay_length_penalty max_sequence_length attn_implementation "
    "unsloth_fixed unsloth_version".split()
)

# Fields of this or of related architectures that would change the result; null and these values mean "not used".
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_qk_norm": (False,),
    "qk_norm": (False,),
    "qk_layernorm": (False,),
    "partial_rotary_factor": (1,),
    "rotary_pct": (1,),
    "rope_ratio": (1,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "position_embedding_type": ("rope", "rotary"),
    "alibi": (False,),
    "use_alibi": (False,),
    "no_rope_layers": ([],),
    "no_rope_layer_interval": (),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logit_softcapping": (0,),
    "attn_temperature_tuning": (False, 0),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (),
    "residual_multiplier": (1,),
    "embedding_multiplier": (1,),
    "embedding_scale": (1,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "scale_emb": (1,),
    "scale_depth": (),
    "dim_model_base": (),
    "clip_qkv": (),
    "attention_sinks": (False, 0),
    "attention_sink": (False, 0),
    "use_attention_sinks": (False,),
    "attention_chunk_size": (),
    "parallel_attn": (False,),
    "parallel_residual": (False,),
    "use_parallel_residual": (False,),
    "use_parallel_block": (False,),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "num_experts_per_tok": (0,),
    "per_layer_config": ({},),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "quantization_config": (),
    "compression_config": (),
    "layer_types": (),
}


def load_config(path: str | Path) -> LlamaConfig:
    """Read a model's config.json, given the file or its directory.

    A generation_config.json beside it overrides the begin and end token ids; its sampling defaults (temperature, top_k,
    ...) are left alone: sampling is what the caller says. Raises ConfigError.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    raw = _read_json(file)
    generation = file.parent / "generation_config.json"
    if generation.exists():
        ids = _read_json(generation)
        raw |= {key: ids[key] for key in ("bos_token_id", "eos_token_id") if ids.get(key) is not None}
    return from_hf(raw, source=str(file))


def from_hf(raw: Mapping[str, Any], *, source: str = "config.json") -> LlamaConfig:
    """A config from the dict of a Hugging Face config.json, in the older (`rope_theta`, `rope_scaling`, `torch_dtype`)
    or the newer (`rope_parameters`, `dtype`) layout. `source` names the file in errors and warnings.

    Absent fields mean what they mean in transformers. Raises ConfigError for what is missing, malformed or unsupported;
    warns of fields that nobody knows.
    """
    try:
        return _from_hf(raw, source)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def _from_hf(raw: Mapping[str, Any], source: str) -> LlamaConfig:
    architecture = _architecture(raw)
    family = FAMILIES[architecture]
    _check_fields(raw, architecture, source)
    hidden, heads = _integer(raw, "hidden_size"), _integer(raw, "num_attention_heads")
    head_dim = _integer(raw, "head_dim", family.head_dim or 0, null=0)
    if head_dim == 0:
        if heads == 0 or hidden % heads:
            raise ConfigError(f"hidden_size {hidden} is not a multiple of {heads} heads, and head_dim is not given")
        head_dim = hidden // heads
    layers, context = _integer(raw, "num_hidden_layers"), _integer(raw, "max_position_embeddings", family.context)
    rope_theta, rope_scaling = _rope(raw, context, source)
    attention_bias = _boolean(raw, "attention_bias")
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not supported; supported are {', '.join(DTYPES)}")
    return LlamaConfig(
        architecture=architecture,
        vocab_size=_integer(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_integer(raw, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_integer(raw, "num_key_value_heads", family.kv_heads or heads, null=heads),
        head_dim=head_dim,
        context=context,
        norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        windows=_windows(raw, architecture, layers),
        tie_embeddings=_boolean(raw, "tie_word_embeddings"),
        qkv_bias=True if architecture == "Qwen2ForCausalLM" else attention_bias,
        o_bias=False if architecture == "Qwen2ForCausalLM" else attention_bias,
        mlp_bias=_boolean(raw, "mlp_bias"),
        qk_norm=architecture == "Qwen3ForCausalLM",
        dtype=dtype,
        bos_id=next(iter(_token_ids(raw, "bos_token_id", family.bos)), None),
        eos_ids=_token_ids(raw, "eos_token_id", family.eos),
    )


def to_hf(config: LlamaConfig) -> dict[str, Any]:
    """The dict of a config.json that means `config`: `from_hf(to_hf(config)) == config`.

    Written in the older layout, which every version of transformers reads. Raises ConfigError for a config that its
    architecture cannot express (say, a Mistral with biases).
    """
    if config.architecture not in FAMILIES:
        raise ConfigError(f"architecture {config.architecture!r} is not one of {', '.join(FAMILIES)}")
    raw: dict[str, Any] = {
        "architectures": [config.architecture],
        "model_type": FAMILIES[config.architecture].model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_scaling_to_hf(config.rope_scaling),
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": config.dtype,
        "bos_token_id": config.bos_id,
        "eos_token_id": (config.eos_ids[0] if len(config.eos_ids) == 1 else list(config.eos_ids) or None),
    }
    understood = _UNDERSTOOD_BY[config.architecture]
    if "attention_bias" in understood:
        raw["attention_bias"] = config.o_bias
    if "mlp_bias" in understood:
        raw["mlp_bias"] = config.mlp_bias
    if "sliding_window" in understood:
        raw["sliding_window"] = next((window for window in config.windows if window is not None), None)
    if "use_sliding_window" in understood:
        raw["use_sliding_window"] = raw["sliding_window"] is not None
        kinds = ["full_attention" if config.window(i) is None else "sliding_attention" for i in range(config.num_layers)]
        raw["layer_types"] = kinds
        raw["max_window_layers"] = (kinds + ["sliding_attention"]).index("sliding_attention")
    read_back = from_hf(raw, source="to_hf")
    lost = [name for name in config.__dataclass_fields__ if getattr(read_back, name) != getattr(config, name)]
    if lost:
        values = ", ".join(f"{name}={getattr(config, name)!r}" for name in lost)
        raise ConfigError(f"a {config.architecture} cannot have {values}")
    return raw


def _rope_scaling_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    raw: dict[str, Any] = {"rope_type": scaling.kind, "type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        raw["low_freq_factor"] = scaling.low_freq_factor
        raw["high_freq_factor"] = scaling.high_freq_factor
        raw["original_max_position_embeddings"] = scaling.original_context
    return raw


def _read_json(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{file}: holds a {type(raw).__name__}, not a JSON object")
    return raw


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures")
    if not names:  # older files name the model type alone
        names = [name for name, family in FAMILIES.items() if family.model_type == raw.get("model_type")]
    if not isinstance(names, list) or not names:
        raise ConfigError(f"names no known architecture; supported are {', '.join(FAMILIES)}")
    if names[0] not in FAMILIES:
        raise ConfigError(f"architecture {names[0]!r} is not supported; supported are {', '.join(FAMILIES)}")
    return names[0]


def _check_fields(raw: Mapping[str, Any], architecture: str, source: str) -> None:
    understood = _UNDERSTOOD | _UNDERSTOOD_BY[architecture]
    for key, value in raw.items():
        if key in understood or key not in _NEUTRAL or value is None or value in _NEUTRAL[key]:
            continue
        if key in ("quantization_config", "compression_config"):
            raise ConfigError(f"{key} is set: quantized checkpoints are not supported yet; use one in 16 or 32 bits")
        if key == "layer_types" and set(value) == _layer_kinds(raw, architecture):
            continue
        if key == "attention_bias" and architecture == "Qwen2ForCausalLM":
            continue  # its biases are fixed
        wanted = " or ".join(repr(neutral) for neutral in (*_NEUTRAL[key], None))
        raise ConfigError(f"{key} = {value!r} is not supported for {architecture}; supported: {wanted}")
    unknown = [key for key in raw if key not in understood | _HARMLESS | _NEUTRAL.keys() and not key.startswith("_")]
    if unknown:
        warnings.warn(f"{source}: unknown fields are ignored: {', '.join(sorted(unknown))}", stacklevel=5)


def _layer_kinds(raw: Mapping[str, Any], architecture: str) -> set[str]:
    """The layer types that an architecture without a choice of them has everywhere."""
    windowed = architecture == "MistralForCausalLM" and raw.get("sliding_window", 4096) is not None
    return {"sliding_attention" if windowed else "full_attention"}


def _rope(raw: Mapping[str, Any], context: int, source: str) -> tuple[float, RopeScaling | None]:
    """Rotary base and scaling, of either layout; values inside the dict win over those beside it, as in transformers."""
    older, newer = raw.get("rope_scaling") or {}, raw.get("rope_parameters") or {}
    if not isinstance(older, dict) or not isinstance(newer, dict):
        raise ConfigError("rope_scaling and rope_parameters must be JSON objects or null")
    differing = [key for key in older if key in newer and older[key] != newer[key]]
    if differing:
        raise ConfigError(f"rope_scaling and rope_parameters disagree about {', '.join(differing)}")
    rope = newer | older
    theta = _number({"rope_theta": 10000.0} | dict(raw) | rope, "rope_theta", 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise ConfigError(f"rope type {kind!r} is not supported; supported are {', '.join(ROPE_KINDS)}")
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise ConfigError(f"partial_rotary_factor = {rope['partial_rotary_factor']!r} is not supported; supported: 1")
    known = set(
        "rope_theta rope_type type partial_rotary_factor factor low_freq_factor high_freq_factor "
        "original_max_position_embeddings".split()
    )
    if unknown := sorted(set(rope) - known):
        warnings.warn(f"{source}: unknown rope fields are ignored: {', '.join(unknown)}", stacklevel=5)
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind, _number(rope, "factor"))
    low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
    if high <= low:
        raise ConfigError(f"rope high_freq_factor {high} must be greater than low_freq_factor {low}")
    beside = raw if raw.get("original_max_position_embeddings") is not None else rope
    original = _integer(beside, "original_max_position_embeddings", context, null=context)
    return theta, RopeScaling(kind, _number(rope, "factor"), low, high, original)


def _windows(raw: Mapping[str, Any], architecture: str, layers: int) -> tuple[int | None, ...]:
    if architecture == "LlamaForCausalLM":
        return ()
    window = _integer(raw, "sliding_window", 4096) if raw.get("sliding_window", 4096) is not None else None
    if architecture == "MistralForCausalLM":
        return (window,) * layers if window is not None else ()
    if not _boolean(raw, "use_sliding_window"):
        window = None
    kinds = raw.get("layer_types")
    if kinds is None:
        first = _integer(raw, "max_window_layers", 28)
        kinds = ["sliding_attention" if window is not None and i >= first else "full_attention" for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ConfigError(f"layer_types must list one type for each of the {layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(f"layer type {kind!r} is not supported; supported: full_attention, sliding_attention")
    if "sliding_attention" not in kinds:
        return ()
    if window is None:
        raise ConfigError("layer_types has sliding_attention, but use_sliding_window or sliding_window is not set")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _integer(raw: Mapping[str, Any], key: str, default: int | None = None, null: int | None = None) -> int:
    """raw[key]; `default` where it is absent, `null` where it is null. Never negative."""
    value = raw.get(key, default)
    if value is None and key in raw:
        value = null
    if value is None:
        raise ConfigError(f"{key} is missing")
    if type(value) is not int or value < 0:
        raise ConfigError(f"{key} = {value!r} is not a non-negative integer")
    return value


def _number(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = raw.get(key, default)
    if value is None:
        raise ConfigError(f"{key} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf):
        raise ConfigError(f"{key} = {value!r} is not a positive number")
    return float(value)


def _boolean(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key)
    if value not in (None, False, True):
        raise ConfigError(f"{key} = {value!r} is neither true nor false")
    return bool(value)


def _token_ids(raw: Mapping[str, Any], key: str, default: int | None) -> tuple[int, ...]:
    value = raw.get(key, default)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(i) is not int or i < 0 for i in ids):
        raise ConfigError(f"{key} = {value!r} is not a token id or a list of them")
    return tuple(ids)
