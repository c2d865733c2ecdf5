"""setstream: encode sets of any size, in any chunks, on any number of machines, to the same answer.

    elements --phi--> features --pool--> State --finalize--> k slots --head--> output

See `SetEncoder` for the three verbs (update, +, finalize), `UMBC` for the pool, `State` for what is kept.
"""

from setstream import data, errors, integrations, nn, testing
from setstream._utils import moved
from setstream.gradients.encode import encode
from setstream.gradients.streamed_loss import streamed_loss
from setstream.models import functional as pure
from setstream.models.encoder import SetEncoder
from setstream.models.model import SetModel
from setstream.models.stream import SetStream
from setstream.pools import SSE, UMBC, Activation, ChunkMean, DeepSets, HierarchicalSSE, Parallel, Projected
from setstream.pools.base import Pool
from setstream.sets.chunks import Chunks
from setstream.sets.scatter import scatter_sets
from setstream.states.state import State
from setstream.stores.store import StateStore

__version__ = "0.1.0"

moved.install()

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
