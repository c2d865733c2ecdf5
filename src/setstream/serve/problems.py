"""Errors as HTTP: which status each gets."""

from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect

from setstream.errors import ConsistencyError, MismatchError, SetstreamError, StoreError, StoreFullError, UnknownSetError

# Characters of an answer that says what was wrong.
MOST_TEXT = 2000


class TooManyElements(SetstreamError, ValueError):
    """More elements, or larger counts, than a request may have."""


class BadMessage(SetstreamError, ValueError):
    """An invalid message to the playground."""


# The first match counts. Errors that are not listed are invalid input.
STATUS: tuple[tuple[type[SetstreamError], int], ...] = (
    (TooManyElements, 413),
    (UnknownSetError, 404),
    (StoreFullError, 403),
    (StoreError, 503),
    (MismatchError, 409),
    (ConsistencyError, 409),
    (SetstreamError, 422),
)


def status_of(error: SetstreamError) -> int:
    """The status of an error."""
    return next(status for kind, status in STATUS if isinstance(error, kind))


def message_of(error: SetstreamError) -> str:
    """Its message, without the place of the store, which clients need not know."""
    text = _sendable(str(error.args[0]) if error.args else str(error))
    return text.partition(": ")[2] if isinstance(error, UnknownSetError | StoreFullError) else text


def problem(status: int, detail: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """An answer that says what was wrong."""
    return JSONResponse({"detail": _sendable(detail)}, status, headers)


def validation_message(error: Any) -> str:
    """One of pydantic's errors, in a line."""
    place = ".".join(map(str, error["loc"]))
    return f"{place}: {error['msg']}" if place else str(error["msg"])


def _sendable(text: str) -> str:
    """The text without lone surrogates, which have no bytes, and not too long: clients may have sent both."""
    return text[:MOST_TEXT].encode("utf-8", "backslashreplace").decode()


def add_handlers(app: FastAPI) -> None:
    """Turn errors into answers."""

    @app.exception_handler(SetstreamError)
    async def failed(request: Request, error: SetstreamError) -> JSONResponse:
        status = status_of(error)
        if status == 503:  # the reason is for the log only
            request.state.problem = str(error)
            return problem(503, "the store of states cannot be reached, or is busy: try again", {"Retry-After": "1"})
        return problem(status, message_of(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return problem(422, "; ".join(map(validation_message, error.errors()[:5])))

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> JSONResponse:
        return problem(400, "the body was cut off")  # for the log: the client is gone

    @app.exception_handler(StarletteHTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        return problem(error.status_code, str(error.detail), dict(error.headers or {}))
