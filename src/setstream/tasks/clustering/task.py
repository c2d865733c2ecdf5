"""Amortised clustering: from a set of points to the mixture that made it, in one pass.

    loss = - mean_j log Σ_k π_k N(x_j; μ_k, σ_k),     (π, μ, σ) = model(points)

No labels: the likelihood of the set's own points is the loss. Beside every NLL stands the oracle, that of the true parameters;
the gap between them is the score.
"""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from setstream.models.model import SetModel
from setstream.pools.base import AVERAGE
from setstream.tasks.clustering.mixtures import DiagonalMixture, Sample, negative_log_likelihood, sample
from setstream.tasks.clustering.models import MODELS, MixtureHead
from setstream.tasks.clustering.released import MODELS as RELEASED
from setstream.training.seeds import mix
from setstream.training.task import Batch, Encode, Task

TEST_BATCH = 100


class Clustering(Task):
    """Mixtures of `clusters` Gaussians in `dim` dimensions.

    points:       in a training set; test_points: in a test set.
    variant:      released or text (see `mixtures.py`).
    test_sets:    how many there are; a fifth of them while training goes on.
    test_chunk:   at test time, models that are not consistent see chunks of this size and average them.
    """

    name = "clustering"
    summary = "mixtures of Gaussians: from a set of points to the mixture that made it (NLL, gap to the oracle)"
    report = "setstream.tasks.clustering.report:add_evidence"
    models: ClassVar[dict[str, Callable[..., SetModel]]] = MODELS | RELEASED

    def __init__(
        self,
        points: int = 512,
        clusters: int = 4,
        dim: int = 2,
        variant: str = "released",
        test_points: int = 1024,
        test_sets: int = 1000,
        test_chunk: int = 8,
        test_seed: int = 1,
    ) -> None:
        self.points, self.clusters, self.dim, self.variant = points, clusters, dim, variant
        self.test_points, self.test_sets, self.test_chunk, self.test_seed = test_points, test_sets, test_chunk, test_seed
        self._tests: list[Sample] | None = None

    def build(self, model: str, **options: object) -> SetModel:
        """One of the models, for this number of clusters and dimensions."""
        return super().build(model, **({"clusters": self.clusters, "dim": self.dim} | options))

    def batch(self, step: int, size: int, generator: torch.Generator) -> Batch:
        """Fresh mixtures at every step."""
        points = self.points
        if self.variant == "text":
            points = int(torch.randint(self.points // 2, self.points + 1, (), generator=generator))
        return {"points": self.draw(size, points, generator).points}

    def loss(self, model: SetModel, batch: Batch, encode: Encode) -> Tensor:
        """The mean negative log-likelihood of what training sees of the sets."""
        x = encode.sees(batch["points"])
        head = model.head
        assert isinstance(head, MixtureHead)
        return negative_log_likelihood(*head.raw(encode(model.encoder, x)), x).mean()

    def tests(self) -> list[Sample]:
        """The test sets, in batches: the same for every model and seed."""
        if self._tests is None:
            starts = range(0, self.test_sets, TEST_BATCH)
            generators = [torch.Generator().manual_seed(mix(self.test_seed, start, 3)) for start in starts]
            sizes = [min(TEST_BATCH, self.test_sets - start) for start in starts]
            self._tests = [
                self.draw(size, self.test_points, generator) for size, generator in zip(sizes, generators, strict=True)
            ]
        return self._tests

    @torch.no_grad()
    def evaluate(self, model: SetModel, *, quick: bool = False) -> dict[str, float]:
        """NLL, oracle and gap; of models that are not consistent, given chunks, and beside it given whole sets."""
        tests = self.tests()[: max(1, len(self.tests()) // 5)] if quick else self.tests()
        oracle = torch.cat([test.oracle() for test in tests])
        nll = torch.cat([self.predict(model, test.points).nll(test.points.to(_device(model))).cpu() for test in tests])
        found = {"nll": float(nll.mean()), "oracle": float(oracle.mean()), "gap": float((nll - oracle).mean())}
        if len(nll) > 1:
            found["gap_error"] = float((nll - oracle).std() / len(nll) ** 0.5)
        if not model.encoder.pool.consistent:
            whole = [model(test.points.to(_device(model))).nll(test.points.to(_device(model))).cpu() for test in tests]
            found["nll_whole"] = float(torch.cat(whole).mean())
        return found

    @torch.no_grad()
    def predict(self, model: SetModel, points: Tensor) -> DiagonalMixture:
        """The mixtures of sets of points, given chunk by chunk."""
        stream = model.stream(chunks=AVERAGE)
        for chunk in points.to(_device(model)).split(self.test_chunk, dim=1):
            stream.update(chunk)
        mixture: DiagonalMixture = stream.predict()
        return mixture

    def draw(self, sets: int, points: int, generator: torch.Generator) -> Sample:
        """Sets of this task's kind."""
        return sample(sets, points, clusters=self.clusters, dim=self.dim, variant=self.variant, generator=generator)


def _device(model: SetModel) -> torch.device:
    return next(model.parameters()).device
