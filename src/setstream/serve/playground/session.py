"""One visitor of the playground: a WebSocket, messages in, answers out.

    {"ask": 7, "do": "append", "chunks": [[0, 1, 2]]}     ->  {"ask": 7, "count": 3, "models": {...}, "last": true}

`ask` is any number; the answer carries it. A message that asks for several answers gets them one by one, the last of them with
"last": true. A message that cannot be is answered with its "problem" and changes nothing. Messages are worked on one after
another: who waits for each answer has the stream at the speed of the models.
"""

from collections.abc import Callable, Iterator
from typing import Any

from fastapi import APIRouter, WebSocket, WebSocketDisconnect
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from setstream.errors import SetstreamError
from setstream.serve.playground.clusters import Clusters
from setstream.serve.playground.messages import Append, Clear, Compare, Draw, Message, Order, Paint, Put, Rewind, Truth
from setstream.serve.playground.pictures import Picture
from setstream.serve.problems import BadMessage, message_of
from setstream.serve.service import Service
from setstream.serve.watching import PROTOCOL

#: Visitors at a time: they share one thread.
MOST_VISITORS = 16
TRY_AGAIN_LATER, NOT_TEXT = 1013, 1003

router = APIRouter()

Answers = dict[str, Any] | Iterator[dict[str, Any]]
#: What each message holds, which tab it is for, and what that does with it.
VERBS: dict[str, tuple[type[Message], type, Callable[[Any, Any], Answers]]] = {
    "draw": (Draw, Clusters, Clusters.draw),
    "put": (Put, Clusters, Clusters.put),
    "clear": (Clear, Clusters, Clusters.clear),
    "rewind": (Rewind, Clusters, Clusters.rewind),
    "order": (Order, Clusters, Clusters.order),
    "append": (Append, Clusters, Clusters.append),
    "compare": (Compare, Clusters, Clusters.compare),
    "picture": (Truth, Picture, Picture.picture),
    "paint": (Paint, Picture, Picture.paint),
}


class Envelope(BaseModel):
    """What every message has besides its own fields."""

    model_config = ConfigDict(extra="allow")
    ask: int = Field(ge=0, lt=2**53)
    do: str


class Session:
    """What one visitor has before them. Each tab is made when it is first used."""

    def __init__(self) -> None:
        self._tabs: dict[type, Any] = {}

    def answer(self, envelope: Envelope) -> Answers:
        """What the message's tab says to it."""
        if envelope.do not in VERBS:
            raise BadMessage(f"unknown verb {envelope.do[:40]!r}: expected one of {', '.join(VERBS)}")
        kind, tab, verb = VERBS[envelope.do]
        message = kind.model_validate(envelope.model_extra)
        if tab not in self._tabs:
            self._tabs[tab] = tab()
        return verb(self._tabs[tab], message)

    def answers(self, text: str) -> Iterator[dict[str, Any]]:
        """Everything that is to be said to a message."""
        ask = None
        try:
            envelope = Envelope.model_validate_json(text)
            ask = envelope.ask
            answer = self.answer(envelope)
            if isinstance(answer, dict):
                yield {"ask": ask, "last": True} | answer
            else:
                yield from ({"ask": ask, "last": False} | own for own in answer)
                yield {"ask": ask, "last": True}
        except ValidationError as error:
            yield {"ask": ask, "last": True, "problem": _first(error)}
        except SetstreamError as error:
            yield {"ask": ask, "last": True, "problem": message_of(error)}


@router.websocket("/playground/live")
async def play(socket: WebSocket) -> None:
    """Answer a visitor's messages until they leave."""
    service: Service = socket.app.state.service
    await socket.accept(PROTOCOL if PROTOCOL in socket.scope.get("subprotocols", []) else None)
    if service.visitors >= MOST_VISITORS:
        await socket.close(TRY_AGAIN_LATER, f"{MOST_VISITORS} visitors are here already")
        return
    service.visitors += 1
    session = Session()
    try:
        while (message := await socket.receive())["type"] == "websocket.receive":
            if message.get("text") is None:
                await socket.close(NOT_TEXT, "messages are JSON, as text")
                break
            answers = session.answers(message["text"])
            while (answer := await service.beside(next, answers, None)) is not None:
                await socket.send_json(answer)
    except (WebSocketDisconnect, RuntimeError):  # they left while we were answering
        pass
    finally:
        service.visitors -= 1


def _first(error: ValidationError) -> str:
    """What was wrong, in a line."""
    found = error.errors()[0]
    place = ".".join(str(own) for own in found["loc"])
    return f"{place}: {found['msg']}" if place else found["msg"]
