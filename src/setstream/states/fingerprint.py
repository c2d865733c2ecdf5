"""Which encoder made a state: a digest of all that it computes with, computed only when it is needed.

    fingerprint = "2:" + BLAKE2b(classes and attributes of all modules, (name, dtype, shape, bytes) of every weight and buffer)

Attributes of any type count: numbers, lists, dicts, arrays, tensors, functions, objects, also private ones. A value that cannot
be compared across processes (a lambda, an open file) is an error. Not counted: what torch.nn.Module itself keeps (`training`),
private attributes of modules of the LIBRARIES below, and the names in a module's `not_in_fingerprint`, for caches and other
values that do not change what it computes.

Hashing all weights at every update would cost more than many updates. An `Origin` remembers what it saw instead: objects by
identity, tensors by their version counters, plain values as they are. It hashes the first time that a fingerprint is needed:
to save a state, or to compare it with one from elsewhere. States of one encoder share one Origin, so merging them compares two
pointers.

Some writers change weights behind the version counters (fused optimisers, `p.data`). So an Origin also keeps one number of each
tensor, and looks at it again after any optimiser has stepped and whenever a fingerprint is made.
"""

from __future__ import annotations

import functools
import logging
import re
import sys
import threading
import types
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from itertools import chain
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from setstream.errors import ConfigurationError, MismatchError
from setstream.states.compat import fingerprint_0_1
from setstream.states.digest import digest, tensor_bytes

VERSION = "2:"
#: What torch.nn.Module, torch.compile and transformers keep in every module. It does not change what is computed.
BOOKKEEPING = frozenset(vars(nn.Module())) | {
    "_compiled_call_impl",
    "_is_torch_compile",
    "_is_hf_initialized",
    "not_in_fingerprint",
}
#: Libraries whose private attributes, and the modules of whose functions, do not count.
LIBRARIES = ("setstream", "torch", "transformers")
#: The origin and version of a model of transformers, which do not change what it computes.
FOUND = {"name_or_path", "transformers_version", "architectures", "model_type", "dtype", "torch_dtype"}
PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), range, slice, torch.dtype, torch.layout)
IDLE = (logging.Logger, type(threading.Lock()), type(threading.RLock()), torch.device)

_steps = 0


def _count_step(*_: Any) -> None:
    global _steps
    _steps += 1


register_optimizer_step_post_hook(_count_step)


# -- what a module computes with ------------------------------------------------------------------------------------------


def _library(thing: type | Callable[..., Any]) -> str:
    """The one of LIBRARIES that a class or function belongs to, if any."""
    package = (getattr(thing, "__module__", None) or "").partition(".")[0]
    return package if package in LIBRARIES else ""


# By class: the attributes that do not count, and whether private ones do.
_rules: weakref.WeakKeyDictionary[type, tuple[frozenset[str], bool]] = weakref.WeakKeyDictionary()


def _rule(kind: type) -> tuple[frozenset[str], bool]:
    rule = _rules.get(kind)
    if rule is None:
        declared = (vars(base).get("not_in_fingerprint", ()) for base in kind.__mro__)
        origin = FOUND if any(_library(base) == "transformers" for base in kind.__mro__) else ()
        rule = _rules[kind] = BOOKKEEPING.union(origin, *declared), not _library(kind)
    return rule


def _attributes(thing: Any) -> list[tuple[str, Any]]:
    """The attributes of a module or another object that count."""
    kind = type(thing)
    attributes: dict[str, Any] = getattr(thing, "__dict__", {})
    if not isinstance(thing, nn.Module):
        slots = chain.from_iterable(_slots(base) for base in kind.__mro__)
        attributes = attributes | {name: getattr(thing, name) for name in slots if hasattr(thing, name)}
    left_out, private = _rule(kind)
    if "not_in_fingerprint" in attributes:
        left_out = left_out.union(attributes["not_in_fingerprint"])
    return [(name, value) for name, value in attributes.items() if name not in left_out and (private or name[0] != "_")]


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _contents(module: nn.Module, *, deep: bool = False) -> Iterator[tuple[str, Any]]:
    """Every submodule's class, parameters, buffers, hooks and attributes, by name. `deep`: packed and compiled ones, too."""
    for name, child in module.named_modules():
        if type(child).__name__ == "OptimizedModule":  # torch.compile's wrapper computes what it wraps
            continue
        prefix = f"{name}.".replace("_orig_mod.", "") if name else ""
        for key, tensor in chain(child._parameters.items(), child._buffers.items()):
            yield prefix + key, tensor
        for hooks in (child._forward_pre_hooks, child._forward_hooks):
            yield from ((f"{prefix}(hook)", hook) for hook in hooks.values())
        if deep:
            yield from ((f"{prefix}(state) {key}", value) for key, value in _extra_state(child).items())
        if isinstance(child, (torch.jit.ScriptModule, torch.fx.GraphModule)):  # its class may have any name
            yield f"{prefix}(code)", str(child.code)
        else:
            yield f"{prefix}(class)", type(child).__name__
            yield from ((f"{prefix}(closure) {key}", value) for key, value in _closures(type(child)))
            derived = {key for key in vars(child) if _is_derived(child, key)}
            yield from ((prefix + key, value) for key, value in _attributes(child) if key not in derived)


