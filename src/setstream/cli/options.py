"""From flags and files to the options of a run."""

import json
from pathlib import Path
from typing import Any

from setstream.errors import ConfigurationError
from setstream.training.config import TrainConfig, read_options


def parse_value(text: str) -> Any:
    """A number, true or false, a JSON list or object; otherwise the text itself.

    >>> parse_value("3"), parse_value("0.5"), parse_value("true"), parse_value("learned")
    (3, 0.5, True, 'learned')
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes` on top; mappings are merged, not replaced."""
    merged = dict(base)
    for name, value in changes.items():
        before = merged.get(name)
        merged[name] = merge(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return merged


def assignments(pairs: list[str]) -> dict[str, Any]:
    """Options from NAME=VALUE; `task.NAME=VALUE` and `model.NAME=VALUE` go to the task and the model.

    >>> assignments(["lr=0.01", "model.num_slots=16"])
    {'lr': 0.01, 'model_options': {'num_slots': 16}}
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise ConfigurationError(f"an option is NAME=VALUE, like lr=0.001 or model.num_slots=16; got {pair!r}")
        owner, dot, inner = name.partition(".")
        if not dot:
            options[name] = parse_value(text)
        elif owner in ("task", "model"):
            options.setdefault(f"{owner}_options", {})[inner] = parse_value(text)
        else:
            raise ConfigurationError(f"options with a dot begin with task. or model.; got {name!r}")
    return options


def build_config(file: Path | None, flags: dict[str, Any], pairs: list[str]) -> TrainConfig:
    """The options of a run: those of the file, then flags, then assignments."""
    options = read_options(file) if file is not None else {}
    options = merge(options, {name: value for name, value in flags.items() if value is not None})
    return TrainConfig.from_dict(merge(options, assignments(pairs)))
