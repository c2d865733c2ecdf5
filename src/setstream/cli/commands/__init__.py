"""The flags of the commands, in the order of `setstream --help`; those of `setstream slides` are in slides.py.

`tasks` and `models` read catalogue.json and need no torch; `python -m tests.cli.write_catalogue` writes it from the tasks.
"""

import json
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated

from typer import Argument, Option

from setstream.cli.command import Average, Builder, Config, Device, Model, Options, Trust, Words, app, command, print_table, run
from setstream.cli.commands import slides  # noqa: F401 - it declares commands, too

__all__ = ["app", "run"]

CATALOGUE = Path(__file__).with_name("catalogue.json")


@command(
    "setstream.cli.train:run_train",
    "setstream train clustering umbc+set-transformer --out runs/umbc",
    "setstream train clustering deepsets --steps 2000 --gradient full -o task.points=256",
    "setstream train --config run.toml --out runs/mine",
    "torchrun --nproc-per-node 2 -m setstream.cli train clustering umbc+set-transformer --out runs/two",
    note="Ctrl-C saves and stops. The same command with the same --out resumes the run.",
)
def train(
    task: Annotated[str | None, Argument(help="A task (`setstream tasks`), or package.module:Class.")] = None,
    model: Annotated[str | None, Argument(help="A model of the task (`setstream models TASK`).")] = None,
    out: Annotated[Path | None, Option(help="Run folder. Default: runs/TASK-MODEL-SEED.")] = None,
    config: Config = None,
    steps: Annotated[int | None, Option(help="Training steps.")] = None,
    batch: Annotated[int | None, Option(help="Sets per step.")] = None,
    lr: Annotated[float | None, Option(help="Learning rate.")] = None,
    optimizer: Annotated[str | None, Option(help="adam, adamw or sgd.")] = None,
    schedule: Annotated[str | None, Option(help="constant, step or cosine.")] = None,
    gradient: Annotated[str | None, Option(help="full, exact, unbiased, importance or subset: see docs/gradients.md.")] = None,
    chunk_size: Annotated[int | None, Option(help="Elements per chunk.")] = None,
    grad_chunks: Annotated[int | None, Option(help="Chunks of each set that carry the gradient.")] = None,
    seed: Annotated[int | None, Option(help="Seed of all random numbers.")] = None,
    device: Annotated[str | None, Option(help="auto, cpu, cuda, cuda:1 or mps.")] = None,
    threads: Annotated[int | None, Option(help="Threads on a CPU; one for models below a million weights.")] = None,
    amp: Annotated[str | None, Option(help="Mixed precision: none or bf16.")] = None,
    parallel: Annotated[str | None, Option(help="Under torchrun: data (some sets each) or set (a part of every set).")] = None,
    option: Options = None,
    resume: Annotated[bool, Option(help="Resume a run in this folder.")] = True,
) -> None:
    """Train a model of a task."""


@command(
    "setstream.cli.crossval:run_crossval",
    "setstream crossval mil umbc+set-transformer --config sweeps/mil/musk1.toml --out runs/musk1-umbc",
    "setstream crossval mil ab-mil --out runs/ab -o task.data=features/ -o task.labels=labels.csv -o task.split=splits/",
    "setstream crossval mil ab-mil --out runs/nested --each lr=[1e-4,3e-4,1e-3] --inner 5 -o task.data=musk1",
    note="If it is stopped, the same command continues with the unfinished folds.",
)
def crossval(
    task: Annotated[str, Argument(help="A task that takes fold, count and repeat.")],
    model: Annotated[str, Argument(help="A model of the task.")],
    out: Annotated[Path, Option(help="Folder for the run folders.")],
    config: Config = None,
    folds: Annotated[int | None, Option(help="Folds.", min=2, show_default="10, or those of task.split")] = None,
    repeats: Annotated[int, Option(help="Repetitions, each with a new seed and, if they are drawn, new folds.", min=1)] = 5,
    each: Annotated[Words, Option(help="NAME=[VALUE, ...]: each fold chooses among these options by inner folds.")] = None,
    inner: Annotated[int, Option(help="Inner folds, with --each.", min=2)] = 5,
    option: Options = None,
) -> None:
    """Cross-validate a model."""


