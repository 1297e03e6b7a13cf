"""Keeps a training run's state in a file, so that an interrupted run resumes at its last evaluation."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jllm.errors import InputFileError, OutputError
from jllm.files.run_identity import differing

FILE = "training_state.npz"


@dataclass(frozen=True)
class Kept:
    """The state of a run."""

    state: Any  # a pytree of arrays
    rows: list[dict[str, Any]]  # of its evaluations; it resumes at the last one's "step"


def keep(folder: Path, run: dict[str, Any], kept: Kept) -> None:
    """Replaces the kept state at once. `run` has what decides the run. Raises OutputError."""
    leaves: dict[str, Any] = {f"leaf{i}": _plain(leaf) for i, leaf in enumerate(jax.tree.leaves(kept.state))}
    about = np.frombuffer(json.dumps({"run": run, "rows": kept.rows}).encode(), np.uint8)
    file, new = folder / FILE, folder / f"{FILE}.new"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(new, "wb") as out:
            np.savez(out, about=about, **leaves)
        os.replace(new, file)
    except OSError as error:
        raise OutputError(f"{file}: cannot be written: {error.strerror}") from None


def kept(folder: Path, run: dict[str, Any], like: Any) -> Kept | None:
    """Returns the kept state of the same run, as a pytree like `like` (arrays or shapes), or None without one. Raises
    InputFileError for a damaged file, and for another run's."""
    file = folder / FILE
    if not file.exists():
        return None
    try:
        with np.load(file) as found:
            about = json.loads(found["about"].tobytes())
            leaves = [found[f"leaf{i}"] for i in range(len(found.files) - 1)]
    except (OSError, ValueError, KeyError) as error:
        raise InputFileError(f"{file}: is not the state of a training run: {error}") from None
    if names := differing(about["run"], json.loads(json.dumps(run))):
        raise InputFileError(
            f"{file}: is of another run ({', '.join(names[:3])} differ): remove it, or give another folder"
        )
    old, tree = jax.tree.flatten(like)
    if [_shape(leaf) for leaf in old] != [leaf.shape for leaf in leaves]:
        raise InputFileError(f"{file}: has other shapes than this run: remove it, or give another folder")
    state = [jax.random.wrap_key_data(x) if _is_key(leaf) else jax.numpy.asarray(x) for leaf, x in zip(old, leaves)]
    return Kept(jax.tree.unflatten(tree, state), about["rows"])


def forget(folder: Path) -> None:
    (folder / FILE).unlink(missing_ok=True)


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _shape(leaf: Any) -> tuple[int, ...]:
    """Returns the stored shape; of a random key, that of its words."""
    return jax.eval_shape(jax.random.key_data, leaf).shape if _is_key(leaf) else leaf.shape


def _plain(leaf: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
