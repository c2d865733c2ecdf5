"""Saved models: folders in the layout of Hugging Face.

    folder/config.json          how the model is built: {"builder": "package.module:name", "options": {...}, ...}
           model.safetensors    its weights

A model is described by the function that builds it and its options, never by pickled code. Our builders are entries of a
`MODELS` mapping, like `setstream.tasks.mil.models:MODELS[ab-mil]`; models of `task.build` and `from_pretrained` know theirs.
Any function in a module can be a builder. Your own builders and backbones are called only if you name them again: a config.json
from elsewhere must not choose what code is run (`setstream._utils.import_path`), nor how much memory is used
(`setstream.models.weights`).
"""

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self, cast

import torch
from torch import nn

from setstream import __version__
from setstream._utils.atomic import write_atomically
from setstream._utils.import_path import find, named_by_file, place_of
from setstream._utils.optional import need
from setstream.errors import ConfigurationError
from setstream.models.weights import building, load_model, save_weights

CONFIG, WEIGHTS = "config.json", "model.safetensors"
FORMAT = 1
#: Options whose default was another one in 0.1, by builder. What 0.1 wrote does not say which version wrote it.
DEFAULTS_0_1: dict[str, dict[str, Any]] = {
    "setstream.tasks.mil.models:MODELS[sse]": {"normalise": False},
    "setstream.tasks.mil.models:MODELS[umbc+set-transformer]": {"layer_norm": True, "head_dropout": 0.5},
}
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

Builder = str | Callable[..., nn.Module]
Facts = dict[str, Any] | None
Dtype = torch.dtype | None


class Pretrained:
    """`save_pretrained`, `from_pretrained` and `push_to_hub` for a module."""

    #: (import path of the builder, its options), if they are known; they do not change what the module computes.
    _built: tuple[str, dict[str, Any]] | None = None

    def remember(self, builder: Builder, options: dict[str, Any]) -> Self:
        """Remember how this module was built, so that it can be saved without naming its builder."""
        try:
            plain = json.loads(json.dumps(options))
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"options are numbers, texts, lists and mappings, which JSON can hold: {error}") from error
        self._built = (_import_path(builder), plain)
        return self

    @property
    def options(self) -> dict[str, Any]:
        """The options that this module was built with, if they are known: a classifier's `classes`, for example."""
        return {} if self._built is None else dict(self._built[1])

    def save_pretrained(
        self,
        folder: str | Path,
        *,
        builder: Builder | None = None,
        options: Facts = None,
        about: Facts = None,
        dtype: Dtype = None,
    ) -> Path:
        """Write config.json and model.safetensors into a folder.

        Args:
            builder: `builder(**options)` returns this model with other weights; needed unless the model knows it.
            about: Anything else for config.json: steps, scores, a licence.
            dtype: The dtype of the weights in the file, torch.float16 to halve it; None: as they are.

        Example:
            >>> import setstream as ss
            >>> from setstream.tasks.clustering.models import MODELS
            >>> model = MODELS["deepsets"](dim=3)
            >>> with TemporaryDirectory() as folder:
            ...     place = model.save_pretrained(folder, builder=MODELS["deepsets"], options={"dim": 3})
            ...     again = ss.SetModel.from_pretrained(folder)
            >>> torch.equal(again(torch.ones(1, 9, 3)).means, model(torch.ones(1, 9, 3)).means)
            True
        """
        module = cast(nn.Module, self)
        if builder is not None:
            self.remember(builder, options or {})
        elif options is not None:
            raise ConfigurationError("options without a builder: name the function that takes them (builder=)")
        if self._built is None:
            raise ConfigurationError(
                "the builder of this model is not known: a model is saved as the function that builds it, and its "
                "options. Give save_pretrained(folder, builder=function, options={...}) a function in one of your modules, or "
                "build the model by name, with task.build(name, **options)"
            )
        place, known = self._built
        with torch.random.fork_rng(), building(known):
            again: nn.Module = find(place, "builder")(**known)
        if {n: t.shape for n, t in again.state_dict().items()} != {n: t.shape for n, t in module.state_dict().items()}:
            raise ConfigurationError(
                f"{place} with {known} builds another model than this one: its weights have other names or shapes"
            )
        config = {"format": FORMAT, "library": "setstream", "version": __version__, "builder": place, "options": known}
        config["about"] = about or {}
        folder = Path(folder)
        save_weights(module, folder / WEIGHTS, dtype)
        write_atomically(folder / CONFIG, json.dumps(config, indent=2) + "\n")
        return folder

    @classmethod
    def from_pretrained(
        cls, place: str | Path, *, builder: Builder | None = None, trust: Iterable[str] = (), revision: str | None = None
    ) -> Self:
        """A saved model in eval mode.

        Args:
            place: A folder, or an id on the hub, `owner/name` (extra `hub`).
            builder: Your own function, instead of the one that config.json names.
            trust: Import paths outside setstream, package.module:name, that config.json may name.
            revision: The revision of a model on the hub.
        """
        folder = find_folder(place, revision)
        config = read_config(folder)
        named, options = config["builder"], config["options"]
        make = find(builder, "builder") if isinstance(builder, str) else builder
        weights, trusted = folder / WEIGHTS, bool(make or trust)
        with torch.random.fork_rng(), named_by_file(folder / CONFIG, trust):
            model: Any = load_model(lambda: (make or find(named, "builder"))(**options), options, weights, trusted=trusted)
        if not isinstance(model, cls):
            raise ConfigurationError(f"{named} builds a {type(model).__name__}; expected a {cls.__name__}")
        model._built = (named, options)
        return model

    def push_to_hub(self, repo_id: str, *, private: bool = False, **options: Any) -> str:
        """Save this model on the hub (extra `hub`, and your own login); takes the options of `save_pretrained`."""
        api = need("huggingface_hub", "hub", "models on the hub").HfApi()
        with TemporaryDirectory() as folder:
            self.save_pretrained(folder, **options)
            api.create_repo(repo_id, private=private, exist_ok=True)
            return str(api.upload_folder(repo_id=repo_id, folder_path=folder))