@command("setstream.cli.train:run_evaluate", "setstream evaluate runs/umbc -o task.test_sets=2000")
def evaluate(
    folder: Annotated[Path, Argument(help="A run folder.")],
    option: Annotated[Words, Option("-o", "--option", help="task.NAME=VALUE; may be repeated.")] = None,
    device: Device = "auto",
    as_json: Annotated[bool, Option("--json", help="Print JSON, for scripts.")] = False,
    trust: Trust = None,
) -> None:
    """Evaluate the model of a run, finished or not, on test data."""


@command(
    "setstream.cli.predict:run_predict",
    "setstream predict runs/slides features/ --out predictions.csv",
    "setstream predict runs/slides features/ --out predictions.parquet --patients labels.csv --without",
)
def predict(
    model: Annotated[str, Argument(help="The folder of a run of the task mil, or of a model that it saved.")],
    data: Annotated[Path, Argument(help="Bags: a file or folder that ss.data.open recognises.")],
    out: Annotated[Path, Option(help="A .csv or .parquet file: one row per slide, and per patient.")],
    patients: Annotated[Path | None, Option(help="CSV with the patient of each slide: also predict patients.")] = None,
    patient: Annotated[str, Option(help="Its column of patients.")] = "case_id",
    without: Annotated[bool, Option("--without", help="Also predict each patient without each of its slides.")] = False,
    logits: Annotated[bool, Option("--logits", help="Also write the model's raw outputs.")] = False,
    chunk_size: Annotated[int, Option(help="Elements per chunk.", min=1)] = 4096,
    device: Device = "auto",
    builder: Builder = None,
    trust: Trust = None,
) -> None:
    """Predict slides and patients: probability, label and threshold, or what the model was trained for."""


@command(
    "setstream.cli.sweep:run_sweep",
    "setstream sweep sweeps/clustering.toml --out runs/clustering --jobs 2",
    note="If it is stopped, the same command continues: finished runs are skipped, others are resumed.",
)
def sweep(
    file: Annotated[Path, Argument(help="TOML or JSON with a table `defaults` and tables `runs`.")],
    out: Annotated[Path, Option(help="Folder for the run folders.")] = Path("runs"),
    jobs: Annotated[int, Option(help="Runs at the same time.", min=1)] = 2,
    threads: Annotated[int, Option(help="Threads per run.", min=1)] = 1,
) -> None:
    """Train all configurations of a file, several at a time."""


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
    time: Annotated[str | None, Option(help="For tables: the column of times; needs --states and --tile.")] = None,
    tile: Annotated[float | None, Option(help="Keep the states by tiles of so many seconds, too: 3600 for hours.")] = None,
    skip_bad: Annotated[bool, Option("--skip-bad", help="Leave out sets that cannot be read, and list them.")] = False,
    chunks: Average = None,
    device: Device = "auto",
    builder: Builder = None,
    trust: Trust = None,
) -> None:
    """Encode sets in files: representations and predictions, one row per set, in constant memory."""


