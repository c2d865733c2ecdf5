"""The routes: what can be asked for over HTTP."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from setstream.errors import UnknownSetError
from setstream.serve.answers import (
    ID_PATTERN,
    Health,
    MergeFrom,
    Model,
    Page,
    Prediction,
    Problem,
    SetDetails,
    SetId,
    SetInfo,
)
from setstream.serve.bodies import ARROW, JSON, NPY
from setstream.serve.metrics import CONTENT_TYPE
from setstream.serve.service import Service

STATE = "application/octet-stream"
REASONS = {
    400: "Path or headers that cannot be.",
    401: "No token, or a wrong one.",
    403: "Another origin, or no more sets may begin.",
    404: "There is no such set.",
    408: "The body took too long to arrive.",
    409: "A state of another encoder.",
    413: "Too many bytes or elements.",
    415: "A content type that is not taken here.",
    421: "Another host name than this server's.",
    422: "Values that cannot be: the answer says what was expected.",
    429: "Too many bytes at a time: try again.",
    503: "The store cannot be reached.",
}
ALWAYS = (400, 401, 403, 421)
CHANGES = (408, 413, 415, 422, 429, 503)
BINARY = {"type": "string", "format": "binary"}


def answers(*codes: int) -> dict[int | str, dict[str, Any]]:
    """The problems that a route may answer with, for OpenAPI."""
    return {code: {"model": Problem, "description": REASONS[code]} for code in sorted({*codes, *ALWAYS})}


def body_of(**contents: Any) -> dict[str, Any]:
    """A body that a route reads by itself, for OpenAPI."""
    return {"requestBody": {"required": True, "content": contents}}


def service_of(request: Request) -> Service:
    """The service that the application was made with."""
    found: Service = request.app.state.service
    return found


Asked = Annotated[Service, Depends(service_of)]
Id = Annotated[SetId, Path(pattern=ID_PATTERN, description="The set's id.", examples=["customer-7"])]
router = APIRouter()


def content_type(request: Request, *allowed: str) -> str:
    """The content type of a request; 415 if it is none of these."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in allowed:
        raise HTTPException(415, f"expected Content-Type {', '.join(allowed)}; got {kind or 'none'}")
    return kind


# -- changes ----------------------------------------------------------------------------------------------------------

ELEMENTS = {
    JSON: {
        "schema": {
            "type": "object",
            "properties": {"elements": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}},
            "required": ["elements"],
            "additionalProperties": False,
        },
        "examples": {"two points": {"value": {"elements": [[0.1, 0.2], [0.3, 0.4]]}}},
    },
    NPY: {"schema": BINARY},
    ARROW: {"schema": BINARY},
}


@router.post("/sets/{id}/elements", responses=answers(*CHANGES), openapi_extra=body_of(**ELEMENTS))
async def append(id: Id, request: Request, service: Asked) -> SetInfo:
    """Add elements to a set, which begins with them if it is new. Answered when they are committed."""
    kind = content_type(request, JSON, NPY, ARROW)
    done = await service.append(id, kind, await request.body())
    return SetInfo(id=id, count=done.count)


MERGE_BYTES = 2**12  # of a body that names a set
MERGE = {JSON: {"schema": MergeFrom.model_json_schema()}}


@router.post("/sets/{id}/merge", responses=answers(404, 409, *CHANGES), openapi_extra=body_of(**MERGE))
async def merge(id: Id, request: Request, service: Asked) -> SetInfo:
    """Add another set to a set. The other stays."""
    content_type(request, JSON)
    body = await request.body()
    if len(body) > MERGE_BYTES:
        raise HTTPException(413, f"a body that names a set has at most {MERGE_BYTES} bytes")
    try:
        other = MergeFrom.model_validate_json(body)
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False, include_input=False)) from None
    done = await service.merge(id, other.source)
    return SetInfo(id=id, count=done.count)


