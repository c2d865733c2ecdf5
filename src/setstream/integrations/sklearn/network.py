"""The networks of the estimators: each standardises, reads a set in several streams, and predicts like its estimator::

    x --(x - mean) / scale--+-- Moments, Shares -+- t -- W t + b ----------> the linear stream of the statistics
                            |                    +- layers of a member ----> the bent stream of the statistics
                            +-- layers of a member --> h --+-- W h + b, maximum over the set --> the elements' stream
                                                           +-- UMBC, PMA on its slots ---------> the set's stream

    rows_s = mean over the members of log softmax (classifier), or of the outputs (regressor), of stream s
    y = Σ_s trust_s rows_s + offset      classifier: softmax(y); regressor: y · scale + mean, in the units of the targets

Of a table, "(x - mean) / scale" also replaces missing values and reads categories (`columns`).
Means, scales, trust and offset are part of the weights: a fitted network takes raw elements, in chunks, in a stream, on a
server or in ONNX. The elements' stream is the one of multiple instance learning: a set is of a class if one of its elements
is. It has an output for each class, so that none of them is the "negative" one.

Networks without members (`two_stream`) are those of 0.1 and 0.2, and of `SetFeaturizer`: the last two streams, equally trusted.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from setstream.integrations.sklearn.columns import EMBEDDING, Embedded, MixedColumns
from setstream.models.encoder import SetEncoder
from setstream.models.model import SetModel
from setstream.nn.mlp import mlp
from setstream.nn.set_transformer import PMA, set_transformer_head
from setstream.nn.standardise import Standardise
from setstream.pools import UMBC, DeepSets, Moments, Parallel, Projected
from setstream.pools.base import Pool

#: Statistics farther than this many deviations from those of training are moved there.
FARTHEST = 8.0


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

    def probabilities(self, rows: Tensor) -> Tensor:
        """(B, classes) of rows (B, S, classes)."""
        return mean_softmax(rows)

    def forward(self, z: Tensor | dict[str, Tensor]) -> Tensor:
        return self.probabilities(self.streams(z))


class NumbersHead(StreamsHead):
    """The numbers themselves, (B, outputs), in the units of the targets."""

    def __init__(self, decoder: nn.Sequential, outputs: int) -> None:
        super().__init__(decoder)
        self.mean, self.scale = nn.Buffer(torch.zeros(outputs)), nn.Buffer(torch.ones(outputs))

    def numbers(self, rows: Tensor) -> Tensor:
        """(B, outputs) of rows (B, S, outputs)."""
        return rows.mean(1) * self.scale.to(rows) + self.mean.to(rows)

    def forward(self, z: Tensor | dict[str, Tensor]) -> Tensor:
        return self.numbers(self.streams(z))


class FeaturesHead(StreamsHead):
    """The input of the last layer of the set's stream, (B, width)."""

    def forward(self, z: Tensor | dict[str, Tensor]) -> Tensor:
        return self.decoder[:-1](z["set"] if isinstance(z, dict) else z)


def mean_softmax(rows: Tensor) -> Tensor:
    """Probabilities (B, K) of rows (B, S, K): each stream has the same weight."""
    return rows.softmax(-1).mean(1)


class Beside(nn.Module):
    """[x, branch_1(x), ..., branch_M(x)] side by side."""

    def __init__(self, branches: Sequence[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, *(branch(x) for branch in self.branches)], -1)


class Columns(nn.Module):
    """The columns from `first` to `first + width`."""

    def __init__(self, first: int, width: int) -> None:
        super().__init__()
        self.first, self.out_features = first, width

    def forward(self, x: Tensor) -> Tensor:
        return x[..., self.first : self.first + self.out_features]


class Shares(nn.Module):
    """Where an element lies in each of the first columns; the means over a set are the shares of it above each level::

    σ((x - level_k) / width_k)          level_k: a quantile over all elements; width_k: a quarter of the way to the next
    """

    QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
    NARROWEST = 0.02  # of a width; of columns with few values, levels may be equal

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns, self.out_features = columns, len(self.QUANTILES) * columns
        self.level = nn.Buffer(torch.zeros(len(self.QUANTILES), columns))
        self.width = nn.Buffer(torch.ones(len(self.QUANTILES), columns))

    @torch.no_grad()
    def fit(self, rows: Tensor) -> None:
        """Take the levels from elements (N, columns)."""
        level = rows.sort(dim=0).values[[round(share * (len(rows) - 1)) for share in self.QUANTILES]]
        self.level.copy_(level)
        self.width.copy_((torch.gradient(level, dim=0)[0] / 4).clamp(min=self.NARROWEST))

    def forward(self, x: Tensor) -> Tensor:
        x = x[..., : self.columns].unsqueeze(-2)
        return ((x - self.level) / self.width).sigmoid().flatten(-2)


