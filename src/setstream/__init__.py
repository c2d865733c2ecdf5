"""setstream: encode sets of any size, in any chunks, on any number of machines, to the same answer.

    elements --phi--> features --pool--> State --finalize--> k slots --head--> output

See `SetEncoder` for the three verbs (update, +, finalize), `UMBC` for the pool, `State` for what is kept.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from setstream._utils import moved

if TYPE_CHECKING:
    from setstream import data, errors, integrations, nn, testing
    from setstream.gradients.encode import encode
    from setstream.gradients.streamed_loss import streamed_loss
    from setstream.models import functional as pure
    from setstream.models.encoder import SetEncoder
    from setstream.models.model import SetModel
    from setstream.models.stream import SetStream
    from setstream.models.window import Window
    from setstream.pools import (
        DSMIL,
        SSE,
        UMBC,
        Activation,
        ChunkMean,
        DeepSets,
        GatedAttention,
        HierarchicalSSE,
        Moments,
        MultiPass,
        Parallel,
        Projected,
        SlotAttention,
    )
    from setstream.pools.base import Pool, given_slots
    from setstream.sets.chunks import Chunks, scatter_sets
    from setstream.states.state import State
    from setstream.stores.store import StateStore

__version__ = "0.2.0"

moved.install()

__all__ = [
    "DSMIL",
    "SSE",
    "UMBC",
    "Activation",
    "ChunkMean",
    "Chunks",
    "DeepSets",
    "GatedAttention",
    "HierarchicalSSE",
    "Moments",
    "MultiPass",
    "Parallel",
    "Pool",
    "Projected",
    "SetEncoder",
    "SetModel",
    "SetStream",
    "SlotAttention",
    "State",
    "StateStore",
    "Window",
    "data",
    "encode",
    "errors",
    "given_slots",
    "integrations",
    "nn",
    "pure",
    "scatter_sets",
    "streamed_loss",
    "testing",
]

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
_FOLDERS = {
    "bulk",
    "data",
    "errors",
    "gradients",
    "integrations",
    "models",
    "nn",
    "pools",
    "sets",
    "states",
    "stores",
    "testing",
}

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
