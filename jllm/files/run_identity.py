"""Identifies a run by everything that decides its results besides its prompts and options, as flat JSON.

Only a run of the same identity continues an interrupted one. Only functions that need JAX import it.
"""

import hashlib
import importlib.metadata
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jllm.quant.schemes import Scheme

PACKAGES = ("jllm", "jax", "jaxlib", "sentencepiece", "tokenizers")
CONFIG = ("config.json", "generation_config.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json")
TOKENIZER = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja",
)  # fmt: skip


def of_machine() -> dict[str, str]:
    """Returns the device, and the versions of the packages."""
    from pallas_kernels.bench.gpus import device_kind

    return {"device": device_kind()} | {name: version_of(name) for name in PACKAGES}


def of_model(model: str | Path) -> dict[str, str]:
    """Returns the identity of a directory, Hub id or GGUF file by the content of its files, wherever they lie. Raises
    CheckpointError."""
    from jllm.files import fingerprint
    from jllm.files.find import find_model
    from jllm.files.gguf.reader import is_gguf, read_gguf

    folder = find_model(model)
    if is_gguf(folder):
        metadata = digest([json.dumps(read_gguf(folder).metadata, sort_keys=True).encode()])
        return {"config": metadata, "weights": fingerprint.of_files(folder), "tokenizer": metadata}
    return {
        "config": _of_files(folder, CONFIG),
        "weights": fingerprint.of_files(folder),
        "tokenizer": _of_files(folder, TOKENIZER),
    }


def of_scheme(scheme: "str | Path | Scheme") -> str:
    """Returns the identity of a scheme by its rules and rotation, whatever its name. Raises QuantizationError."""
    from jllm.quant.schemes import find_scheme

    found = find_scheme(scheme)
    return digest([json.dumps(found.rules).encode(), *([] if found.rotate is None else [found.rotate.encode()])])


def of_adapters(adapters: Mapping[str, Path]) -> str:
    """Returns the identity of adapters by their names and the content of their files."""
    files = ("adapter_config.json", "adapter_model.safetensors")
    return digest(part.encode() for name, path in adapters.items() for part in (name, _of_files(path, files)))


def of_inputs(folder: Path, name: str) -> str:
    """Returns the identity of arrays that requests bring by a name."""
    return _of_files(folder, [f"{name}.safetensors"])


def differing(there: Mapping[str, object], here: Mapping[str, object]) -> list[str]:
    """Returns the keys that only one of the two has, or whose values differ."""
    return [key for key in {**here, **there} if (key in here, here.get(key)) != (key in there, there.get(key))]


def digest(parts: Iterable[bytes]) -> str:
    """Returns a short hash of the parts."""
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()[:32]


def _of_files(folder: Path, names: Iterable[str]) -> str:
    """Returns a hash of the existing files' names and contents."""
    files = [folder / name for name in names]
    return digest(part for file in files if file.is_file() for part in (file.name.encode(), file.read_bytes()))


def version_of(package: str) -> str:
    """Returns the installed version of a package, or "none"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
