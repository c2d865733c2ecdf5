"""The answers of the service, and how a prediction becomes JSON."""

import math
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from torch import Tensor

from setstream.errors import MismatchError

# Letters, digits and a few signs without a meaning in paths: no slash, no backslash, nothing that begins with a dot.
ID_PATTERN = r"^\w[\w .:@+=~-]{0,199}$"
SetId = Annotated[str, StringConstraints(pattern=ID_PATTERN)]


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
        name="bags",
        fingerprint="0b5c",
        element_width=2,
        classes=["benign", "malignant"],
        parameters=9_201,
        max_elements=100_000,
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


class Prediction(BaseModel):
    """The prediction for a set now: nested lists, or an object of them; null while there is no such set."""

    model_config = _example(id="customer-7", count=150, prediction=[[0.25, 0.75]])
    id: str
    count: int
    prediction: Any


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
