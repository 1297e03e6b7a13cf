"""Which weights these are, as a short text that is cheap to make: of the files of a checkpoint, or of Params.

The two are not comparable: files are hashed as they are stored, Params by their values. A fingerprint tells different
models apart; it is no protection against an author who wants two to have the same.
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jllm.checkpoint_files import stored_tensors
from jllm.config import LlamaConfig
from jllm.errors import ConfigError
from jllm.parallel.shares import places
from jllm.param_specs import param_specs
from jllm.params import Params
from jllm.safetensors_io import StoredTensor, read_bytes
from pallas_kernels.quantized_weights import QuantizedWeight

PIECE = 16 << 10  # bytes read at a place
PIECES = 4  # places of a tensor that are read, the first and the last bytes among them; smaller tensors are read whole


def of_files(folder: str | Path) -> str:
    """The fingerprint of a checkpoint directory: names, dtypes and shapes of its tensors, and a sample of the bytes of
    each. Neither the directory's name, nor how the tensors are distributed over files, nor config.json plays a part.

    Reads at most 64 KiB of a tensor. Raises CheckpointError for files that are missing or damaged.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(stored_tensors(Path(folder)).items()):
        digest.update(json.dumps([name, tensor.dtype, tensor.shape]).encode())
        for start, count in _pieces(tensor):
            digest.update(read_bytes(tensor, start, count))
    return digest.hexdigest()[:32]


def _pieces(tensor: StoredTensor) -> list[tuple[int, int]]:
    """(start, count) of the bytes of a tensor that are read."""
    if tensor.nbytes <= PIECE * PIECES:
        return [(0, tensor.nbytes)]
    return [((tensor.nbytes - PIECE) * i // (PIECES - 1), PIECE) for i in range(PIECES)]


def of_params(params: Params) -> str:
    """The fingerprint of weights in memory: the names and shapes of the leaves, and a checksum of all values of each,
    made where they are. Equal values have equal fingerprints whichever dtype holds them: widening bfloat16 to float32
    changes nothing."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    sums = jax.device_get([_checksum(leaf) for _, leaf in leaves])
    found = [(_name(path), leaf.shape, int(s)) for (path, leaf), s in zip(leaves, sums, strict=True)]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:32]


def of_shares(params: Params, config: LlamaConfig) -> str | None:
    """of_params of the whole weights, of those of the config's mesh, each value where it is. None for quantized ones:
    their codes are packed otherwise where a device has a part of a row."""
    specs = param_specs(replace(config, tie_embeddings=params.head is None))
    leaves = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda leaf: isinstance(leaf, QuantizedWeight))[0]
    if any(isinstance(leaf, QuantizedWeight) for _, leaf in leaves):
        return None
    found = []
    for (path, leaf), spec in zip(leaves, jax.tree.leaves(specs), strict=True):
        at = places(spec.entry, config)
        width = spec.shape[1] if len(spec.shape) == 2 else 1
        parts = leaf.reshape(*at.rows.shape, -1)
        found.append((_name(path), spec.shape, _share_sums(parts, at.rows, at.first, at.column, np.uint32(width))))
    sums = jax.device_get([s for *_, s in found])
    named = [(name, shape, int(s)) for (name, shape, _), s in zip(found, sums)]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()[:32]


def of_model(params: Params, config: LlamaConfig) -> str:
    """The fingerprint of all that K and V depend on besides tokens and their own formats: the weights, their dtype and
    formats, and the config. ConfigError for quantized weights on a mesh, which have none."""
    weights = of_params(params) if config.mesh is None else of_shares(params, config)
    if weights is None:
        raise ConfigError("quantized weights on a mesh have no fingerprint to compare: load the model without a mesh")
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, QuantizedWeight))
    formats = [leaf.format if isinstance(leaf, QuantizedWeight) else None for leaf in leaves]
    found = f"{weights} {params.dtype} {formats} {config} {config.activation_parts}"
    return hashlib.sha256(found.encode()).hexdigest()[:32]


def of_norms(params: Params) -> str:
    """The fingerprint of a model's norms and biases alone, which quantizing its matrices leaves as they are."""
    leaves, tree = jax.tree.flatten(params, is_leaf=lambda leaf: isinstance(leaf, QuantizedWeight))
    vectors = [None if isinstance(leaf, QuantizedWeight) or leaf.ndim > 1 else leaf for leaf in leaves]
    return of_params(jax.tree.unflatten(tree, vectors))


def _name(path: tuple[Any, ...]) -> str:
    """A leaf's name in fingerprints. It stays as it was when a layer had no parts, since snapshots of caches keep
    fingerprints of the weights that made them."""
    name = jax.tree_util.keystr(path).replace(".attention.norm", ".attn_norm").replace(".mlp.norm", ".mlp_norm")
    return name.replace(".attention.", ".").replace(".mlp.", ".")


@jax.jit
def _share_sums(parts: jax.Array, rows: jax.Array, first: jax.Array, column: jax.Array, width: jax.Array) -> jax.Array:
    """_checksum of a whole leaf [N, width], of its shares [ranks, n, k], whose rows i32[ranks, n] count where they are
    the `first`, and whose columns begin at i32[ranks]."""
    bits = jax.lax.bitcast_convert_type(parts.astype(jnp.float32), jnp.uint32)
    inside = jax.lax.broadcasted_iota(jnp.uint32, parts.shape, 2) + column.astype(jnp.uint32)[:, None, None]
    place = rows.astype(jnp.uint32)[..., None] * width + inside
    return jnp.sum(jnp.where(first[..., None], bits * (2 * place + 1), 0), dtype=jnp.uint32)


@jax.jit  # leaves of one shape share a program
def _checksum(x: jax.Array) -> jax.Array:
    """The sum mod 2^32 of all values' bits, each times an odd number of its own: any single change alters it, and the
    order of the additions does not."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        bits = x.astype(jnp.uint32)
    else:
        bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    place = jnp.zeros((), jnp.uint32)
    for axis, size in enumerate(x.shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    return jnp.sum(bits * (2 * place + 1), dtype=jnp.uint32)
