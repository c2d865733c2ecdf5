"""Checks of every request before the service sees it, and what is added to every answer.

    in    token, path, headers, host, size, time            refused with 401, 400, 421, 403, 413, 408, 429
    out   a request id, headers for browsers, one line of log, metrics

Without a valid token the answer to every request is 401. The front page and /health need none.
"""

import asyncio
import hashlib
import hmac
import logging
import random
import re
import time
from typing import Any

from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from setstream.serve.answers import problem
from setstream.serve.options import BODY_START, Options

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
ONCE = ("host", "authorization", "content-type", "content-length", "origin", "sec-websocket-protocol", "idempotency-key")
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "WEBSOCKET")
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
POLICY += "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
BROWSER_HEADERS = Headers({"content-security-policy": POLICY, "x-content-type-options": "nosniff"}).raw
BROWSER_HEADERS += Headers({"referrer-policy": "no-referrer", "cache-control": "no-store"}).raw
BEARER_PROTOCOL = "bearer."
# Buckets of the histograms.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
CHANGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
logger = logging.getLogger("setstream.serve")


class Metrics:
    """The counters of one server, which /metrics answers."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)  # CPU seconds, memory, open files
        named, seconds = ["method", "route"], "From the first byte to the answer."
        self.requests = Counter("setstream_requests", "Requests answered.", [*named, "status"], registry=registry)
        self.seconds = Histogram("setstream_request_seconds", seconds, named, buckets=SECONDS, registry=registry)
        reasons = "Connections closed by the server, by reason."
        self.dropped = Counter("setstream_connections_dropped", reasons, ["reason"], registry=registry)
        self.elements = Counter("setstream_elements", "Elements committed.", registry=registry)
        self.body_bytes = Counter("setstream_body_bytes", "Bytes of request bodies.", registry=registry)
        shared = "Changes that shared a commit."
        self.rounds = Histogram("setstream_round_changes", shared, buckets=CHANGES, registry=registry)
        self.sets = Gauge("setstream_sets", "Sets in the store, as this server knows.", registry=registry)
        self.watchers = Gauge("setstream_watchers", "Open WebSockets.", registry=registry)


class Guard:
    """The service with its checks, as an ASGI application; `app` is the service itself, which `api` documents."""

    def __init__(self, app: ASGIApp, api: FastAPI, options: Options, metrics: Metrics, open_paths: frozenset[str]) -> None:
        self.app, self.api, self.options, self.metrics, self.open_paths = app, api, options, metrics, open_paths
        self.body_bytes = 0  # of all bodies that are in memory
        self._digests = [hashlib.sha256(token.encode()).digest() for token in options.tokens]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] not in ("http", "websocket"):
            await self.api(scope, receive, send)
            return
        exchange = _Exchange(self, scope, receive, send)
        try:
            try:
                self._check(scope, Headers(scope=scope))
            except HTTPException as refusal:
                await exchange.refuse(refusal)
            else:
                await self.app(scope, exchange.receive, exchange.send)
        except Exception:  # answered already, with a 500 without details
            logger.exception("failure", extra={"facts": {"request": exchange.id}})
        finally:
            exchange.end()

    def _check(self, scope: Scope, headers: Headers) -> None:
        path: str = scope["path"]
        if path not in self.open_paths and not self._has_token(headers, scope["type"]):
            raise HTTPException(401, "a token is needed: Authorization: Bearer TOKEN", {"WWW-Authenticate": "Bearer"})
        raw = scope.get("raw_path") or b""
        if re.search(rb"%(2f|5c|[01][0-9a-f]|7f)", raw.lower()) or "\\" in path or {".", ".."} & set(path.split("/")):
            raise HTTPException(400, "the path holds an encoded slash, a backslash, a control character, or . or .. as a part")
        names = headers.keys()
        if len(names) > len(set(names)) and (twice := [header for header in ONCE if names.count(header) > 1]):
            raise HTTPException(400, f"the header {twice[0]} was sent twice")
        host = headers.get("host", "").lower()
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if self.options.hosts and name not in self.options.hosts:
            raise HTTPException(421, "this server does not answer to that host name: start it with --allow-host NAME")
        origin = headers.get("origin")
        if origin is not None and origin.lower().partition("://")[2] != host:
            raise HTTPException(403, "pages of other origins may not use this server")
        if "content-encoding" in headers and headers["content-encoding"].lower() != "identity":
            raise HTTPException(415, "bodies must be sent without Content-Encoding")
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit():
            raise HTTPException(400, "Content-Length is not a number")
        if int(length[:20]) > self.options.max_body:
            raise HTTPException(413, f"a body has at most {self.options.max_body} bytes")

    def _has_token(self, headers: Headers, kind: str) -> bool:
        """Whether the request has one of the server's tokens, in a time that does not depend on the token."""
        if not self._digests:
            return True
        given = headers.getlist("authorization")
        token = given[0].partition(" ")[2] if len(given) == 1 and given[0][:7].lower() == "bearer " else ""
        if kind == "websocket" and not given:  # a page cannot set the header of a WebSocket
            protocols = [name.strip() for name in headers.get("sec-websocket-protocol", "").split(",")]
            token = next((name.removeprefix(BEARER_PROTOCOL) for name in protocols if name.startswith(BEARER_PROTOCOL)), "")
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        return sum([hmac.compare_digest(digest, known) for known in self._digests]) > 0


