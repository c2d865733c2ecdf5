"""Pools whose states add up, so that sets can be streamed; one module per pool."""

from setstream.pools.activations import ACTIVATIONS, Activation
from setstream.pools.chunk_mean import ChunkMean
from setstream.pools.deepsets import DeepSets
from setstream.pools.ds_mil import DSMIL
from setstream.pools.gated_attention import GatedAttention
from setstream.pools.moments import Moments
from setstream.pools.multi_pass import MultiPass, SlotAttention
from setstream.pools.parallel import Parallel
from setstream.pools.projected import Projected
from setstream.pools.sse import SSE, HierarchicalSSE
from setstream.pools.umbc import UMBC

__all__ = [
    "ACTIVATIONS",
    "DSMIL",
    "SSE",
    "UMBC",
    "Activation",
    "ChunkMean",
    "DeepSets",
    "GatedAttention",
    "HierarchicalSSE",
    "Moments",
    "MultiPass",
    "Parallel",
    "Projected",
    "SlotAttention",
]
