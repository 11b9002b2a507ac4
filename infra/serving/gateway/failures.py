"""Failures that a caller of the API sees, in OpenAI's error format."""

import json
from collections.abc import Collection, Mapping
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from ostinato.infra.platform.errors import (
    CapacityExhausted,
    ConfigError,
    EngineError,
    OstinatoError,
    StorageError,
)
from ostinato.infra.serving.gateway.config import MAX_MESSAGE_CHARACTERS

CONTEXT_FULL = "context_length_exceeded"
_MAX_ERROR_CHARACTERS = 400

NeutralValues = Mapping[str, tuple[tuple[Any, ...], str]]
"""Field -> the values that do not change an answer, and why no other value is supported."""


class ApiError(HTTPException):
    """A refused request: HTTP status, message with the wanted value, code, and field at fault."""

    def __init__(
        self,
        status_code: int,
        message: str,
        *,
        code: str = "invalid_value",
        param: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        self.code = code
        headers = None
        if retry_after_seconds is not None:
            headers = {"Retry-After": str(max(1, round(retry_after_seconds + 0.5)))}
        super().__init__(
            status_code, detail=error_body(message, code=code, param=param), headers=headers
        )


def error_body(message: str, *, code: str, param: str | None = None) -> dict[str, Any]:
    """The body of a refusal or a fault. A long message, which may quote the request, loses its middle."""
    if len(message) > _MAX_ERROR_CHARACTERS:
        message = f"{message[: _MAX_ERROR_CHARACTERS - 100]} ... {message[-80:]}"
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


def check_model(asked: str, served: str) -> None:
    """ApiError for a model that is not the served one."""
    if asked != served:
        raise ApiError(
            404,
            f"model is {asked!r}, wanted {served!r}",
            code="model_not_found",
            param="model",
        )


def check_neutral(
    request: BaseModel,
    neutral: NeutralValues,
    ignored_keys: Collection[tuple[str, str]] = (),
    *,
    has_tools: bool = True,
) -> None:
    """ApiError for the first field with an unsupported value. `ignored_keys`: (field, key) pairs that may have
    any value. Without tools `parallel_tool_calls` may too, since no call is made.
    """
    for name, (values, reason) in neutral.items():
        if name == "parallel_tool_calls" and not has_tools:
            continue
        value: Any = getattr(request, name, None)
        if isinstance(value, dict):
            value = {key: item for key, item in value.items() if (name, key) not in ignored_keys}
        if value not in values:
            wanted = " or ".join(json.dumps(each) for each in values)
            raise ApiError(
                400,
                f"{name} is {json.dumps(value)[:200]}, wanted {wanted}: {reason}",
                code="unsupported_parameter",
                param=name,
            )


SERVER_CODES = frozenset(
    {"engine_failed", "capacity_exhausted", "storage_failed", "sandbox_failed", "internal_error"}
)


_STATUS_OF: tuple[tuple[type[OstinatoError], int, str], ...] = (
    (CapacityExhausted, 503, "capacity_exhausted"),
    (EngineError, 503, "engine_failed"),
    (StorageError, 503, "storage_failed"),
    (ConfigError, 400, "invalid_value"),
    (OstinatoError, 500, "internal_error"),
)


def refusal_answer(refusal: ApiError, headers: Mapping[str, str]) -> JSONResponse:
    """The response to a refused request, with further headers."""
    return JSONResponse(
        refusal.detail,
        status_code=refusal.status_code,
        headers={**(refusal.headers or {}), **headers},
    )


def fault_answer(error: OstinatoError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The response to a failure below the API."""
    return JSONResponse(fault_body(error), status_code=fault_status(error), headers=headers)


def fault_status(error: OstinatoError) -> int:
    """HTTP status of a failure below the API."""
    return next(status for kind, status, _ in _STATUS_OF if isinstance(error, kind))


def fault_body(error: OstinatoError) -> dict[str, Any]:
    """Error body of a failure. For a server fault it shows only the code: messages may hold local paths."""
    code = next(code for kind, _, code in _STATUS_OF if isinstance(error, kind))
    is_caller_fault = code == "invalid_value"
    message = (
        str(error) if is_caller_fault else f"{code}: a fault of this server, not of your request"
    )
    return error_body(message, code=code)
