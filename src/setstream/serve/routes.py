"""The routes of the HTTP interface."""

import asyncio
import re
import uuid
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Path, Query, Request, Response, WebSocket, WebSocketDisconnect
from fastapi.exceptions import RequestValidationError
from fastapi.requests import HTTPConnection
from fastapi.responses import JSONResponse
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import TypeAdapter, ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from setstream.serve import answers
from setstream.serve.answers import SetInfo
from setstream.serve.bodies import ARROW, JSON, NPY
from setstream.serve.events import NDJSON, append_events
from setstream.serve.service import Service, accept
from setstream.serve.writer import Request as Change
from setstream.stores.store import Changed

STATE = "application/octet-stream"
REASONS = {
    400: "Invalid path or headers.",
    401: "No token, or a wrong one.",
    403: "Another origin, or no more sets may be created.",
    404: "There is no such set.",
    408: "The body took too long to arrive.",
    409: "A state of another encoder, or a request with the same key is in progress.",
    413: "Too many bytes or elements.",
    415: "A content type that this route does not accept.",
    421: "Another host name than this server's.",
    422: "Invalid values, or a key that came with another body: the answer says what was expected.",
    429: "Too many bytes at a time: try again.",
    503: "The store cannot be reached.",
}
CHANGES = (408, 413, 415, 422, 429, 503)
BINARY = {"schema": {"type": "string", "format": "binary"}}
ROWS = {"elements": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}}
OBJECT = {"type": "object", "properties": ROWS, "required": ["elements"], "additionalProperties": False}
EXAMPLES = {"two points": {"value": {"elements": [[0.1, 0.2], [0.3, 0.4]]}}}
EVENTS = {
    "two events": {"value": '{"id": "a", "element": [0.1, 0.2]}\n{"id": "b", "element": [0.3, 0.4], "time": 1700000000}\n'}
}
# The bodies that routes read by themselves, and answers that are not JSON, for OpenAPI.
ELEMENTS = {JSON: {"schema": OBJECT, "examples": EXAMPLES}, NPY: BINARY, ARROW: BINARY}
KEY_HEADER = "Idempotency-Key"
REPLAYED = {"Idempotency-Replayed": "true"}
KEY: dict[str, Any] = {
    "name": KEY_HEADER,
    "in": "header",
    "required": False,
    "description": "Make the change once: a repetition with this key gets the first answer, with Idempotency-Replayed: true.",
    "schema": {"type": "string", "pattern": '^"[A-Za-z0-9_.:-]{1,255}"$'},
    "examples": {"a UUID": {"value": '"8e03978e-40d5-43dd-bc93-6894a57f9324"'}},
}


def takes(content: dict[str, Any]) -> dict[str, Any]:
    """A body that a route reads by itself, and the header with a key, for OpenAPI."""
    return {"requestBody": {"required": True, "content": content}, "parameters": [KEY]}


ELEMENTS_BODY = takes(ELEMENTS)
EVENTS_BODY = takes({NDJSON: {"schema": {"type": "string"}, "examples": EVENTS}})
MERGE_BODY = takes({JSON: {"schema": answers.MergeFrom.model_json_schema()}})
STATE_BODY = takes({STATE: BINARY})
STATE_ANSWER: Any = {200: {"content": {STATE: BINARY}, "description": "A safetensors file."}}
METRICS_ANSWER: Any = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "For Prometheus."}}
MERGE_BYTES = 2**12  # of a body that names a set


def problems(*codes: int) -> dict[int | str, dict[str, Any]]:
    """The problems that a route may answer with, for OpenAPI."""
    return {code: {"model": answers.Problem, "description": REASONS[code]} for code in sorted({400, 401, 403, 421, *codes})}


async def service_of(connection: HTTPConnection) -> Service:
    """The service that the application was made with; async, as FastAPI calls other functions in a thread."""
    return connection.app.state.service


Served = Annotated[Service, Depends(service_of)]
Id = Annotated[answers.SetId, Path(pattern=answers.ID_PATTERN, description="The set's id.", examples=["customer-7"])]
Seconds = Annotated[float | None, Query(allow_inf_nan=False)]
Time = Annotated[Seconds, Query(description="When the elements happened, in seconds since 1970; now, unless given.")]
Since = Annotated[Seconds, Query(description="Only elements from this time on, in seconds since 1970, in whole tiles.")]
Until = Annotated[Seconds, Query(description="Only elements before this time.")]
Last = Annotated[float | None, Query(gt=0, allow_inf_nan=False, description="Only elements of the last so many seconds.")]
VALID_ID = TypeAdapter(answers.SetId).validator
router = APIRouter()


