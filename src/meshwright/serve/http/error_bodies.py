"""Errors as the OpenAI API writes them: {"error": {"message", "type", "param", "code"}}."""

from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from meshwright.errors import RequestError
from meshwright.serve.engine.request import EngineError, EngineStopped

_TYPES = {401: "authentication_error", 404: "not_found_error", 408: "timeout_error", 429: "rate_limit_error"}
# Codes of refusals without one of their own.
_CODES = {400: "invalid_value", 404: "unknown_url", 405: "method_not_supported", 413: "request_too_large"}
# A queue that is full now has room again once an answer ends.
_RETRY_SECONDS = 1


def error_object(error: Exception) -> dict[str, Any]:
    """The error object of `error`; an unexpected one keeps its details for the log."""
    if isinstance(error, RequestError):
        kind = _TYPES.get(error.status, "invalid_request_error")
        return _object(str(error), kind, error.param, error.code or _CODES.get(error.status))
    if isinstance(error, EngineStopped):
        return _object(str(error), "server_error", None, "engine_stopped")
    if isinstance(error, EngineError):
        return _object(str(error), "server_error", None, "engine_error")
    return _object(
        "the server failed on this request; its log says why", "server_error", None, "internal_error"
    )


def headers_of(error: RequestError) -> dict[str, str]:
    """The headers that a refusal with the status of `error` must have."""
    if error.status == 401:
        return {"WWW-Authenticate": "Bearer"}
    if error.status == 429:
        return {"Retry-After": str(error.retry_after_seconds or _RETRY_SECONDS)}
    return {}


def _object(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


async def on_request_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return JSONResponse(error_object(error), error.status, headers_of(error))


async def on_http_exception(request: Request, error: Exception) -> Response:
    """404 and 405 of the router, in the same shape."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail.lower()}"
    refused = RequestError(message, status=error.status_code)
    return JSONResponse(error_object(refused), error.status_code, error.headers)


async def on_failure(_: Request, error: Exception) -> Response:
    return JSONResponse(error_object(error), 503 if isinstance(error, EngineStopped) else 500)
