"""What is done with trained models: `setstream encode`, `serve`, `report` and `demo`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from setstream.cli.command import AverageChunks, Builder, Device, Model, Trust, command


@command(
    "setstream.cli.encode:run_encode",
    "setstream encode runs/mine slides/ --out slides.parquet --states states.db",
    "setstream encode runs/mine new-patches/ --out slides.parquet --update states.db --states states-2.db",
    "setstream encode runs/mine events.parquet --out users.h5 --engine ray",
    note="If it is killed or stopped, the same command continues the work.",
)
def encode(
    model: Model,
    data: Annotated[Path, Argument(help="Sets: a file or folder that ss.data.open recognises.")],
    out: Annotated[Path, Option(help="A .parquet or .h5 file: one row per set.")],
    what: Annotated[str, Option(help="representations, predictions or both.")] = "both",
    states: Annotated[Path | None, Option(help="Keep the states in this new store.")] = None,
    update: Annotated[Path | None, Option(help="Add the elements to the states of this earlier store.")] = None,
    chunk_size: Annotated[int, Option(help="Elements per chunk.", min=1)] = 4096,
    engine: Annotated[str, Option(help="local or ray.")] = "local",
    ray_address: Annotated[str | None, Option(help="An existing Ray cluster. Default: a local one.")] = None,
    workers: Annotated[int | None, Option(help="Ray workers.")] = None,
    set_column: Annotated[str | None, Option(help="For tables: the column of set ids.")] = None,
    columns: Annotated[str | None, Option(help="For tables: the feature columns, separated by commas.")] = None,
    skip_bad: Annotated[bool, Option("--skip-bad", help="Leave out sets that cannot be read, and list them.")] = False,
    chunks: AverageChunks = None,
    device: Device = "auto",
    builder: Builder = None,
    trust: Trust = None,
) -> None:
    """Encode sets in files: representations and predictions, one row per set, in constant memory."""


@command(
    "setstream.cli.serve:run_serve",
    "setstream serve bags --states bags.db",
    "SETSTREAM_TOKENS=... setstream serve runs/mine --states postgresql://user@db/states --host 0.0.0.0",
    needs=("serve", "fastapi", "uvicorn", "websockets", "prometheus_client"),
    note="SIGTERM or Ctrl-C: open requests are finished, then the server stops. Every answered change is on the disk.",
)
def serve(
    model: Model = "umbc+set-transformer",
    states: Annotated[
        str | None,
        Option(help="A file (SQLite), or postgresql://... when several servers share them.", show_default="MODEL.db"),
    ] = None,
    builder: Builder = None,
    trust: Trust = None,
    host: Annotated[str, Option(help="Address to bind to. The default is reachable from this machine only.")] = "127.0.0.1",
    port: Annotated[int, Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8000,
    token_file: Annotated[Path | None, Option(help="File of bearer tokens, one per line; or set SETSTREAM_TOKENS.")] = None,
    allow_host: Annotated[
        list[str] | None, Option(help="A host name to answer to. Default: all names; on loopback, only its own.")
    ] = None,
    max_body: Annotated[int, Option(help="Bytes per request.", min=1)] = 16 * 2**20,
    max_elements: Annotated[int, Option(help="Elements per request.", min=1)] = 100_000,
    max_sets: Annotated[int, Option(help="Sets in the store.", min=1)] = 1_000_000,
    connections: Annotated[int, Option(help="Connections at the same time; at most half may be WebSockets.", min=1)] = 4096,
    grace: Annotated[int, Option(help="Seconds that open requests have to finish when the server stops.", min=1)] = 30,
    threads: Annotated[int, Option(help="Threads of the computation.", min=1)] = 1,
    chunks: AverageChunks = None,
    device: Device = "auto",
    log_level: Annotated[str, Option(help="info (one line per request), warning or error.")] = "info",
) -> None:
    """Serve a model and the states of many sets over HTTP, with a playground as its front page."""


@command("setstream.cli.report:run_report", "setstream report runs/clustering --out report.html")
def report(
    folders: Annotated[list[Path], Argument(help="Run folders, or folders that hold some.")],
    out: Annotated[Path, Option(help="The page to write.")] = Path("report.html"),
    figures: Annotated[Path | None, Option(help="A folder for the page's figures as files.")] = None,
    trust: Trust = None,
) -> None:
    """Turn finished runs into one self-contained HTML page."""


@command("setstream.cli.report:run_demo", "setstream demo --out out/demo --seed 7")
def demo(
    out: Annotated[Path, Option(help="Folder for the figure, the animation and the report.")] = Path("out/demo"),
    seed: Annotated[int, Option(help="The set to draw; the default is easy to see.")] = 129,
    points: Annotated[int, Option(help="Points in the set.", min=16)] = 512,
) -> None:
    """Stream one set in four orders through two trained models, and compare their answers."""
