"""Lists the families of models that jllm loads and saves. Each has one file here."""

from collections.abc import Mapping
from typing import Any

from jllm.errors import ConfigError
from jllm.files.families.family import Family, renamed
from jllm.files.families.gemma import GEMMA2, GEMMA3
from jllm.files.families.gpt_oss import GPT_OSS
from jllm.files.families.granite import GRANITE
from jllm.files.families.llama import LLAMA
from jllm.files.families.mistral import MISTRAL, MIXTRAL
from jllm.files.families.olmo import OLMO2, OLMO3, OLMOE
from jllm.files.families.phi import PHI3
from jllm.files.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from jllm.files.families.smollm3 import SMOLLM3

ALL = (
    *(LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, GEMMA2, GEMMA3),
    *(GPT_OSS, GRANITE, OLMO2, OLMO3, OLMOE, PHI3, SMOLLM3),
)
FAMILIES = {family.architecture: family for family in ALL}
_NAMES = tuple(pair for family in ALL for pair in family.names)
_FILES = {family.architecture: tuple((ours, theirs) for theirs, ours in family.names) for family in ALL}


def family_of(raw: Mapping[str, Any]) -> Family:
    """Returns the family of a config.json. Raises ConfigError for one that is not here."""
    names = raw.get("architectures")
    if not names:  # older files have only the model type
        names = [name for name, family in FAMILIES.items() if family.model_type == raw.get("model_type")]
    if not isinstance(names, list) or not names:
        raise ConfigError(f"names no known architecture; supported are {', '.join(FAMILIES)}")
    name = names[0]
    if not isinstance(name, str) or name not in FAMILIES:
        raise ConfigError(f"architecture {name!r} is not supported; supported are {', '.join(FAMILIES)}")
    wanted = FAMILIES[name].model_type
    if raw.get("model_type", wanted) != wanted:
        raise ConfigError(f"model_type {raw['model_type']!r} contradicts architecture {name}; its own is {wanted!r}")
    return FAMILIES[name]


def ours(name: str) -> str:
    """Returns a tensor's name in the table of weights (params.py), whatever family's file it is from."""
    return renamed(name, _NAMES)


def theirs(name: str, architecture: str) -> str:
    """Returns a tensor's name in a file of that architecture: the inverse of ours."""
    return renamed(name, _FILES.get(architecture, ()))
