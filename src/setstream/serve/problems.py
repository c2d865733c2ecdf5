"""Errors as HTTP: which status each gets. The message is the error's own."""

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect

from setstream.errors import ConsistencyError, MismatchError, SetstreamError, StoreError, StoreFullError, UnknownSetError

# The first that fits counts. What is not named here is something that the client sent, and cannot be.
STATUS: tuple[tuple[type[SetstreamError], int], ...] = (
    (UnknownSetError, 404),
    (StoreFullError, 403),
    (StoreError, 503),
    (MismatchError, 409),
    (ConsistencyError, 409),
    (SetstreamError, 422),
)


# Characters of an answer that says what was wrong.
MOST_TEXT = 2000


class TooManyElements(SetstreamError, ValueError):
    """More elements, or larger counts, than a request may bring."""


class BadMessage(SetstreamError, ValueError):
    """A message of the playground that cannot be."""


def status_of(error: SetstreamError) -> int:
    """The status of one of our errors."""
    if isinstance(error, TooManyElements):
        return 413
    return next(status for kind, status in STATUS if isinstance(error, kind))


def message_of(error: SetstreamError) -> str:
    """Its message, without the place of the store: that is nobody's business outside."""
    text = _sendable(str(error.args[0]) if error.args else str(error))
    return text.partition(": ")[2] if isinstance(error, UnknownSetError | StoreFullError) else text


def problem(status: int, detail: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """An answer that says what was wrong."""
    return JSONResponse({"detail": _sendable(detail)}, status, headers)


def _sendable(text: str) -> str:
    """Without halves of characters, which have no bytes, and not longer than anybody reads: both may have been sent to us."""
    return text[:MOST_TEXT].encode("utf-8", "backslashreplace").decode()


def add_handlers(app: FastAPI) -> None:
    """Turn errors into answers."""

    @app.exception_handler(SetstreamError)
    async def ours(request: Request, error: SetstreamError) -> JSONResponse:
        status = status_of(error)
        if status == 503:  # the store's own troubles are for the log
            request.state.problem = str(error)
            return problem(503, "the store of states cannot be reached, or is busy: try again", {"Retry-After": "1"})
        return problem(status, message_of(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        found = ["{}: {}".format(".".join(map(str, own["loc"])), own["msg"]) for own in error.errors()[:5]]
        return problem(422, "; ".join(found))

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> JSONResponse:
        return problem(400, "the body was cut off")  # for the log: nobody hears it

    @app.exception_handler(StarletteHTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        return problem(error.status_code, str(error.detail), dict(error.headers or {}))
