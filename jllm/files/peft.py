"""Reads and writes adapters as PEFT's directories: adapter_config.json and adapter_model.safetensors.

A module's factors are lora_A [r, in] and lora_B [out, r]. Its scale is lora_alpha / r, or lora_alpha / sqrt(r) with
use_rslora. rank_pattern and alpha_pattern give other ones to modules whose name ends as a pattern says. If files of the
family have q, k and v as one tensor (Phi), so have these directories: one lora_A for all, and all rows of lora_B.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from jllm.config import LlamaConfig
from jllm.errors import CheckpointError, OutputError
from jllm.files.families import FAMILIES
from jllm.files.safetensors_io import DTYPES, StoredTensor, read_as_stored, read_header, write_file
from jllm.model.adapters import MOST_RANK, Adapter, LowRank, Target, all_targets, check_adapter, merge_params
from jllm.model.model import Model
from jllm.model.params import layer_prefix

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
NAME = re.compile(r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_magnitude_vector)(\.weight)?")
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
# Fields of the configuration that this module does not read, and the values that mean that they change nothing.
OTHERS: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "modules_to_save": (None, []),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False,),
    "megatron_config": (None,),
    "use_bdlora": (None, False),
    "kasa_config": (None,),
}
PATTERNS = ("rank_pattern", "alpha_pattern")
ENDS_WITH = r"(.*\.)?({})$"  # how PEFT puts a pattern before it looks a module up
MOVES_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")  # initial values by which PEFT changes the base too


def load_adapter(path: str | PathLike, config: LlamaConfig) -> Adapter:
    """Returns the adapter in a PEFT directory, for a model with this config.

    Ranks that differ within a matrix are padded to the largest, which changes no value. Raises CheckpointError for a
    damaged file, and by name for what is no low-rank adapter of this model's layers: DoRA (merge_adapter merges it),
    saved modules, embeddings, biases, and modules that the model lacks.
    """
    found = _read(Path(path), config)
    if found.magnitudes:
        raise CheckpointError(f"{path}: use_dora scales whole weights: merge it by jllm.merge_adapter(model, path)")
    return found.adapter


def merge_adapter(model: Model, given: str | PathLike | Adapter) -> Model:
    """Returns the model with an adapter merged into its weights: a PEFT directory, DoRA too, or a pytree. Raises
    QuantizationError for quantized weights, into which merging would round."""
    found = _Read(given, {}) if isinstance(given, dict) else _read(Path(given), model.config)
    return replace(model, params=merge_params(model.params, model.config, found.adapter, found.magnitudes))


def save_adapter(path: str | PathLike, adapter: Adapter, config: LlamaConfig, base: str | None = None) -> None:
    """Writes an adapter as a PEFT directory. `base` is the name of its model. Modules that it does not scale are left
    out. Raises OutputError if a file cannot be written, and WeightsError for an adapter of another model."""
    folder, targets = Path(path), all_targets(config)
    check_adapter(adapter, targets, MOST_RANK, "the adapter")
    tensors: dict[str, np.ndarray] = {}
    ranks, alphas = dict[str, int](), dict[str, float]()
    for field, each in adapter.items():
        target = targets[field]
        for at, layer in enumerate(target.layers):
            parts = _modules(each, target, at)
            if len(parts) > 1 and config.architecture in FAMILIES and FAMILIES[config.architecture].merged:
                parts = [_joined(parts, target)]
            for module, a, b, scale in parts:
                name = f"{layer_prefix(layer)}{module}"
                if scale:
                    tensors[f"{PREFIX}{name}.lora_A.weight"] = np.ascontiguousarray(a)
                    tensors[f"{PREFIX}{name}.lora_B.weight"] = np.ascontiguousarray(b)
                    ranks[name], alphas[name] = len(a), scale * len(a)
    rank, alpha = (max(some.values(), key=list(some.values()).count, default=1) for some in (ranks, alphas))
    written = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {_exactly(name): r for name, r in ranks.items() if r != rank},
        "alpha_pattern": {_exactly(name): a for name, a in alphas.items() if a != alpha},
        "target_modules": sorted(ranks),
        "inference_mode": True,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / WEIGHTS, tensors, {"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        if isinstance(error, OutputError):
            raise
        raise OutputError(f"{folder}: cannot be written: {error.strerror}") from None


Part = tuple[str, np.ndarray, np.ndarray, float]  # a module's name, a [r, in], b [out, r] and scale


def _modules(each: LowRank, target: Target, at: int) -> list[Part]:
    """Returns the factors of each module of a matrix, in one of its layers."""
    a, b = (np.asarray(x) for x in (each.a[at], each.b[at]))
    rows = np.split(b, np.cumsum(target.parts)[:-1])
    return list(zip(target.modules, np.split(a, len(rows)), rows, each.scale[at]))


def _joined(parts: list[Part], target: Target) -> Part:
    """Returns the factors of modules as those of one: with their a if it is the same, else with the a's of all that
    have a scale."""
    scale, name = max((own for *_, own in parts), key=abs), str(target.entry.name)
    used = {i: a for i, (_, a, _, own) in enumerate(parts) if own} or {0: parts[0][1]}
    first, *others = used.values()
    b = [rows * (own / scale if scale else 0) for *_, rows, own in parts]
    if all((each == first).all() for each in others):
        return name, first, np.concatenate(b).astype(first.dtype), scale
    wide = np.block([[rows if i == j else np.zeros_like(rows) for j in used] for i, rows in enumerate(b)])
    return name, np.concatenate([first, *others]), wide.astype(first.dtype), scale


def _exactly(module: str) -> str:
    return "^" + re.escape(module)


@dataclass(frozen=True)
class _Read:
    adapter: Adapter
    magnitudes: dict[str, np.ndarray]  # of DoRA by field: [L, out], NaN for rows that are not scaled


def _read(folder: Path, config: LlamaConfig) -> _Read:
    raw = _read_config(folder)
    factors = _factors(folder / WEIGHTS, read_header(folder / WEIGHTS), config)
    if not factors:
        raise CheckpointError(f"{folder / WEIGHTS}: has no factor lora_A")
    adapter, magnitudes, targets = {}, {}, all_targets(config)
    for target in targets.values():
        _cut_merged(folder / WEIGHTS, factors, target)
    for field, target in targets.items():
        own = {key: factors.pop(key) for key in _keys(target) if key in factors}
        if own:
            adapter[field] = _stacked(folder, raw, target, own)
            if raw.get("use_dora"):
                magnitudes[field] = _magnitudes(folder, target, own)
            elif any("lora_magnitude_vector" in some for some in own.values()):
                raise CheckpointError(f"{folder / WEIGHTS}: has a lora_magnitude_vector, and {CONFIG} no use_dora")
    if factors:
        layer, module = next(iter(factors))
        why = "and experts take no adapters" if ".experts." in module else "which this model lacks"
        raise CheckpointError(f"{folder / WEIGHTS}: changes {layer_prefix(layer)}{module}, {why}")
    return _Read(adapter, magnitudes)


def _read_config(folder: Path) -> dict[str, Any]:
    """Returns the configuration. Raises CheckpointError for one that is unreadable, or asks for more than factors."""
    path = folder / CONFIG
    try:
        raw = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path}: not readable as JSON") from None
    if not isinstance(raw, dict) or raw.get("peft_type") != "LORA":
        kind = raw.get("peft_type") if isinstance(raw, dict) else None
        raise CheckpointError(f"{path}: peft_type is {kind!r}, and LORA alone is supported")
    for name, plain in OTHERS.items():
        if raw.get(name, plain[0]) not in plain:
            raise CheckpointError(f"{path}: {name}={raw[name]!r} is not supported: low-rank factors alone are")
    for name in PATTERNS:
        try:
            for pattern, _ in (raw.get(name) or {}).items():
                re.compile(ENDS_WITH.format(pattern))
        except (AttributeError, re.error):
            raise CheckpointError(f"{path}: {name} must be numbers by regular expression, not {raw[name]!r}") from None
    start = raw.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(MOVES_BASE):
        why = "PEFT changes the base by it too, so convert the adapter to plain LoRA first"
        raise CheckpointError(f"{path}: init_lora_weights={start!r} is not supported: {why}")
    return raw


Key = tuple[int, str]  # a layer, and a module in it
Factors = dict[str, Any]  # of a module: its tensors, and under "name" the module in the file


def _factors(path: Path, stored: Mapping[str, StoredTensor], config: LlamaConfig) -> dict[Key, Factors]:
    """Returns the tensors of each module. Raises CheckpointError for tensors that are no factors of a layer's."""
    found: dict[Key, Factors] = {}
    for name, tensor in stored.items():
        match = NAME.fullmatch(name.removeprefix(PREFIX))
        layer = match and LAYER.fullmatch(match["module"])
        if not match or not layer or tensor.dtype not in DTYPES:
            raise CheckpointError(f"{path}: tensor {name} is no low-rank factor of a layer")
        if int(layer[1]) >= config.num_layers:
            raise CheckpointError(f"{path}: tensor {name}: the model has {config.num_layers} layers")
        found.setdefault((int(layer[1]), layer[2]), {"name": match["module"]})[match["part"]] = read_as_stored(tensor)
    return found


