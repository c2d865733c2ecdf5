"""Amortised clustering: from a set of points to the mixture they were drawn from, in one pass.

    loss = - mean_j log Σ_k π_k N(x_j; μ_k, σ_k),     (π, μ, σ) = model(points)

There are no labels: the likelihood of the set's own points is the loss. The score is the gap between the model's NLL and that
of the true parameters, the oracle.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from setstream.models.model import SetModel
from setstream.tasks.clustering.mixtures import DiagonalMixture, Sample, sample
from setstream.tasks.clustering.models import MODELS
from setstream.tasks.clustering.released import MODELS as RELEASED
from setstream.tasks.registry import RenamedModels, predict_in_chunks
from setstream.training.task import Batch, Encode, Task, mix

TEST_BATCH = 100


@dataclass(eq=False)
class Clustering(Task):
    """Mixtures of Gaussians.

    Args:
        variant: how mixtures are drawn, `released` or `text` (see `mixtures.py`).
        test_sets: the number of test sets; a fifth of them is used during training.
        test_chunk: points per chunk in a test. Models that are not consistent average over the chunks.
    """

    name = "clustering"
    summary = "mixtures of Gaussians: from a set of points to the mixture that made it (NLL, gap to the oracle)"
    report = "setstream.tasks.clustering.report:add_report"
    models = RenamedModels(MODELS | RELEASED, MODELS.renamed)

    points: int = 512
    clusters: int = 4
    dim: int = 2
    variant: str = "released"
    test_points: int = 1024
    test_sets: int = 1000
    test_chunk: int = 8
    test_seed: int = 1

    def build(self, model: str, **options: object) -> SetModel:
        return super().build(model, **({"clusters": self.clusters, "dim": self.dim} | options))

    def batch(self, step: int, size: int, generator: torch.Generator) -> Batch:
        """New mixtures at every step."""
        points = self.points
        if self.variant == "text":
            points = int(torch.randint(self.points // 2, self.points + 1, (), generator=generator))
        return {"points": self.draw(size, points, generator).points}

    def loss(self, model: SetModel, batch: Batch, encode: Encode) -> Tensor:
        x = encode.sees(batch["points"])
        return model.head(encode(model.encoder, x)).nll(x).mean()

    @cached_property
    def tests(self) -> list[Sample]:
        """The test sets, in batches: the same for every model and seed."""
        sizes = {start: min(TEST_BATCH, self.test_sets - start) for start in range(0, self.test_sets, TEST_BATCH)}
        seeds = {start: torch.Generator().manual_seed(mix(self.test_seed, start, 3)) for start in sizes}
        return [self.draw(size, self.test_points, seeds[start]) for start, size in sizes.items()]

    def evaluate(self, model: SetModel, *, quick: bool = False) -> dict[str, float]:
        """NLL, oracle and gap, with sets in chunks; for models that are not consistent, also the NLL with whole sets."""
        tests = self.tests[: max(1, len(self.tests) // 5)] if quick else self.tests
        nll, oracle = self.nll(model, tests), torch.cat([test.oracle() for test in tests])
        metrics = {"nll": float(nll.mean()), "oracle": float(oracle.mean()), "gap": float((nll - oracle).mean())}
        if len(nll) > 1:
            metrics["gap_error"] = float((nll - oracle).std() / len(nll) ** 0.5)
        if not model.encoder.pool.consistent:
            metrics["nll_whole"] = float(self.nll(model, tests, chunk=self.test_points).mean())
        return metrics

    @torch.no_grad()
    def nll(self, model: SetModel, tests: list[Sample], chunk: int | None = None) -> Tensor:
        """The NLL of each test set's points under the model's mixture; `chunk`: see `predict`."""
        device = model.encoder.device
        return torch.cat([self.predict(model, test.points, chunk).nll(test.points.to(device)) for test in tests]).cpu()

    def predict(self, model: SetModel, points: Tensor, chunk: int | None = None) -> DiagonalMixture:
        """The mixtures of sets of points (B, N, D), given in chunks of `test_chunk` points, or of `chunk`."""
        return predict_in_chunks(model, points.to(model.encoder.device).split(chunk or self.test_chunk, dim=1))

    def draw(self, sets: int, points: int, generator: torch.Generator) -> Sample:
        """Sets of this task's kind."""
        return sample(sets, points, clusters=self.clusters, dim=self.dim, variant=self.variant, generator=generator)
