"""Run the service until it is asked to stop: SIGTERM or Ctrl-C lets requests finish, closes the store, and ends."""

import errno
import sys
from asyncio import Protocol
from collections.abc import Callable
from dataclasses import replace
from socket import SOCK_STREAM, create_server, getaddrinfo, socket
from typing import cast

import uvicorn

from setstream.errors import ConfigurationError
from setstream.serve.app import create_app
from setstream.serve.connections import connections_of
from setstream.serve.log import log_config, logger
from setstream.serve.options import Options
from setstream.stores.store import StateStore

# Seconds that a thread may hold the interpreter while another waits. The writer computes all the time under load; Python's
# default of 5 ms would be added to every step of every request.
SWITCH = 0.0005


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
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None if log_level is None else log_config(log_level),
        access_log=False,
        server_header=False,
        limit_concurrency=connections,
        timeout_graceful_shutdown=grace,
        http=cast(type[Protocol], connections_of(app)),
        ws="websockets-sansio",
        ws_max_size=2**16,
        proxy_headers=False,
    )
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


def run(server: Server, bound: socket) -> None:
    """Serve on a bound socket until a signal arrives."""
    sys.setswitchinterval(SWITCH)
    server.run([bound])
