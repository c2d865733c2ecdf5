"""Which encoder made a state: a digest of all that it computes with, computed only when it is needed.

    fingerprint = "2:" + the digest of `digest.py`

Hashing all weights at every update would cost more than many updates. An `Origin` remembers what it saw instead: objects by
identity, tensors by their version counters, plain values as they are. It hashes the first time that a fingerprint is needed:
to save a state, or to compare it with one from elsewhere. States of one encoder share one Origin, so merging them compares two
pointers.

Some writers change weights behind the version counters (fused optimisers, `p.data`). So an Origin also keeps one number of each
tensor, and looks at it again after any optimiser has stepped and whenever a fingerprint is made.
"""

import functools
import operator
import types
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from setstream.errors import MismatchError
from setstream.states.accumulators import accumulator_dtype
from setstream.states.compat import fingerprint_0_1
from setstream.states.digest import IDLE, PLAIN, ModuleDigest, attributes, contents

VERSION = "2:"
OPAQUE = (Mapping, set, frozenset, np.ndarray, functools.partial)  # whose contents are not watched
_steps = 0


def _count_step(*_: Any) -> None:
    global _steps
    _steps += 1


register_optimizer_step_post_hook(_count_step)


class _Seen:
    """A cheap summary of what a module computes with: equal values as long as it has not changed."""

    def __init__(self, module: nn.Module) -> None:
        self.tensors: list[Tensor] = []
        self._inside: dict[int, tuple[Any, Any]] = {}  # values, which keeps their ids unique, and summaries
        self.values = {name: self._glance(value) for name, value in contents(module)}

    def _glance(self, value: Any) -> Any:
        if type(value) in PLAIN:
            return type(value), value
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return id(value), 0 if value.is_inference() else value._version, value.dtype
        if id(value) in self._inside:
            return self._inside[id(value)][1]
        self._inside[id(value)] = value, id(value)  # it may contain itself
        summary: Any = id(value)
        if isinstance(value, list | tuple):
            summary = tuple(self._glance(item) for item in value)
        elif isinstance(value, Mapping):
            summary = tuple((self._glance(key), self._glance(item)) for key, item in value.items())
        elif isinstance(value, set | frozenset):
            summary = frozenset(self._glance(item) for item in value)
        elif isinstance(value, np.ndarray):
            summary = id(value), zlib.crc32(value.tobytes())
        elif isinstance(value, nn.Module):
            summary = id(value), tuple((name, self._glance(item)) for name, item in contents(value))
        elif isinstance(value, functools.partial):
            summary = id(value), self._glance((value.func, value.args, value.keywords))
        elif not isinstance(value, (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, *IDLE)):
            summary = id(value), tuple((name, self._glance(item)) for name, item in attributes(value))
        self._inside[id(value)] = value, summary
        return summary


class _Watch:
    """Which objects the names of a module had: that nothing was assigned since is seen faster than by a new summary.

    For modules whose attributes are plain values, tensors, functions, or objects and lists of these; others are not `simple`.
    """

    def __init__(self, module: nn.Module) -> None:
        self.simple, self.tensors = True, list[Tensor]()
        self._dicts, self._named = list[Any](), list[Any]()  # all containers, and those that are not empty
        self._names, self._values = list[Callable[[Any], Any]](), list[Any]()
        for child in module.modules():
            special = isinstance(child, torch.jit.ScriptModule | torch.fx.GraphModule) or "<locals>" in type(child).__qualname__
            self.simple = self.simple and not (special or child._forward_hooks or child._forward_pre_hooks)
            if not self.simple:
                break
            self._watch(vars(child), [name for name, _ in attributes(child)])
            for part in (child._parameters, child._buffers, child._modules, child._forward_hooks, child._forward_pre_hooks):
                self._watch(part, [*part])
        self._lengths = [*map(len, self._dicts)]
        self._versions = self._now()

    def _watch(self, container: Any, names: list[Any]) -> None:
        values = tuple(container[name] for name in names)
        self._dicts.append(container)
        if names:
            self._names.append(operator.itemgetter(*names, names[0]))  # of two names or more, it gives a tuple
            self._named.append(container)
            self._values += [*values, values[0]]
        for value in values:
            if isinstance(value, Tensor):
                self.tensors.append(value)
            elif isinstance(value, list | tuple):
                self._watch(value, [*range(len(value))])
            elif isinstance(value, OPAQUE) or hasattr(type(value), "__slots__"):
                self.simple = False
            elif not isinstance(value, (*PLAIN, type, types.FunctionType, types.BuiltinFunctionType, nn.Module, *IDLE)):
                self.simple &= hasattr(value, "__dict__")
                if self.simple:
                    self._watch(vars(value), [name for name, _ in attributes(value)])

    def unchanged(self) -> bool:
        """Whether every name still has the same object, and every tensor its version."""
        if not self.simple or [*map(len, self._dicts)] != self._lengths:
            return False
        with suppress(KeyError, IndexError):
            now = chain.from_iterable(map(operator.call, self._names, self._named))
            return all(map(operator.is_, now, self._values)) and self._now() == self._versions
        return False

    def _now(self) -> list[Any]:
        return [(tensor.dtype, tensor.device, 0 if tensor.is_inference() else tensor._version) for tensor in self.tensors]


