"""Finds the default folder of compiled steps, with which a second start compiles nothing."""

import os
import sys
import warnings
from pathlib import Path

from jllm.errors import OutputError


def default_path() -> Path:
    """Returns ~/Library/Caches/jllm/steps on macOS, elsewhere jllm/steps under $XDG_CACHE_HOME or ~/.cache."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "jllm" / "steps"
    xdg = os.environ.get("XDG_CACHE_HOME", "")  # the specification says to ignore relative paths
    return (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache") / "jllm" / "steps"


def make_compile_cache(path: Path | None = None) -> Path:
    """Returns the folder `path` (None: `default_path`) for EngineOptions.executables. Creates it if it is missing.

    Raises OutputError where it cannot be written.
    """
    path = (default_path() if path is None else path).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"compile cache {path}: cannot be made: {error.strerror}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise OutputError(f"compile cache {path}: is not writable")
    return path


def find_compile_cache(path: Path | None = None) -> Path | None:
    """Returns the folder of make_compile_cache; None, with a warning, where it cannot be written."""
    try:
        return make_compile_cache(path)
    except OutputError as error:
        warnings.warn(f"{error}; compiling without it", stacklevel=2)
        return None