def content_type(request: Request, *allowed: str) -> str:
    """The content type of a request; 415 if it is none of these."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in allowed:
        raise HTTPException(415, f"expected Content-Type {', '.join(allowed)}; got {kind or 'none'}")
    return kind


def key_of(request: Request) -> str | None:
    """The key of a request: a string of structured fields, "in quotes"; without them it is accepted, too."""
    given = request.headers.get(KEY_HEADER)
    if given is None:
        return None
    key = given[1:-1] if len(given) > 1 and given[0] == given[-1] == '"' else given
    if not re.fullmatch(r"[ !#-\[\]-~]{1,255}", key):
        raise HTTPException(400, f'{KEY_HEADER} is 1 to 255 printable characters in quotes, such as "{uuid.uuid4()}"')
    return key


def counted(id: str, result: Changed) -> JSONResponse:
    """The answer to a change, which says if it is that of an earlier request with the same key."""
    return JSONResponse({"id": id, "count": result.count}, headers=REPLAYED if result.replayed else None)


@router.post("/sets/{id}/elements", responses=problems(409, *CHANGES), openapi_extra=ELEMENTS_BODY, response_model=SetInfo)
async def append(id: Id, request: Request, service: Served, time: Time = None) -> Response:
    """Add elements to a set, which is created if it is new. Answered when they are committed."""
    kind, key = content_type(request, JSON, NPY, ARROW), key_of(request)
    return counted(id, await service.append(id, kind, await request.body(), key, time))


APPEND = router.routes[-1]


def append_directly(api: FastAPI) -> ASGIApp:
    """The application; appends skip FastAPI's routing, dependencies and models, which would take longer than reading them."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        id = path.removeprefix("/sets/").removesuffix("/elements")
        direct = scope.get("method") == "POST" and path == f"/sets/{id}/elements" and not scope.get("query_string")
        if not direct or not VALID_ID.isinstance_python(id):
            await api(scope, receive, send)
            return
        scope.update(app=api, route=APPEND)
        request, failure = Request(scope, receive), None
        answer: Response
        try:
            answer = await append(id, request, api.state.service)
        except Exception as error:
            answer, failure = await answers.on_error(request, error), error
        await answer(scope, receive, send)
        if failure is not None and answer.status_code == 500:
            raise failure

    return app


@router.post("/events", responses=problems(409, *CHANGES), openapi_extra=EVENTS_BODY, response_model=answers.Appended)
async def add_events(request: Request, service: Served) -> Response:
    """Add events to many sets, each with its own time: a line of JSON per event."""
    content_type(request, NDJSON)
    answer, replayed = await append_events(service, await request.body(), key_of(request))
    return JSONResponse(answer.model_dump(), headers=REPLAYED if replayed else None)


@router.post("/sets/{id}/merge", responses=problems(404, 409, *CHANGES), openapi_extra=MERGE_BODY, response_model=SetInfo)
async def merge(id: Id, request: Request, service: Served) -> Response:
    """Add another set to a set. The other stays."""
    content_type(request, JSON)
    key = key_of(request)
    body = await request.body()
    if len(body) > MERGE_BYTES:
        raise HTTPException(413, f"a body that names a set has at most {MERGE_BYTES} bytes")
    try:
        other = answers.MergeFrom.model_validate_json(body)
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False, include_input=False)) from None
    return counted(id, await service.submit(Change(id, other.source), key, "merge", body))


@router.delete("/sets/{id}", status_code=204, responses=problems(404, 422, 503))
async def delete(id: Id, service: Served) -> None:
    """Delete a set."""
    await service.delete(id)


@router.delete("/sets/{id}/elements", responses=problems(404, 422, 503))
async def remove_range(id: Id, service: Served, since: Since = None, until: Until = None) -> answers.SetInfo:
    """Remove the elements of a range of time, which consists of whole tiles."""
    count = await service.run_in_reader(partial(service.store.remove, id, since=since, until=until))
    service.watchers.notify([id])
    return answers.SetInfo(id=id, count=count)


