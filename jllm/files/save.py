"""Saves Params as Hugging Face checkpoint directories, one tensor at a time."""

import json
import math
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np

from jllm.config import DTYPES, LlamaConfig
from jllm.errors import CheckpointError, TokenizerError
from jllm.files.families import FAMILIES, theirs
from jllm.files.find import BLOCK, INDEX, WEIGHTS, all_or_nothing
from jllm.files.hf_config import to_hf
from jllm.files.merged_experts import merge_experts, merged_name
from jllm.files.quantized import arrays, quantization_config
from jllm.files.run_identity import TOKENIZER
from jllm.files.safetensors_io import DTYPES as STORED_DTYPES
from jllm.files.safetensors_io import encode_header
from jllm.files.tokenizer import Tokenizer
from jllm.model.param_specs import LeafSpec, param_specs
from jllm.model.params import EMBED, HEAD, Params, matrix_modules
from jllm.model.shards import share_shape, whole
from jllm.parallel.mesh import has_processes, ranks_of
from jllm.quant.quantize import weight_formats
from pallas_kernels.formats.quantized_weights import QuantizedWeight


def save(
    path: str | Path,
    params: Params,
    config: LlamaConfig,
    *,
    tokenizer: Tokenizer | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes a directory that `load_params` and transformers read. Loading it gives the same bits.

    It has config.json, generation_config.json and one safetensors file, or several with their index. Each of several
    has at most `max_shard_bytes`; a larger tensor gets its own file. With `tokenizer`, a loaded model's, its files are
    copied, so that the directory loads as a model that takes text. Quantized weights are stored as quantized.py
    defines, which transformers does not read. Scales that were quantized themselves (`nf4-dq`) are stored as their
    float16 values.

    Tensors are written one by one, into files that get their names once all are complete. Then extra files of an older
    checkpoint are removed. An earlier failure (OutputError, for example of a full disk) leaves the directory unchanged.
    Params on the config's mesh are gathered leaf by leaf, so each device holds its shards and one whole leaf.

    Raises CheckpointError for params that do not fit the config, or that several processes share. Raises ConfigError
    for a config that its architecture cannot express, and TokenizerError for a tokenizer whose files are gone.
    """
    path = Path(path)
    copied = {} if tokenizer is None else _tokenizer_files(tokenizer)
    if has_processes(config):
        raise CheckpointError("several processes have parts of the params: save them where one has all devices")
    leaves, dtype = _leaves_to_store(params, config)
    tensors = [t for spec, leaf in leaves for t in _tensors(spec, jax.eval_shape(lambda x: x, leaf), config)]
    written = (t for spec, leaf in leaves for t in _tensors(spec, leaf, config))
    raw = to_hf(replace(config, dtype=dtype.name, mesh=None, expert_parallel=None))
    if formats := weight_formats(params):
        raw["quantization_config"] = quantization_config(formats, matrix_modules(params))
    shards: list[list[_Tensor]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(t.nbytes for t in shards[-1]) + tensor.nbytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    count = len(shards)
    names = [WEIGHTS] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    with all_or_nothing(path) as create:
        for name, shard in zip(names, shards):
            with create(name) as file:
                file.write(encode_header((t.name, np.dtype(t.leaf.dtype), t.shape) for t in shard))
                for tensor in islice(written, len(shard)):
                    tensor.write(file)
        ids = {"bos_token_id": raw["bos_token_id"], "eos_token_id": raw["eos_token_id"]}
        documents = {"generation_config.json": ids, "config.json": raw}
        if count > 1:
            weight_map = {t.name: name for name, shard in zip(names, shards) for t in shard}
            total = {"total_size": sum(t.nbytes for t in tensors)}
            documents[INDEX] = {"metadata": total, "weight_map": weight_map}
        for name, document in documents.items():
            with create(name) as file:
                file.write((json.dumps(document, indent=2) + "\n").encode())
        for name, data in copied.items():
            with create(name) as file:
                file.write(data)


def _tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Returns the files that a tokenizer was loaded from."""
    if tokenizer.files is not None:
        return dict(tokenizer.files)
    folder = tokenizer.folder
    found = {} if folder is None else {n: (folder / n).read_bytes() for n in TOKENIZER if (folder / n).is_file()}
    if not found:
        raise TokenizerError(f"the tokenizer's files are not in {folder}: save takes a tokenizer that was loaded")
    return found


@dataclass(frozen=True)
class _Tensor:
    """Describes rows start .. start + shape[0] of a leaf, with their name in files."""

    name: str
    leaf: jax.Array
    start: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.leaf.dtype.itemsize

    def write(self, file: BinaryIO) -> None:
        rows = self.shape[0]
        step = max(1, BLOCK * rows // max(1, self.nbytes))
        for start in range(0, rows, step):
            # It copies first: a jax.Array caches its host value, and the leaves' host values would add up.
            block = jnp.copy(self.leaf[self.start + start : self.start + min(start + step, rows)])
            file.write(memoryview(np.ascontiguousarray(block).reshape(-1).view(np.uint8)))


def _leaves_to_store(params: Params, config: LlamaConfig) -> tuple[list[tuple[LeafSpec, object]], np.dtype]:
    """Returns the leaves to write, and the dtype of weights that are not quantized."""
    apart = params.head is not None and not weight_formats(params).keys().isdisjoint((EMBED, HEAD))
    wanted = param_specs(replace(config, tie_embeddings=config.tie_embeddings and not apart))
    specs = dict(jax.tree_util.tree_flatten_with_path(wanted)[0])
    leaves = dict(jax.tree_util.tree_flatten_with_path(params, lambda leaf: isinstance(leaf, QuantizedWeight))[0])
    if odd := [path for path in [*specs, *leaves] if path not in specs or path not in leaves]:
        problem = "is not in the params" if odd[0] in specs else "is in the params, but not in the config"
        raise CheckpointError(f"params{jax.tree_util.keystr(odd[0])} {problem}")
    for path, spec in specs.items():
        shares = (ranks_of(config),) if config.mesh is not None and isinstance(leaves[path], QuantizedWeight) else ()
        if (*shares, *leaves[path].shape) != (shape := share_shape(spec, config)):
            where, own = jax.tree_util.keystr(path), [*shares, *leaves[path].shape]
            raise CheckpointError(f"params{where} has shape {own}, but the config says {list(shape)}")
    dtypes = {leaf.dtype for leaf in leaves.values() if not isinstance(leaf, QuantizedWeight)}
    if len(dtypes) != 1 or not dtypes <= set(STORED_DTYPES.values()):
        found = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise CheckpointError(f"params are of {found}; one dtype of {', '.join(DTYPES)} can be saved")
    return [(spec, leaves[path]) for path, spec in specs.items()], dtypes.pop()


def _tensors(spec: LeafSpec, leaf: Any, config: LlamaConfig) -> list[_Tensor]:
    """Returns the stored tensors of a leaf, or of its shapes."""
    leaf = whole(leaf, spec.entry, config, spec.shape)
    if isinstance(leaf, QuantizedWeight):
        assert spec.weight is not None, "only matrices are quantized"
        return [_Tensor(name, array, 0, array.shape) for name, array in arrays(spec.weight, leaf).items()]
    family = FAMILIES[config.architecture]
    if spec.entry.over is not None and family.merged_experts:
        abstract = isinstance(leaf, jax.ShapeDtypeStruct)
        leaf = jax.eval_shape(partial(merge_experts, spec), leaf) if abstract else merge_experts(spec, leaf)
        return [_Tensor(merged_name(spec), leaf, 0, leaf.shape)]
    if spec.weight is not None and len(spec.parts) > 1 and family.merged:
        return [_Tensor(f"{spec.weight}.weight", leaf, 0, spec.shape)]
    starts = accumulate((rows for _, rows in spec.parts), initial=0)
    return [
        _Tensor(theirs(name, config.architecture), leaf, start, spec.part_shape(rows))
        for start, (name, rows) in zip(starts, spec.parts)
    ]