def _cut_merged(path: Path, factors: dict[Key, Factors], target: Target) -> None:
    """Replaces the factors of a merged module by those of its parts: all have its lora_A, and their rows of the rest.
    Raises CheckpointError if it has another number of rows, or if a part has factors too."""
    merged, ends = str(target.entry.name), np.cumsum(target.parts)
    for layer in target.layers if len(target.parts) > 1 else ():
        if (whole := factors.pop((layer, merged), None)) is None:
            continue
        rows = {name: x for name, x in whole.items() if name in ("lora_B", "lora_magnitude_vector")}
        for name, x in rows.items():
            if x.shape[:1] != (ends[-1],):
                got = f"{name} {list(x.shape)}, and this model takes {ends[-1]} rows"
                raise CheckpointError(f"{path}: {layer_prefix(layer)}{merged} has {got}")
        for module, start, end in zip(target.modules, (0, *ends), ends):
            if (layer, module) in factors:
                raise CheckpointError(f"{path}: {layer_prefix(layer)}{merged} and its part {module} both have factors")
            factors[layer, module] = whole | {name: x[start:end] for name, x in rows.items()}


def _keys(target: Target) -> Iterable[Key]:
    return ((layer, module) for layer in target.layers for module in target.modules)


def _stacked(folder: Path, raw: Mapping[str, Any], target: Target, own: Mapping[Key, Factors]) -> LowRank:
    """Returns the factors of one matrix in all its layers."""
    rows = dict(zip(target.modules, target.parts))
    for (layer, module), some in own.items():
        name = f"{folder / WEIGHTS}: {layer_prefix(layer)}{module}"
        if missing := {"lora_A", "lora_B"} - some.keys():
            raise CheckpointError(f"{name} lacks {min(missing)}")
        a, b = some["lora_A"], some["lora_B"]
        want = f"[r, {target.inputs}] and [{rows[module]}, r]"
        if a.ndim != 2 or (a.shape[1], *b.shape) != (target.inputs, rows[module], a.shape[0]):
            got = f"{list(a.shape)} and {list(b.shape)}"
            raise CheckpointError(f"{name} has factors {got}, and this model takes {want}")
    rank = max(some["lora_A"].shape[0] for some in own.values())
    dtypes = {some[part].dtype for some in own.values() for part in ("lora_A", "lora_B")}
    dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float64 if np.dtype(np.float64) in dtypes else np.float32)
    (L, *a_shape), (_, *b_shape) = target.shapes(rank)
    a, b = np.zeros((L, *a_shape), dtype), np.zeros((L, *b_shape), dtype)
    scale = np.zeros((L, len(target.parts)))
    for at, layer in enumerate(target.layers):
        start = 0
        for part, (module, size) in enumerate(rows.items()):
            if (found := own.get((layer, module))) is not None:
                r = found["lora_A"].shape[0]
                a[at, part * rank : part * rank + r], b[at, start : start + size, :r] = found["lora_A"], found["lora_B"]
                scale[at, part] = _scale(folder, raw, found["name"], r)
            start += size
    return LowRank(a, b, tuple(map(tuple, scale.tolist())))


