"""phi: features of elements, each from one element alone.

    features (M, in_dim) = phi(elements (M, ...))

A `Reader` holds what phi's modules determine (device, dtype, layers, the size of blocks): it is made once, not for every chunk.
"""

import cmath
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from setstream.errors import BatchStatisticsError, DeviceError, MismatchError, NonFiniteError, ShapeError, wrong_width
from setstream.pools.base import Pool, parameter_dtype
from setstream.pools.kernels.cheap_layers import CheapLayers
from setstream.pools.kernels.weighted_sums import block_size
from setstream.states.compat import read_as
from setstream.states.state import State, fits

ONE_SET = "Sets are (B, N, ...): for one set (N, width), pass x[None]; for one element (width,), pass x[None, None]"
# Numbers in memory while phi reads a block of elements without a graph.
BLOCK_NUMBERS = 2**21


def all_finite(x: Tensor) -> bool:
    """Whether x holds no NaN and no infinity. One pass and no temporary unless the sum overflows."""
    if not (x.is_floating_point() or x.is_complex()):
        return True
    x = x.detach()
    return cmath.isfinite(x.sum().item()) or bool(torch.isfinite(x).all())


class Reader:
    """How phi reads elements."""

    def __init__(self, phi: nn.Module, pool: Pool, device: torch.device | None) -> None:
        self.phi, self.pool, self.device = phi, pool, device
        self.dtype = parameter_dtype(phi)
        #: Replaces the NaN that phi's first layer takes as missing values; None: it takes none.
        self.fill: Callable[[Tensor], Tensor] | None = getattr(first_layer(phi), "fill_missing", None)
        #: The layers of a phi that is a chain of cheap ones.
        self.layers = CheapLayers.of(phi)
        self.batch_norms: dict[str, _BatchNorm] = {}
        if self.layers is not None:
            self.widest = max(CheapLayers.width(self.layers), pool.width)
        else:
            modules = [*phi.named_modules()]
            self.batch_norms = {name: module for name, module in modules if isinstance(module, _BatchNorm)}
            widths = [module.out_features for _, module in modules if isinstance(module, nn.Linear)]
            widths += [module.embedding_dim for _, module in modules if isinstance(module, nn.Embedding)]
            self.widest = max(pool.width, *widths, 1)

    def check(self, elements: Tensor) -> None:
        """Raise an error if phi mixes the elements of a chunk, or is on another device."""
        for name, module in self.batch_norms.items():
            if module.training or module.running_mean is None:
                raise BatchStatisticsError(
                    f"phi{'.' + name if name else ''} is a {type(module).__name__} that uses the statistics of its batch: the "
                    "answer would depend on the chunking. Put it in eval mode (encoder.phi.eval() freezes its statistics), or "
                    "use LayerNorm, GroupNorm or InstanceNorm, which look at one element only."
                )
        if self.device not in (None, elements.device):
            raise DeviceError(f"the elements are on {elements.device}, the encoder is on {self.device}: move one of them")

    def read(self, elements: Tensor, run: Callable[[Tensor], Any], cast: bool) -> Tensor:
        """The features, checked to be of the right shape. run: phi, or the same computed otherwise; cast: to phi's dtype."""
        in_dim, feature_dtype = self.pool.in_dim, self.dtype or torch.get_default_dtype()
        if not len(elements) and in_dim is not None:
            return torch.empty(0, in_dim, device=elements.device, dtype=feature_dtype)
        try:
            features = run(cast_elements(elements, self.phi, self.dtype) if cast else elements)
        except (RuntimeError, IndexError) as error:
            if wrong := unreadable(self.phi, elements):
                raise ShapeError(wrong) from error
            error.add_note(f"phi was reading {len(elements)} elements of shape {tuple(elements.shape[1:])}, {elements.dtype}")
            if elements.dim() == 1:
                error.add_note(ONE_SET)
            raise
        if not isinstance(features, Tensor):
            kind = type(features).__name__
            raise ShapeError(f"phi must return a tensor ({len(elements)}, {in_dim or 'D'}); it returned {kind}")
        if features.dim() != 2 or len(features) != len(elements) or in_dim not in (None, features.shape[-1]):
            raise ShapeError(
                (unreadable(self.phi, elements) if elements.dim() == 1 else None)
                or f"phi must turn elements {tuple(elements.shape)} into features ({len(elements)}, {in_dim or 'D'}), the "
                f"pool's in_dim; it returned {tuple(features.shape)}"
            )
        return features if features.is_floating_point() else features.to(feature_dtype)

    def filled(self, elements: Tensor) -> Tensor:
        """Elements as they are checked for NaN and infinity: without missing values that phi replaces."""
        return elements if self.fill is None else self.fill(elements)

    def block_size(self, elements: Tensor) -> int:
        """How many elements phi and the pool should read together: as fit a cache, or more if phi is not cheap."""
        example = elements.numel() // max(1, len(elements))
        if self.layers is not None:
            return block_size(elements.device, max(self.widest, example))
        return max(1, BLOCK_NUMBERS // (example + 4 * self.widest))


def cast_elements(elements: Tensor, phi: nn.Module, dtype: torch.dtype | None) -> Tensor:
    """Elements in phi's dtype; whole numbers stay whole if phi holds an embedding."""
    if dtype is None or elements.dtype == dtype or elements.is_complex():
        return elements
    if not elements.is_floating_point() and any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in phi.modules()):
        return elements if elements.dtype in (torch.int32, torch.int64) else elements.long()
    return elements.to(dtype)


def first_layer(phi: nn.Module) -> nn.Module | None:
    """The layer that reads elements, if phi is a chain of layers or a layer."""
    return next((layer for layer in phi.modules() if not isinstance(layer, nn.Sequential | nn.Identity)), None)


def element_width(phi: nn.Module) -> int | None:
    """The numbers per element, if phi begins with a linear layer or a norm; otherwise None."""
    first = first_layer(phi)
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
