"""Stores the windows that an evaluation has scored, so that it can resume. The file has one window per line.

The first line identifies the evaluation: protocol, tokens, models, formats, device, versions. Arrays are in base64, so
they are read exactly as written. An incomplete last line is ignored.
"""

import base64
import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jllm.analysis.scoring import Scores
from jllm.errors import EvaluationError
from jllm.files.fingerprint import of_params
from jllm.model.model import Model
from pallas_kernels.one_writer import open_alone

Key = dict[str, object]

SAMPLE = 256  # values per recorded state that identify a reference


@contextlib.contextmanager
def open_progress(path: str | Path, key: Key) -> Iterator[tuple[dict[int, Scores], Callable[[int, Scores], None]]]:
    """Yields the windows in the file, by number, and a function that adds one. A missing file is created. Raises
    EvaluationError for a file of another evaluation, for any other file, and for one that another process writes."""
    path = Path(path)
    try:
        file = open_alone(path)
    except OSError as error:
        raise EvaluationError(f"{path}: cannot be written: {error.strerror}") from None
    if file is None:
        raise EvaluationError(f"{path}: another process writes it; name another file")
    with file:
        yield _read_progress(path, key), partial(_add, path)


def _read_progress(path: Path, key: Key) -> dict[int, Scores]:
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise EvaluationError(f"{path}: cannot be read: {error.strerror}") from None
    first = json.dumps(key).encode() + b"\n"
    whole = [line for line in lines if line.endswith(b"\n")]
    if whole or not first.startswith(b"".join(lines)):
        _check_key(path, _parse(path, lines[0]), key)
    found = dict(_window(path, line) for line in whole[1:])
    try:
        with path.open("ab") as file:
            file.truncate(sum(map(len, whole)))
            if not whole:
                file.write(first)
    except OSError as error:
        raise EvaluationError(f"{path}: cannot be written: {error.strerror}") from None
    return found


def _add(path: Path, window: int, scores: Scores) -> None:
    with path.open("ab") as file:
        file.write(json.dumps({"window": window, "scores": _packed(scores)}).encode() + b"\n")


def fingerprint(model: Model, states: Sequence[np.ndarray] | None = None) -> str:
    """Returns a digest of a model's config, dtype and weights, and of some states of a recorded reference."""
    digest = hashlib.sha256(f"{model.config} {model.params.dtype} {of_params(model.params)}".encode())
    for state in states or ():
        digest.update(state.reshape(-1)[:: max(1, state.size // SAMPLE)].tobytes())
    return digest.hexdigest()


def digest_of(ids: Sequence[np.ndarray]) -> str:
    """Returns a digest of each text's token ids."""
    digest = hashlib.sha256()
    for tokens in ids:
        digest.update(len(tokens).to_bytes(8, "little") + np.asarray(tokens, np.int32).tobytes())
    return digest.hexdigest()


def _check_key(path: Path, found: object, key: Key) -> None:
    if not isinstance(found, dict) or found.keys() != key.keys():
        raise EvaluationError(f"{path}: is not the progress of an evaluation; name a file that does not exist yet")
    if different := [name for name in key if found[name] != key[name]]:
        raise EvaluationError(
            f"{path}: is the progress of another evaluation, of other {' and '.join(different)}; name another file"
        )


def _parse(path: Path, line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        raise EvaluationError(
            f"{path}: is not the progress of an evaluation; name a file that does not exist yet"
        ) from None


def _window(path: Path, line: bytes) -> tuple[int, Scores]:
    entry = _parse(path, line)
    try:
        return int(entry["window"]), {name: _unpacked(*value) for name, value in entry["scores"].items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise EvaluationError(f"{path}: is damaged; delete it to begin again") from None


def _packed(scores: Scores) -> dict[str, tuple[str, str]]:
    return {name: (str(x.dtype), base64.b64encode(x.tobytes()).decode()) for name, x in scores.items()}


def _unpacked(dtype: str, data: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(data, validate=True), np.dtype(dtype))