class MemberHead(nn.Module):
    """One member's rows of outputs, (B, S, outputs): the statistics, the elements (where there is that stream), the set."""

    def __init__(self, statistics: int, width: int, outputs: int, dropout: float) -> None:
        super().__init__()
        hidden = max(width, 2 * outputs)
        layers = (nn.Linear(statistics, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, outputs))
        self.statistics = nn.Sequential(nn.Dropout(dropout / 2), *layers)
        pooled = (nn.Dropout(dropout), PMA(width, layer_norm=True), nn.Flatten(1), nn.Dropout(dropout))
        self.decoder = nn.Sequential(*pooled, nn.Linear(width, outputs))

    def forward(self, z: dict[str, Tensor], t: Tensor) -> Tensor:
        elements = [z["elements"]] if "elements" in z else []
        return torch.stack([self.statistics(t), *elements, self.decoder(z["set"])], dim=1)


def statistics_of(z: dict[str, Any]) -> Tensor:
    """t, (B, statistics): moments and shares."""
    return torch.cat([z["statistics"], z["shares"]], -1)


class EnsembleHead(nn.Module):
    """All streams of all members, weighed by how much each is trusted; subclasses say what a row of outputs is."""

    def __init__(self, statistics: int, width: int, outputs: int, streams: int, members: int, dropout: float) -> None:
        super().__init__()
        self.centre, self.spread = nn.Buffer(torch.zeros(statistics)), nn.Buffer(torch.ones(statistics))
        self.linear = nn.Linear(statistics, outputs)
        self.members = nn.ModuleList(MemberHead(statistics, width, outputs, dropout) for _ in range(members))
        self.trust, self.offset = nn.Buffer(torch.full((streams,), 1.0 / streams)), nn.Buffer(torch.zeros(outputs))

    @staticmethod
    def normalise(rows: Tensor) -> Tensor:
        """Outputs (..., outputs) in the scale in which they are averaged."""
        return rows

    def standardised(self, t: Tensor) -> Tensor:
        """Statistics in units of their spread over the sets of training, and never far from them."""
        return ((t - self.centre) / self.spread).clamp(-FARTHEST, FARTHEST)

    def streams(self, z: dict[str, Any]) -> Tensor:
        """(B, S, outputs): the linear path, then the mean over the members of each of their streams."""
        t = self.standardised(statistics_of(z))
        rows = [self.normalise(member(z[f"member{number}"], t)) for number, member in enumerate(self.members)]
        return torch.cat([self.normalise(self.linear(t)).unsqueeze(1), torch.stack(rows).mean(0)], dim=1)

    def combined(self, rows: Tensor) -> Tensor:
        """Σ_s trust_s rows_s + offset: (B, outputs)."""
        return (rows * self.trust.to(rows).unsqueeze(-1)).sum(1) + self.offset.to(rows)


class EnsembleClasses(EnsembleHead):
    """The probability of each class, (B, classes)."""

    @staticmethod
    def normalise(rows: Tensor) -> Tensor:
        return rows.log_softmax(-1)

    def probabilities(self, rows: Tensor) -> Tensor:
        """(B, classes) of rows (B, S, classes)."""
        return self.combined(rows).softmax(-1)

    def forward(self, z: dict[str, Any]) -> Tensor:
        return self.probabilities(self.streams(z))


class EnsembleNumbers(EnsembleHead):
    """The numbers themselves, (B, outputs), in the units of the targets."""

    def __init__(self, statistics: int, width: int, outputs: int, *options: Any) -> None:
        super().__init__(statistics, width, outputs, *options)
        self.mean, self.scale = nn.Buffer(torch.zeros(outputs)), nn.Buffer(torch.ones(outputs))

    def numbers(self, rows: Tensor) -> Tensor:
        """(B, outputs) of rows (B, S, outputs)."""
        return self.combined(rows) * self.scale.to(rows) + self.mean.to(rows)

    def forward(self, z: dict[str, Any]) -> Tensor:
        return self.numbers(self.streams(z))


