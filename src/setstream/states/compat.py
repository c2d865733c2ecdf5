"""How version 0.1 kept states and named encoders; its states and stores are still read.

    weighted sums    had `spent`, the squares of weights that were removed, instead of `error`
    means and sums   were plain sums of a total and a mass; those of chunks held the number of chunks as well
    fingerprints     left out much that encoders differ in, and have no version in front

Nothing here is needed to write states.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from setstream.states.accumulators.base import NOTHING, Accumulator
from setstream.states.digest import tensor_bytes


def without_spent(tensors: dict[str, Tensor], rounding_error: Callable[..., Tensor]) -> dict[str, Tensor]:
    """The tensors of weighted sums with `error` instead of `spent`, where they are whole."""
    tensors = dict(tensors)
    spent = tensors.pop("spent", None)
    if spent is None or not {"numerator", "normaliser", "shift"} <= tensors.keys():
        return tensors
    numerator, normaliser, shift = (tensors[name] for name in ("numerator", "normaliser", "shift"))
    if not spent.shape == normaliser.shape == shift.shape == numerator.shape[: normaliser.dim()]:
        return tensors
    if not all(tensor.is_floating_point() for tensor in (spent, *tensors.values())):
        return tensors
    error = rounding_error(numerator, normaliser, shift.clamp(min=NOTHING))
    ever = normaliser.square().add(spent).sqrt() / normaliser.masked_fill(normaliser == 0, 1.0)
    return tensors | {"error": error * ever.unsqueeze(-1)}


def read_as(accumulators: dict[str, Accumulator], like: Mapping[str, Accumulator]) -> dict[str, Accumulator]:
    """The accumulators with plain sums of 0.1 turned into what `like` has in their places: weighted sums, and chunks."""
    accumulators = dict(accumulators)
    for name, current in like.items():
        sums = accumulators.get(name.removesuffix("chunks") + "pooled")
        seen = None if sums is None else sums.tensors.get("chunks")
        if current.kind == "chunks" and name not in accumulators and seen is not None and seen.is_floating_point():
            accumulators[name] = type(current)(seen=seen.ceil().long())
    for name, sums in accumulators.items():
        if sums.kind == "sums" and name in like and like[name].kind == "log-sums" and len(sums.tensors) == 2:
            masses = [tensor for key, tensor in sums.tensors.items() if key != "total"]
            if len(masses) == 1:
                shift = torch.where(masses[0] > 0, 0.0, NOTHING)
                accumulators[name] = type(like[name])(numerator=sums["total"], normaliser=masses[0], shift=shift)
    return accumulators


def _options(module: nn.Module) -> dict[str, Any]:
    declared = getattr(module, "configuration", None)
    if callable(declared):
        return declared()
    plain = (bool, int, float, str, tuple, type(None))
    hidden = ("training", "check_finite", "cast_input")
    return {k: repr(v) for k, v in sorted(vars(module).items()) if k[0] != "_" and k not in hidden and isinstance(v, plain)}


def fingerprint_0_1(module: nn.Module) -> str:
    """The fingerprint that version 0.1 gave, which its states and stores carry."""
    hasher = hashlib.blake2b(digest_size=16)
    for name, child in module.named_modules():
        hasher.update(json.dumps([name, type(child).__name__, _options(child)]).encode())
    for name, tensor in sorted(module.state_dict().items()):
        if isinstance(tensor, Tensor):
            hasher.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
            hasher.update(tensor_bytes(tensor))
    return hasher.hexdigest()
