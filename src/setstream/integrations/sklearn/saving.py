"""Fitted estimators in folders: the network as `SetModel.save_pretrained` writes it; the rest is in config.json, `about`."""

from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from setstream.errors import ConfigurationError
from setstream.integrations.sklearn.columns import TableColumns
from setstream.integrations.sklearn.network import EnsembleNumbers, NumbersHead
from setstream.models.model import SetModel
from setstream.models.pretrained import find_folder, read_config
from setstream.models.weights import building

Estimator = TypeVar("Estimator")
#: What else `fit` leaves, if it does.
FITTED = ("n_features_in_", "n_iter_", "loss_curve_", "validation_losses_", "_takes_tables", "_several", "_n_features_out")


def save_estimator(estimator: Any, folder: str | Path) -> Path:
    """Write a fitted estimator. A RandomState is not kept."""
    options = estimator.get_params()
    options["widths"] = [int(width) for width in options["widths"]]
    if not isinstance(options["random_state"], int | np.integer):
        options["random_state"] = None
    if isinstance(options.get("class_weight"), dict):  # keys of JSON are texts
        options["class_weight"] = list(options["class_weight"].items())
    fitted = {name: vars(estimator)[name] for name in FITTED if name in vars(estimator)}
    objects = getattr(estimator, "classes_", np.zeros(0)).dtype.kind == "O"
    names = [str(name) for name in getattr(estimator, "feature_names_in_", [])]
    about = {"estimator": type(estimator).__name__, "params": _plain(options), "fitted": _plain(fitted), "names": names}
    return estimator.model_.save_pretrained(folder, about=about | {"objects": objects})


def load_estimator(kind: type[Estimator], place: str | Path, revision: str | None) -> Estimator:
    """A fitted estimator of this class. The file is not trusted."""
    folder = find_folder(place, revision)
    about = read_config(folder)["about"]
    if about.get("estimator") != kind.__name__:
        found = about.get("estimator", "a model without its estimator, which ss.SetModel.from_pretrained reads")
        raise ConfigurationError(f"{folder} holds {found}; expected a {kind.__name__}")
    model = SetModel.from_pretrained(folder)
    with building(about):
        options = dict(about["params"])
        if isinstance(options.get("class_weight"), list):
            options["class_weight"] = dict(options["class_weight"])
        estimator: Any = kind(**options)
        if not str(model._built and model._built[0]).endswith(f"sklearn.network:MODELS[{estimator._network}]"):
            raise ConfigurationError(f"{folder} names another network than that of a {kind.__name__}")
        vars(estimator).update({name: about["fitted"][name] for name in FITTED if name in about["fitted"]})
        estimator.n_features_in_, estimator.model_ = int(model.options["in_dim"]), model
        columns = model.options.get("columns")
        if names := tuple(map(str, about["names"])):
            estimator.feature_names_in_ = np.array(names, object)
        if columns is not None and columns["names"]:
            estimator._columns = TableColumns(names, tuple(map(tuple, columns["categories"])))
        if "classes" in model.options:
            estimator.classes_ = np.array(model.options["classes"], dtype=object if about["objects"] else None)
        if isinstance(model.head, NumbersHead | EnsembleNumbers):
            estimator.target_mean_, estimator.target_scale_ = (
                number.numpy().astype(np.float64) for number in (model.head.mean, model.head.scale)
            )
    return estimator


def _plain(value: Any) -> Any:
    """numpy's numbers and arrays as Python's."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
