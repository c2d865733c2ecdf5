"""One visitor of the playground: a WebSocket, messages in, answers out.

    {"ask": 7, "do": "append", "chunks": [[0, 1, 2]]}     ->  {"ask": 7, "count": 3, "models": {...}, "last": true}

`ask` is any number; the answer repeats it. `do` is a method of a tab, which checks the other fields. Where a message has
several answers, they are sent one by one, the last with "last": true. An invalid message is answered with its "problem" and
changes nothing. Messages are handled one after another: a client that waits for each answer streams at the models' speed.
"""

import asyncio
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from fastapi import APIRouter, WebSocket, WebSocketDisconnect
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from setstream.errors import DataError, SetstreamError
from setstream.serve.answers import message_of, validation_message
from setstream.serve.playground.tabs import Clusters, Picture
from setstream.serve.playground.windows import Events
from setstream.serve.service import Service, accept

#: Visitors at a time: they share one thread.
MOST_VISITORS = 16
TRY_AGAIN_LATER, NOT_TEXT = 1013, 1003
#: The messages, and the tab that each is for.
TABS: dict[str, type] = dict.fromkeys(("draw", "put", "clear", "rewind", "order", "append", "compare"), Clusters)
TABS |= dict.fromkeys(("picture", "paint"), Picture)
TABS |= dict.fromkeys(("simulate", "report", "advance", "look", "sweep"), Events)
router = APIRouter()


class Envelope(BaseModel):
    """The fields that every message has."""

    model_config = ConfigDict(extra="allow")
    ask: int = Field(ge=0, lt=2**53)
    do: str


class Session:
    """The tabs of one visitor, each made when it is first used."""

    def __init__(self) -> None:
        self._tab: Callable[[type], Any] = cache(lambda kind: kind())

    def answers(self, text: str) -> Iterator[dict[str, Any]]:
        ask = None
        try:
            envelope = Envelope.model_validate_json(text)
            ask = envelope.ask
            if envelope.do not in TABS:
                raise DataError(f"unknown verb {envelope.do[:40]!r}: expected one of {', '.join(TABS)}")
            answer = getattr(self._tab(TABS[envelope.do]), envelope.do)(**(envelope.model_extra or {}))
            if isinstance(answer, dict):
                yield {"ask": ask, "last": True} | answer
            else:
                yield from ({"ask": ask, "last": False} | item for item in answer)
                yield {"ask": ask, "last": True}
        except ValidationError as error:
            yield {"ask": ask, "last": True, "problem": validation_message(error.errors()[0])}
        except SetstreamError as error:
            yield {"ask": ask, "last": True, "problem": message_of(error)}


@router.websocket("/playground/live")
async def play(socket: WebSocket) -> None:
    """Answer a visitor's messages until they leave."""
    service: Service = socket.app.state.service
    await accept(socket)
    if service.visitors >= MOST_VISITORS:
        await socket.close(TRY_AGAIN_LATER, f"{MOST_VISITORS} visitors are here already")
        return
    service.visitors += 1
    session, loop = Session(), asyncio.get_running_loop()
    try:
        while (message := await socket.receive())["type"] == "websocket.receive":
            if message.get("text") is None:
                await socket.close(NOT_TEXT, "messages are JSON, as text")
                break
            answers = session.answers(message["text"])
            while (answer := await loop.run_in_executor(service.playground, next, answers, None)) is not None:
                await socket.send_json(answer)
    except (WebSocketDisconnect, RuntimeError):  # the visitor left while we were answering
        pass
    finally:
        service.visitors -= 1
