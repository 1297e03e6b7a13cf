"""The engine's options that choose a KV policy and what it may count on, checked and made into a policy."""

from collections.abc import Callable, Mapping
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any

from jllm.engine.kv_policy import OnDemand, Policy
from jllm.engine.pages import PagePool
from jllm.errors import ConfigError
from jllm.kv_policies.extent import Extent
from jllm.kv_policies.learned_length import PREFIX, load_learned
from jllm.kv_policies.length import NAMES, Longest, Predictor, make_predictor
from jllm.kv_policies.predicted import Predicted
from jllm.kv_policies.reserve import Reserve

if TYPE_CHECKING:
    from jllm.engine.options import EngineOptions
    from jllm.pretrained import Model

KV_POLICIES = ("paged", "reserve", "extent")
OVERFLOWS = ("scatter", "move")
QUANTILE = 0.9  # by default


def with_learned(options: Mapping[str, Any], model: "Model") -> dict[str, Any]:
    """Engine options whose length_predictor "learned:FILE" is the predictor in that file. Raises
    LengthPredictorError."""
    name = options.get("length_predictor")
    if not isinstance(name, str) or not name.startswith(PREFIX):
        return dict(options)
    return {**options, "length_predictor": load_learned(name.removeprefix(PREFIX), model)}


def check_policy(options: "EngineOptions") -> None:
    """Raises ConfigError for a policy, or one of its options, that does not exist or has no meaning."""
    name, policy = options.length_predictor, options.kv_policy
    if policy not in KV_POLICIES:
        raise ConfigError(f"kv_policy must be one of {', '.join(KV_POLICIES)}, not {policy!r}")
    if not (name is None or name in NAMES if isinstance(name, str | None) else isinstance(name, Predictor)):
        names = ", ".join(NAMES)
        raise ConfigError(f"length_predictor must be one of {names}, or an object like length.Predictor, not {name!r}")
    if policy == "reserve" and name not in (None, "none", "longest"):
        raise ConfigError("kv_policy='reserve' reserves the longest length: it takes no length_predictor")
    if policy == "extent" and name == "none":
        raise ConfigError("kv_policy='extent' needs a length_predictor ('longest' if nothing better), not 'none'")
    if name == "longest" and policy != "reserve" and options.admission_quantile is not None:
        raise ConfigError("admission_quantile has no meaning with length_predictor='longest': leave it out")
    predicts = policy != "reserve" and _predictor_name(options) != "none"
    _check_share(options, "admission_quantile", predicts, "a length_predictor")
    _check_share(options, "watermark", policy == "paged", "kv_policy='paged'")
    if options.extent_overflow is not None:
        if policy != "extent":
            raise ConfigError(f"extent_overflow is an option of kv_policy='extent', not of {policy!r}")
        if options.extent_overflow not in OVERFLOWS:
            raise ConfigError(f"extent_overflow must be {' or '.join(OVERFLOWS)}, not {options.extent_overflow!r}")


def _check_share(options: "EngineOptions", name: str, used: bool, by: str) -> None:
    value = getattr(options, name)
    if value is None:
        return
    if not used:
        raise ConfigError(f"{name} has no meaning without {by}: leave it out")
    least = "(0" if name == "admission_quantile" else "[0"
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not 0 <= float(value) < 1 or (name == "admission_quantile" and value == 0):
        raise ConfigError(f"{name} must be a number in {least}, 1), not {value!r}")


def _predictor_name(options: "EngineOptions") -> "str | Predictor":
    return options.length_predictor or ("quantile" if options.kv_policy == "extent" else "none")


def policy_of(options: "EngineOptions") -> Callable[[PagePool], Policy]:
    """What makes the KV policy that the options choose for a pool; all that it makes share one predictor, which
    learns."""
    predictor = _predictor_name(options)
    return make_policy(
        options.kv_policy,
        predictor=make_predictor(predictor) if isinstance(predictor, str) else predictor,
        quantile=QUANTILE if options.admission_quantile is None else options.admission_quantile,
        watermark=options.watermark or 0.0,
        overflow=options.extent_overflow or OVERFLOWS[0],
    )


def make_policy(
    name: str = "paged",
    *,
    predictor: Predictor | None = None,
    quantile: float = QUANTILE,
    watermark: float = 0.0,
    overflow: str = OVERFLOWS[0],
) -> Callable[[PagePool], Policy]:
    """What makes the policy called `name` for a pool, with those options that it has."""
    if name == "reserve":
        return Reserve
    if name == "extent":
        return partial(Extent, predictor=predictor or Longest(), quantile=quantile, overflow=overflow)
    if predictor is None:
        return partial(OnDemand, watermark=watermark)
    return partial(Predicted, predictor=predictor, quantile=quantile, watermark=watermark)
