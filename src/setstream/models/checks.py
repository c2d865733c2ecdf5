"""The checks of an encoder: phi reads elements one at a time, elements and features fit, a state belongs to it."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from setstream.errors import BatchStatisticsError, MismatchError, NonFiniteError, ShapeError, wrong_width
from setstream.states.compat import read_as
from setstream.states.state import State, fits

ONE_SET = "Sets are (B, N, ...): for one set (N, width), pass x[None]; for one element (width,), pass x[None, None]"


def check_phi(phi: nn.Module) -> None:
    """Raise BatchStatisticsError if phi mixes the elements of a chunk."""
    for name, module in phi.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            raise BatchStatisticsError(
                f"phi{'.' + name if name else ''} is a {type(module).__name__} that uses the statistics of its batch: the "
                "answer would depend on the chunking. Put it in eval mode (encoder.phi.eval() freezes its statistics), or "
                "use LayerNorm, GroupNorm or InstanceNorm, which look at one element only."
            )


def element_width(phi: nn.Module) -> int | None:
    """The numbers per element, if phi begins with a linear layer or a norm; otherwise None."""
    first = next((layer for layer in phi.modules() if not isinstance(layer, nn.Sequential | nn.Identity)), None)
    if isinstance(first, nn.LayerNorm | nn.RMSNorm) and len(first.normalized_shape) == 1:
        return int(first.normalized_shape[0])
    width = getattr(first, "in_features", None)  # linear layers and Standardise have it
    return width if isinstance(width, int) else None


def unreadable(phi: nn.Module, elements: Tensor) -> str | None:
    """The error text if phi's first layer takes another width than these elements have."""
    width = element_width(phi)
    if width is not None and elements.dim() == 1:
        return f"{wrong_width('phi', width, 'the given elements', ())}: they are single numbers. {ONE_SET}"
    if width is not None and elements.shape[-1] != width:
        return wrong_width("phi", width, f"the {len(elements)} given elements", tuple(elements.shape[1:]))
    return None


def non_finite(elements: Tensor) -> NonFiniteError:
    """The error for elements that contain NaN or infinity."""
    bad = ~torch.isfinite(elements.detach()).flatten(1).all(1) if elements.dim() > 1 else ~torch.isfinite(elements)
    return NonFiniteError(
        f"{int(bad.sum())} of {len(elements)} elements hold NaN or infinity (first: element {int(bad.int().argmax())} "
        f"of the real elements of this chunk). Clean or mask them; check_finite=False switches this check off."
    )


def check_features(phi: nn.Module, elements: Tensor, features: object, in_dim: int | None) -> None:
    """Raise ShapeError unless phi returned one feature vector of width `in_dim` (None: of any width) per element."""
    if not isinstance(features, Tensor):
        raise ShapeError(f"phi must return a tensor ({len(elements)}, {in_dim or 'D'}); it returned {type(features).__name__}")
    if features.dim() != 2 or len(features) != len(elements) or in_dim not in (None, features.shape[-1]):
        raise ShapeError(
            (unreadable(phi, elements) if elements.dim() == 1 else None)
            or f"phi must turn elements {tuple(elements.shape)} into features ({len(elements)}, {in_dim or 'D'}), the "
            f"pool's in_dim; it returned {tuple(features.shape)}"
        )


def check_accumulators(state: State, example: State) -> None:
    """Raise MismatchError unless a state has the accumulators, shapes and types of an example, before any arithmetic."""
    state.accumulators = read_as(state.accumulators, example.accumulators)
    if state.kinds() != example.kinds():
        hint = " Was it made in training mode, with drawn slots?" * state.has_draw
        raise MismatchError(f"the state has the parts {state.kinds()}, but states of this encoder {example.kinds()}.{hint}")
    tensors, known = state.tensors(), example.tensors()
    if tensors.keys() != known.keys():
        raise MismatchError(f"the state holds {sorted(tensors)}, but states of this encoder {sorted(known)}")
    for name, tensor in tensors.items():
        any_width = not example.count.any() and 1 in known[name].shape[1:]  # the example has not seen an element
        floats = known[name].is_floating_point()
        same_type = tensor.is_floating_point() if floats else tensor.dtype == known[name].dtype
        if len(tensor) != len(state) or not (any_width or fits(state, tensor, known[name])) or not same_type:
            kind, shape = str(tensor.dtype).removeprefix("torch."), (len(state), *known[name].shape[1:])
            wanted = "float" if floats else str(known[name].dtype).removeprefix("torch.")
            raise MismatchError(f"{name} is {kind} {tuple(tensor.shape)}, but {wanted} {shape} in states of this encoder")
