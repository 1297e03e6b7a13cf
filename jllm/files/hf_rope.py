"""Reads and writes the rotary embedding of a Hugging Face config.json, in its older layout and its newer."""

import math
import warnings
from collections.abc import Mapping
from typing import Any

from jllm.config import LlamaConfig, RopeScaling
from jllm.errors import ConfigError
from jllm.files.hf_fields import read_boolean, read_integer, read_number

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_BY_WINDOW = ("full_attention", "sliding_attention")
_FIELDS = {
    "rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings", "partial_rotary_factor",
}  # fmt: skip
_FIELDS_OF = {
    "yarn": {"attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"},
    "longrope": {"attention_factor", "short_factor", "long_factor"},
}


def read_rope(
    raw: Mapping[str, Any], context: int, source: str, *, theta: float = 10000.0, partial: bool = False
) -> tuple[float, RopeScaling | None]:
    """Returns rotary base and scaling, of either layout. A value in the dict wins over one beside it, as in
    transformers. `context` is max_position_embeddings, `theta` the default base. `partial`: a part of a head may be
    rotated."""
    older, newer = _rope_fields(raw, "rope_scaling"), _rope_fields(raw, "rope_parameters")
    differing = [key for key in older if key in newer and older[key] != newer[key]]
    if differing:
        raise ConfigError(f"rope_scaling and rope_parameters disagree about {', '.join(differing)}")
    rope = newer | older
    if nested := [key for key, value in rope.items() if isinstance(value, dict) and key != "rope_type"]:
        raise ConfigError(
            f"rope parameters of their own for {', '.join(nested)} are not supported; give all layers one"
        )
    theta = read_number({"rope_theta": theta} | dict(raw) | rope, "rope_theta", theta)
    kind = rope.get("rope_type", "default")
    if kind not in KINDS:
        raise ConfigError(f"rope type {kind!r} is not supported; supported are {', '.join(KINDS)}")
    if not partial and rope.get("partial_rotary_factor") not in (None, 1):
        raise ConfigError(f"partial_rotary_factor = {rope['partial_rotary_factor']!r} is not supported; supported: 1")
    if unknown := sorted(set(rope) - _FIELDS - _FIELDS_OF.get(kind, set())):
        warnings.warn(f"{source}: unknown rope fields are ignored: {', '.join(unknown)}", stacklevel=5)
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind, read_number(rope, "factor"))
    if kind == "dynamic":
        return theta, RopeScaling(kind, read_number(rope, "factor"), original_context=context)
    beside = raw if raw.get("original_max_position_embeddings") is not None else rope
    original = read_integer(beside, "original_max_position_embeddings", context, null=context, least=1)
    if kind == "llama3":
        low, high = read_number(rope, "low_freq_factor"), read_number(rope, "high_freq_factor")
        if high <= low:
            raise ConfigError(f"rope high_freq_factor {high} must be greater than low_freq_factor {low}")
        return theta, RopeScaling(kind, read_number(rope, "factor"), low, high, original)
    given = {key: value for key, value in rope.items() if value is not None}
    factor = read_number(given, "factor", context / original)
    if kind == "yarn" and theta <= 1:
        raise ConfigError(f"rope_theta = {theta} is too small for rope type yarn: it must be greater than 1")
    return theta, (_yarn if kind == "yarn" else _longrope)(given, factor, original)


def read_partial_rope(
    raw: Mapping[str, Any], context: int, source: str, *, head_dim: int, theta: float = 10000.0
) -> dict[str, Any]:
    """Returns LlamaConfig's fields of rotary embeddings, where partial_rotary_factor says what part of a head is
    rotated."""
    theta, scaling = read_rope(raw, context, source, theta=theta, partial=True)
    rope = _rope_fields(raw, "rope_parameters") | _rope_fields(raw, "rope_scaling")
    factor = read_number({"partial_rotary_factor": 1.0} | dict(raw) | rope, "partial_rotary_factor")
    dims = int(head_dim * factor)
    return {"rope_theta": theta, "rope_scaling": scaling, "rotary_dim": None if dims == head_dim else dims}


def read_rope_by_window(
    raw: Mapping[str, Any], context: int, source: str, *, theta: float, window_theta: float | None = None
) -> dict[str, Any]:
    """Returns LlamaConfig's fields of rotary embeddings, where layers with a window have their own. Newer files have a
    dict for each kind of layer. Older ones describe that of full attention, and rope_local_base_freq the other's base;
    its default is `window_theta` (None: the same base)."""
    kinds = raw.get("rope_parameters") or {}
    if not isinstance(kinds, dict) or not all(isinstance(kinds.get(kind, {}), dict) for kind in _BY_WINDOW):
        raise ConfigError("rope_parameters must be a JSON object with one for each type of layer, or null")
    if odd := sorted(kinds.keys() - set(_BY_WINDOW)):
        raise ConfigError(f"rope_parameters has {odd[0]} beside its types of layers, {' and '.join(_BY_WINDOW)}")
    full, local = (kinds.get(kind, {}) for kind in _BY_WINDOW)
    if local.get("rope_type", "default") != "default":
        raise ConfigError(f"rope type {local['rope_type']!r} is not supported for layers with a window")
    base, scaling = read_rope(dict(raw) | {"rope_parameters": full}, context, source, theta=theta)
    own = base if window_theta is None else window_theta
    own = read_number({"rope_local_base_freq": own} | dict(raw), "rope_local_base_freq", own)
    return {"rope_theta": base, "rope_scaling": scaling, "window_theta": read_number(local, "rope_theta", own)}


