"""Makes KV policies by their names in options of experiments, with the predictor for admission."""

from typing import Any

from experiments.training.learned_length import Learned, load_learned
from jllm.engine.kv_policy import Policy, policy_of
from jllm.errors import ConfigError
from jllm.kv_policies.extent import Extent
from jllm.kv_policies.length import Longest, Predictor, Quantile
from jllm.kv_policies.predicted import Predicted
from jllm.model.model import Model

LEARNED = "learned:"  # followed by a file's path
PREDICTORS = {"longest": Longest, "quantile": Quantile}
NAMES = ("none", *PREDICTORS)


def learned_by(name: str, model: Model) -> Learned:
    """Returns the predictor of learned:FILE. Raises LengthPredictorError."""
    return load_learned(name.removeprefix(LEARNED), model)


def policy_with(
    policy: str, predictor: str | Predictor | None = None, quantile: float | None = None, overflow: str | None = None
) -> Policy:
    """Returns a KV policy by its name. `predictor` is an object or one of NAMES; None keeps the policy's default.
    Raises ConfigError for options that do not go together."""
    if isinstance(predictor, str) and predictor not in NAMES:
        raise ConfigError(f"a length predictor must be one of {', '.join(NAMES)} or {LEARNED}FILE, not {predictor!r}")
    if policy == "extent" and predictor == "none":
        raise ConfigError("extent needs a length predictor: longest if nothing better, not none")
    if policy == "reserve" and predictor not in (None, "none", "longest"):
        raise ConfigError("reserve reserves the longest length: it takes no length predictor")
    if policy != "extent" and overflow is not None:
        raise ConfigError(f"an overflow has no meaning with {policy}: leave it out")
    found: Any = PREDICTORS[predictor]() if predictor in PREDICTORS else predictor
    if policy == "extent":
        return Extent(found, quantile=quantile, **({} if overflow is None else {"overflow": overflow}))
    if policy == "paged" and found not in (None, "none"):
        return Predicted(found, quantile=quantile)
    if quantile is not None:
        raise ConfigError(f"a quantile has no meaning with {policy} without a length predictor: leave it out")
    return policy_of(policy)
