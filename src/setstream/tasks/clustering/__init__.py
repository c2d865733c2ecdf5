"""Amortised clustering of mixtures of Gaussians: the paper's first experiment."""

from setstream.tasks.clustering.em import refined
from setstream.tasks.clustering.mixtures import DiagonalMixture, Sample, log_likelihood, sample
from setstream.tasks.clustering.models import pretrained
from setstream.tasks.clustering.task import Clustering

__all__ = ["Clustering", "DiagonalMixture", "Sample", "log_likelihood", "pretrained", "refined", "sample"]
