"""Reads GGUF tensors: as numbers, or as the codes that kernels serve.

| type | format |
|---|---|
| Q8_0 | w8a16-g32 |
| Q4_0 | w4a16-g32 |
| IQ4_NL | iq4nl-g32 |
| MXFP4 | mxfp4-weight |

Codes and scales keep their values. A merged weight (q, k, v; gate, up) keeps codes if all its parts have one such type.
All else is dequantized to the dtype of the model.
"""

from collections.abc import Callable, Mapping

import numpy as np

from jllm.errors import CheckpointError
from jllm.files.gguf.blocks import TYPES, decode, half, nibbles
from jllm.files.gguf.reader import GGUFTensor
from jllm.files.safetensors_io import StoredTensor, cast_into, read_bytes
from jllm.files.stored import StoredWeight
from jllm.model.param_specs import LeafSpec
from jllm.quant.codes import block_weight, group_weight
from pallas_kernels.formats.quantized_weights import QuantizedWeight
from pallas_kernels.formats.weight_formats import parse_weight_format

_PIECE = 4 << 20  # values decoded at a time
FORMATS = {"Q8_0": "w8a16-g32", "Q4_0": "w4a16-g32", "IQ4_NL": "iq4nl-g32", "MXFP4": "mxfp4-weight"}


def stored_weights(specs: Mapping[str, LeafSpec], stored: Mapping[str, StoredTensor]) -> dict[str, StoredWeight]:
    """Returns the weights that are kept as codes, by name."""
    found = {}
    for name, spec in specs.items():
        parts = [stored.get(part) for part, _ in spec.parts]
        kinds = {None if part is None else part.dtype for part in parts}
        if len(kinds) == 1 and (kind := kinds.pop()) in FORMATS:
            found[name] = _stored_weight(name, kind, spec)
    return found


def _stored_weight(name: str, kind: str, spec: LeafSpec) -> StoredWeight:
    def build(found: Mapping[str, np.ndarray]) -> QuantizedWeight:
        return _weight(name, np.concatenate([found[part] for part, _ in spec.parts]), kind)

    return StoredWeight({part: (kind, spec.part_shape(rows)) for part, rows in spec.parts}, build)


def _weight(name: str, octets: np.ndarray, kind: str) -> QuantizedWeight:
    """Returns the weight of rows of blocks, uint8 [N, bytes]."""
    N, size = octets.shape[0], TYPES[kind][1]
    blocks = octets.reshape(-1, size)
    fmt = parse_weight_format(FORMATS[kind])
    if kind == "MXFP4":
        codes, scales = nibbles(blocks[:, 1:]), blocks[:, 0]
        codes[codes == 8] = 0  # ggml has no -0
        scales = np.where(codes.any(axis=1), scales, np.maximum(scales, 1))  # a block of zeros: any normal scale
        return block_weight(name, codes.view(np.int8).reshape(N, -1), scales.reshape(N, -1), fmt)
    if kind == "Q8_0":
        codes = np.ascontiguousarray(blocks[:, 2:]).view(np.int8)
    else:
        codes = nibbles(blocks[:, 2:]).view(np.int8) - np.int8(8 if kind == "Q4_0" else 0)
    return group_weight(name, codes.reshape(N, -1), half(blocks[:, :2]).reshape(N, -1), fmt)


def read_raw(tensor: GGUFTensor, progress: Callable[[int], object] = lambda n: None) -> np.ndarray:
    """Returns the blocks of a matrix by rows, uint8 [N, bytes of a row], in Hugging Face's order of rows."""
    octets = np.frombuffer(read_bytes(tensor, 0, tensor.nbytes), np.uint8).reshape(tensor.shape[0], -1)
    progress(tensor.nbytes)
    return _ordered(octets, tensor.heads)


def read_values(tensor: GGUFTensor, out: np.ndarray, progress: Callable[[int], object] = lambda n: None) -> None:
    """Reads a tensor into the array `out` of the same shape, and converts it to its dtype. Raises CheckpointError as
    safetensors_io.read_tensor does."""
    values, size, _ = TYPES[tensor.dtype]
    flat, count = out.reshape(-1), out.size // values
    if count * size != tensor.nbytes:
        raise CheckpointError(f"{tensor.path}: tensor {tensor.name}: {tensor.nbytes} bytes for {out.size} values")
    step = max(1, _PIECE // values)
    for start in range(0, count, step):
        blocks = min(step, count - start)
        octets = np.frombuffer(read_bytes(tensor, start * size, blocks * size), np.uint8)
        cast_into(flat[start * values : (start + blocks) * values], decode(octets, tensor.dtype), tensor)
        progress(blocks * size)
    if tensor.heads is not None:
        out[...] = _ordered(out, tensor.heads)


def _ordered(rows: np.ndarray, heads: int | None) -> np.ndarray:
    """Returns rows with each head's two halves one after the other, where llama.cpp interleaves them."""
    if heads is None:
        return rows
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
