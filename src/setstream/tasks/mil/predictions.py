"""Answers about bags, as tables: by slide and by patient, and what each slide contributes.

    state of a patient = sum of the states of the slides        answer without a slide = that of the sum of the others

A model that reads its bag once needs every slide once for all of these. Others read the slides of a patient as one set.
"""

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from operator import add
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from setstream._utils.atomic import whole_or_nothing, write_atomically
from setstream._utils.optional import need
from setstream.data import JoinedSource, SetSource
from setstream.errors import ConfigurationError
from setstream.gradients.encode import encode
from setstream.models.model import SetModel
from setstream.states.state import State
from setstream.tasks.mil.targets import Answers, Target, target_from
from setstream.training.config import read_options

PREDICTIONS, ANSWERS, TARGET, MODEL = "predictions.csv", "predictions.safetensors", "target.json", "model"
Columns = dict[str, list[Any]]


@torch.no_grad()
def bag_logits(model: SetModel, bags: Iterable[Tensor | SetSource], chunk_size: int) -> Tensor:
    """The model's output (N, ...) about bags, one after another; in chunks, unless it needs whole bags."""
    gradient, device = "none" if model.encoder.pool.consistent else "full", model.encoder.device
    sets: Iterable[Any] = ([bag.to(device) if isinstance(bag, Tensor) else bag] for bag in bags)
    return torch.cat([model.head(encode(model.encoder, bag, chunk_size=chunk_size, gradient=gradient)).cpu() for bag in sets])


@torch.no_grad()
def patient_logits(model: SetModel, slides: Sequence[SetSource], chunk_size: int, without: bool) -> list[Tensor]:
    """The outputs of a patient (1, ...), of its slides (n, ...) and, if asked for, of the patient without each (n, ...)."""
    if model.encoder.passes > 1 or not model.encoder.pool.consistent or len(slides) == 1:
        others = [JoinedSource([*slides[:n], *slides[n + 1 :]]) for n in range(len(slides))] if len(slides) > 1 else []
        groups = [[JoinedSource(slides)], slides, others if without else []]
        return [bag_logits(model, group, chunk_size) for group in groups if group]
    states = [_state(model, slide, chunk_size) for slide in slides]
    before, after = list(accumulate(states, add)), list(accumulate(states[::-1], add))[::-1]
    rest = [after[1], *(a + b for a, b in zip(before, after[2:], strict=False)), before[-2]] if without else []
    return [torch.cat([model.finalize(state).cpu() for state in group]) for group in ([before[-1]], states, rest) if group]


def _state(model: SetModel, slide: SetSource, chunk_size: int) -> State:
    state, device = model.encoder.empty(1), model.encoder.device
    for chunk in slide.chunks(chunk_size):
        state = model.encoder.update(state, chunk.to(device)[None])
    return state


def predict_table(
    model: SetModel,
    target: Target | None,
    sources: Sequence[SetSource],
    patients: Mapping[str, str] | None = None,
    *,
    chunk_size: int = 4096,
    without: bool = False,
    logits: bool = False,
) -> Columns:
    """A row per slide; with `patients`, the patient of each slide, first a row per patient, too, in the column `level`.

    Args:
        without: also the answer about each patient without this slide: columns that begin with `without_`.
        logits: also the logits, stream by stream. Without a target there is nothing else.
    """
    slides_of: dict[str, list[SetSource]] = {}
    for source in sources:
        slides_of.setdefault(source.id if patients is None else patients[source.id], []).append(source)
    columns: Columns = {"id": []} if patients is None else {"level": [], "id": [], "patient": []}
    rows: list[Tensor] = []
    rest: list[Tensor | None] = []
    for patient, slides in slides_of.items():
        whole, each, *others = patient_logits(model, slides, chunk_size, without and len(slides) > 1)
        for level, names, found in (("patient", [patient], whole), ("slide", [slide.id for slide in slides], each)):
            if patients is None and level == "patient":
                continue
            new = {"level": [level] * len(names), "id": names, "patient": [patient] * len(names)}
            for name, column in columns.items():
                column += new[name]
            rows.append(found)
            rest += [*others[0].split(1)] if others and level == "slide" else [None] * len(names)
        for slide in slides:
            slide.close()
    answers = torch.cat(rows)
    if target is not None:
        streams = answers.unflatten(1, (-1, target.outputs))
        columns |= target.table(target.predict(streams))
    if target is not None and without:
        known = [x for x in rest if x is not None]
        streams = torch.cat(known).unflatten(1, (-1, target.outputs)) if known else streams[:0]
        for name, column in target.table(target.predict(streams)).items():
            values = iter(column)
            columns[f"without_{name}"] = [None if x is None else next(values) for x in rest]
    if logits or target is None:
        columns |= {f"logit_{number}": column for number, column in enumerate(answers.flatten(1).T.tolist())}
    return columns


def write_columns(path: Path, columns: Columns) -> None:
    """Write a table as .csv or .parquet, completely or not at all."""
    if path.suffix not in (".csv", ".parquet"):
        raise ConfigurationError(f"{path}: predictions are written to a .csv or .parquet file")
    with whole_or_nothing(path) as hidden:
        if path.suffix == ".parquet":
            need("pyarrow.parquet", "data").write_table(need("pyarrow", "data").table(columns), hidden)
            return
        with hidden.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))


def write_results(folder: Path, model: SetModel, target: Target, ids: Sequence[str], answers: Answers) -> None:
    """What a run leaves: predictions for its test bags, as a table and as tensors, and the model with its target."""
    write_columns(folder / PREDICTIONS, {"id": list(ids)} | target.truth(answers.values) | target.table(answers.predicted))
    with whole_or_nothing(folder / ANSWERS) as hidden:
        save_file({name: tensor.contiguous() for name, tensor in answers._asdict().items()}, hidden)
    write_atomically(folder / TARGET, json.dumps(target.to_dict()))
    with suppress(ConfigurationError):  # models whose builder is not known are in the run folder only
        model.save_pretrained(folder / MODEL, about={"target": target.to_dict()})


def read_target(folder: Path) -> Target:
    """The target of a run that is done, with its thresholds."""
    return target_from(read_options(folder / TARGET))


def read_answers(folder: Path) -> Answers:
    """The answers about the test bags of a run that is done."""
    with safe_open(folder / ANSWERS, "pt") as file:
        return Answers(file.get_tensor("predicted"), file.get_tensor("values"))
