"""The KV policies that options take by name."""

from collections.abc import Callable

from jllm.engine.kv_policy import OnDemand, Policy
from jllm.errors import ConfigError
from jllm.kv_policies.extent import Extent
from jllm.kv_policies.reserve import Reserve

KV_POLICIES: dict[str, Callable[[], Policy]] = {"paged": OnDemand, "reserve": Reserve, "extent": Extent}


def policy_of(policy: str | Policy) -> Policy:
    """Returns the policy that an option gives, by its name or as an object. Raises ConfigError for neither."""
    if isinstance(policy, str) and policy in KV_POLICIES:
        return KV_POLICIES[policy]()
    if not isinstance(policy, Policy) or isinstance(policy, type):
        names = ", ".join(KV_POLICIES)
        raise ConfigError(f"kv_policy must be one of {names}, or an object like kv_policy.Policy, not {policy!r}")
    return policy
