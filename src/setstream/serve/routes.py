"""The routes of the HTTP interface."""

import asyncio
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
from setstream.serve.bodies import ARROW, JSON, NPY
from setstream.serve.service import Service, accept

STATE = "application/octet-stream"
REASONS = {
    400: "Invalid path or headers.",
    401: "No token, or a wrong one.",
    403: "Another origin, or no more sets may be created.",
    404: "There is no such set.",
    408: "The body took too long to arrive.",
    409: "A state of another encoder.",
    413: "Too many bytes or elements.",
    415: "A content type that this route does not accept.",
    421: "Another host name than this server's.",
    422: "Invalid values: the answer says what was expected.",
    429: "Too many bytes at a time: try again.",
    503: "The store cannot be reached.",
}
CHANGES = (408, 413, 415, 422, 429, 503)
BINARY = {"schema": {"type": "string", "format": "binary"}}
ROWS = {"elements": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}}
OBJECT = {"type": "object", "properties": ROWS, "required": ["elements"], "additionalProperties": False}
EXAMPLES = {"two points": {"value": {"elements": [[0.1, 0.2], [0.3, 0.4]]}}}
# The bodies that routes read by themselves, and answers that are not JSON, for OpenAPI.
ELEMENTS = {JSON: {"schema": OBJECT, "examples": EXAMPLES}, NPY: BINARY, ARROW: BINARY}
ELEMENTS_BODY = {"requestBody": {"required": True, "content": ELEMENTS}}
MERGE_BODY = {"requestBody": {"required": True, "content": {JSON: {"schema": answers.MergeFrom.model_json_schema()}}}}
STATE_BODY = {"requestBody": {"required": True, "content": {STATE: BINARY}}}
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
VALID_ID = TypeAdapter(answers.SetId).validator
router = APIRouter()


def content_type(request: Request, *allowed: str) -> str:
    """The content type of a request; 415 if it is none of these."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in allowed:
        raise HTTPException(415, f"expected Content-Type {', '.join(allowed)}; got {kind or 'none'}")
    return kind


@router.post("/sets/{id}/elements", responses=problems(*CHANGES), openapi_extra=ELEMENTS_BODY)
async def append(id: Id, request: Request, service: Served) -> answers.SetInfo:
    """Add elements to a set, which is created if it is new. Answered when they are committed."""
    kind = content_type(request, JSON, NPY, ARROW)
    return answers.SetInfo(id=id, count=await service.append(id, kind, await request.body()))


APPEND = router.routes[-1]


def append_directly(api: FastAPI) -> ASGIApp:
    """The application; appends skip FastAPI's routing, dependencies and models, which would take longer than reading them."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        id = path.removeprefix("/sets/").removesuffix("/elements")
        if scope.get("method") != "POST" or path != f"/sets/{id}/elements" or not VALID_ID.isinstance_python(id):
            await api(scope, receive, send)
            return
        scope.update(app=api, route=APPEND)
        request, failure = Request(scope, receive), None
        try:
            answer = JSONResponse((await append(id, request, api.state.service)).model_dump())
        except Exception as error:
            answer, failure = await answers.on_error(request, error), error
        await answer(scope, receive, send)
        if failure is not None and answer.status_code == 500:
            raise failure

    return app


@router.post("/sets/{id}/merge", responses=problems(404, 409, *CHANGES), openapi_extra=MERGE_BODY)
async def merge(id: Id, request: Request, service: Served) -> answers.SetInfo:
    """Add another set to a set. The other stays."""
    content_type(request, JSON)
    body = await request.body()
    if len(body) > MERGE_BYTES:
        raise HTTPException(413, f"a body that names a set has at most {MERGE_BYTES} bytes")
    try:
        other = answers.MergeFrom.model_validate_json(body)
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False, include_input=False)) from None
    return answers.SetInfo(id=id, count=await service.writer.submit(id, other.source))


@router.delete("/sets/{id}", status_code=204, responses=problems(404, 422, 503))
async def delete(id: Id, service: Served) -> None:
    """Delete a set."""
    await service.delete(id)


@router.put("/sets/{id}/state", responses=problems(409, *CHANGES), openapi_extra=STATE_BODY)
async def replace_state(id: Id, request: Request, service: Served) -> answers.SetInfo:
    """Replace a set by a state (safetensors, as State.to_bytes writes it); the set is created if it is new."""
    content_type(request, STATE)
    return answers.SetInfo(id=id, count=await service.upload(id, await request.body(), replace=True))


@router.post("/sets/{id}/state", responses=problems(409, *CHANGES), openapi_extra=STATE_BODY)
async def add_state(id: Id, request: Request, service: Served) -> answers.SetInfo:
    """Add a state that was made elsewhere to a set: what another machine has seen."""
    content_type(request, STATE)
    return answers.SetInfo(id=id, count=await service.upload(id, await request.body(), replace=False))


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
async def predict(id: Id, service: Served) -> answers.Prediction:
    """The model's prediction for a set now."""
    return await service.predict(id)


@router.websocket("/sets/{id}/live")
async def live(id: Id, socket: WebSocket, service: Served) -> None:
    """Send {id, count, prediction} at once and whenever that changes. What a client sends is not read."""
    await accept(socket)
    service.metrics.watchers.inc()
    gone, sent = asyncio.create_task(_until_gone(socket)), ""
    try:
        with service.watchers.watch(id) as changed:
            while True:
                waiting = asyncio.create_task(changed.wait())
                await asyncio.wait({gone, waiting}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if gone.done():
                    break
                changed.clear()
                message = await service.watchers.message(id)
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
async def download_state(id: Id, service: Served) -> Response:
    """The state of a set, for State.from_bytes, another server, or an archive."""
    return Response(await service.run_in_reader(service.store.get_bytes, id), media_type=STATE)


@router.get("/model", responses=problems())
async def model(service: Served) -> answers.Model:
    """Which model answers, and what its elements look like."""
    encoder, classes = service.store.encoder, service.store.model.options.get("classes")
    return answers.Model(
        name=service.name,
        fingerprint=await service.run_in_reader(lambda: encoder.empty(1).fingerprint or ""),
        element_width=encoder.width(),
        classes=classes if isinstance(classes, list) else None,
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
