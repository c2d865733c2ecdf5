"""Kinds of labels, each a class: how they are read, the loss, the answers, the metrics and the report."""

from typing import Any

from setstream.errors import ConfigurationError
from setstream.tasks.mil.targets.base import Answers, Rows, Target
from setstream.tasks.mil.targets.classification import Binary, Classes, MultiLabel
from setstream.tasks.mil.targets.regression import Regression
from setstream.tasks.mil.targets.survival import Cox, DiscreteTime

__all__ = ["TARGETS", "Answers", "Binary", "Rows", "Target", "target_class", "target_from"]

TARGETS: dict[str, type[Target]] = {
    target.kind: target for target in (Binary, Classes, MultiLabel, Regression, Cox, DiscreteTime)
}


def target_class(kind: str) -> type[Target]:
    """The class of a kind of labels."""
    if kind not in TARGETS:
        raise ConfigurationError(f"unknown kind of labels {kind!r}: choose one of {', '.join(TARGETS)}")
    return TARGETS[kind]


def target_from(options: dict[str, Any]) -> Target:
    """The target that `to_dict` described."""
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items() if name != "kind"}
    try:
        return target_class(str(options.get("kind")))(**fields)
    except TypeError as error:
        raise ConfigurationError(f"these are not the fields of a kind of labels ({options}): {error}") from error
