"""What a module computes with, and a digest of it that is equal in every process that has built and loaded the same.

    digest = BLAKE2b(classes and attributes of all modules, (name, dtype, shape, bytes) of every weight and buffer)

Attributes of any type count: numbers, lists, dicts, arrays, tensors, functions, objects, also private ones. A value that cannot
be compared across processes (a lambda, an open file) is an error. Not counted: what torch.nn.Module itself keeps (`training`),
private attributes of modules of the LIBRARIES below, and the names in a module's `not_in_fingerprint`, for caches and other
values that do not change what it computes.
"""

import functools
import hashlib
import logging
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from itertools import chain
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from setstream.errors import ConfigurationError

#: What torch.nn.Module, torch.compile and transformers keep in every module. It does not change what is computed.
BOOKKEEPING = frozenset(vars(nn.Module())) | {"_compiled_call_impl", "_is_torch_compile", "_is_hf_initialized"}
#: Libraries whose private attributes, and the modules of whose functions, do not count.
LIBRARIES = ("setstream", "torch", "transformers")
#: The origin and version of a model of transformers, which do not change what it computes.
PROVENANCE = {"name_or_path", "transformers_version", "architectures", "model_type", "dtype", "torch_dtype"}
PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), range, slice, torch.dtype, torch.layout)
IDLE = (logging.Logger, type(threading.Lock()), type(threading.RLock()), torch.device)


def digest(data: bytes) -> str:
    """BLAKE2b of 128 bits, as text."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def tensor_bytes(tensor: Tensor) -> bytes:
    """The raw bytes of a tensor, of any dtype, as in a file."""
    try:
        return tensor.numpy(force=True).tobytes()
    except TypeError:  # a type that numpy does not have
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _library(thing: type | Callable[..., Any]) -> str:
    """The one of LIBRARIES that a class or function belongs to, if any."""
    package = (getattr(thing, "__module__", None) or "").partition(".")[0]
    return package if package in LIBRARIES else ""


@functools.lru_cache(maxsize=1024)
def _rule(kind: type) -> tuple[frozenset[str], bool]:
    """The attributes of a class that do not count, and whether private ones do."""
    declared = (vars(base).get("not_in_fingerprint", ()) for base in kind.__mro__)
    origin = PROVENANCE if any(_library(base) == "transformers" for base in kind.__mro__) else ()
    return BOOKKEEPING.union(("not_in_fingerprint",), origin, *declared), not _library(kind)


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def attributes(thing: Any) -> list[tuple[str, Any]]:
    """The attributes of a module or another object that count."""
    values: dict[str, Any] = getattr(thing, "__dict__", {})
    if not isinstance(thing, nn.Module):
        slots = chain.from_iterable(map(_slots, type(thing).__mro__))
        values = values | {name: getattr(thing, name) for name in slots if hasattr(thing, name)}
    left_out, private = _rule(thing.__class__)
    if "not_in_fingerprint" in values:
        left_out = left_out.union(values["not_in_fingerprint"])
    return [(name, value) for name, value in values.items() if name not in left_out and (private or name[0] != "_")]


def contents(module: nn.Module, *, deep: bool = False) -> Iterator[tuple[str, Any]]:
    """Every submodule's class, parameters, buffers, hooks and attributes, by name. `deep`: packed and compiled ones, too."""
    for name, child in module.named_modules():
        if type(child).__name__ == "OptimizedModule":  # torch.compile's wrapper computes what it wraps
            continue
        prefix = f"{name}.".replace("_orig_mod.", "") if name else ""
        weights = child._parameters
        for key, tensor in chain(weights.items(), child._buffers.items()):
            yield prefix + key, tensor
        for hook in chain(child._forward_pre_hooks.values(), child._forward_hooks.values()):
            yield f"{prefix}(hook)", hook
        if deep:
            yield from ((f"{prefix}(state) {key}", value) for key, value in _extra_state(child).items())
        if isinstance(child, (torch.jit.ScriptModule, torch.fx.GraphModule)):  # its class may have any name
            yield f"{prefix}(code)", str(child.code)
            continue
        yield f"{prefix}(class)", type(child).__name__
        yield from ((f"{prefix}(closure) {key}", value) for key, value in _closures(type(child)))
        for key, value in attributes(child):
            # Weight norm, spectral norm and pruning recompute a tensor from parameters at every call.
            if f"{key}_orig" not in weights and not (f"{key}_g" in weights and f"{key}_v" in weights):
                yield prefix + key, value


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


class ModuleDigest:
    """The digest of what a module computes with, as `text`."""

    def __init__(self, module: nn.Module) -> None:
        self._open: dict[int, int] = {}
        self._done: dict[int, tuple[Any, str]] = {}  # with the value, which keeps its id unique
        self._in_transformers = False  # in a configuration of transformers, files change the order of mappings
        self.text = digest(repr(sorted(self._named(contents(module, deep=True)))).encode())

    def _named(self, items: Iterable[tuple[str, Any]], place: str = "") -> list[tuple[str, str]]:
        return [(name, self._of(value, place + name)) for name, value in items]

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
            inside = self._inside(value, name)
            del self._open[id(value)]
            self._done[id(value)] = value, digest(repr(inside).encode())
        return self._done[id(value)][1]

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
            return "module", sorted(self._named(contents(value, deep=True), f"{name}."))
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
            path, module = getattr(value, "__qualname__", value.__name__), getattr(value, "__module__", None)
            found = functools.reduce(
                lambda owner, part: getattr(owner, part, None), path.split("."), sys.modules.get(str(module))
            )
            if not isinstance(value, types.FunctionType) or found is value:
                return "name", _library(value) or module, path
        elif hasattr(value, "__dict__") or any(map(_slots, type(value).__mro__)):
            outside = self._in_transformers
            self._in_transformers = outside or _library(type(value)) == "transformers"
            named = sorted(self._named(attributes(value), f"{name}."))
            self._in_transformers = outside
            return "object", type(value).__name__, named
        raise ConfigurationError(
            f"this encoder has no fingerprint: {name} is {value!r}, and another process cannot tell whether it has the same. "
            "Write a function at the top of a module, or make it a torch.nn.Module. If it does not change what the encoder "
            f"computes, say so in its module's class: not_in_fingerprint = ({name.rpartition('.')[2]!r},)"
        )