def _probe(tensors: list[Tensor]) -> list[float]:
    """The last number of each tensor: any training step changes some of them. One copy from each device."""
    last: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() and not tensor.is_meta:
            number = tensor.detach()[(-1,) * tensor.dim()]
            number = number.real + number.imag if number.is_complex() else number
            last.setdefault(number.device, []).append(number.to(accumulator_dtype(number.device)))
    return [number for numbers in last.values() for number in torch.stack(numbers).cpu().tolist()]


class Origin:
    """What a module computed with at one moment, or, for a loaded state, the digest of it alone."""

    def __init__(self, module: nn.Module | None, digest: str | None = None) -> None:
        self._module, self._digest = module, digest
        self._digest_0_1: str | None = None
        #: What was computed from the module, for as long as this is its origin.
        self.known: dict[str, Any] = {}
        if module is not None:
            self._seen, self._watch, self._steps = _Seen(module), _Watch(module), _steps
            self._probe = _probe(self._seen.tensors)

    def current(self, *, look: bool = False) -> bool:
        """Whether the module has not changed since this origin was made; `look`: compare the numbers in any case."""
        return self._module is not None and self._changed(self._module, look) is None

    def _changed(self, module: nn.Module, look: bool) -> str | None:
        """The name of something that has changed."""
        if not look and self._steps == _steps and self._watch.unchanged():
            return None
        now, before = _Seen(module), self._seen.values
        if now.values != before:
            return min(now.values.keys() ^ before.keys() or {name for name in before if now.values[name] != before[name]})
        if look or self._steps != _steps:
            if _probe(now.tensors) != self._probe:
                return "a weight"
            self._steps = _steps
        self._watch = _Watch(module)
        self.known.clear()  # the same weights may be on another device
        return None

    @property
    def fingerprint(self) -> str:
        if self._module is not None and self._digest is None:
            if changed := self._changed(self._module, look=True):
                raise MismatchError(
                    f"the weights of the encoder changed after this state was made ({changed}), or an attribute that counts: "
                    "the state no longer belongs to it. Encode the elements again. If an attribute does not change what the "
                    "encoder computes, list its name in not_in_fingerprint of its module's class."
                )
            self._digest = VERSION + ModuleDigest(self._module).text
        return str(self._digest)

    @property
    def loaded(self) -> bool:
        """Whether this is a digest alone, of a state from elsewhere."""
        return self._module is None

    def same_as(self, other: "Origin") -> bool:
        """Whether both have the same structure and weights. An origin of 0.1 becomes a current one at its first comparison."""
        if self is other or self.fingerprint == other.fingerprint:
            return True
        old, new = (other, self) if self.fingerprint.startswith(VERSION) else (self, other)
        if old.fingerprint.startswith(VERSION) or not new.fingerprint.startswith(VERSION):
            return False
        if new._module is None:
            raise MismatchError(
                "setstream 0.1 saved one of these states, with a fingerprint that cannot be compared with that of the other. "
                "Check both with their encoder first: encoder.check_state(state)"
            )
        if new._digest_0_1 is None:
            new._digest_0_1 = fingerprint_0_1(new._module)
        if same := old.fingerprint == new._digest_0_1:
            old._digest = new.fingerprint
        return same
