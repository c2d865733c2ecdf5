"""The service as an ASGI application, `create_app(store)`, and a server that runs it, `make_server(store, options)`.

SIGTERM or Ctrl-C lets requests finish, closes the store, and ends the server.
"""

import errno
import json
import logging
import mimetypes
import sys
import time
from asyncio import Protocol
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from socket import SOCK_STREAM, create_server, getaddrinfo, socket
from typing import Any, cast

import uvicorn
from fastapi import FastAPI, Response

from setstream import __version__
from setstream.errors import ConfigurationError
from setstream.serve.answers import HANDLERS
from setstream.serve.connections import Connection
from setstream.serve.guard import Guard, Metrics, logger
from setstream.serve.options import Options
from setstream.serve.playground import session
from setstream.serve.routes import append_directly, router
from setstream.serve.service import Service
from setstream.stores.store import StateStore

#: The front page: `/` is index.html, `/playground/NAME` every other file.
PAGES = Path(__file__).parent / "playground" / "pages"
SUMMARY = """
Sets by id: add elements as they arrive, get the model's prediction at any time, merge sets, move their states
elsewhere. The prediction does not depend on the order of the elements, or on how they were cut into requests. A request
is answered when its change is committed.
"""


def create_app(store: StateStore, options: Options | None = None, name: str = "model") -> Guard:
    """The service as an ASGI application. It closes the store when it ends.

    Args:
        store: The states, and the model that reads them.
        options: The limits, and the tokens.
        name: The model's name in `GET /model`.

    Example:
        >>> import tempfile, torch, setstream as ss
        >>> from fastapi.testclient import TestClient
        >>> encoder = ss.SetEncoder(torch.nn.Linear(2, 8), ss.UMBC(8, num_slots=2))
        >>> model = ss.SetModel(encoder, torch.nn.Linear(8, 1)).eval()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     app = create_app(ss.StateStore(f"{folder}/states.db", model))
        ...     with TestClient(app, "http://localhost") as client:
        ...         client.post("/sets/a/elements", json={"elements": [[1, 2], [3, 4]]}).json()
        {'id': 'a', 'count': 2}
    """
    options, metrics = options or Options(), Metrics()

    @asynccontextmanager
    async def lifespan(api: FastAPI) -> AsyncIterator[None]:
        api.state.service = Service(store, options, metrics, name)
        try:
            yield
        finally:
            await api.state.service.close()

    about: dict[str, Any] = {"title": "setstream", "version": __version__, "description": SUMMARY}
    without: dict[str, Any] = {"docs_url": None, "redoc_url": None, "redirect_slashes": False}  # docs load from other hosts
    api = FastAPI(**about, **without, lifespan=lifespan, exception_handlers=HANDLERS)
    api.include_router(router)
    api.include_router(session.router)
    pages = {add_page(api, file) for file in PAGES.iterdir() if file.is_file()}
    return Guard(append_directly(api), api, options, metrics, frozenset({"/health", *pages}))


def add_page(api: FastAPI, file: Path) -> str:
    """Serve a file, which is read once, from memory; returns its path on the server."""
    path = "/" if file.name == "index.html" else f"/playground/{file.name}"
    content, kind = file.read_bytes(), mimetypes.guess_type(file.name)[0] or "application/octet-stream"

    @api.get(path, include_in_schema=False)
    async def page() -> Response:
        return Response(content, media_type=kind)

    return path


class JsonLines(logging.Formatter):
    """Logs as JSON, one object per line: {"time": ..., "level": ..., "event": "request"} and extra={"facts": ...}."""

    def format(self, record: logging.LogRecord) -> str:
        """A line. Everything beyond ASCII is escaped, so that no id can forge a line."""
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line: dict[str, Any] = {"time": when, "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_config(level: str) -> dict[str, Any]:
    """For logging.config: our lines and uvicorn's, to the standard error."""
    shown = {"handlers": ["lines"], "level": level.upper(), "propagate": False}
    quiet = shown | {"level": "WARNING"}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": {"()": JsonLines}},
        "handlers": {"lines": {"class": "logging.StreamHandler", "formatter": "json", "stream": sys.stderr}},
        "loggers": {"setstream.serve": shown, "uvicorn": quiet, "uvicorn.error": shown, "uvicorn.access": quiet},
    }


class Server(uvicorn.Server):
    """A server that calls `ready` with its address as soon as it can be reached."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[str], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Start to listen."""
        await super().startup(sockets)
        if self.started:
            host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
            url = f"http://{host}:{self.servers[0].sockets[0].getsockname()[1]}"
            logger.info("running on %s", url)
            self._ready(url)


def make_server(
    store: StateStore,
    options: Options,
    *,
    name: str = "model",
    host: str = "127.0.0.1",
    port: int = 0,
    log_level: str | None = None,
    connections: int = 4096,
    grace: int = 30,
    ready: Callable[[str], None] = lambda url: None,
) -> Server:
    """A server that is not yet running.

    Args:
        store: The states, and the model that reads them.
        options: The limits, and the tokens.
        name: The model's name in `GET /model`.
        host: The address to listen on; it is one of the host names that the server answers to.
        port: The port; 0 takes a free one, and the log says which.
        log_level: The level of the log, which goes to the standard error; None leaves logging as it is.
        connections: Connections at a time.
        grace: Seconds that requests have to finish when the server is stopped.
        ready: Called with the address when the server can be reached.
    """
    if options.hosts:
        options = replace(options, hosts=(*options.hosts, host.lower()))
    app = create_app(store, options, name)
    http = cast(type[Protocol], partial(Connection, app, [OrderedDict() for _ in range(3)]))
    logs = None if log_level is None else log_config(log_level)
    limits: dict[str, Any] = {"limit_concurrency": connections, "timeout_graceful_shutdown": grace, "ws_max_size": 2**16}
    hidden: dict[str, Any] = {"access_log": False, "server_header": False, "proxy_headers": False}
    config = uvicorn.Config(app, host, port, http=http, ws="websockets-sansio", log_config=logs, **limits, **hidden)
    return Server(config, ready)


def listen(host: str, port: int) -> socket:
    """A socket that is bound to an address; port 0 takes a free one."""
    try:
        family, _, _, _, address = getaddrinfo(host, port, type=SOCK_STREAM)[0]
        return create_server(address[:2], family=family)
    except OSError as error:
        taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
        instead = "give another --port, or 0 for any that is free" if taken else "is it an address of this machine (--host)?"
        raise ConfigurationError(f"cannot listen on {host}, port {port}: {error.strerror or error}; {instead}") from error