def _magnitudes(folder: Path, target: Target, own: Mapping[Key, Factors]) -> np.ndarray:
    found = np.full((len(target.layers), sum(target.parts)), np.nan)
    for at, layer in enumerate(target.layers):
        start = 0
        for module, size in zip(target.modules, target.parts):
            if some := own.get((layer, module)):
                name = f"{folder / WEIGHTS}: {layer_prefix(layer)}{module}"
                if "lora_magnitude_vector" not in some or some["lora_magnitude_vector"].size != size:
                    raise CheckpointError(f"{name} lacks a lora_magnitude_vector of {size} values")
                found[at, start : start + size] = some["lora_magnitude_vector"].reshape(-1)
            start += size
    return found


def _scale(folder: Path, raw: Mapping[str, Any], module: str, rank: int) -> float:
    """Returns a module's scale, whose rank must be the configuration's."""
    r, alpha = (_of(raw, module, *names) for names in zip(PATTERNS, ("r", "lora_alpha")))
    numbers = isinstance(alpha, int | float) and math.isfinite(alpha)
    if r != rank or not rank or not numbers:
        raise CheckpointError(f"{folder / CONFIG}: {module} has rank {rank}, and r={r!r}, lora_alpha={alpha!r}")
    return float(alpha / math.sqrt(r) if raw.get("use_rslora") else alpha / r)


def _of(raw: Mapping[str, Any], module: str, patterns: str, otherwise: str) -> Any:
    """Returns the value of the first pattern that a module's name ends with, as PEFT looks it up."""
    for pattern, value in (raw.get(patterns) or {}).items():
        if re.match(ENDS_WITH.format(pattern), module):
            return value
    return raw.get(otherwise)