@router.delete("/sets/{id}", status_code=204, responses=answers(404, 422, 503))
async def forget(id: Id, service: Asked) -> None:
    """Forget a set."""
    if not await service.forget(id):
        raise UnknownSetError(f"store: there is no set {id!r}")


@router.put("/sets/{id}/state", responses=answers(409, *CHANGES), openapi_extra=body_of(**{STATE: {"schema": BINARY}}))
async def replace_state(id: Id, request: Request, service: Asked) -> SetInfo:
    """Put a state (safetensors, as State.to_bytes writes it) in the place of a set's; the set begins with it if it is new."""
    content_type(request, STATE)
    done = await service.upload(id, await request.body(), replace=True)
    return SetInfo(id=id, count=done.count)


@router.post("/sets/{id}/state", responses=answers(409, *CHANGES), openapi_extra=body_of(**{STATE: {"schema": BINARY}}))
async def add_state(id: Id, request: Request, service: Asked) -> SetInfo:
    """Add a state that was made elsewhere to a set: what another machine has seen."""
    content_type(request, STATE)
    done = await service.upload(id, await request.body(), replace=False)
    return SetInfo(id=id, count=done.count)


# -- questions --------------------------------------------------------------------------------------------------------


@router.get("/sets", responses=answers(422, 503))
async def list_sets(
    service: Asked,
    after: Annotated[str, Query(max_length=200, pattern=r"^[^\x00]*$", description="Ids that follow this one.")] = "",
    limit: Annotated[int, Query(ge=1, le=1000, description="So many at most.")] = 100,
) -> Page:
    """The sets, in the order of their ids, page by page."""
    found = await service.run_in_reader(service.store.counts, after, limit + 1)
    sets = [SetInfo(id=id, count=count) for id, count in found[:limit]]
    return Page(sets=sets, next=sets[-1].id if len(found) > limit else None)


@router.get("/sets/{id}", responses=answers(404, 422, 503))
async def describe(id: Id, service: Asked) -> SetDetails:
    """How many elements a set has seen, and how large its state is."""
    count, size = await service.run_in_reader(service.store.describe, id)
    return SetDetails(id=id, count=count, bytes=size)


@router.get("/sets/{id}/prediction", responses=answers(404, 422, 503))
async def predict(id: Id, service: Asked) -> Prediction:
    """What the model says about a set now."""
    count, prediction = await service.predict(id)
    return Prediction(id=id, count=count, prediction=prediction)


@router.get(
    "/sets/{id}/state",
    response_class=Response,
    responses=answers(404, 422, 503) | {200: {"content": {STATE: {"schema": BINARY}}, "description": "A safetensors file."}},
)
async def download_state(id: Id, service: Asked) -> Response:
    """The state of a set, for State.from_bytes, another server, or a shelf."""
    return Response(await service.run_in_reader(service.store.get_bytes, id), media_type=STATE)


# -- the server itself ------------------------------------------------------------------------------------------------


@router.get("/model", responses=answers())
async def model(request: Request, service: Asked) -> Model:
    """Which model answers, and what its elements look like."""
    encoder, classes = service.store.encoder, service.store.model.options.get("classes")
    return Model(
        name=request.app.state.model_name,
        fingerprint=await service.run_in_reader(lambda: encoder.empty(1).fingerprint or ""),
        element_width=encoder.width(),
        classes=classes if isinstance(classes, list) else None,
        parameters=sum(own.numel() for own in service.store.model.parameters()),
        max_elements=service.options.max_elements,
    )


@router.get("/health", responses=answers(503))
async def health(service: Asked) -> Health:
    """Whether the server and its store answer. Needs no token."""
    await service.check_store()
    return Health(status="ok")


@router.get(
    "/metrics",
    response_class=Response,
    responses=answers() | {200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "For Prometheus."}},
)
async def metrics(service: Asked) -> Response:
    """Counters for Prometheus."""
    service.metrics.sets.set(service.writer.sets)
    return Response(service.metrics.text(), media_type=CONTENT_TYPE)
