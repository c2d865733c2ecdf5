"""What all tasks share: models by name, the trained ones that are shipped with the package, and predictions in chunks."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from setstream.errors import ConfigurationError
from setstream.models.model import SetModel
from setstream.pools.base import AVERAGE

Builder = Callable[..., SetModel]


class RenamedModels(dict[str, Builder]):
    """A task's models by name. The names in `renamed` still work, with a DeprecationWarning, and are not listed."""

    def __init__(self, models: Mapping[str, Builder], renamed: Mapping[str, str]) -> None:
        super().__init__(models)
        self.renamed = renamed

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self.renamed

    def __missing__(self, name: str) -> Builder:
        if name not in self.renamed:
            raise KeyError(name)
        message = f"the model {name!r} is now called {self.renamed[name]!r}; the old name will be removed in version 0.3"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return self[self.renamed[name]]


class Masked(nn.Module):
    """Set functions one after another, each with the mask that it needs."""

    def __init__(self, modules: nn.Sequential) -> None:
        super().__init__()
        self.modules_ = modules

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for module in self.modules_:
            x = module(x, mask)
        return x


def variants(build: Builder, parts: Mapping[str, Callable[..., Any]]) -> dict[str, Builder]:
    """Models that differ in one part: `build(part, **options)` for each, with the name and docstring of the part."""
    models: dict[str, Builder] = {}
    for name, part in parts.items():
        models[name] = update_wrapper(partial(build, part), part.func if isinstance(part, partial) else part)
        models[name].__module__ = build.__module__
    return models


def check_passes(passes: int) -> None:
    """Raise ConfigurationError unless a model reads its sets at least once."""
    if passes < 1:
        raise ConfigurationError(f"passes is how often a set is read, at least 1; got {passes}")


class ShippedModels:
    """The trained models of a task that come with the package: those that have a folder weights/NAME beside its modules.

    The folders are written by `save_pretrained` in half precision; `about` in their config.json holds the model's scores.

    >>> from setstream.tasks import clustering, completion
    >>> points = torch.randn(1, 1000, 2)
    >>> clustering.pretrained("umbc+set-transformer")(points).log_prob(points).shape
    torch.Size([1, 1000])
    >>> pixels = torch.cat([torch.rand(1, 90, 2), torch.ones(1, 90, 3)], -1)  # ninety white pixels at random places
    >>> bool(completion.pretrained("umbc+set-transformer")(pixels).at(completion.places(32, 32)[None]).mean.mean() > 0.8)
    True
    """

    def __init__(self, module: str, models: Mapping[str, Builder]) -> None:
        self.folder, self.models = Path(module).parent / "weights", models

    def folder_of(self, name: str) -> Path:
        return self.folder / name.replace("+", "-")

    def available(self) -> list[str]:
        return [name for name in self.models if self.folder_of(name).is_dir()]

    def __call__(self, name: str) -> SetModel:
        """A trained model, in eval mode."""
        if name not in self.available():
            raise ConfigurationError(f"no weights of {name!r} are shipped: choose one of {', '.join(self.available())}")
        return SetModel.from_pretrained(self.folder_of(name))


def interval_ends(drawn: Mapping[str, Tensor], level: float) -> dict[str, float]:
    """The ends of bootstrap intervals, `NAME_low` and `NAME_high`, from the values (R,) of R draws."""
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    quantiles = {name: torch.nanquantile(values, ends).tolist() for name, values in drawn.items()}
    return {f"{name}_{end}": value for name in quantiles for end, value in zip(("low", "high"), quantiles[name], strict=True)}


@torch.no_grad()
def predict_in_chunks(model: SetModel, chunks: Iterable[Tensor]) -> Any:
    """The model's output after all chunks (B, n, ...) of its sets. Models that are not consistent average over the chunks."""
    stream, chunks = model.stream(chunks=AVERAGE), list(chunks)
    for number in range(model.encoder.passes):
        if number:
            stream.next_pass()
        for chunk in chunks:
            stream.update(chunk)
    return stream.predict()
