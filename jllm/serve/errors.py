"""Writes errors as the OpenAI API has them: a status, and a body with one line of explanation."""

from collections.abc import Mapping

from jllm.errors import EngineBusy, EngineClosed, JllmError, QueueFull, RequestError, TokenizerError, TooLongError

TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
TOO_LONG = "context_length_exceeded"  # the code of prompts that clients should shorten and send again
LONGEST = 500  # letters of a message, which may repeat the input
RETRY = {"Retry-After": "1"}  # seconds


class HttpError(JllmError):
    """Is an error with its HTTP status. `param` is the field of the body that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        line = " ".join(message.split())
        super().__init__(line if len(line) <= LONGEST else line[: LONGEST - 3] + "...")
        self.status, self.param, self.code, self.headers = status, param, code, headers or {}

    def body(self) -> dict[str, object]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def bad(param: str, message: str) -> HttpError:
    """Returns the error for a field that cannot be served."""
    return HttpError(400, f"{param}: {message}", param=param)


def http_error(error: Exception) -> HttpError:
    """Returns the HTTP error for an error of the library, or for an unexpected one."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, QueueFull):
        return HttpError(429, str(error), code="queue_full", headers=RETRY)
    if isinstance(error, EngineClosed | EngineBusy):
        return HttpError(503, str(error), code="unavailable", headers=RETRY)
    if isinstance(error, RequestError | TokenizerError):
        return HttpError(400, str(error), code=TOO_LONG if isinstance(error, TooLongError) else None)
    return HttpError(500, f"the server failed: {type(error).__name__}")
