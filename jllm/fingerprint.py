"""Which weights these are, as a short text that is cheap to make: of the files of a checkpoint, or of Params.

The two are not comparable: files are hashed as they are stored, Params by their values. A fingerprint tells different
models apart; it is no protection against an author who wants two to have the same.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jllm.checkpoint_files import stored_tensors
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
