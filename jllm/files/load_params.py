"""Loads Hugging Face checkpoint directories into Params, one tensor at a time, with no second copy in host memory.

save.py writes them.
"""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from jllm.config import LlamaConfig
from jllm.errors import CheckpointError, QuantizationError, counted
from jllm.files.families import FAMILIES
from jllm.files.find import BLOCK, stored_tensors
from jllm.files.fit import check_weights
from jllm.files.gguf import weights as gguf
from jllm.files.gguf.reader import GGUFTensor, is_gguf
from jllm.files.hf_config import load_quantization
from jllm.files.importers.kv_scales import scale_names, tensor_factors
from jllm.files.merged_experts import ExpertTensor, cut_experts, read_expert
from jllm.files.safetensors_io import DTYPES as STORED_DTYPES
from jllm.files.safetensors_io import StoredTensor, read_as_stored, read_bytes, read_tensor
from jllm.files.stored import StoredWeight
from jllm.files.stored_names import modules_renamed
from jllm.model.param_specs import LeafSpec, param_dtype, param_specs, weight_specs
from jllm.model.params import EMBED, HEAD, Params, Weight, matrix_modules
from jllm.model.shards import share, share_changed
from jllm.parallel.mesh import has_whole_experts, ranks_of
from jllm.quant.codes import scale_rows
from jllm.quant.quantize import check_shapes, map_weights, quantize_weight, that_fit
from jllm.quant.schemes import Formats, Scheme, choose_format
from pallas_kernels.formats.numerics import compute_dtype
from pallas_kernels.formats.quantized_weights import QuantizedWeight

PACKED = (".qweight", ".weight_packed", ".weight.absmax", ".values")  # suffixes of the names of quantized tensors
LONG = 1 << 30  # bytes from which loading shows a progress bar


def load_params(
    path: str | Path,
    config: LlamaConfig,
    dtype: DTypeLike | None = None,
    scheme: Scheme | None = None,
    free: int | None = None,
) -> Params:
    """Reads a directory's safetensors files, or a GGUF file, into Params of one dtype (None: config.dtype, as stored).

    Every leaf is read, part by part, into one host buffer, put on the device, and dropped before the next. So host
    memory beyond the params stays under the largest leaf. A `scheme` quantizes each weight as soon as it is read, so
    that the 16-bit model never exists whole. Weights that are stored quantized (quantization_config) stay as they are.
    With a mesh in the config every device gets its shard of a leaf as soon as that is read. All names and shapes are
    checked before any data is read.

    Raises CheckpointError for missing, superfluous, misshapen or damaged tensors. Raises QuantizationError for a scheme
    that does not fit. Raises NoRoomError for weights that take more than `free` bytes of each device (None: unknown).
    """
    path, dtype = Path(path), param_dtype(config, dtype)
    stored = stored_tensors(path)
    quantized, kv_scales = _quantized_weights(path, config, stored)
    if quantized and scheme is not None:
        raise QuantizationError(f"{path}: is quantized already; load it without scheme {scheme.name!r}")
    apart = HEAD in quantized or (EMBED in quantized and f"{HEAD}.weight" in stored)
    specs = _specs(config, head=not config.tie_embeddings or apart)
    turned = config.architecture in FAMILIES and FAMILIES[config.architecture].merged_experts
    stored = cut_experts(_cut_merged(specs, stored), turned)
    formats = {} if scheme is None else that_fit(scheme.formats(matrix_modules(specs)), config)
    _check_tensors(path, specs, quantized, stored, kv_scales)
    check_shapes(specs, formats)
    total = sum(_loaded_bytes(tensor, quantized, dtype) for tensor in stored.values())
    room = None if free is None else free * ranks_of(config)  # replicated leaves are small
    check_weights(path, config, dtype, scheme, room, total if quantized else None)
    with _progress_bar(sum(tensor.nbytes for tensor in stored.values())) as advance:
        if kv_scales and config.norm_offset:
            raise CheckpointError(
                f"{path}: scales of K and V ({kv_scales[0]}) are not supported for this family's norms"
            )
        with _named(path):
            factors = tensor_factors({name: read_as_stored(stored[name], advance) for name in kv_scales}, stored)

        def read(spec: LeafSpec) -> np.ndarray:
            host, row = np.empty(spec.shape, dtype), 0
            for name, rows in spec.parts:
                part, tensor = host[row : row + rows], stored[name]
                if isinstance(tensor, GGUFTensor):
                    gguf.read_values(tensor, part, advance)
                elif isinstance(tensor, ExpertTensor):
                    read_expert(tensor, part, advance)
                else:
                    read_tensor(tensor, part, advance)
                if name in factors:
                    part[...] = part.astype(compute_dtype(dtype)) * factors[name]
                row += rows
            return host

        def placed(spec: LeafSpec, leaf: Any) -> Any:
            """Puts a leaf on its device or devices, and waits, before the next buffer is made."""
            shared = share(leaf, spec.entry, config, spec.weight or "")
            return jax.block_until_ready(shared if config.mesh is not None else jax.device_put(leaf))

        def load_weight(name: str, spec: LeafSpec, wanted: Formats) -> Weight:
            if name in quantized:
                return placed(spec, _build(path, quantized[name], stored, advance, spec, factors))
            if wanted and spec.entry.over is not None and has_whole_experts(config):
                fmt = choose_format(name, spec.shape, wanted)
                if not fmt.scales_together:  # else experts are quantized together, as on one device
                    coded = share_changed(partial(quantize_weight, name, formats=(fmt,)), read(spec), spec, config)
                    return jax.block_until_ready(coded)
            if wanted:
                return placed(spec, quantize_weight(name, jax.device_put(read(spec)), wanted))
            return placed(spec, read(spec))

        weights = map_weights(load_weight, specs, formats)
        params = jax.tree.map(lambda leaf: placed(leaf, read(leaf)) if isinstance(leaf, LeafSpec) else leaf, weights)
        if specs.head is None and f"{HEAD}.weight" in stored:
            _check_tied(stored[f"{EMBED}.weight"], stored[f"{HEAD}.weight"], advance)
    return params