def classifier(in_dim: int, classes: Sequence[Any], members: int | None = None, **options: Any) -> SetModel:
    """A network that returns the probability of each of `classes`, whose names are among its options."""
    if members is not None:
        return ensemble(in_dim, len(classes), EnsembleClasses, members, **options)
    return two_stream(in_dim, len(classes), ClassesHead, **options)


def regressor(in_dim: int, outputs: int = 1, members: int | None = None, **options: Any) -> SetModel:
    """A network that returns this many numbers."""
    if members is not None:
        return ensemble(in_dim, outputs, EnsembleNumbers, members, **options)
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
    columns: dict[str, Any] | None = None,
) -> SetModel:
    """UMBC and a Set Transformer on its slots, beside the maximum of the elements' own outputs."""
    first = first_layer(in_dim, columns)
    width, phi = last_width(first, widths), nn.Sequential(first, element_layers(first, widths))
    pools = streams_of(width, outputs, num_slots, heads, elements_stream)
    pool = Parallel(**pools) if elements_stream else pools["set"]
    return SetModel(SetEncoder(phi, pool), head(set_transformer_head(width, dropout=dropout, outputs=outputs)))


def first_layer(in_dim: int, columns: dict[str, Any] | None) -> Standardise:
    """The layer that standardises; `columns`: the options of `MixedColumns`, for a table."""
    return Standardise(in_dim) if columns is None else MixedColumns(in_dim, **columns)


def element_layers(first: Standardise, widths: Sequence[int]) -> nn.Sequential:
    """The layers after the first one, which read one element at a time."""
    if not isinstance(first, MixedColumns) or not first.tables:
        return mlp([first.out_features, *widths])
    embedded = Embedded(len(first.mean), first.tables)
    return nn.Sequential(embedded, *mlp([embedded.out_features, *widths]))


def last_width(first: Standardise, widths: Sequence[int]) -> int:
    """The width of what `element_layers` returns."""
    tables = first.tables if isinstance(first, MixedColumns) else []
    return [len(first.mean) + EMBEDDING * len(tables), *widths][-1]


def streams_of(
    width: int, outputs: int, num_slots: int, heads: int, elements_stream: bool, fold: bool | None = None
) -> dict[str, Pool]:
    """The pools of the last two streams, over features of this width; `fold` as in UMBC."""
    elements = {"elements": Projected(nn.Linear(width, outputs), DeepSets("max"))} if elements_stream else {}
    return elements | {"set": UMBC(width, num_slots, heads=heads, slots="learned", fold=fold)}


def ensemble(
    in_dim: int,
    outputs: int,
    head: type[EnsembleHead],
    members: int,
    widths: Sequence[int] = (128, 64),
    num_slots: int = 16,
    heads: int = 4,
    dropout: float = 0.5,
    elements_stream: bool = True,
    columns: dict[str, Any] | None = None,
) -> SetModel:
    """Statistics of the elements beside `members` networks. Without the elements' stream there are no extrema either."""
    first = first_layer(in_dim, columns)
    width, numbers = last_width(first, widths), len(first.mean)
    moments = Moments(extrema=elements_stream, in_dim=numbers)
    phi = nn.Sequential(first, Beside([element_layers(first, widths) for _ in range(members)]))
    shares = Shares(numbers)
    pools: dict[str, Pool] = {
        "statistics": Projected(Columns(0, numbers), moments),
        "shares": Projected(shares, DeepSets("mean")),
    }
    for number in range(members):
        # Folded, a set of four elements would cost as much as one of fifty.
        own = Parallel(**streams_of(width, outputs, num_slots, heads, elements_stream, fold=False))
        pools[f"member{number}"] = Projected(Columns(first.out_features + number * width, width), own)
    streams = 3 + elements_stream
    statistics = moments.out_dim(numbers) + shares.out_features
    return SetModel(SetEncoder(phi, Parallel(**pools)), head(statistics, width, outputs, streams, members, dropout))


MODELS: dict[str, Callable[..., SetModel]] = {"classifier": classifier, "regressor": regressor, "featurizer": featurizer}
