"""Every error that a user can cause, each saying in one line what is wrong and what would be right.

The command line prints the line and exits with status 2; a program catches the type.
"""


def how_to_install(extra: str) -> str:
    """Returns what a message says of an extra that is missing: from the sources, since PyPI's jllm is another
    project."""
    return f"uv pip install -e '.[{extra}]' in the folder of jllm's sources"


def counted(count: int, what: str) -> str:
    """Returns a number of things as a message says it: "1 turn", "2 turns"."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def between(least: int, most: int, form: str = "{} to {}") -> str:
    """Returns the numbers that there are to choose from: "1 to 8", or the only one."""
    return str(least) if least == most else form.format(least, most)


class JllmError(Exception):
    """Base of all errors that jllm raises on purpose."""


class ConfigError(JllmError, ValueError):
    """A config file or an engine option asks for something unknown, unsupported or inconsistent."""


class NoRoomError(ConfigError):
    """A model or an engine that its device has no room for."""


class DrafterError(ConfigError):
    """A drafter that does not fit the model, or a file of one that is damaged or was made for another model."""


class CheckpointError(JllmError, ValueError):
    """A checkpoint directory or one of its files is missing, damaged or does not fit its config."""


class QuantizationError(JllmError, ValueError):
    """A quantization scheme that is unknown or garbled, or does not fit the model or its weights."""


class TokenizerError(JllmError, ValueError):
    """No tokenizer where one is needed, or one that cannot be read, or text that it cannot take."""


class EvaluationError(JllmError, ValueError):
    """A text, a protocol or a pair of models that perplexity or divergence can't be computed of."""


class SnapshotError(JllmError, ValueError):
    """A snapshot of a KV cache that is damaged, or does not fit the cache or the pages that it should go to."""


class RequestError(JllmError, ValueError):
    """A prompt or its sampling parameters cannot be served."""


class TooLongError(RequestError):
    """A prompt, with the tokens that are to follow it, that is longer than the engine has room for."""


class QueueFull(JllmError, RuntimeError):
    """More requests wait than may: those that come later may find room."""


class UnknownParameterError(RequestError, TypeError):
    """A keyword that is no sampling parameter."""


class InputFileError(JllmError, ValueError):
    """A line of an input file (named by its number) is broken."""


class OutputError(JllmError, OSError):
    """Results could not be written; what was written before is kept."""


class RemoteError(JllmError, RuntimeError):
    """Another process that this one works with cannot be reached, has gone, or does not fit it."""


class EngineClosed(JllmError, RuntimeError):
    """The engine was closed, by the caller or after a device error that it could not recover from."""


class EngineBusy(JllmError, RuntimeError):
    """A call of an engine that may not overlap with the one that is running; that one goes on undisturbed."""