@router.put("/sets/{id}/state", responses=problems(409, *CHANGES), openapi_extra=STATE_BODY, response_model=SetInfo)
@router.post("/sets/{id}/state", responses=problems(409, *CHANGES), openapi_extra=STATE_BODY, response_model=SetInfo)
async def upload_state(id: Id, request: Request, service: Served, time: Time = None) -> Response:
    """POST adds a state that was made elsewhere (safetensors, as State.to_bytes writes it) to a set; PUT replaces the set."""
    content_type(request, STATE)
    return counted(id, await service.upload(id, await request.body(), request.method == "PUT", key_of(request), time))


@router.get("/sets", responses=problems(422, 503))
async def list_sets(
    service: Served,
    after: Annotated[str, Query(max_length=200, pattern=r"^[^\x00]*$", description="Ids that follow this one.")] = "",
    limit: Annotated[int, Query(ge=1, le=1000, description="How many, at most.")] = 100,
) -> answers.Page:
    """The sets, in the order of their ids, page by page."""
    counts = await service.run_in_reader(service.store.counts, after, limit + 1)
    sets = [answers.SetInfo(id=id, count=count) for id, count in counts[:limit]]
    return answers.Page(sets=sets, next=sets[-1].id if len(counts) > limit else None)


@router.get("/sets/{id}", responses=problems(404, 422, 503))
async def describe(id: Id, service: Served) -> answers.SetDetails:
    """How many elements a set has seen, and how large its state is."""
    count, size = await service.run_in_reader(service.store.describe, id)
    return answers.SetDetails(id=id, count=count, bytes=size)


@router.get("/sets/{id}/prediction", responses=problems(404, 422, 503))
async def predict(id: Id, service: Served, since: Since = None, until: Until = None) -> answers.Prediction:
    """The model's prediction for a set now, or for its elements of a range of time."""
    return await service.predict(id, since, until)


@router.post("/predictions", responses=problems(408, 413, 422, 429, 503))
async def predict_all(wanted: answers.PredictionRequest, service: Served) -> answers.Predictions:
    """The model's predictions for several sets, or for their elements of a range of time."""
    return await service.predict_all(wanted)


@router.websocket("/sets/{id}/live")
async def live(id: Id, socket: WebSocket, service: Served, last: Last = None) -> None:
    """Send {id, count, prediction} at once and whenever that changes. What a client sends is not read."""
    await accept(socket)
    service.metrics.watchers.inc()
    gone, sent = asyncio.create_task(_until_gone(socket)), ""
    tiles = service.store.tiles
    pause = None if last is None or tiles is None else max(1.0, tiles.tiling.tile)  # then elements may have become too old
    try:
        with service.watchers.watch(id) as changed:
            while True:
                waiting = asyncio.create_task(changed.wait())
                await asyncio.wait({gone, waiting}, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if gone.done():
                    break
                changed.clear()
                message = await service.watchers.message(id, last)
                if message != sent:  # a change may be read before its event is set: then the client has it already
                    await socket.send_text(message)
                    sent = message
    except (WebSocketDisconnect, RuntimeError):  # the client left while we were sending
        pass
    finally:
        gone.cancel()
        service.metrics.watchers.dec()


async def _until_gone(socket: WebSocket) -> None:
    while (await socket.receive())["type"] != "websocket.disconnect":
        pass


@router.get("/sets/{id}/state", response_class=Response, responses=problems(404, 422, 503) | STATE_ANSWER)
async def download_state(id: Id, service: Served, since: Since = None, until: Until = None) -> Response:
    """The state of a set, or of a range of time, for State.from_bytes, another server, or an archive."""
    return Response(await service.run_in_reader(service.state, id, since, until), media_type=STATE)


@router.get("/model", responses=problems())
async def model(service: Served) -> answers.Model:
    """Which model answers, and what its elements look like."""
    encoder = service.store.encoder
    return answers.Model(
        name=service.name,
        fingerprint=await service.run_in_reader(lambda: encoder.empty(1).fingerprint or ""),
        element_width=encoder.width(),
        classes=service.classes,
        parameters=sum(parameter.numel() for parameter in service.store.model.parameters()),
        max_elements=service.options.max_elements,
    )


@router.get("/health", responses=problems(503))
async def health(service: Served) -> answers.Health:
    """Whether the server and its store answer. Needs no token."""
    await service.check_store()
    return answers.Health(status="ok")


@router.get("/metrics", response_class=Response, responses=problems() | METRICS_ANSWER)
async def metrics(service: Served) -> Response:
    """Counters for Prometheus."""
    service.metrics.sets.set(service.writer.sets)
    return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)
