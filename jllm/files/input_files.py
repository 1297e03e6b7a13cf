"""Reads the arrays that requests bring by name, from a folder of .safetensors files."""

from pathlib import Path

import numpy as np

from jllm.errors import CheckpointError, RequestError
from jllm.files.safetensors_io import NAMES, read_as_stored, read_header


def read_input_file(folder: Path, name: str) -> dict[str, np.ndarray]:
    """Returns the arrays of folder/name.safetensors. Raises RequestError for a name without a file, and for a damaged
    file. The folder is read anew each time."""
    files = {path.stem: path for path in folder.glob("*.safetensors")}
    if name not in files:
        raise RequestError(f"inputs: {name!r} is not in {folder}, which has {', '.join(sorted(files)) or 'no files'}")
    try:
        stored = read_header(files[name])
        return {key: read_as_stored(tensor) for key, tensor in stored.items() if tensor.dtype in NAMES.values()}
    except CheckpointError as error:
        raise RequestError(f"inputs: {error}") from None
