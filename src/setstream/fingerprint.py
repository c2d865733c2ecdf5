"""Which encoder made a state: a digest of its structure and weights, taken only when somebody asks.

    fingerprint = BLAKE2b(class names, pool configuration, (name, dtype, shape, bytes) of every parameter and buffer)

Hashing all weights at every update would cost more than many updates. An `Origin` remembers the version counters of
the weights instead, and hashes them the first time that a fingerprint is needed: to save a state, or to compare it with
one from elsewhere. States of one encoder share one Origin, so merging them compares two pointers.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor, nn

from setstream.errors import MismatchError


def tensor_bytes(tensor: Tensor) -> bytes:
    """The raw bytes of a tensor, of any dtype, as they would lie in a file."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _weights(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(), module.buffers())


def _digest(module: nn.Module) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for name, child in module.named_modules():
        configuration = getattr(child, "configuration", None)
        options = configuration() if callable(configuration) else None
        hasher.update(json.dumps([name, type(child).__name__, options]).encode())
    for name, tensor in sorted(module.state_dict().items()):
        if isinstance(tensor, Tensor):
            hasher.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
            hasher.update(tensor_bytes(tensor))
    return hasher.hexdigest()


class Origin:
    """The weights of one module at one moment, or, for a loaded state, their digest alone."""

    def __init__(self, module: nn.Module | None, digest: str | None = None) -> None:
        self._module = module
        self._digest = digest
        self._seen = [] if module is None else [(weakref.ref(t), t._version, t.dtype) for t in _weights(module)]

    def current(self) -> bool:
        """Whether the module still has the weights that it had when this origin was made."""
        if self._module is None:
            return False
        now = list(_weights(self._module))
        return len(now) == len(self._seen) and all(
            ref() is tensor and version == tensor._version and dtype == tensor.dtype
            for tensor, (ref, version, dtype) in zip(now, self._seen, strict=True)
        )

    @property
    def fingerprint(self) -> str:
        """The digest as hexadecimal text."""
        if self._digest is None:
            if self._module is None or not self.current():
                raise MismatchError(
                    "the weights of the encoder changed after this state was made, so the state no longer belongs to it. "
                    "Encode the elements again with the new weights."
                )
            self._digest = _digest(self._module)
        return self._digest

    def same_as(self, other: Origin) -> bool:
        """Whether both stand for the same structure and weights."""
        return self is other or self.fingerprint == other.fingerprint
