"""Reads and writes the config.json of Hugging Face directories."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jllm.config import DTYPES, MOST_LAYERS, LlamaConfig
from jllm.errors import ConfigError
from jllm.files.families import FAMILIES, family_of
from jllm.files.gguf.config import raw_config
from jllm.files.gguf.reader import is_gguf
from jllm.files.hf_fields import check_fields, read_boolean, read_integer, read_number, read_token_ids
from jllm.files.hf_rope import rope_scaling_to_hf, served_context, written_context

_LAYOUT = ("bits", "group_size", "desc_act", "sym", "checkpoint_format", "zero_point")  # both files must agree on these


_QUANTIZATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}


TOKEN_IDS = ("bos_token_id", "eos_token_id")


def load_config(path: str | Path, *, stored_layers: int | None = None) -> LlamaConfig:
    """Reads a model's config.json, given the file or its directory, or a GGUF file's metadata.

    A generation_config.json beside it overrides the begin and end token ids. Its sampling defaults (temperature, top_k,
    ...) are ignored, since the caller decides how to sample. Raises ConfigError, also if the config has more layers
    than the weights (`stored_layers`).
    """
    path = Path(path)
    if is_gguf(path):
        return from_hf(raw_config(path), source=str(path))
    file = path / "config.json" if path.is_dir() else path
    raw = _read_json(file)
    generation = file.parent / "generation_config.json"
    if generation.exists():
        ids = {key: id for key, id in _read_json(generation).items() if key in TOKEN_IDS and id is not None}
        try:
            for key in ids:
                read_token_ids(ids, key, None)
        except ConfigError as error:
            raise ConfigError(f"{generation}: {error}") from None
        raw |= ids
    layers = raw.get("num_hidden_layers")
    if stored_layers and isinstance(layers, int) and layers > stored_layers:
        raise ConfigError(f"{file}: num_hidden_layers is {layers}, but the weights beside it have {stored_layers}")
    return from_hf(raw, source=str(file))


def load_quantization(path: str | Path) -> dict[str, Any] | None:
    """Returns a model directory's description of how its weights are quantized; None if there is none.

    It is `quantization_config` in config.json (older files: `compression_config`), else a file beside it, as AutoGPTQ
    and AutoAWQ wrote. Raises ConfigError, also if there are both and they contradict each other.
    """
    file = Path(path) / "config.json"
    if not file.exists():
        return None
    raw = _read_json(file)
    found = raw.get("quantization_config") or raw.get("compression_config")
    if found is not None and not isinstance(found, dict):
        raise ConfigError(f"{file}: quantization_config is a {type(found).__name__}, not a JSON object")
    for name, method in _QUANTIZATION_FILES.items():
        if not (file.parent / name).exists():
            continue
        beside = {"quant_method": method} | _read_json(file.parent / name)
        if not found:
            found = beside
        elif found.get("quant_method") == beside["quant_method"] and (odd := _differing(found, beside)):
            one, other = (json.dumps(config[odd[0]]) for config in (found, beside))
            raise ConfigError(f"{file}: quantization_config says {odd[0]} = {one}, but {name} beside it says {other}")
    return found or None


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return [key for key in _LAYOUT if key in one and key in other and one[key] != other[key]]


def from_hf(raw: Mapping[str, Any], *, source: str = "config.json") -> LlamaConfig:
    """Returns a config from the dict of a Hugging Face config.json.

    It reads the older layout (`rope_theta`, `rope_scaling`, `torch_dtype`) and the newer (`rope_parameters`, `dtype`).
    `source` names the file in errors and warnings. Absent fields have the defaults of transformers. load_quantization
    reads how the weights are quantized. Raises ConfigError for missing, malformed or unsupported fields. Warns of
    unknown fields.
    """
    try:
        return _from_hf(raw, source)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def _from_hf(raw: Mapping[str, Any], source: str) -> LlamaConfig:
    family = family_of(raw)
    check_fields(raw, family.architecture, family.fields, family.fixed, source)
    hidden, heads = read_integer(raw, "hidden_size", least=1), read_integer(raw, "num_attention_heads", least=1)
    head_dim = read_integer(raw, "head_dim", family.head_dim or 0, null=0)
    if head_dim == 0:
        if hidden % heads:
            raise ConfigError(f"hidden_size {hidden} is not a multiple of {heads} heads, and head_dim is not given")
        head_dim = hidden // heads
    layers = read_integer(raw, "num_hidden_layers", least=1, most=MOST_LAYERS)
    context = read_integer(raw, "max_position_embeddings", family.context, least=1)
    rope = family.rope(raw, context, head_dim, source)
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not supported; supported are {', '.join(DTYPES)}")
    return LlamaConfig(
        architecture=family.architecture,
        vocab_size=read_integer(raw, "vocab_size", least=1),
        hidden_size=hidden,
        intermediate_size=read_integer(raw, "intermediate_size", least=1),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=read_integer(raw, "num_key_value_heads", family.kv_heads or heads, null=heads, least=1),
        head_dim=head_dim,
        context=served_context(rope["rope_scaling"], context),
        norm_eps=read_number(raw, "rms_norm_eps", family.eps),
        tie_embeddings=read_boolean(raw, "tie_word_embeddings", family.tied),
        dtype=dtype,
        bos_id=next(iter(read_token_ids(raw, "bos_token_id", family.bos)), None),
        eos_ids=read_token_ids(raw, "eos_token_id", family.eos),
        **rope,
        **family.read(raw, layers),
    )


def to_hf(config: LlamaConfig) -> dict[str, Any]:
    """Returns the dict of a config.json for `config`: `from_hf(to_hf(config)) == config`.

    It has the older layout, which every version of transformers reads. Raises ConfigError for a config that its
    architecture cannot express (for example a Mistral with biases).
    """
    if type(config) is not LlamaConfig:
        raise ConfigError(f"config.json cannot describe a {type(config).__name__}: give a LlamaConfig")
    if config.architecture not in FAMILIES:
        raise ConfigError(f"architecture {config.architecture!r} is not one of {', '.join(FAMILIES)}")
    family = FAMILIES[config.architecture]
    raw: dict[str, Any] = {
        "architectures": [config.architecture],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": written_context(config),
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope_scaling_to_hf(config.rope_scaling),
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": config.dtype,
        "bos_token_id": config.bos_id,
        "pad_token_id": None,  # a family's default may be no token of a small vocabulary
        "eos_token_id": (config.eos_ids[0] if len(config.eos_ids) == 1 else list(config.eos_ids) or None),
    }
    raw |= family.write(config)
    read_back = from_hf(raw, source="to_hf")
    lost = [name for name in config.__dataclass_fields__ if getattr(read_back, name) != getattr(config, name)]
    if lost:
        values = ", ".join(f"{name}={getattr(config, name)!r}" for name in lost)
        raise ConfigError(f"a {config.architecture} cannot have {values}")
    return raw


def _read_json(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{file}: holds a {type(raw).__name__}, not a JSON object")
    return raw
