"""Flags that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[Path | None, typer.Option(help="Options in a TOML, YAML or JSON file; flags take precedence.")]
Options = Annotated[
    list[str] | None, typer.Option("-o", "--option", help="NAME=VALUE, task.NAME=VALUE or model.NAME=VALUE; may be repeated.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")]
Model = Annotated[
    str, typer.Argument(help="A run folder, a saved model's folder, a shipped model's name, or package.module:name.")
]
Builder = Annotated[
    str | None, typer.Option(help="For your own saved model: the function that builds it, package.module:name.")
]
Trust = Annotated[
    list[str] | None,
    typer.Option(help="package.module:name of your own task, backbone or builder that the folder's config.json may name."),
]
AverageChunks = Annotated[
    str | None,
    typer.Option(help="average: let a model that is not consistent average over the chunks of a set. Otherwise an error."),
]