def _extra_state(module: nn.Module) -> dict[str, Any]:
    """What a module saves besides its parameters and buffers (packed weights); of a compiled one, what its code uses."""
    if isinstance(module, torch.jit.ScriptModule):
        if not module._c._has_method("forward"):
            return {}
        code, constants = module.code_with_constants
        used = {name for name in re.findall(r"\.(\w+)", code) if module._c.hasattr(name)} - dict(module.named_children()).keys()
        return {**constants.const_mapping, **{name: getattr(module, name) for name in sorted(used)}}
    kind = type(module)
    if kind._save_to_state_dict is nn.Module._save_to_state_dict and kind.get_extra_state is nn.Module.get_extra_state:
        return {}
    saved: dict[str, Any] = {}
    module._save_to_state_dict(saved, "", False)
    return {key: value for key, value in saved.items() if key not in module._parameters and key not in module._buffers}


def _closures(kind: type) -> Iterator[tuple[str, Any]]:
    """What the methods of a class that was made inside a function take from there."""
    if "<locals>" in kind.__qualname__:
        for name, method in vars(kind).items():
            cells = getattr(method, "__closure__", None) or ()
            for free, cell in zip(method.__code__.co_freevars if cells else (), cells, strict=True):
                if free != "__class__":
                    yield f"{name}.{free}", cell.cell_contents


def _is_derived(module: nn.Module, name: str) -> bool:
    """Whether a tensor is recomputed from parameters at every call: by weight norm, spectral norm, pruning."""
    weights = module._parameters
    return f"{name}_orig" in weights or (f"{name}_g" in weights and f"{name}_v" in weights)


class _Seen:
    """A cheap summary of what a module computes with: equal values as long as it has not changed."""

    def __init__(self, module: nn.Module) -> None:
        self.kept: list[Any] = []  # keeps ids unique
        self._inside: dict[int, Any] = {}
        self.values = {name: self._glance(value) for name, value in _contents(module)}

    def _glance(self, value: Any) -> Any:
        if type(value) in PLAIN:
            return type(value), value
        if isinstance(value, Tensor):
            self.kept.append(value)
            return id(value), 0 if value.is_inference() else value._version, value.dtype
        if id(value) in self._inside:
            return self._inside[id(value)]
        self.kept.append(value)
        self._inside[id(value)] = id(value)  # it may contain itself
        found: Any = id(value)
        if isinstance(value, list | tuple):
            found = tuple(self._glance(item) for item in value)
        elif isinstance(value, Mapping):
            found = tuple((self._glance(key), self._glance(item)) for key, item in value.items())
        elif isinstance(value, set | frozenset):
            found = frozenset(self._glance(item) for item in value)
        elif isinstance(value, np.ndarray):
            found = id(value), zlib.crc32(value.tobytes())
        elif isinstance(value, nn.Module):
            found = id(value), tuple((name, self._glance(item)) for name, item in _contents(value))
        elif isinstance(value, functools.partial):
            found = id(value), self._glance((value.func, value.args, value.keywords))
        elif not isinstance(value, (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, *IDLE)):
            found = id(value), tuple((name, self._glance(item)) for name, item in _attributes(value))
        self._inside[id(value)] = found
        return found

    def tensors(self) -> list[Tensor]:
        return [thing for thing in self.kept if isinstance(thing, Tensor)]


