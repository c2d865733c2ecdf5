"""setstream: encode sets of any size, in any chunks, on any number of machines, to the same answer.

    elements --phi--> features --pool--> State --finalize--> k slots --head--> output

See `SetEncoder` for the three verbs (update, +, finalize), `UMBC` for the pool, `State` for what is kept.
"""

from setstream import data, errors, integrations, nn, pure, testing
from setstream.encode import encode
from setstream.encoder import SetEncoder
from setstream.model import SetModel
from setstream.partition import Chunks
from setstream.pool import Pool
from setstream.pools import SSE, UMBC, Activation, ChunkMean, DeepSets, HierarchicalSSE, Parallel, Projected
from setstream.scale import scatter_sets
from setstream.state import State
from setstream.store import StateStore
from setstream.stream import SetStream
from setstream.streamed_loss import streamed_loss

__version__ = "0.1.0"

__all__ = [
    "SSE",
    "UMBC",
    "Activation",
    "ChunkMean",
    "Chunks",
    "DeepSets",
    "HierarchicalSSE",
    "Parallel",
    "Pool",
    "Projected",
    "SetEncoder",
    "SetModel",
    "SetStream",
    "State",
    "StateStore",
    "data",
    "encode",
    "errors",
    "integrations",
    "nn",
    "pure",
    "scatter_sets",
    "streamed_loss",
    "testing",
]