def write_rope_by_window(config: LlamaConfig) -> dict[str, Any]:
    """Returns rope_parameters with a dict for each kind of layer. The fields of the older layout stand beside it."""
    full = {"rope_theta": config.rope_theta} | (rope_scaling_to_hf(config.rope_scaling) or {"rope_type": "default"})
    local = {"rope_theta": config.window_theta, "rope_type": "default"}
    return {"rope_parameters": dict(zip(_BY_WINDOW, (full, local)))}


def _yarn(rope: Mapping[str, Any], factor: float, original: int) -> RopeScaling:
    def growth(scale: str | None) -> float:
        times = 1.0 if scale is None else read_number(rope, scale)
        return 1.0 if factor <= 1 else 0.1 * times * math.log(factor) + 1.0

    both = rope.get("mscale") and rope.get("mscale_all_dim")  # transformers reads neither where one is missing
    attention = growth("mscale") / growth("mscale_all_dim") if both else growth(None)
    fast, slow = (read_number(rope, name, default) for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0)))
    if fast < slow:
        raise ConfigError(f"rope beta_fast {fast} must be at least beta_slow {slow}")
    return RopeScaling(
        "yarn",
        factor,
        original_context=original,
        attention_factor=read_number(rope, "attention_factor", attention),
        beta_fast=fast,
        beta_slow=slow,
        truncate=read_boolean({"truncate": True} | dict(rope), "truncate"),
    )


def _longrope(rope: Mapping[str, Any], factor: float, original: int) -> RopeScaling:
    if factor > 1 and original == 1:
        raise ConfigError("original_max_position_embeddings = 1 is too small for rope type longrope")
    attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    short, long = (_numbers(rope, name) for name in ("short_factor", "long_factor"))
    attention = read_number(rope, "attention_factor", attention)
    more: dict[str, Any] = {"attention_factor": attention, "short_factors": short, "long_factors": long}
    return RopeScaling("longrope", factor, original_context=original, **more)


def _numbers(rope: Mapping[str, Any], key: str) -> tuple[float, ...]:
    value = rope.get(key)
    if not isinstance(value, list):
        raise ConfigError(f"{key} is missing" if value is None else f"{key} = {value!r} is not a list of numbers")
    return tuple(read_number({key: number}, key) for number in value)


def _rope_fields(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Returns the rope dict of either layout, with its kind under "rope_type", whichever name the file has for it."""
    fields = raw.get(key) or {}
    if not isinstance(fields, dict):
        raise ConfigError("rope_scaling and rope_parameters must be JSON objects or null")
    kinds = [fields[name] for name in ("rope_type", "type") if fields.get(name) is not None]
    if len(kinds) == 2 and kinds[0] != kinds[1]:
        raise ConfigError(f"{key} has rope_type {kinds[0]!r} and type {kinds[1]!r}; they must be the same")
    rest = {name: value for name, value in fields.items() if name not in ("rope_type", "type")}
    return rest | ({"rope_type": kinds[0]} if kinds else {})


def served_context(scaling: RopeScaling | None, context: int) -> int:
    """Returns the most positions of a model whose file says max_position_embeddings = `context`. Files of kinds
    "dynamic" and "yarn" may state the original length there: their factor extends it."""
    if scaling is None or scaling.kind not in ("dynamic", "yarn"):
        return context
    return max(context, int(scaling.factor * scaling.original_context))


def written_context(config: LlamaConfig) -> int:
    """Returns max_position_embeddings of a config's file. Rope type dynamic has the original length there."""
    scaling = config.rope_scaling
    return scaling.original_context if scaling is not None and scaling.kind == "dynamic" else config.context


def rope_scaling_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """Returns rope_scaling of a config.json, which read_rope reads back."""
    if scaling is None:
        return None
    s, raw = scaling, {"rope_type": scaling.kind, "type": scaling.kind, "factor": scaling.factor}
    if s.kind in ("llama3", "yarn", "longrope"):
        raw["original_max_position_embeddings"] = s.original_context
    if s.kind == "llama3":
        raw |= {"low_freq_factor": s.low_freq_factor, "high_freq_factor": s.high_freq_factor}
    if s.kind in ("yarn", "longrope"):
        raw["attention_factor"] = s.attention_factor
    if s.kind == "yarn":
        raw |= {"beta_fast": s.beta_fast, "beta_slow": s.beta_slow, "truncate": s.truncate}
    if s.kind == "longrope":
        raw |= {"short_factor": list(s.short_factors), "long_factor": list(s.long_factors)}
    return raw
