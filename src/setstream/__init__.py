"""setstream: encode sets of any size, in any chunks, on any number of machines, to the same answer.

    elements --phi--> features --pool--> State --finalize--> k slots --head--> output

See `SetEncoder` for the three verbs (update, +, finalize), `UMBC` for the pool, `State` for what is kept.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from setstream._utils import moved

if TYPE_CHECKING:  # type checkers see the public names here
    from setstream import data as data
    from setstream import errors as errors
    from setstream import integrations as integrations
    from setstream import nn as nn
    from setstream import testing as testing
    from setstream.gradients.encode import encode as encode
    from setstream.gradients.streamed_loss import streamed_loss as streamed_loss
    from setstream.models import functional
    from setstream.models.encoder import SetEncoder as SetEncoder
    from setstream.models.model import SetModel as SetModel
    from setstream.models.stream import SetStream as SetStream
    from setstream.models.window import Window as Window
    from setstream.pools import DSMIL as DSMIL
    from setstream.pools import SSE as SSE
    from setstream.pools import UMBC as UMBC
    from setstream.pools import Activation as Activation
    from setstream.pools import ChunkMean as ChunkMean
    from setstream.pools import DeepSets as DeepSets
    from setstream.pools import GatedAttention as GatedAttention
    from setstream.pools import HierarchicalSSE as HierarchicalSSE
    from setstream.pools import Moments as Moments
    from setstream.pools import MultiPass as MultiPass
    from setstream.pools import Parallel as Parallel
    from setstream.pools import Projected as Projected
    from setstream.pools import SlotAttention as SlotAttention
    from setstream.pools.base import Pool as Pool
    from setstream.pools.base import given_slots as given_slots
    from setstream.sets.chunks import Chunks as Chunks
    from setstream.sets.chunks import scatter_sets as scatter_sets
    from setstream.states.state import State as State
    from setstream.stores.store import StateStore as StateStore

    pure = functional

__version__ = "0.2.0"

moved.install()

#: Where the public names are defined. They are imported at their first use (PEP 562): torch takes seconds to import, and the
#: help of the command line does not need it.
_MODULES = {
    "gradients.encode": ("encode",),
    "gradients.streamed_loss": ("streamed_loss",),
    "models.encoder": ("SetEncoder",),
    "models.model": ("SetModel",),
    "models.stream": ("SetStream",),
    "models.window": ("Window",),
    "pools": (
        *("DSMIL", "SSE", "UMBC", "Activation", "ChunkMean", "DeepSets", "GatedAttention", "HierarchicalSSE"),
        *("Moments", "MultiPass", "Parallel", "Projected", "SlotAttention"),
    ),
    "pools.base": ("Pool", "given_slots"),
    "sets.chunks": ("Chunks", "scatter_sets"),
    "states.state": ("State",),
    "stores.store": ("StateStore",),
}
_DEFINED_IN = {name: module for module, names in _MODULES.items() for name in names}
_PUBLIC_FOLDERS = ("data", "errors", "integrations", "nn", "testing")
_FOLDERS = {"bulk", *_PUBLIC_FOLDERS, *(module.partition(".")[0] for module in _MODULES)}
__all__ = sorted([*_DEFINED_IN, *_PUBLIC_FOLDERS, "pure"])

if not TYPE_CHECKING:  # type checkers read the imports above, and report names that do not exist

    def __getattr__(name: str) -> Any:
        if name in _DEFINED_IN:
            value = getattr(import_module(f"setstream.{_DEFINED_IN[name]}"), name)
        elif name in _FOLDERS:
            value = import_module(f"setstream.{name}")
        elif name == "pure":
            value = import_module("setstream.models.functional")
        else:
            raise AttributeError(f"module 'setstream' has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
