"""phi as a chain of cheap layers, which reads elements that are in the cache: one tile after another, in the same memory.

h_0 = x,   h_i = layer_i(h_{i-1})          linear layers, activations element by element, norms
"""

from collections.abc import Callable
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Activations that have a form in place.
IN_PLACE: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {
    nn.ReLU: torch.relu_,
    nn.Tanh: torch.tanh_,
    nn.Sigmoid: torch.sigmoid_,
    nn.SiLU: lambda h: F.silu(h, inplace=True),
}
FEW = 64  # elements: for fewer, memory of one's own takes longer than it saves
CHEAP = (*IN_PLACE, nn.GELU, nn.LeakyReLU, nn.ELU, nn.Softplus, nn.Linear, nn.LayerNorm, nn.RMSNorm)


class CheapLayers:
    """The layers of a phi without a graph. Its result is overwritten by the next call."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self.layers = layers
        self.memory: dict[int, Tensor] = {}

    @staticmethod
    def of(phi: nn.Module) -> list[nn.Module] | None:
        """The layers, if phi is a chain of cheap ones without hooks; otherwise None."""
        if type(phi) is nn.Identity:
            return []
        if phi._forward_hooks or phi._forward_pre_hooks:
            return None
        if type(phi) is nn.Sequential:
            parts = [CheapLayers.of(layer) for layer in phi]
            return None if None in parts else [*chain.from_iterable(part for part in parts if part)]
        return [phi] if type(phi) in CHEAP else None

    @staticmethod
    def width(layers: list[nn.Module]) -> int:
        """The widest linear layer."""
        return max((max(layer.in_features, layer.out_features) for layer in layers if isinstance(layer, nn.Linear)), default=1)

    def __call__(self, x: Tensor) -> Tensor:
        """phi of (n, width) elements."""
        h, few = x, len(x) < FEW
        for number, layer in enumerate(self.layers):
            if few and type(layer) is nn.Linear:
                h = F.linear(h, layer.weight, layer.bias)
            elif isinstance(layer, nn.Linear) and h.dim() == 2 and layer.bias is not None and h.dtype == layer.weight.dtype:
                memory = self.memory.get(number)
                if memory is None or len(memory) < len(h):
                    memory = self.memory[number] = h.new_empty(len(h), layer.out_features)
                h = torch.addmm(layer.bias, h, layer.weight.t(), out=memory[: len(h)])
            elif type(layer) in IN_PLACE and h is not x:
                h = IN_PLACE[type(layer)](h)
            else:
                h = layer(h)
        return h
