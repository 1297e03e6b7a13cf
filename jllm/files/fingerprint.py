"""Fingerprints weights as a short text that is cheap to make, from the files of a checkpoint or from Params.

The two kinds are not comparable: files are hashed as stored, Params by their values. A fingerprint distinguishes
models. It is no protection against an author who wants two models to have the same one.
"""

import hashlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jllm.config import LlamaConfig
from jllm.files.find import stored_tensors
from jllm.files.safetensors_io import StoredTensor, read_bytes
from jllm.model.param_specs import param_specs
from jllm.model.params import Params
from jllm.model.shards import ShareIndices, share_indices
from jllm.parallel.mesh import has_whole_experts, ranks_of
from pallas_kernels.formats.quantized_weights import QuantizedWeight, unpacked

PIECE = 16 << 10  # bytes read at a place
PIECES = 4  # places of a tensor that are read, first and last bytes included; smaller tensors are read whole

Sum = tuple[str, tuple[int, ...], jax.Array]  # a leaf's name, shape and checksum


def of_files(folder: str | Path) -> str:
    """Returns the fingerprint of a checkpoint directory: names, dtypes and shapes of its tensors, and a sample of the
    bytes of each.

    It does not depend on the directory's name, the split of tensors into files, or config.json. It reads at most 64 KiB
    of a tensor. Raises CheckpointError for missing or damaged files.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(stored_tensors(Path(folder)).items()):
        digest.update(json.dumps([name, tensor.dtype, tensor.shape]).encode())
        for start, count in _pieces(tensor):
            digest.update(read_bytes(tensor, start, count))
    return digest.hexdigest()[:32]


def _pieces(tensor: StoredTensor) -> list[tuple[int, int]]:
    """Returns (start, count) of the bytes of a tensor that are read."""
    if tensor.nbytes <= PIECE * PIECES:
        return [(0, tensor.nbytes)]
    return [((tensor.nbytes - PIECE) * i // (PIECES - 1), PIECE) for i in range(PIECES)]


def of_params(params: Any) -> str:
    """Returns the fingerprint of weights (or any pytree of arrays) in memory: names and shapes of the leaves, and a
    checksum of all values of each.

    The checksums are computed on the leaves' devices. Equal values have equal fingerprints in any dtype: widening
    bfloat16 to float32 changes nothing. Quantized weights count by their codes, scales and zeros, however codes are
    packed.
    """
    found = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_quantized)[0]:
        coded = _is_quantized(leaf)
        shapes, sums = (jax.eval_shape(unpacked, leaf), _code_sums(leaf)) if coded else (leaf, _checksum(leaf))
        own = jax.tree_util.tree_flatten_with_path(shapes)[0]
        found += [(_name((*path, *ends)), x.shape, s) for (ends, x), s in zip(own, jax.tree.leaves(sums), strict=True)]
    return _digest(found)


def of_shares(params: Params, config: LlamaConfig) -> str:
    """Returns of_params of the whole weights, computed from their shards on the config's mesh."""
    specs = param_specs(replace(config, tie_embeddings=params.head is None))
    leaves = jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_quantized)[0]
    found: list[Sum] = []
    for (path, leaf), spec in zip(leaves, jax.tree.leaves(specs), strict=True):
        at = share_indices(spec.entry, config)
        if isinstance(leaf, QuantizedWeight):
            found += [(_name(path) + name, size, s) for name, size, s in _of_codes(leaf, at, spec.shape)]
            continue
        width = spec.shape[1] if len(spec.shape) == 2 else 1
        found.append((_name(path), spec.shape, _share_sums(leaf, at, at.column, (width, 1))))
    return _digest(found)