class _Digest:
    """A digest of what a module computes with: equal in every process that has built and loaded the same."""

    def __init__(self, module: nn.Module) -> None:
        self._open: dict[int, int] = {}
        self._done: dict[int, Any] = {}
        self._kept: list[Any] = []
        self._in_transformers = False  # in a configuration of transformers, files change the order of mappings
        contents = sorted((name, self._of(value, name)) for name, value in _contents(module, deep=True))
        self.text = VERSION + digest(repr(contents).encode())

    def _of(self, value: Any, name: str) -> str:
        """A short text for a value; `name` is its place, for errors."""
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, Enum):
            return f"{type(value).__name__}.{value.name}"
        if isinstance(value, PLAIN) and not getattr(value, "__dict__", None):
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, IDLE):
            return type(value).__name__
        if id(value) in self._open:  # it contains itself
            return f"back {len(self._open) - self._open[id(value)]}"
        if id(value) not in self._done:
            self._open[id(value)] = len(self._open)
            contents = self._inside(value, name)
            del self._open[id(value)]
            self._kept.append(value)
            self._done[id(value)] = digest(repr(contents).encode())
        return str(self._done[id(value)])

    def _inside(self, value: Any, name: str) -> Any:
        if isinstance(value, PLAIN):  # a subclass
            return type(value).__name__, repr(value), sorted((key, self._of(item, name)) for key, item in vars(value).items())
        if isinstance(value, Tensor) and value.is_quantized:
            return "quantised", str(value.dtype), self._of(value.dequantize(), name)
        if isinstance(value, Tensor):
            return "tensor", str(value.dtype), list(value.shape), digest(tensor_bytes(value))
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return "array", str(value.dtype), list(value.shape), digest(value.tobytes())
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if isinstance(value, list | tuple):  # files turn tuples into lists
            return "list", [self._of(item, f"{name}[{place}]") for place, item in enumerate(value)]
        if isinstance(value, Mapping):
            items = [(self._of(key, name), self._of(item, f"{name}[{key!r}]")) for key, item in value.items()]
            return "mapping", sorted(items) if self._in_transformers else items
        if isinstance(value, set | frozenset):
            return "set", sorted(self._of(item, name) for item in value)
        if isinstance(value, nn.Module):
            return "module", sorted((key, self._of(item, f"{name}.{key}")) for key, item in _contents(value, deep=True))
        if isinstance(value, weakref.ref):
            return "reference", self._of(value(), name)
        if isinstance(value, functools.partial):
            return "partial", [self._of(part, name) for part in (value.func, value.args, value.keywords)]
        if isinstance(value, PurePath | types.ModuleType):
            return type(value).__name__, str(value)
        owner = getattr(value, "__self__", None)
        if callable(value) and owner is not None and not isinstance(owner, type | types.ModuleType):
            function = getattr(value, "__func__", None)
            from_class = function is None or getattr(type(owner), value.__name__, None) is function
            return "method", value.__name__ if from_class else self._of(function, name), self._of(owner, name)
        if isinstance(value, type) or (callable(value) and hasattr(value, "__name__")):
            if isinstance(value, type) or not isinstance(value, types.FunctionType) or _can_be_imported(value):
                where = _library(value) or getattr(value, "__module__", None)
                return "name", where, getattr(value, "__qualname__", value.__name__)
        elif hasattr(value, "__dict__") or any(map(_slots, type(value).__mro__)):
            outside = self._in_transformers
            self._in_transformers = outside or _library(type(value)) == "transformers"
            attributes = sorted((key, self._of(item, f"{name}.{key}")) for key, item in _attributes(value))
            self._in_transformers = outside
            return "object", type(value).__name__, attributes
        raise ConfigurationError(
            f"this encoder has no fingerprint: {name} is {value!r}, and another process cannot tell whether it has the same. "
            "Write a function at the top of a module, or make it a torch.nn.Module. If it does not change what the encoder "
            f"computes, say so in its module's class: not_in_fingerprint = ({name.rpartition('.')[2]!r},)"
        )


def _can_be_imported(function: types.FunctionType) -> bool:
    value: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        value = getattr(value, name, None)
    return value is function


# -- the origin of a state ---------------------------------------------------------------------------------------------------


def _probe(tensors: list[Tensor]) -> list[float]:
    """The last number of each tensor: any training step changes some of them. One copy from each device."""
    last: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() and not tensor.is_meta:
            number = tensor.detach()[(-1,) * tensor.dim()]
            number = number.real + number.imag if number.is_complex() else number
            last.setdefault(number.device, []).append(
                number.to(torch.float32 if number.device.type == "mps" else torch.float64)
            )
    return [number for numbers in last.values() for number in torch.stack(numbers).cpu().tolist()]


class Origin:
    """What a module computed with at one moment, or, for a loaded state, the digest of it alone."""

    def __init__(self, module: nn.Module | None, digest: str | None = None) -> None:
        self._module, self._digest = module, digest
        self._digest_0_1: str | None = None
        self._seen = None if module is None else _Seen(module)
        self._probe, self._steps = [] if self._seen is None else _probe(self._seen.tensors()), _steps

    def current(self, *, look: bool = False) -> bool:
        """Whether the module has not changed since this origin was made; `look`: compare the numbers in any case."""
        return self._module is not None and self._changed(look) is None

    def _changed(self, look: bool) -> str | None:
        """The name of something that has changed."""
        assert self._module is not None
        assert self._seen is not None
        now, before = _Seen(self._module), self._seen.values
        if now.values != before:
            names = now.values.keys() ^ before.keys() or {n for n in before if now.values[n] != before[n]}
            return min(names)
        if look or self._steps != _steps:
            if _probe(now.tensors()) != self._probe:
                return "a weight"
            self._steps = _steps
        return None

    @property
    def fingerprint(self) -> str:
        """The digest as text."""
        if self._module is not None and self._digest is None:
            changed = self._changed(look=True)
            if changed is not None:
                raise MismatchError(
                    f"the weights of the encoder changed after this state was made ({changed}), or an attribute that counts: "
                    "the state no longer belongs to it. Encode the elements again. If an attribute does not change what the "
                    "encoder computes, list its name in not_in_fingerprint of its module's class."
                )
            self._digest = _Digest(self._module).text
        assert self._digest is not None
        return self._digest

    @property
    def loaded(self) -> bool:
        """Whether this is a digest alone, of a state from elsewhere."""
        return self._module is None

    def same_as(self, other: Origin) -> bool:
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
        if old.fingerprint != new._digest_0_1:
            return False
        old._digest = new.fingerprint
        return True
