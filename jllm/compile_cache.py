"""JAX's persistent compilation cache in the user's cache folder, so that a second start compiles nothing."""

import os
import sys
from pathlib import Path

from jllm.errors import OutputError


def default_path() -> Path:
    """~/Library/Caches/jllm/xla on macOS, elsewhere jllm/xla under $XDG_CACHE_HOME or ~/.cache."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "jllm" / "xla"
    xdg = os.environ.get("XDG_CACHE_HOME", "")  # relative ones are to be ignored, says the specification
    return (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache") / "jllm" / "xla"


def enable_compile_cache(path: Path | None = None) -> Path:
    """Keeps what JAX compiles from now on under `path` (None: `default_path`), and returns it.

    Every executable is kept, also quick and small ones: JAX's defaults would skip most of them. Changes JAX's settings
    for the whole process, so this is for commands; the library never calls it. Raises OutputError, and changes
    nothing, where the folder cannot be written.
    """
    path = (default_path() if path is None else path).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"compile cache {path}: cannot be made: {error.strerror}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise OutputError(f"compile cache {path}: is not writable")
    import jax

    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path
