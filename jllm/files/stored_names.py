"""Maps the names of a checkpoint's tensors to jllm's, without prefixes that wrappers add.

Wrappers put their names into tensors' names: torch.compile (`_orig_mod`), data parallelism (`module`), checkpointing of
activations. A part of a larger model has the part's name as a prefix (`language_model.`). A model saved without its
head lacks `model.`.
"""

import re
from collections.abc import Mapping
from typing import Any

from jllm.errors import CheckpointError
from jllm.files import families
from jllm.files.safetensors_io import StoredTensor
from jllm.model.params import EMBED, HEAD

_WRAPPER = re.compile(r"(?<![^.])(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_BASE, _, _EMBED = EMBED.partition(".")


def by_our_names(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns the tensors by their names in Params; unknown tensors keep their names. Raises CheckpointError for two
    tensors of one name."""
    bare = {name: _WRAPPER.sub("", name) for name in stored}
    before = {name.partition(f"{_EMBED}.")[0] for name in bare.values() if f".{_EMBED}." in f".{name}"}
    root = before.pop() if len(before) == 1 else f"{_BASE}."  # with several embeddings the model is ambiguous
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        own = families.ours(_without(root, bare[name]))
        if own in found:
            raise CheckpointError(f"tensors {found[own].name} and {name} both stand for {own}: remove one")
        found[own] = tensor
    return found


def _without(root: str, name: str) -> str:
    """Returns a name with `model.` in place of the embedding's prefix `root`. A head's name gets no prefix."""
    before, head, rest = name.partition(f"{HEAD}.")
    if head and root.startswith(before):
        return head + rest
    if name.startswith(root) and re.match(rf"{_EMBED}\.|layers\.\d|norm\.|rotary_emb\.", name[len(root) :]):
        return f"{_BASE}.{name[len(root) :]}"
    return name


def modules_renamed(raw: Any, stored: Mapping[str, StoredTensor]) -> Any:
    """Returns JSON whose lists name modules as jllm does, where they named them as the files do."""
    names: dict[str, str] = {}
    for own, tensor in stored.items():
        here, there = own.split("."), tensor.name.split(".")
        while here != there and here.pop() == there.pop() and here and there:
            names[".".join(there)] = ".".join(here)
    return _renamed(raw, names) if names else raw


def _renamed(raw: object, names: Mapping[str, str]) -> object:
    if isinstance(raw, dict):
        return {key: _renamed(value, names) for key, value in raw.items()}
    if isinstance(raw, list):
        return [names.get(value, value) if isinstance(value, str) else _renamed(value, names) for value in raw]
    return raw
