"""Which encoder made a state: a digest of its structure and weights, taken only when somebody asks.

    fingerprint = BLAKE2b(classes and options of all modules, (name, dtype, shape, bytes) of every parameter and buffer)

Hashing all weights at every update would cost more than many updates. An `Origin` remembers modules, tensors and their
version counters instead, and hashes the weights the first time that a fingerprint is needed: to save a state, or to compare it
with one from elsewhere. States of one encoder share one Origin, so merging them compares two pointers.

Some writers change weights behind the version counters (fused optimisers, `p.data`). So an Origin also keeps one number of each
tensor, and looks at it again after any optimiser has stepped and whenever a fingerprint is made.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from setstream.errors import MismatchError

_steps = 0


def _count_step(*_: Any) -> None:
    global _steps
    _steps += 1


register_optimizer_step_post_hook(_count_step)


def tensor_bytes(tensor: Tensor) -> bytes:
    """The raw bytes of a tensor, of any dtype, as they would lie in a file."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _things(module: nn.Module) -> Iterator[nn.Module | Tensor]:
    """Every submodule, followed by its own parameters and buffers."""
    for child in module.modules():
        yield child
        yield from (t for t in chain(child._parameters.values(), child._buffers.values()) if t is not None)


def _version(thing: nn.Module | Tensor) -> tuple[int, torch.dtype] | None:
    if isinstance(thing, nn.Module):
        return None
    return (0 if thing.is_inference() else thing._version), thing.dtype


def _probe(things: list[nn.Module | Tensor]) -> list[float]:
    """The last number of each tensor: any training step changes some of them."""
    last = [t.detach().reshape(-1)[-1:].cpu().double() for t in things if isinstance(t, Tensor) and t.numel() and not t.is_meta]
    return torch.cat(last).tolist() if last else []


def _options(module: nn.Module) -> dict[str, Any]:
    """The plain attributes of a module (a slope, a stride, an epsilon), or what a pool declares."""
    declared = getattr(module, "configuration", None)
    if callable(declared):
        return declared()
    plain = (bool, int, float, str, tuple, type(None))
    hidden = ("training", "check_finite", "cast_input")
    return {k: repr(v) for k, v in sorted(vars(module).items()) if k[0] != "_" and k not in hidden and isinstance(v, plain)}


def _digest(module: nn.Module) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for name, child in module.named_modules():
        hasher.update(json.dumps([name, type(child).__name__, _options(child)]).encode())
    for name, tensor in sorted(module.state_dict().items()):
        if isinstance(tensor, Tensor):
            hasher.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
            hasher.update(tensor_bytes(tensor))
    return hasher.hexdigest()


class Origin:
    """The weights of one module at one moment, or, for a loaded state, their digest alone."""

    def __init__(self, module: nn.Module | None, digest: str | None = None) -> None:
        self._module, self._digest = module, digest
        self._things = [] if module is None else list(_things(module))
        self._versions = [_version(thing) for thing in self._things]
        self._probe, self._steps = _probe(self._things), _steps

    def current(self, *, look: bool = False) -> bool:
        """Whether the module still is what it was when this origin was made; `look` at the numbers in any case."""
        if self._module is None:
            return False
        now = list(_things(self._module))
        if len(now) != len(self._things) or any(a is not b for a, b in zip(now, self._things, strict=True)):
            return False
        if [_version(thing) for thing in now] != self._versions:
            return False
        if look or self._steps != _steps:
            if _probe(now) != self._probe:
                return False
            self._steps = _steps
        return True

    @property
    def fingerprint(self) -> str:
        """The digest as hexadecimal text."""
        if self._module is not None and self._digest is None:
            if not self.current(look=True):
                raise MismatchError(
                    "the weights of the encoder changed after this state was made, so the state no longer belongs to it. "
                    "Encode the elements again with the new weights."
                )
            self._digest = _digest(self._module)
        assert self._digest is not None
        return self._digest

    @property
    def loaded(self) -> bool:
        """Whether this is a digest alone, of a state that came from elsewhere."""
        return self._module is None

    def same_as(self, other: Origin) -> bool:
        """Whether both stand for the same structure and weights."""
        return self is other or self.fingerprint == other.fingerprint
