"""jllm: a pure-functional LLaMA for inference research on GPUs, in JAX and Pallas.

The pure half: LlamaConfig, Params, init_params, State, init_state, RaggedBatch, step = forward then sample, Outputs.
The half that serves: load, generate, stream, Engine, SamplingParams.

A name is imported when it is first used (PEP 562). So `python -m jllm.generate --help` needs no JAX and starts at once.
__init__.pyi lists the names.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

from pallas_kernels import LOADED as _LOADED  # noqa: F401  (taken before any module is loaded)

_MODULE_OF = {
    name.name: node.module
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom) and node.module
    for name in node.names
}
_SNAPSHOTS = "save a snapshot and resume it with share=True (docs/several-gpus.md)"
GONE = {  # removed names -> their successors
    "KVStore": _SNAPSHOTS,
    "StoringEngine": _SNAPSHOTS,
    "LengthPredictorError": "experiments.training.learned_length has it",
    "checkpoint_saving": "use jllm.save",
    "drafter_files": "use jllm.load_drafter",
    "snapshot": "use jllm.load_snapshot and jllm.save_snapshot",
}
__all__ = sorted(_MODULE_OF)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        return _submodule(name)
    value = getattr(import_module(_MODULE_OF[name]), name)
    return globals().setdefault(name, value)  # later look-ups skip this function; `step` is bound already, see step/


def _submodule(name: str) -> Any:
    """Returns a submodule, so that `import jllm; jllm.errors` works whether it was imported before or not. Raises
    ImportError for a name that is gone: `from jllm import` drops the text of an AttributeError."""
    if name in GONE:
        raise ImportError(f"jllm.{name} is gone: {GONE[name]}", name=__name__)
    path = f"{__name__}.{name}"
    try:
        return import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
