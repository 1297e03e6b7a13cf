"""Loads drafters with weights: a directory of a LLaMA, or one safetensors file of Medusa heads or an EAGLE head.

A file has the leaves of Medusa.heads or Eagle.head, by names such as "0.linear" or "layer.mlp.down". Its metadata are
the kind, the tree as a JSON list of its nodes' parents, and two fingerprints of the target. One is of all its weights.
The other is of its norms and biases, which its quantized and float16 copies share.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jllm.errors import CheckpointError, ConfigError, DrafterError
from jllm.files.fingerprint import of_norms, of_params
from jllm.files.safetensors_io import DTYPES, StoredTensor, read_header, read_metadata, read_tensor, write_file
from jllm.model.params import Params
from jllm.speculative.draft_model import DraftModel
from jllm.speculative.drafter import Drafter
from jllm.speculative.eagle import Eagle, EagleHead, eagle_shapes
from jllm.speculative.medusa import Medusa, MedusaHead, medusa_shapes
from jllm.speculative.tree import Tree, chain
from jllm.speculative.weights import named
from pallas_kernels.formats.quantized_weights import QuantizedWeight

if TYPE_CHECKING:
    from jllm.model.model import Model

KINDS = {"draft": "a directory", "medusa": "a file", "eagle": "a file"}
DRAFTS = 4  # default number of drafts of a draft model


def load_drafter(kind: str, path: str | Path, model: "Model", tree: Tree | None = None) -> Drafter:
    """Loads a drafter for a model: "draft" from a directory (or Hub id) as jllm.load takes it, "medusa" or "eagle" from
    a file.

    `tree` replaces the tree that the file names; the default of a draft model is a chain of four. Raises ConfigError
    for an unknown kind. Raises DrafterError (a ConfigError) for a file that is damaged, of another kind, or made for
    another model. Raises CheckpointError for a directory that is no model.
    """
    if kind == "draft":
        return _load_draft_model(path, model, chain(DRAFTS) if tree is None else tree)
    if kind not in KINDS:
        raise ConfigError(f"drafters are loaded as {', '.join(KINDS)}, not {kind!r}")
    return _load_heads(kind, Path(path).expanduser(), model, tree)


def save_heads(path: str | Path, drafter: Medusa | Eagle, target: Params, *, dtype: DTypeLike = jnp.bfloat16) -> None:
    """Writes heads that were made for a target, rounded to `dtype`. Raises OutputError if the file cannot be
    written."""
    kind, leaves = ("medusa", drafter.heads) if isinstance(drafter, Medusa) else ("eagle", drafter.head)
    arrays = {name: np.asarray(leaf).astype(jnp.dtype(dtype)) for name, leaf in named(leaves).items()}
    made_for = {"target": of_params(target), "norms": of_norms(target)}
    write_file(Path(path), arrays, {"kind": f"jllm-{kind}", "tree": json.dumps(drafter.tree.parents), **made_for})


def _load_draft_model(path: str | Path, model: "Model", tree: Tree) -> DraftModel:
    from jllm.files.load import load

    draft = load(path)
    own, target = draft.config.vocab_size, model.config.vocab_size
    if own != target:
        raise DrafterError(
            f"{path}: has a vocabulary of {own} tokens, its target one of {target}: a draft model shares its target's"
        )
    return DraftModel(draft.params, draft.config, tree)


def _load_heads(kind: str, path: Path, model: "Model", tree: Tree | None) -> Medusa | Eagle:
    try:
        metadata, stored = read_metadata(path), read_header(path)
        if metadata.get("kind") != f"jllm-{kind}":
            raise DrafterError(f"{path}: not a file of kind jllm-{kind}: its kind is {metadata.get('kind')!r}")
        tree = _tree(path, metadata) if tree is None else tree
        config, dtype = model.config, model.params.dtype
        if kind == "eagle":
            shapes: EagleHead | tuple[MedusaHead, ...] = eagle_shapes(config, dtype)
        else:
            count = len([name for name in stored if name.endswith(".linear")])
            shapes = medusa_shapes(config, dtype, [f"{i}.head" in stored for i in range(count)])
        _check_shapes(path, shapes, stored)
        _check_target(path, metadata, model.params)
        leaves = [_read(stored[name], leaf.dtype) for name, leaf in named(shapes).items()]
    except CheckpointError as error:
        raise DrafterError(str(error)) from None
    weights = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
    return Eagle(weights, tree) if kind == "eagle" else Medusa(weights, tree)


def _tree(path: Path, metadata: dict[str, str]) -> Tree:
    try:
        parents = json.loads(metadata["tree"])
        if not all(type(parent) is int for parent in parents):
            raise ValueError("its nodes' parents are integers")
        return Tree(tuple(parents))
    except (KeyError, TypeError, ValueError) as error:
        raise DrafterError(f"{path}: its metadata have no tree: {error}") from None


def _check_shapes(path: Path, shapes: object, stored: dict[str, StoredTensor]) -> None:
    wanted = {name: leaf.shape for name, leaf in named(shapes).items()}
    if odd := [name for name in [*wanted, *stored] if name not in stored or name not in wanted]:
        raise DrafterError(f"{path}: {'lacks' if odd[0] in wanted else 'has no place for'} tensor {odd[0]}")
    for name, shape in wanted.items():
        if stored[name].shape != shape:
            found = f"has shape {list(stored[name].shape)}, and this model takes {list(shape)}"
            raise DrafterError(f"{path}: tensor {name} {found}: it was made for another model")
        if stored[name].dtype not in DTYPES:
            raise DrafterError(f"{path}: tensor {name} is {stored[name].dtype}; supported are {', '.join(DTYPES)}")


def _check_target(path: Path, metadata: dict[str, str], params: Params) -> None:
    """Raises DrafterError unless the file was made for these weights, or these are a rounded copy of its target."""
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, QuantizedWeight))
    rounded = params.dtype == jnp.float16 or any(isinstance(leaf, QuantizedWeight) for leaf in leaves)
    found = of_norms(params) if rounded else of_params(params)
    wanted = metadata.get("norms" if rounded else "target")
    if found != wanted:
        of = "norms" if rounded else "weights"
        raise DrafterError(
            f"{path}: was made for a model whose {of} have the fingerprint {wanted}, and this one's have {found}: "
            "train heads for it (experiments.train_drafters)"
        )


def _read(tensor: StoredTensor, dtype: np.dtype) -> jax.Array:
    host = np.empty(tensor.shape, dtype)
    read_tensor(tensor, host)
    return jnp.asarray(host)