@command(
    "setstream.cli.serve:run_serve",
    "setstream serve",
    "setstream serve runs/mine --states mine.db --tile 3600 --retention 604800",
    "SETSTREAM_TOKENS=... setstream serve runs/mine --states postgresql://user@db/states --host 0.0.0.0",
    needs=("serve", "fastapi", "uvicorn", "websockets", "prometheus_client"),
    note="SIGTERM or Ctrl-C: open requests are finished, then the server stops. Every answered change is on the disk.",
)
def serve(
    model: Model = "umbc+set-transformer",
    states: Annotated[str | None, Option(help="A file or postgresql://... (several servers).", show_default="MODEL.db")] = None,
    tile: Annotated[float | None, Option(help="Seconds of a tile, for states of any range of time: 3600 for hours.")] = None,
    retention: Annotated[str | None, Option(help="Seconds that tiles are kept, or by size: 3600:604800,86400:inf.")] = None,
    builder: Builder = None,
    trust: Trust = None,
    host: Annotated[str, Option(help="Address to bind to. The default is reachable from this machine only.")] = "127.0.0.1",
    port: Annotated[int, Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8000,
    token_file: Annotated[Path | None, Option(help="File of bearer tokens, one per line; or set SETSTREAM_TOKENS.")] = None,
    allow_host: Annotated[Words, Option(help="A host name to answer to. Default: all; on loopback, only its own.")] = None,
    max_body: Annotated[int, Option(help="Bytes per request.", min=1)] = 16 * 2**20,
    max_elements: Annotated[int, Option(help="Elements per request.", min=1)] = 100_000,
    max_sets: Annotated[int, Option(help="Sets in the store.", min=1)] = 1_000_000,
    connections: Annotated[int, Option(help="Connections at the same time; at most half may be WebSockets.", min=1)] = 4096,
    grace: Annotated[int, Option(help="Seconds that open requests have to finish when the server stops.", min=1)] = 30,
    threads: Annotated[int, Option(help="Threads of the computation.", min=1)] = 1,
    chunks: Average = None,
    device: Device = "auto",
    log_level: Annotated[str, Option(help="info (one line per request), warning or error.")] = "info",
) -> None:
    """Serve a model and the states of many sets over HTTP, with a playground as its front page."""


@command(
    "setstream.cli.consume:run_consume",
    "setstream consume runs/mine --states mine.db --name orders < orders.jsonl",
    "setstream consume runs/mine redis://localhost:6379/0 --stream orders --consumer 0 --states mine.db --tile 3600",
    "kcat -C -b db -t orders -p 0 -f '%o\\t%s\\n' -u | setstream consume runs/mine --states mine.db --name orders --offsets",
    note="SIGTERM or Ctrl-C: what was read is committed. The same command goes on after what is in the store.",
)
def consume(
    model: Model,
    states: Annotated[str, Option(help="The store: a file or postgresql://...")],
    source: Annotated[str, Argument(help="-: standard input; redis://...; or package.module:name of your own source.")] = "-",
    tile: Annotated[float | None, Option(help="Keep states by tiles of so many seconds, too: 3600 for hours.")] = None,
    name: Annotated[
        str | None, Option(help="Of standard input: skip what the store has. Without it, all lines are new.")
    ] = None,
    partition: Annotated[str, Option(help="Of standard input: the partition, if there are several.")] = "",
    offsets: Annotated[
        bool, Option("--offsets", help="Each line begins with its offset and a tab, as kcat writes it.")
    ] = False,
    stream: Annotated[str | None, Option(help="Of Redis: the stream, whose entries have a field `event`.")] = None,
    group: Annotated[str, Option(help="Of Redis: the consumer group.")] = "setstream",
    consumer: Annotated[str, Option(help="Of Redis: this consumer's name, which it keeps after a restart.")] = "0",
    set_column: Annotated[str, Option(help="The field of set ids.")] = "id",
    columns: Annotated[
        str | None, Option(help="The fields of an element's numbers.", show_default="element or elements")
    ] = None,
    time_column: Annotated[str | None, Option(help="The field of times, with tiles.", show_default="time, or now")] = None,
    dead_letters: Annotated[
        Path | None, Option(help="File for lines that cannot be read. Without it, they are an error.")
    ] = None,
    batch: Annotated[int, Option(help="Events per transaction, about.", min=1)] = 5000,
    metrics_port: Annotated[
        int | None, Option(help="Port of this machine for Prometheus: events, lag.", min=1, max=65535)
    ] = None,
    position: Annotated[bool, Option("--position", help="Print where the consumer would go on, and do nothing.")] = False,
    threads: Annotated[int, Option(help="Threads of the computation.", min=1)] = 1,
    chunks: Average = None,
    device: Device = "auto",
    builder: Builder = None,
    trust: Trust = None,
) -> None:
    """Add events from a pipe, a file, Redis Streams or your own source to the states of many sets, each once."""


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
    """Stream one set in four orders through five trained models, and compare their answers."""


@app.command()
def tasks() -> None:
    """List the tasks."""
    rows = [(name, task["summary"], str(len(task["models"]))) for name, task in json.loads(CATALOGUE.read_text()).items()]
    print_table(("task", "what it is", "models"), rows)


@app.command()
def models(name: Annotated[str, Argument(metavar="TASK", help="A task or package.module:Class.")] = "clustering") -> None:
    """List the models of a task."""
    task = json.loads(CATALOGUE.read_text()).get(name) or resolve_name("setstream.training.task:describe_task")(name)
    print_table(("model", "what it is"), task["models"].items())