def _loaded_bytes(tensor: StoredTensor, quantized: Mapping[str, StoredWeight], dtype: np.dtype) -> int:
    """Counts the bytes that a stored tensor takes on the device. Those of GGUF that are not kept as codes grow."""
    if not isinstance(tensor, GGUFTensor) or any(tensor.name in weight.tensors for weight in quantized.values()):
        return tensor.nbytes
    return math.prod(tensor.shape) * dtype.itemsize


def _specs(config: LlamaConfig, *, head: bool) -> Params:
    """Returns param_specs with or without a head. A tied model has a head if it is quantized apart from the
    embedding."""
    return param_specs(replace(config, tie_embeddings=not head))


def _cut_merged(specs: Params, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns the tensors, those cut into modules that a file has as one (q, k and v of Phi)."""
    found = dict(stored)
    for spec in jax.tree.leaves(specs):
        whole, row = found.get(f"{spec.weight}.weight"), 0
        if whole is None or len(spec.parts) == 1 or whole.shape != spec.shape:
            continue
        del found[f"{spec.weight}.weight"]
        step = whole.nbytes // spec.shape[0]
        for name, rows in spec.parts:
            place = {"offset": whole.offset + row * step, "nbytes": rows * step}
            found[name] = replace(whole, shape=spec.part_shape(rows), **place)
            row += rows
    return found


def _quantized_weights(
    path: Path, config: LlamaConfig, stored: dict[str, StoredTensor]
) -> tuple[dict[str, StoredWeight], tuple[str, ...]]:
    """Returns a checkpoint's quantized weights by name, and the names of its scales of K and V."""
    if is_gguf(path):
        return gguf.stored_weights(weight_specs(config), stored), ()
    raw = load_quantization(path)
    if raw is None:
        return {}, ()
    from jllm.files.importers import has_kv_scales, stored_weights, warn_of_unknown

    vectors = {name for leaf in jax.tree.leaves(param_specs(config)) if leaf.weight is None for name, _ in leaf.parts}
    with _named(path):
        raw = modules_renamed(raw, stored)
        others = {name: tensor for name, tensor in stored.items() if name not in vectors}
        found = stored_weights(raw, weight_specs(config), others), scale_names(stored) if has_kv_scales(raw) else ()
    warn_of_unknown(raw, str(path))
    return found


def _build(
    path: Path,
    weight: StoredWeight,
    stored: dict[str, StoredTensor],
    advance: Callable[[int], object],
    spec: LeafSpec,
    factors: Mapping[str, np.float32],
) -> QuantizedWeight:
    """Returns a stored weight, as its importer makes it of arrays on the host."""
    with _named(path):
        found: dict[str, np.ndarray] = {}
        for name in weight.tensors:
            tensor = stored[name]
            if isinstance(tensor, GGUFTensor):
                found[name] = gguf.read_raw(tensor, advance)
            else:
                found[name] = read_as_stored(tensor, advance)
        built = weight.build(found)
        if any(name in factors for name, _ in spec.parts):
            rows = np.concatenate([np.full(rows, factors.get(name, 1), np.float32) for name, rows in spec.parts])
            built = scale_rows(built, rows, factors.get(f"{spec.modules[0]}.input_scale"))
    return built


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


@contextlib.contextmanager
def _progress_bar(total: int) -> Iterator[Callable[[int], object]]:
    if not sys.stderr.isatty():
        yield lambda n: None
        return
    from tqdm import tqdm

    delay = 0 if total > LONG else 2
    with tqdm(
        total=total, desc="loading", unit="B", unit_scale=True, unit_divisor=1024, delay=delay, leave=False
    ) as bar:
        yield bar.update


def _check_tensors(
    path: Path,
    specs: Params,
    quantized: dict[str, StoredWeight],
    stored: dict[str, StoredTensor],
    kv_scales: tuple[str, ...],
) -> None:
    plain = [spec for spec in jax.tree.leaves(specs) if spec.weight not in quantized]
    wanted: dict[str, tuple[str | None, tuple[int, ...]]] = {
        name: (None, spec.part_shape(rows)) for spec in plain for name, rows in spec.parts
    }
    wanted |= {name: tensor for weight in quantized.values() for name, tensor in weight.tensors.items()}
    wanted |= {name: (None, (1,) if stored[name].shape == (1,) else ()) for name in kv_scales}
    if missing := [name for name in wanted if name not in stored]:
        by = ", by its quantization_config" if quantized else ""
        if not quantized and (packed := [name for name in stored if name.endswith(PACKED)]):
            by = f" ({packed[0]} is there, but no quantization_config for it)"
        raise CheckpointError(f"{path}: {len(missing)} of {len(wanted)} tensors missing{by}, the first is {missing[0]}")
    ignored = ("rotary_emb.inv_freq", f"{HEAD}.weight") if specs.head is None else ("rotary_emb.inv_freq",)
    if extra := [name for name in stored if name not in wanted and not name.endswith(ignored)]:
        few = counted(len(extra), "tensor")
        raise CheckpointError(f"{path}: {few} that its config has no use for, the first is {extra[0]}")
    for name, (dtype, shape) in wanted.items():
        found, config = stored[name], "config" if dtype is None else "quantization_config"
        if found.shape != shape:
            raise CheckpointError(
                f"{path}: tensor {name} has shape {list(found.shape)}, but the {config} says {list(shape)}"
            )
        if dtype is not None and found.dtype != dtype:
            raise CheckpointError(f"{path}: tensor {name} is stored as {found.dtype}, but the {config} says {dtype}")
        if dtype is None and found.dtype not in STORED_DTYPES and not isinstance(found, GGUFTensor):
            supported = ", ".join(STORED_DTYPES)
            raise CheckpointError(f"{path}: tensor {name} is stored as {found.dtype}; supported are {supported}")


def _check_tied(embed: StoredTensor, head: StoredTensor, advance: Callable[[int], object]) -> None:
    """Raises CheckpointError unless the stored head of a tied model equals the embedding."""
    if _holds(head, embed, advance):
        return
    cut = "" if head.shape == embed.shape else f", and cut the tensor from {list(head.shape)} to {list(embed.shape)}"
    raise CheckpointError(
        f"{head.path}: {head.name} is not the embedding, though config.json ties them: remove the tensor, or set "
        f"tie_word_embeddings to false{cut}"
    )


def _holds(head: StoredTensor, embed: StoredTensor, advance: Callable[[int], object]) -> bool:
    """Returns whether a head has the embedding's rows, as they are or rounded to either's dtype. Further rows, of no
    token, may follow."""
    if head.dtype not in STORED_DTYPES or head.shape[1:] != embed.shape[1:] or head.shape < embed.shape:
        return False
    one, other = STORED_DTYPES[embed.dtype], STORED_DTYPES[head.dtype]
    size, step = math.prod(embed.shape), BLOCK // 8
    for start in range(0, size, step):
        count = min(step, size - start)
        x = np.frombuffer(read_bytes(embed, start * one.itemsize, count * one.itemsize), one)
        y = np.frombuffer(read_bytes(head, start * other.itemsize, count * other.itemsize), other)
        advance(y.nbytes)
        if x.tobytes() != y.astype(one).tobytes() and x.astype(other).tobytes() != y.tobytes():
            return False
    return True
