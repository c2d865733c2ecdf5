"""`setstream serve`."""

from pathlib import Path
from typing import Annotated

import typer

from setstream.cli.command import command
from setstream.cli.commands.flags import AverageChunks, Builder, Device, Model, Trust


@command(
    "setstream.cli.serve:run_serve",
    needs=("serve", "fastapi", "uvicorn", "websockets", "prometheus_client"),
    examples=[
        "setstream serve bags --states bags.db",
        "SETSTREAM_TOKENS=... setstream serve runs/mine --states postgresql://user@db/states --host 0.0.0.0",
    ],
    note="SIGTERM or Ctrl-C: open requests are finished, then the server stops. Every answered change is on the disk.",
)
def serve(
    model: Model = "umbc+set-transformer",
    states: Annotated[
        str | None,
        typer.Option(help="A file (SQLite), or postgresql://... when several servers share them.", show_default="MODEL.db"),
    ] = None,
    builder: Builder = None,
    trust: Trust = None,
    host: Annotated[
        str, typer.Option(help="Address to bind to. The default is reachable from this machine only.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8000,
    token_file: Annotated[
        Path | None, typer.Option(help="File of bearer tokens, one per line; or set SETSTREAM_TOKENS.")
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A host name to answer to. Default: all names; on loopback, only its own.")
    ] = None,
    max_body: Annotated[int, typer.Option(help="Bytes per request.", min=1)] = 16 * 2**20,
    max_elements: Annotated[int, typer.Option(help="Elements per request.", min=1)] = 100_000,
    max_sets: Annotated[int, typer.Option(help="Sets in the store.", min=1)] = 1_000_000,
    connections: Annotated[
        int, typer.Option(help="Connections at the same time; at most half may be WebSockets.", min=1)
    ] = 4096,
    grace: Annotated[int, typer.Option(help="Seconds that open requests have to finish when the server stops.", min=1)] = 30,
    threads: Annotated[int, typer.Option(help="Threads of the computation.", min=1)] = 1,
    chunks: AverageChunks = None,
    device: Device = "auto",
    log_level: Annotated[str, typer.Option(help="info (one line per request), warning or error.")] = "info",
) -> None:
    """Serve a model and the states of many sets over HTTP, with a playground as its front page."""
