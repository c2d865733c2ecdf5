"""`setstream predict`: what a trained model says of bags in files, by slide and by patient."""

from pathlib import Path
from typing import Any

from setstream.cli.command import File, Text, Words, console
from setstream.data import open as open_sets
from setstream.errors import ConfigurationError, DataError
from setstream.models.model import SetModel
from setstream.models.pretrained import is_saved, read_config
from setstream.tasks.loading import open_model
from setstream.tasks.mil.bags import by_id, patients_of
from setstream.tasks.mil.predictions import MODEL, predict_table, write_columns
from setstream.tasks.mil.targets import Target, target_from


def open_classifier(model: str, **opening: Any) -> tuple[SetModel, Target | None]:
    """A trained model and its kind of labels, from a run folder or a saved model; None, if it was saved without one."""
    saved = Path(model) / MODEL if is_saved(Path(model) / MODEL) else Path(model)
    known = read_config(saved)["about"].get("target") if is_saved(saved) else None
    network = open_model(str(saved), **opening)
    return network, None if known is None else target_from(known)


def run_predict(
    model: str,
    data: Path,
    out: Path,
    patients: File,
    patient: str,
    device: str,
    builder: Text,
    trust: Words,
    **options: Any,
) -> None:
    """Write a table of predictions; `options` are those of `predict_table`."""
    network, target = open_classifier(model, device=device, builder=builder, trust=trust)
    if target is None and not options["logits"]:
        advice = "train it with `setstream train mil`, or give --logits"
        raise ConfigurationError(f"{model} does not say what its outputs mean: {advice}")
    sets = open_sets(data)
    of_slide = None if patients is None else patients_of(by_id(patients), patient, patients)
    if of_slide is not None and (missing := [name for name in sets.ids if name not in of_slide]):
        raise DataError(f"{patients}: has no row for {missing[:5]}")
    if options["without"] and of_slide is None:
        raise ConfigurationError("--without compares the slides of a patient: give the table of patients (--patients)")
    with console.status("predicting"):
        columns = predict_table(network, target, sets.sources, of_slide, **options)
    write_columns(out, columns)
    rows = {level: columns.get("level", ["slide"] * len(sets)).count(level) for level in ("slide", "patient")}
    console.print(", ".join(f"{count} {level}s" for level, count in rows.items() if count) + f": {out}", soft_wrap=True)
