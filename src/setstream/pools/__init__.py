"""Pools whose states add up, so that sets can be streamed; one module per pool."""

from setstream.pools.activations import ACTIVATIONS, Activation
from setstream.pools.chunk_mean import ChunkMean
from setstream.pools.deepsets import DeepSets
from setstream.pools.moments import Moments
from setstream.pools.parallel import Parallel
from setstream.pools.projected import Projected
from setstream.pools.sse import SSE, HierarchicalSSE
from setstream.pools.umbc import UMBC

__all__ = [
    "ACTIVATIONS",
    "SSE",
    "UMBC",
    "Activation",
    "ChunkMean",
    "DeepSets",
    "HierarchicalSSE",
    "Moments",
    "Parallel",
    "Projected",
]