def _of_codes(w: QuantizedWeight, at: ShareIndices, shape: tuple[int, ...]) -> list[Sum]:
    """Returns names, shapes and checksums of the leaves of a whole weight [N, K], computed from its shards."""
    (N, K), own = shape, jax.vmap(unpacked)(w)
    once = replace(at, first=at.first & (at.column == 0)[:, None])  # counts values that all parts of a row share
    found: list[Sum] = [(".values", (N, K), _share_sums(own.values, at, at.column, (K, 1)))]
    for name in ("scales", "zeros", "scale_steps"):  # [ranks, n], or by groups [ranks, G, n]
        leaf = getattr(own, name)
        if leaf is not None and leaf.ndim == 2:
            found.append((f".{name}", (N,), _share_sums(leaf, once, at.column, (1, N))))
        elif leaf is not None:
            group = w.format.group
            assert group is not None, "one scale a row otherwise"
            sums = _share_sums(leaf.swapaxes(1, 2), at, at.column // group, (1, N))
            found.append((f".{name}", (-(-K // group), N), sums))
    if own.columns is not None:  # each device has the order of whole rows, or of its own part
        order = own.columns[0] if own.columns.shape[1] == K else own.columns.reshape(-1)
        found.append((".columns", (K,), _checksum(order)))
    if own.input_scale is not None:
        found.append((".input_scale", own.input_scale.shape[1:], _checksum(own.input_scale[0])))
    return found


def of_model(params: Params, config: LlamaConfig) -> str:
    """Returns the fingerprint of everything that K and V depend on besides tokens and their formats.

    It covers the weights, their dtype and formats, and the config. If inputs are quantized, it covers in how many
    parts, and whether experts have parts too.
    """
    weights = of_params(params) if config.mesh is None else of_shares(params, config)
    leaves = jax.tree.leaves(params, is_leaf=_is_quantized)
    formats = [replace(leaf.format, double_quant=False) if _is_quantized(leaf) else None for leaf in leaves]
    rounds = any(fmt is not None and fmt.activations is not None for fmt in formats)
    parts = config.activation_parts * ranks_of(config) if rounds else 1  # one of the two is 1
    found = f"{weights} {params.dtype} {formats} {config} {parts}"
    if parts > 1 and has_whole_experts(config):
        found += " whole experts"
    return hashlib.sha256(found.encode()).hexdigest()[:32]


def of_function(params: Params, config: LlamaConfig) -> str:
    """Returns the fingerprint of a forward pass, on one device or a mesh. It covers the weights' values and the config,
    without its dtype, context length and special tokens."""
    weights = of_params(params) if config.mesh is None else of_shares(params, config)
    same = replace(config, dtype="", context=1, bos_id=None, eos_ids=())
    return hashlib.sha256(f"{weights} {same}".encode()).hexdigest()[:32]


def of_norms(params: Params) -> str:
    """Returns the fingerprint of a model's norms and biases alone, which quantizing its matrices does not change."""
    leaves, tree = jax.tree.flatten(params, is_leaf=_is_quantized)
    vectors = [None if _is_quantized(leaf) or leaf.ndim > 1 else leaf for leaf in leaves]
    return of_params(jax.tree.unflatten(tree, vectors))


def _name(path: tuple[object, ...]) -> str:
    """Returns a leaf's name in fingerprints, without the parts `attention` and `mlp`. Older versions had no such parts,
    and snapshots keep fingerprints of the weights that made them."""
    name = jax.tree_util.keystr(path).replace(".attention.norm", ".attn_norm").replace(".mlp.norm", ".mlp_norm")
    return name.replace(".attention.", ".").replace(".mlp.", ".")


def _is_quantized(leaf: object) -> bool:
    return isinstance(leaf, QuantizedWeight)


def _digest(found: list[Sum]) -> str:
    sums = jax.device_get([s for *_, s in found])
    named = [(name, shape, int(s)) for (name, shape, _), s in zip(found, sums)]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()[:32]


@jax.jit
def _code_sums(w: QuantizedWeight) -> QuantizedWeight:
    return jax.tree.map(_checksum, unpacked(w))


@partial(jax.jit, static_argnames="strides")
def _share_sums(parts: jax.Array, at: ShareIndices, column: jax.Array, strides: tuple[int, int]) -> jax.Array:
    """Returns _checksum of a whole leaf from its shards [ranks, n] or [ranks, n, k].

    `column` is where each shard's columns begin, i32[ranks]. `strides` are the distances between rows, and between
    columns, of the whole leaf.
    """
    bits = _bits(parts.reshape(*at.rows.shape, -1))
    inside = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, 2) + column.astype(jnp.uint32)[:, None, None]
    down, right = (jnp.uint32(stride) for stride in strides)
    place = at.rows.astype(jnp.uint32)[..., None] * down + inside * right
    return jnp.sum(jnp.where(at.first[..., None], bits * (2 * place + 1), 0), dtype=jnp.uint32)


@jax.jit  # leaves of one shape share a program
def _checksum(x: jax.Array) -> jax.Array:
    """Returns the sum mod 2^32 of all values' bits, each times its own odd number. Any single change alters the sum,
    and the order of additions does not."""
    place = jnp.zeros((), jnp.uint32)
    for axis, size in enumerate(x.shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    return jnp.sum(_bits(x) * (2 * place + 1), dtype=jnp.uint32)


def _bits(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.integer):
        return x.astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
