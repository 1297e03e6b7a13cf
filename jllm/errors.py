"""Defines every error that a user can cause. Its one line says what is wrong and what would be right.

The command line prints the line and exits with status 2. A program catches the type.
"""


def how_to_install(extra: str) -> str:
    """Returns the command that installs a missing extra, for a message. It installs from the sources, since PyPI's jllm
    is another project."""
    return f"uv pip install -e '.[{extra}]' in the folder of jllm's sources"


def counted(count: int, what: str) -> str:
    """Returns a number of things for a message: "1 turn", "2 turns"."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def between(least: int, most: int, form: str = "{} to {}") -> str:
    """Returns the valid range of a number for a message: "1 to 8", or the only valid number."""
    return str(least) if least == most else form.format(least, most)


class JllmError(Exception):
    """Is the base of all errors that jllm raises on purpose."""


class ConfigError(JllmError, ValueError):
    """Raised when a config file or an engine option asks for something unknown, unsupported or inconsistent."""


class NoRoomError(ConfigError):
    """Raised when a device has no room for a model or an engine."""


class DrafterError(ConfigError):
    """Raised when a drafter does not fit the model, or when its file is damaged or made for another model."""


class CheckpointError(JllmError, ValueError):
    """Raised when a checkpoint directory or one of its files is missing, damaged or does not fit its config."""


class QuantizationError(JllmError, ValueError):
    """Raised when a quantization scheme is unknown or malformed, or does not fit the model or its weights."""


class TokenizerError(JllmError, ValueError):
    """Raised when a tokenizer is missing or unreadable, or cannot encode a text."""


class EvaluationError(JllmError, ValueError):
    """Raised when perplexity, divergence or another measure cannot be computed for a text or a pair of models."""


class SnapshotError(JllmError, ValueError):
    """Raised when a snapshot of a KV cache is damaged, or does not fit the cache or the given pages."""


class WeightsError(JllmError, ValueError):
    """Raised when new weights do not fit an engine."""


class RequestError(JllmError, ValueError):
    """Raised when a prompt or its sampling parameters cannot be served."""


class TooLongError(RequestError):
    """Raised when a prompt and the tokens after it are longer than the engine has room for."""


class QueueFull(JllmError, RuntimeError):
    """Raised when the queue of waiting requests is full. A later request may find room."""


class UnknownParameterError(RequestError, TypeError):
    """Raised for a keyword that is not a sampling parameter."""


class InputFileError(JllmError, ValueError):
    """Raised when a line of an input file is broken. The message names the line's number."""


class OutputError(JllmError, OSError):
    """Raised when results cannot be written. Results that were written before are kept."""


class RemoteError(JllmError, RuntimeError):
    """Raised when another process that this one works with cannot be reached, has ended, or does not fit it."""


class EngineClosed(JllmError, RuntimeError):
    """Raised when the engine was closed, by the caller or after a device error that it could not recover from."""


class EngineNotReady(JllmError, RuntimeError):
    """Raised when a step cannot run now: the engine sleeps, or its weights were donated. It goes on after wake() or
    update()."""


class EngineBusy(JllmError, RuntimeError):
    """Raised when a call may not overlap with the call of the same engine that is running. The running call goes on
    undisturbed."""
