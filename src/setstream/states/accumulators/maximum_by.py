"""The features of the element with the largest score.

Of equal scores, the larger features win, compared one after another like words. This is a total order: which element wins does
not depend on the order of the elements, and elements that are equal in all of this have the same features.
"""

from typing import Self

import torch
from torch import Tensor

from setstream.states.accumulators.base import Accumulator, align


class MaximumBy(Accumulator):
    """The largest of each of C scores (B, C), -∞ without elements, and the features (B, C, D) of the element that has it.

    It merges, but does not support removal or decay.
    """

    kind = "maximum-by"
    owned_by_one_element = True

    @classmethod
    def of(cls, scores: Tensor, features: Tensor) -> Self:
        """The accumulator of elements with scores (B, n, C), at least -∞, and features (B, n, D)."""
        top, winners = scores.max(1)
        tied = (scores == top.unsqueeze(1)) & top.isfinite().unsqueeze(1)
        for row, column in (tied.sum(1) > 1).nonzero().tolist():  # seldom
            candidates = tied[row, :, column].nonzero().squeeze(1)
            _, places = features[row, candidates].detach().unique(dim=0, return_inverse=True)  # sorted like words
            winners[row, column] = candidates[places.argmax()]
        chosen = features.gather(1, winners.unsqueeze(-1).expand(-1, -1, features.shape[-1]))
        return cls(score=top, features=chosen)

    def _loses(self, other: Self) -> Tensor:
        """Where the winner is the other's: (B, C)."""
        features, others = self["features"], other["features"]
        first = (features != others).int().argmax(-1, keepdim=True)  # where they begin to differ
        larger = (others.gather(-1, first) > features.gather(-1, first)).squeeze(-1)
        return torch.where(self["score"] == other["score"], larger, other["score"] > self["score"])

    def merge(self, other: Self) -> Self:
        loses = self._loses(other)
        return type(self)(**{name: torch.where(align(loses, t), other[name], t) for name, t in self.tensors.items()})

    def graded(self) -> tuple[str, ...]:
        return ("features",)

    def contribution(self, whole: Self, owned: Tensor | None = None) -> dict[str, Tensor]:
        features = self["features"]
        return {"features": features if owned is None else features.masked_fill(~owned, 0.0)}

    def merge_owners(self, other: Self, owners: Tensor, other_owners: Tensor) -> Tensor:
        return torch.where(self._loses(other).unsqueeze(-1), other_owners, owners)

    def fault(self, seen: Tensor) -> str | None:
        score, features = self.tensors.get("score"), self.tensors.get("features")
        if score is None or features is None or features.shape[:-1] != score.shape:
            return "a largest score without the features of its element"
        right = torch.where(align(seen, score), score.isfinite(), score.isneginf())
        good = bool(right.all()) and bool(features.isfinite().all())
        return None if good else "a largest score or its features are not finite, or are of no elements"
