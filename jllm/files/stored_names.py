"""The names of a checkpoint's tensors, without what others put around them.

Wrappers leave their names in those of tensors: torch.compile (`_orig_mod`), data parallelism (`module`), checkpointing
of activations. A part of a larger model has that part's name before its own (`language_model.`); one that was saved
without its head lacks `model.`.
"""

import re
from collections.abc import Mapping
from typing import Any

from jllm.errors import CheckpointError
from jllm.files.safetensors_io import StoredTensor
from jllm.model.params import EMBED, HEAD

_WRAPPER = re.compile(r"(?<![^.])(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_BASE, _, _EMBED = EMBED.partition(".")


def by_our_names(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns the same tensors, by the names that Params has for them; what it has no name for keeps its own. Raises
    CheckpointError for two of one name."""
    bare = {name: _WRAPPER.sub("", name) for name in stored}
    before = {name.partition(f"{_EMBED}.")[0] for name in bare.values() if f".{_EMBED}." in f".{name}"}
    root = before.pop() if len(before) == 1 else f"{_BASE}."  # several embeddings: whose is the model?
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        own = _without(root, bare[name])
        if own in found:
            raise CheckpointError(f"tensors {found[own].name} and {name} both stand for {own}: remove one")
        found[own] = tensor
    return found


def _without(root: str, name: str) -> str:
    """Returns a name with `model.` in place of what the embedding's begins with; a head's with nothing before it."""
    before, head, rest = name.partition(f"{HEAD}.")
    if head and root.startswith(before):
        return head + rest
    if name.startswith(root) and re.match(rf"{_EMBED}\.|layers\.\d|norm\.|rotary_emb\.", name[len(root) :]):
        return f"{_BASE}.{name[len(root) :]}"
    return name


def modules_renamed(raw: Any, stored: Mapping[str, StoredTensor]) -> Any:
    """Returns the same JSON, but what its lists name as the files do has the name that it has here."""
    names: dict[str, str] = {}
    for own, tensor in stored.items():
        here, there = own.split("."), tensor.name.split(".")
        while here != there and here.pop() == there.pop() and here and there:
            names[".".join(there)] = ".".join(here)
    return _renamed(raw, names) if names else raw


def _renamed(raw: Any, names: Mapping[str, str]) -> Any:
    if isinstance(raw, dict):
        return {key: _renamed(value, names) for key, value in raw.items()}
    if isinstance(raw, list):
        return [names.get(value, value) if isinstance(value, str) else _renamed(value, names) for value in raw]
    return raw