class _Exchange:
    """One request and its answer."""

    def __init__(self, guard: Guard, scope: Scope, receive: Receive, send: Send) -> None:
        self.guard, self.scope, self._receive, self._send = guard, scope, receive, send
        client_id = Headers(scope=scope).get("x-request-id", "")
        self.id = client_id if REQUEST_ID.fullmatch(client_id) else f"{random.getrandbits(128):032x}"
        self.began = time.perf_counter()
        self.status, self.size, self.whole = 0, 0, scope["type"] == "websocket"
        scope.setdefault("state", {})

    async def receive(self) -> Message:
        """The next piece of the body, counted and timed."""
        if self.whole:
            return await self._receive()
        options = self.guard.options
        seconds = min(options.body_seconds, BODY_START + self.size / options.body_rate)
        try:
            async with asyncio.timeout(self.began + seconds - time.perf_counter()):
                message = await self._receive()
        except TimeoutError:
            slow = f"the body took too long to arrive: {self.size} bytes in {seconds:.1f} s"
            raise HTTPException(408, slow, {"Connection": "close"}) from None
        if message["type"] == "http.request":
            size = len(message.get("body", b""))
            self.size += size
            self.whole = not message.get("more_body", False)
            self.guard.body_bytes += size
            if self.guard.body_bytes > options.max_waiting:
                raise HTTPException(429, "the server is busy with other bodies: try again", {"Retry-After": "1"})
            if self.size > options.max_body:
                raise HTTPException(413, f"a body has at most {options.max_body} bytes")
        return message

    async def send(self, message: Message) -> None:
        """Send an answer, with the guard's headers."""
        if message["type"] in ("http.response.start", "websocket.http.response.start"):
            self.status = message["status"]
            message["headers"] = [*message.get("headers", []), *BROWSER_HEADERS, (b"x-request-id", self.id.encode())]
        elif message["type"] == "websocket.accept":
            self.status = 101
        await self._send(message)

    async def refuse(self, refusal: HTTPException) -> None:
        """Answer with an error. A WebSocket gets an HTTP answer where the server can give one."""
        status = refusal.status_code
        answer = problem(status, refusal.detail, dict(refusal.headers or {}))
        if self.scope["type"] == "http":
            await answer(self.scope, self.receive, self.send)
        elif "websocket.http.response" in self.scope.get("extensions", {}):
            await self.send({"type": "websocket.http.response.start", "status": status, "headers": answer.raw_headers})
            await self._send({"type": "websocket.http.response.body", "body": answer.body})
        else:
            self.status = status
            await self._send({"type": "websocket.close", "code": 1008})

    def end(self) -> None:
        """Count the request and log it."""
        scope, seconds, metrics = self.scope, time.perf_counter() - self.began, self.guard.metrics
        self.guard.body_bytes -= self.size
        method, route = scope.get("method", "WEBSOCKET"), getattr(scope.get("route"), "path", "other")
        shown = method if method in METHODS else "other"
        metrics.requests.labels(shown, route, str(self.status)).inc()
        metrics.body_bytes.inc(self.size)
        if shown != "WEBSOCKET":
            metrics.seconds.labels(shown, route).observe(seconds)
        facts: dict[str, Any] = {"request": self.id, "method": method, "path": scope["path"][:300], "status": self.status}
        facts |= {"milliseconds": round(1000 * seconds, 2), "bytes": self.size}
        facts |= {name: value for name, value in scope["state"].items() if name == "problem"}
        logger.info("request", extra={"facts": facts})
