"""jllm: a pure-functional LLaMA for inference research on GPUs, in JAX and Pallas.

Names are imported when they are first asked for (PEP 562): `python -m jllm.generate --help` needs no JAX, and takes
0.1 s instead of 2.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pallas_kernels import LOADED as _LOADED  # noqa: F401  (taken before any module is loaded)

if TYPE_CHECKING:
    from jllm.api import Piece, generate, stream
    from jllm.engine.loop import Engine
    from jllm.engine.request import Completion, Event, SamplingParams, Timings, TokenLogprob
    from jllm.errors import (
        CheckpointError,
        ConfigError,
        EngineBusy,
        EngineClosed,
        EvaluationError,
        InputFileError,
        JllmError,
        LengthPredictorError,
        NoRoomError,
        OutputError,
        QuantizationError,
        RequestError,
        SnapshotError,
        TokenizerError,
        UnknownParameterError,
    )
    from jllm.pretrained import Model, load
    from jllm.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "CheckpointError",
    "Completion",
    "ConfigError",
    "Engine",
    "EngineBusy",
    "EngineClosed",
    "EvaluationError",
    "Event",
    "InputFileError",
    "JllmError",
    "LengthPredictorError",
    "Model",
    "NoRoomError",
    "OutputError",
    "Piece",
    "QuantizationError",
    "RequestError",
    "SamplingParams",
    "SnapshotError",
    "Timings",
    "TokenLogprob",
    "Tokenizer",
    "TokenizerError",
    "UnknownParameterError",
    "generate",
    "load",
    "load_tokenizer",
    "stream",
]

_NAMES_OF = {
    "jllm.api": ("Piece", "generate", "stream"),
    "jllm.engine.loop": ("Engine",),
    "jllm.engine.request": ("Completion", "Event", "SamplingParams", "Timings", "TokenLogprob"),
    "jllm.errors": (
        "CheckpointError",
        "ConfigError",
        "EngineBusy",
        "EngineClosed",
        "EvaluationError",
        "InputFileError",
        "JllmError",
        "LengthPredictorError",
        "NoRoomError",
        "OutputError",
        "QuantizationError",
        "RequestError",
        "SnapshotError",
        "TokenizerError",
        "UnknownParameterError",
    ),
    "jllm.pretrained": ("Model", "load"),
    "jllm.tokenizer": ("Tokenizer", "load_tokenizer"),
}
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        return _submodule(name)
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value  # later look-ups do not come here
    return value


def _submodule(name: str) -> Any:
    """So that `import jllm; jllm.errors` works, imported before or not."""
    path = f"{__name__}.{name}"
    try:
        return import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
