"""How version 0.1 kept states and named encoders; its states and stores are still read.

    means and sums   were plain sums of a total and a mass; those of chunks held the number of chunks as well
    fingerprints     left out much that encoders differ in, and have no version in front

Nothing here is needed to write states. See `LogSums.from_tensors` for weighted sums.
"""

import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from setstream.states.accumulators.base import NOTHING, Accumulator
from setstream.states.digest import tensor_bytes


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


def fingerprint_0_1(module: nn.Module) -> str:
    """The fingerprint that version 0.1 gave, which its states and stores carry."""
    plain = (bool, int, float, str, tuple, type(None))
    hidden = ("training", "check_finite", "cast_input")
    hasher = hashlib.blake2b(digest_size=16)
    for name, child in module.named_modules():
        shown = {k: repr(v) for k, v in sorted(vars(child).items()) if k[0] != "_" and k not in hidden and isinstance(v, plain)}
        declared = getattr(child, "configuration", None)
        options = declared() if callable(declared) else shown
        hasher.update(json.dumps([name, type(child).__name__, options]).encode())
    for name, tensor in sorted(module.state_dict().items()):
        if isinstance(tensor, Tensor):
            hasher.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode() + tensor_bytes(tensor))
    return hasher.hexdigest()
