"""Connections with limits: uvicorn has none before a request and after it.

    no request, or half of its headers        closed after head_seconds; between two requests after idle_seconds
    a long URL, or long headers               414, 431
    a body that arrives too slowly            408 (by the guard, which reads bodies)
    answered, but the body still arrives      closed after DRAIN seconds
    an answer that is not read                closed after UNREAD seconds
    more connections than the server accepts  one that keeps the server waiting is closed; 503 if all are busy

Connections that never sent a request are closed first, longest waiting first, then those between two requests, then bodies
that still arrive. A request that has arrived is never dropped. So silent clients cannot lock out others.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from setstream.serve.guard import Guard, logger

DRAIN, LINGER, UNREAD = 2.0, 1.0, 30.0
# Seconds that a connection may wait before another replaces it: a request that is on its way has arrived by then. Until
# then there may be more connections than allowed, up to this many times as many.
YOUNG, OVERFLOW = 2.0, 8
# Bytes that the parser gets at a time until the headers are complete.
HEAD_PIECE = 4096
# The queues of a server's connections that keep it waiting; the first in the first queue is closed first.
NEW, IDLE, BODIES = range(3)


@cache
def room(most: int) -> int:
    """How many connections there may be for a short time, with some files left for the store."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return OVERFLOW * most
    return max(1, min(OVERFLOW * most, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 100))


class Connection(HttpToolsProtocol):
    """One connection of one client; `queues` holds the connections of a server, and when each began to wait."""

    def __init__(self, guard: Guard, queues: Sequence[OrderedDict[Connection, float]], *values: Any, **named: Any) -> None:
        super().__init__(*values, **named)
        self.options, self.metrics, self.queues = guard.options, guard.metrics, queues
        self.most, self.limit_concurrency, self.url = self.limit_concurrency or 0, None, b""
        self.head: int | None = None  # bytes of a request's headers so far; None: no request has begun, or its headers are here
        self.body_comes = self.served = self.deaf = False
        self.refusal = (400, "this is not an HTTP request")
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def _wait(self, queue: int | None = None, seconds: float | None = None, reason: str = "") -> None:
        """Wait for the client in a queue (None: the client waits for the server); close the connection after `seconds`."""
        for other in self.queues:
            other.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self._too_late, reason)
        if queue is not None:
            self.queues[queue][self] = self.loop.time()

    def _wait_for_request(self, idle: bool = False) -> None:
        """Wait for the headers of a request that has begun or must come soon; `idle`: for one that may come later."""
        seconds = self.options.idle_seconds if idle else self.options.head_seconds
        self._wait(IDLE if self.served else NEW, seconds, "idle" if idle else "headers")

    def _too_late(self, reason: str) -> None:
        if reason == "headers" and self.head is not None:
            self.refuse(408, f"the headers took longer than {self.options.head_seconds:g} s to arrive")
        else:
            self._drop(reason, self.transport.close)

    def _drop(self, reason: str, close: Any) -> None:
        self.metrics.dropped.labels(reason).inc()
        self.connections.discard(self)
        self._wait()
        close()

    def refuse(self, status: int, detail: str) -> None:
        """Answer an invalid request, and close: not at once, as unread bytes would cancel the answer."""
        body = json.dumps({"detail": detail}).encode()
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        logger.info("refused", extra={"facts": {"status": status, "problem": detail}})
        self.metrics.requests.labels("other", "other", str(status)).inc()
        self.deaf = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._wait(NEW, LINGER, "refused")

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection; if there are too many now, close another."""
        super().connection_made(transport)
        self._wait_for_request()
        if len(self.connections) > self.most:
            others = (entry for queue in self.queues for entry in queue.items() if entry[0] is not self)
            first, since = next(others, (None, 0.0))
            if first is None:
                self.limit_concurrency = 0  # uvicorn answers 503
            elif len(self.connections) > room(self.most) or self.loop.time() - since > YOUNG:
                first._drop("displaced", first.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Give bytes to the parser, a little at a time until it has seen all headers."""
        place = 0
        while place < len(data) and not self.deaf and not self.transport.is_closing():
            piece = data[place:] if self.body_comes else data[place : place + HEAD_PIECE]
            super().data_received(piece)
            place += len(piece)
            if self.head is None or self.deaf:
                continue
            self.head += len(piece)
            if too_long := self._too_long(self.head - HEAD_PIECE):
                self.refuse(*too_long)

    def pause_writing(self) -> None:
        """The client does not read what the server sends."""
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD, partial(self._drop, "unread", self.transport.abort))

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
        super().resume_writing()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.head = 0
        if self.cycle is None or self.cycle.response_complete:
            self._wait_for_request()

    def on_headers_complete(self) -> None:
        if too_long := self._too_long(len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)):
            self.refusal = too_long
            raise ValueError("the parser stops here: this request is answered before it is complete")
        self.head, self.body_comes = None, True
        self._wait(BODIES)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body is complete: the client waits for the answer, or has it already."""
        super().on_message_complete()
        self.body_comes = False
        if self.cycle is not None and self.cycle.response_complete:
            self._wait_for_request(idle=True)
        else:
            self._wait()

    def on_response_complete(self) -> None:
        queued = bool(self.pipeline)
        super().on_response_complete()
        self._unset_keepalive_if_required()
        self.served = True
        if self.transport.is_closing() or queued:
            self._wait()
        elif self.body_comes:
            self._wait(BODIES, DRAIN, "refused")
        else:
            self._wait_for_request(idle=self.head is None)

    def handle_websocket_upgrade(self) -> None:
        """Accept a WebSocket, if fewer than half of the connections are WebSockets."""
        most = max(1, self.most // 2)
        if sum(not isinstance(connection, Connection) for connection in self.connections) >= most:
            self.refuse(503, f"{most} WebSockets are open already: try again later")
        else:
            self.deaf = True  # another protocol reads from here on
            self._wait()
            super().handle_websocket_upgrade()

    def send_400_response(self, msg: str) -> None:
        self.refuse(*self.refusal)

    def _too_long(self, size: int) -> tuple[int, str] | None:
        """The refusal of a URL or headers of this size, if it is beyond the limit."""
        if len(self.url) > self.options.max_url:
            return 414, f"a URL has at most {self.options.max_url} bytes"
        if size > self.options.max_headers:
            return 431, f"the request line and the headers have at most {self.options.max_headers} bytes"
        return None
