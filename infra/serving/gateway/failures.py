"""Failures that a caller of the API sees, in OpenAI's error format."""

from fastapi import HTTPException

from ostinato.infra.serving.gateway.config import MAX_MESSAGE_CHARACTERS

_MOST_CHARACTERS = 400


class ApiError(HTTPException):
    """Refusal: HTTP status, message with what was wanted, code, and field at fault."""

    def __init__(
        self,
        status_code: int,
        message: str,
        *,
        code: str = "invalid_value",
        param: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        headers = None
        if retry_after_seconds is not None:
            headers = {"Retry-After": str(max(1, round(retry_after_seconds + 0.5)))}
        super().__init__(
            status_code, detail=error_body(message, code=code, param=param), headers=headers
        )


def error_body(message: str, *, code: str, param: str | None = None) -> dict[str, object]:
    """The body of a refusal or a fault. A message that quotes much of the request is cut."""
    if len(message) > _MOST_CHARACTERS:
        message = f"{message[: _MOST_CHARACTERS - 100]} ... {message[-80:]}"
    kind = "server_error" if code in SERVER_CODES else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def check_length(text: str, param: str) -> None:
    """ApiError when a message is too long."""
    if len(text) > MAX_MESSAGE_CHARACTERS:
        raise ApiError(
            400,
            f"{param} has {len(text)} characters, wanted at most {MAX_MESSAGE_CHARACTERS}",
            code="string_above_max_length",
            param=param,
        )


SERVER_CODES = frozenset(
    {"engine_failed", "capacity_exhausted", "storage_failed", "sandbox_failed", "internal_error"}
)
