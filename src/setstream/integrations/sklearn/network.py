"""The networks of the estimators: each standardises, reads a set in two streams, and predicts like its estimator.

    x --(x - mean) / scale, layers--> h --+-- W h + b, maximum over the set -------> a row of outputs: the elements' stream
                                          +-- UMBC, SAB, PMA on its slots ---------> a row of outputs: the set's stream

    classifier    mean over the streams of softmax(row)           one output per class
    regressor     mean over the streams of row · scale + mean     in the units of the targets
    featurizer    the input of the last layer of the set's stream

The means and scales are those of the elements and targets it was fitted on, and part of its weights: a fitted network takes raw
elements, in chunks, in a stream, on a server or in ONNX. The elements' branch is the one of multiple instance learning: a
set is of a class if one of its elements is. It has an output for each class, so that none of them is the "negative" one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from setstream.models.encoder import SetEncoder
from setstream.models.model import SetModel
from setstream.nn.mlp import mlp
from setstream.nn.set_transformer import set_transformer_head
from setstream.nn.standardise import Standardise
from setstream.pools import UMBC, DeepSets, Parallel, Projected


class StreamsHead(nn.Module):
    """A row of outputs for each stream, for the losses; subclasses turn them into the prediction."""

    def __init__(self, decoder: nn.Sequential) -> None:
        super().__init__()
        self.decoder = decoder

    def streams(self, z: Tensor | dict[str, Tensor]) -> Tensor:
        """(B, S, outputs): the elements' stream first where there is one, the set's last."""
        if isinstance(z, dict):
            return torch.stack([z["elements"], self.decoder(z["set"])], dim=1)
        return self.decoder(z).unsqueeze(1)


class ClassesHead(StreamsHead):
    """The probability of each class, (B, classes)."""

    def forward(self, z: Tensor | dict[str, Tensor]) -> Tensor:
        return mean_softmax(self.streams(z))


class NumbersHead(StreamsHead):
    """The numbers themselves, (B, outputs), in the units of the targets."""

    def __init__(self, decoder: nn.Sequential, outputs: int) -> None:
        super().__init__(decoder)
        self.mean, self.scale = nn.Buffer(torch.zeros(outputs)), nn.Buffer(torch.ones(outputs))

    def forward(self, z: Tensor | dict[str, Tensor]) -> Tensor:
        return self.streams(z).mean(1) * self.scale + self.mean


class FeaturesHead(StreamsHead):
    """The input of the last layer of the set's stream, (B, width)."""

    def forward(self, z: Tensor | dict[str, Tensor]) -> Tensor:
        return self.decoder[:-1](z["set"] if isinstance(z, dict) else z)


def mean_softmax(rows: Tensor) -> Tensor:
    """Probabilities (B, K) of rows (B, S, K): each stream has the same weight."""
    return rows.softmax(-1).mean(1)


def classifier(in_dim: int, classes: Sequence[Any], **options: Any) -> SetModel:
    """A network that returns the probability of each of `classes`, whose names are among its options."""
    return two_stream(in_dim, len(classes), ClassesHead, **options)


def regressor(in_dim: int, outputs: int = 1, **options: Any) -> SetModel:
    """A network that returns this many numbers."""
    return two_stream(in_dim, outputs, lambda decoder: NumbersHead(decoder, outputs), **options)


def featurizer(in_dim: int, outputs: int, **options: Any) -> SetModel:
    """A network that returns features, which were learned with this many outputs."""
    return two_stream(in_dim, outputs, FeaturesHead, **options)


def two_stream(
    in_dim: int,
    outputs: int,
    head: Callable[[nn.Sequential], StreamsHead],
    widths: Sequence[int] = (256, 128, 64),
    num_slots: int = 64,
    heads: int = 4,
    dropout: float = 0.5,
    elements_stream: bool = True,
) -> SetModel:
    """UMBC and a Set Transformer on its slots, beside the maximum of the elements' own outputs."""
    width = [in_dim, *widths][-1]
    phi = nn.Sequential(Standardise(in_dim), mlp([in_dim, *widths]))
    pool: Any = UMBC(width, num_slots, heads=heads, slots="learned")
    if elements_stream:
        pool = Parallel(elements=Projected(nn.Linear(width, outputs), DeepSets("max")), set=pool)
    return SetModel(SetEncoder(phi, pool), head(set_transformer_head(width, dropout=dropout, outputs=outputs)))


MODELS: dict[str, Callable[..., SetModel]] = {"classifier": classifier, "regressor": regressor, "featurizer": featurizer}
