"""The WebSocket: the prediction of a set, now and whenever the set changes."""

import asyncio
from functools import partial

from fastapi import APIRouter, WebSocket, WebSocketDisconnect

from setstream.errors import SetstreamError, UnknownSetError
from setstream.serve.answers import Prediction, Problem
from setstream.serve.problems import message_of
from setstream.serve.routes import Id
from setstream.serve.service import Service

PROTOCOL = "setstream"
router = APIRouter()


@router.websocket("/sets/{id}/live")
async def live(id: Id, socket: WebSocket) -> None:
    """Send {id, count, prediction} at once and whenever that changes. What a client sends is not read."""
    service: Service = socket.app.state.service
    await socket.accept(PROTOCOL if PROTOCOL in socket.scope.get("subprotocols", []) else None)
    service.metrics.watchers.inc()
    gone = asyncio.create_task(_until_gone(socket))
    sent = ""
    try:
        with service.watchers.watch(id) as bell:
            while not gone.done():
                rings = asyncio.create_task(bell.wait())
                await asyncio.wait({gone, rings}, return_when=asyncio.FIRST_COMPLETED)
                rings.cancel()
                if gone.done():
                    break
                bell.clear()
                message = await service.watchers.message(id, partial(_message, service))
                # A change may be read before its bell rings: what the watcher has seen is no news then.
                if message != sent:
                    await socket.send_text(message)
                    sent = message
    except (WebSocketDisconnect, RuntimeError):  # it went away while we were sending
        pass
    finally:
        gone.cancel()
        service.metrics.watchers.dec()


async def _until_gone(socket: WebSocket) -> None:
    while (await socket.receive())["type"] != "websocket.disconnect":
        pass


async def _message(service: Service, id: str) -> str:
    try:
        count, prediction = await service.predict(id)
    except UnknownSetError:
        count, prediction = 0, None
    except SetstreamError as error:
        return Problem(detail=message_of(error)).model_dump_json()
    return Prediction(id=id, count=count, prediction=prediction).model_dump_json()