def _import_path(builder: Builder) -> str:
    if isinstance(builder, str):
        find(builder, "builder")
        return builder
    models = vars(sys.modules[builder.__module__]).get("MODELS", {})
    key = next((name for name, entry in models.items() if entry is builder), None) if isinstance(models, dict) else None
    place = place_of(builder, key)
    if place is None:
        raise ConfigurationError(
            f"{getattr(builder, '__qualname__', builder)} cannot be found again by another process: a builder is a function at "
            "the top of a module that can be imported, not of a script or inside another function"
        )
    return place


def find_folder(place: str | Path, revision: str | None = None) -> Path:
    """The folder of a saved model: this one, or a copy of one on the hub."""
    folder = Path(place)
    if folder.is_dir():
        return folder
    if not (isinstance(place, str) and HUB_ID.fullmatch(place)):
        raise ConfigurationError(f"there is no folder {place}, and it is not the id of a model on the hub (owner/name)")
    hub = need("huggingface_hub", "hub", "models on the hub")
    return Path(hub.snapshot_download(place, revision=revision, allow_patterns=[CONFIG, WEIGHTS]))


def is_saved(folder: Path) -> bool:
    """Whether `save_pretrained` wrote this folder; a run's folder has a config.json of another kind."""
    try:
        return "builder" in json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def read_config(folder: Path) -> dict[str, Any]:
    """What config.json says: at least `builder`, `options` and `about`."""
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ConfigurationError(f"{folder} holds no saved model: there is no {name}")
    try:
        config = json.loads((folder / CONFIG).read_text())
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{folder / CONFIG} cannot be read: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("builder"), str):
        raise ConfigurationError(
            f"{folder / CONFIG} does not name the builder of the model. If this is the folder of a training run, read it with "
            "setstream.tasks.loading.open_model and save that model with save_pretrained"
        )
    if config.get("format", FORMAT) != FORMAT:
        raise ConfigurationError(f"{folder} was written by a newer setstream (format {config['format']!r}): update setstream")
    standard: dict[str, Any] = {"options": {}, "about": {}, "version": "0.1"}
    config = standard | config
    if not isinstance(config["options"], dict) or not isinstance(config["about"], dict):
        raise ConfigurationError(f"{folder / CONFIG} cannot be read: `options` and `about` are mappings")
    if str(config["version"]).startswith("0.1"):
        config["options"] = DEFAULTS_0_1.get(config["builder"], {}) | config["options"]
    return config
