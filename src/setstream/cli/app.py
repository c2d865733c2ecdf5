"""The commands of `setstream`.

Exit codes: 0 done, 1 a failure, 2 options that cannot be, 3 a loss that was not finite, 130 interrupted (and saved).
"""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from setstream import __version__
from setstream.cli.encode import EPILOG as ENCODE_EPILOG
from setstream.cli.encode import encode
from setstream.cli.options import AverageChunks, Builder, Trust, build_config
from setstream.cli.slides import app as slides
from setstream.errors import ConfigurationError, NonFiniteError, SetstreamError
from setstream.training.registry import build_task

FAILED, WRONG_OPTIONS, NOT_FINITE, INTERRUPTED = 1, 2, 3, 130

app = typer.Typer(
    name="setstream",
    help="Encode sets of any size, in any chunks, to the same answer; train through all of it in constant memory.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(slides, name="slides")
console = Console()
errors = Console(stderr=True)


def run() -> None:
    """Run the command line and turn our errors into messages and exit codes."""
    sys.path.insert(0, "")  # a task of the user's own, as module:Class, lies where they stand
    try:
        app()
    except NonFiniteError as error:
        errors.print(f"[red]not finite:[/red] {escape(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(NOT_FINITE)
    except ConfigurationError as error:
        errors.print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(WRONG_OPTIONS)
    except SetstreamError as error:
        errors.print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(FAILED)


def _version(asked: bool) -> None:
    if asked:
        console.print(__version__)
        raise typer.Exit


@app.callback()
def options_of_all(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which version.")] = False,
) -> None:
    """Options that stand before the command."""


@app.command(
    epilog="[bold]Examples[/bold]\n\n"
    "setstream train clustering umbc+set-transformer --out runs/umbc\n\n"
    "setstream train clustering deepsets --steps 2000 --gradient full -o task.points=256\n\n"
    "setstream train --config run.toml --out runs/mine\n\n"
    "torchrun --nproc-per-node 2 -m setstream.cli train clustering umbc+set-transformer --out runs/two\n\n"
    "Run it again with the same --out to go on where it was stopped: Ctrl-C saves."
)
def train(
    task: Annotated[str | None, typer.Argument(help="A task (`setstream tasks`), or package.module:Class.")] = None,
    model: Annotated[str | None, typer.Argument(help="A model of the task (`setstream models TASK`).")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; runs/TASK-MODEL-SEED unless given.")] = None,
    config: Annotated[Path | None, typer.Option(help="Your options in a TOML, YAML or JSON file; flags win over it.")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sets in a step.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="adam, adamw or sgd.")] = None,
    schedule: Annotated[str | None, typer.Option(help="constant, step or cosine.")] = None,
    gradient: Annotated[
        str | None, typer.Option(help="full, exact, unbiased, importance or subset: see docs/gradients.md.")
    ] = None,
    chunk_size: Annotated[int | None, typer.Option(help="Elements of a set that carry the gradient, a chunk.")] = None,
    grad_chunks: Annotated[int | None, typer.Option(help="Chunks of a set that carry the gradient.")] = None,
    seed: Annotated[int | None, typer.Option(help="All randomness follows from it.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads on a CPU.")] = None,
    amp: Annotated[str | None, typer.Option(help="none or bf16.")] = None,
    parallel: Annotated[str | None, typer.Option(help="Under torchrun: data (sets over processes) or set.")] = None,
    option: Annotated[
        list[str] | None, typer.Option("-o", "--option", help="NAME=VALUE; task.NAME= and model.NAME= too.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on in a folder that holds a run.")] = True,
) -> None:
    """Train a model of a task."""
    flags: dict[str, Any] = {
        "task": task,
        "model": model,
        "steps": steps,
        "batch": batch,
        "lr": lr,
        "optimizer": optimizer,
        "schedule": schedule,
        "gradient": gradient,
        "chunk_size": chunk_size,
        "grad_chunks": grad_chunks,
        "seed": seed,
        "device": device,
        "threads": threads,
        "amp": amp,
        "parallel": parallel,
    }
    from setstream.training import Trainer

    chosen = build_config(config, flags, option or [])
    folder = out or Path("runs") / f"{chosen.task}-{chosen.model}-{chosen.seed}".replace("/", "-").replace(":", "-")
    trainer = Trainer(build_task(chosen), chosen, folder)
    result = trainer.run(resume=resume)
    trainer.processes.leave()
    console.print(f"run folder: {result.folder}", highlight=False)
    if not result.done:
        raise typer.Exit(INTERRUPTED)


@app.command(
    epilog="[bold]Example[/bold]\n\n"
    "setstream crossval mil umbc+set-transformer --config sweeps/mil/musk1.toml --out runs/musk1-umbc"
)
def crossval(
    task: Annotated[str, typer.Argument(help="A task that takes fold, count and repeat.")],
    model: Annotated[str, typer.Argument(help="A model of the task.")],
    out: Annotated[Path, typer.Option(help="Folder for the run folders.")],
    config: Annotated[Path | None, typer.Option(help="Options in a TOML, YAML or JSON file.")] = None,
    folds: Annotated[int, typer.Option(help="Folds.", min=2)] = 10,
    repeats: Annotated[int, typer.Option(help="Ways of folding, each with a seed of its own.", min=1)] = 5,
    option: Annotated[
        list[str] | None, typer.Option("-o", "--option", help="NAME=VALUE; task.NAME= and model.NAME= too.")
    ] = None,
) -> None:
    """Cross-validate a model; resumable, a fold at a time."""
    from setstream.cli.evaluate import run_crossval

    chosen = build_config(config, {"task": task, "model": model}, ["tensorboard=false", *(option or [])])
    run_crossval(chosen, out, folds, repeats, console)


@app.command(epilog="[bold]Example[/bold]\n\nsetstream evaluate runs/umbc -o task.test_sets=2000")
def evaluate(
    folder: Annotated[Path, typer.Argument(help="A run folder.")],
    option: Annotated[list[str] | None, typer.Option("-o", "--option", help="task.NAME=VALUE.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for scripts.")] = False,
    trust: Trust = None,
) -> None:
    """Test the model of a finished (or unfinished) run again."""
    from setstream.cli.evaluate import run_evaluate

    run_evaluate(folder, option or [], device, as_json, trust or [], console)


app.command(epilog=ENCODE_EPILOG)(encode)


@app.command(
    epilog="[bold]Examples[/bold]\n\nsetstream serve bags --states bags.db\n\n"
    "SETSTREAM_TOKENS=... setstream serve runs/mine --states postgresql://user@db/states --host 0.0.0.0\n\n"
    "SIGTERM or Ctrl-C: requests are finished, then it ends. What was answered is on the disk."
)
def serve(
    model: Annotated[
        str, typer.Argument(help="A run's folder, a saved model's, a shipped one, or package.module:name of a SetModel.")
    ] = "umbc+set-transformer",
    states: Annotated[
        str | None,
        typer.Option(help="A file (SQLite), or postgresql://... when several servers share them.", show_default="MODEL.db"),
    ] = None,
    builder: Builder = None,
    trust: Trust = None,
    host: Annotated[str, typer.Option(help="Address to bind to; others than this machine only if told so.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8000,
    token_file: Annotated[Path | None, typer.Option(help="Bearer tokens, one a line; or SETSTREAM_TOKENS.")] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A host name to answer to; all unless bound to loopback.")
    ] = None,
    max_body: Annotated[int, typer.Option(help="Bytes of a request.", min=1)] = 16 * 2**20,
    max_elements: Annotated[int, typer.Option(help="Elements of a request.", min=1)] = 100_000,
    max_sets: Annotated[int, typer.Option(help="Sets in the store.", min=1)] = 1_000_000,
    connections: Annotated[int, typer.Option(help="Connections at a time; at most half may be WebSockets.", min=1)] = 4096,
    grace: Annotated[int, typer.Option(help="Seconds that requests have to finish when it is stopped.", min=1)] = 30,
    threads: Annotated[int, typer.Option(help="Threads of the computation.", min=1)] = 1,
    chunks: AverageChunks = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")] = "auto",
    log_level: Annotated[str, typer.Option(help="info, warning or error; a line a request at info.")] = "info",
) -> None:
    """Serve a model and the states of many sets over HTTP, with a playground as its front page."""
    from setstream.cli.serve import run_serve

    run_serve(
        model,
        states,
        builder=builder,
        trust=trust or [],
        host=host,
        port=port,
        token_file=token_file,
        allow_host=allow_host or [],
        max_body=max_body,
        max_elements=max_elements,
        max_sets=max_sets,
        connections=connections,
        grace=grace,
        threads=threads,
        chunks=chunks,
        device=device,
        log_level=log_level,
        console=console,
        errors=errors,
    )


@app.command(
    epilog="[bold]Example[/bold]\n\nsetstream sweep sweeps/clustering.toml --out runs/clustering --jobs 2\n\n"
    "Stop it in any way and start it again: finished runs are skipped, others go on."
)
def sweep(
    file: Annotated[Path, typer.Argument(help="TOML, YAML or JSON with a table `defaults` and tables `runs`.")],
    out: Annotated[Path, typer.Option(help="Folder for the run folders.")] = Path("runs"),
    jobs: Annotated[int, typer.Option(help="Runs at a time.", min=1)] = 2,
    threads: Annotated[int, typer.Option(help="Threads of each run.", min=1)] = 1,
) -> None:
    """Run a list of configurations over the cores, resumable."""
    from setstream.cli.sweep import read_sweep, run_sweep

    code = run_sweep(read_sweep(file, out), jobs, threads, console)
    if code:
        raise typer.Exit(code)


@app.command(epilog="[bold]Example[/bold]\n\nsetstream report runs/clustering --out report.html")
def report(
    folders: Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold some.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    figures: Annotated[Path | None, typer.Option(help="A folder for the page's pictures as files of their own.")] = None,
    trust: Trust = None,
) -> None:
    """Turn finished runs into one self-contained HTML page."""
    from setstream.report import write_report

    with console.status("drawing"):
        runs = write_report(folders, out, figures, trust or [])
    console.print(f"{len(runs)} runs: {out}", highlight=False)


@app.command(
    epilog="[bold]Examples[/bold]\n\nsetstream bench pooling\n\nsetstream bench memory --sizes 1000 100000 --modes full exact",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="pooling, step, memory, variance, io, scale, ...: a script in the folder.")],
    folder: Annotated[Path, typer.Option(help="Where the benchmarks are: in a checkout of setstream.")] = Path("benchmarks"),
) -> None:
    """Run one of the benchmarks; further options are its own."""
    import subprocess

    script = folder / f"{name}.py"
    if not script.is_file():
        found = ", ".join(sorted(file.stem for file in folder.glob("*.py"))) or "none: run this in a checkout of setstream"
        raise ConfigurationError(f"there is no benchmark {script}; there are {found}")
    code = subprocess.run([sys.executable, str(script), *context.args], check=False).returncode
    if code:
        raise typer.Exit(code)


@app.command(epilog="[bold]Example[/bold]\n\nsetstream demo --out out/demo --seed 7")
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the figure, the animation and the report.")] = Path("out/demo"),
    seed: Annotated[int, typer.Option(help="Which set is drawn; this one is easy to see.")] = 129,
    points: Annotated[int, typer.Option(help="Points in the set.", min=16)] = 512,
) -> None:
    """Stream one set in four orders through two trained models, and see who minds."""
    from setstream.cli.demo import run_demo

    run_demo(out, seed, points, console)


@app.command()
def tasks() -> None:
    """List the tasks."""
    from setstream.training.registry import TASKS, task_class

    rows = Table("task", "what it is", "models", box=None)
    for name in TASKS:
        kind = task_class(name)
        rows.add_row(name, kind.summary, str(len(kind.models)))
    console.print(rows)


@app.command()
def models(task: Annotated[str, typer.Argument(help="A task.")] = "clustering") -> None:
    """List the models of a task."""
    from setstream.training.registry import task_class

    rows = Table("model", "what it is", box=None)
    for name, build in task_class(task).models.items():
        rows.add_row(name, (build.__doc__ or "").strip().partition("\n")[0])
    console.print(rows)
