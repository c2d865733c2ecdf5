"""The answers of the service: their shapes, how a prediction becomes JSON, and which status an error gets."""

import math
from typing import Annotated, Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from torch import Tensor

from setstream.errors import ConsistencyError, MismatchError, SetstreamError, StoreError, StoreFullError, UnknownSetError

# Letters, digits and a few signs without a meaning in paths: no slash, no backslash, nothing that begins with a dot.
ID_PATTERN = r"^\w[\w .:@+=~-]{0,199}$"
SetId = Annotated[str, StringConstraints(pattern=ID_PATTERN)]
# Sets of one request for predictions.
MOST_IDS = 100
# Characters of an answer that says what was wrong.
MOST_TEXT = 2000


class TooManyElements(SetstreamError, ValueError):
    """More elements, or larger counts, than a request may have."""


class InProgress(SetstreamError):
    """A request with the same key is being answered."""


# The first match counts. Errors that are not listed are invalid input: 422.
STATUS: dict[type[SetstreamError], int] = {TooManyElements: 413, UnknownSetError: 404, StoreFullError: 403, StoreError: 503}
STATUS |= {MismatchError: 409, ConsistencyError: 409, InProgress: 409}


def _example(**values: Any) -> ConfigDict:
    return ConfigDict(json_schema_extra={"examples": [values]})


class Problem(BaseModel):
    """What was wrong with a request, and what was expected."""

    model_config = _example(detail="there is no set 'customer-7'")
    detail: str


class Health(BaseModel):
    """The server and its store answer."""

    model_config = _example(status="ok")
    status: str


class Model(BaseModel):
    """The model of the server."""

    model_config = _example(
        name="bags", fingerprint="0b5c", element_width=2, classes=["benign", "malignant"], parameters=9201, max_elements=100_000
    )
    name: str
    fingerprint: str = Field(description="States of encoders with this fingerprint can be uploaded.")
    element_width: int | None = Field(description="Numbers per element; null if any is accepted or elements are not vectors.")
    classes: list[Any] | None = Field(description="What the numbers of a prediction are probabilities of; null: no classifier.")
    parameters: int
    max_elements: int = Field(description="Elements of one request.")


class SetInfo(BaseModel):
    """A set: its id, and how many elements it has seen."""

    model_config = _example(id="customer-7", count=150)
    id: str
    count: int


class Appended(BaseModel):
    """How many events were added, and to how many sets."""

    model_config = _example(events=3, sets=2)
    events: int
    sets: int


class SetDetails(SetInfo):
    """A set, and what keeping it costs."""

    model_config = _example(id="customer-7", count=150, bytes=17_288)
    bytes: int = Field(description="Size of its state, which does not depend on the count.")


class Page(BaseModel):
    """Some sets in the order of their ids; request after=next for more."""

    model_config = _example(sets=[{"id": "customer-7", "count": 150}], next=None)
    sets: list[SetInfo]
    next: str | None


class MergeFrom(BaseModel):
    """Which set to add. It stays as it is."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"from": "customer-7-phone"}]})
    source: SetId = Field(alias="from")


class Prediction(SetInfo):
    """The prediction for a set now: nested lists, or an object of them; null while there is no such set."""

    model_config = _example(id="customer-7", count=150, prediction=[0.25, 0.75], classes=["benign", "malignant"])
    prediction: Any
    classes: list[Any] | None = Field(default=None, description="Of a classifier: what the numbers are probabilities of.")


class PredictionRequest(BaseModel):
    """Which sets to predict for, and over which range of time, if the store has tiles."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"ids": ["customer-7", "customer-9"]}]})
    ids: list[SetId] = Field(min_length=1, max_length=MOST_IDS)
    since: float | None = Field(None, allow_inf_nan=False)
    until: float | None = Field(None, allow_inf_nan=False)


class Predictions(BaseModel):
    """The predictions in the order of the ids; where there is no such set, the count is 0 and the prediction null."""

    model_config = _example(
        predictions=[{"id": "customer-7", "count": 150, "prediction": [0.25, 0.75], "classes": ["benign", "malignant"]}]
    )
    predictions: list[Prediction]


def as_json(output: Any) -> Any:
    """The output of a head for one set, as lists and objects. JSON has no NaN: it becomes null."""
    if isinstance(output, Tensor):
        return _finite(output[0].tolist())
    if hasattr(output, "named"):
        output = output.named()
    elif hasattr(output, "_asdict"):
        output = output._asdict()
    if isinstance(output, dict):
        return {str(key): as_json(value) for key, value in output.items()}
    if hasattr(output, "flat"):
        return as_json(output.flat())
    raise MismatchError(f"a prediction of type {type(output).__name__} cannot be sent: give the head a tensor output")


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value if not isinstance(value, float) or math.isfinite(value) else None


def problem(status: int, detail: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """An answer that says what was wrong."""
    return JSONResponse({"detail": _sendable(detail)}, status, headers)


def message_of(error: SetstreamError) -> str:
    """Its message, without the place of the store, which clients need not know."""
    text = _sendable(str(error.args[0]) if error.args else str(error))
    return text.partition(": ")[2] if isinstance(error, UnknownSetError | StoreFullError) else text


def validation_message(error: Any) -> str:
    """One of pydantic's errors, in a line."""
    place = ".".join(map(str, error["loc"]))
    return f"{place}: {error['msg']}" if place else str(error["msg"])


def _sendable(text: str) -> str:
    """The text without lone surrogates, which have no bytes, and not too long: clients may have sent both."""
    return text[:MOST_TEXT].encode("utf-8", "backslashreplace").decode()


async def on_error(request: Request, error: Exception) -> JSONResponse:
    """Turn an error of a route into an answer."""
    if isinstance(error, HTTPException):
        return problem(error.status_code, str(error.detail), dict(error.headers or {}))
    if isinstance(error, RequestValidationError):
        return problem(422, "; ".join(map(validation_message, error.errors()[:5])))
    if isinstance(error, ClientDisconnect):
        return problem(400, "the body was cut off")  # for the log: the client is gone
    if not isinstance(error, SetstreamError):
        return problem(500, "the server failed; its log has the reason, under the request id of this answer")
    status = next((status for kind, status in STATUS.items() if isinstance(error, kind)), 422)
    if status == 503:  # the reason is for the log only
        request.state.problem = str(error)
        return problem(503, "the store of states cannot be reached, or is busy: try again", {"Retry-After": "1"})
    return problem(status, message_of(error))


HANDLERS: Any = dict.fromkeys((SetstreamError, RequestValidationError, ClientDisconnect, HTTPException, Exception), on_error)
