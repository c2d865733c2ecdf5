"""From logits to weights: the five activations of the paper, and your own::

    a = weigh(l)      l (..., K, n): logits of n elements in K slots;  a > 0: their weights before any sum over the set

    name           weight of element j in slot i             normalised over the set
    softmax        exp(l_ij)                                 yes
    sigmoid        σ(l_ij)                                   yes
    slot-softmax   exp(l_ij) / Σ_i exp(l_ij)                 yes
    slot-exp       exp(l_ij - max_i l_ij)                    yes
    slot-sigmoid   σ(l_ij) / Σ_i σ(l_ij)                     no: a sum, as in the paper's table (an option)

An element's weights may depend on its logits in all slots, never on another element: that alone makes every partition
of the set give the same sums. All five are computed as log-weights: with a running maximum over the set no logit
overflows and no slot underflows, for logits of any size.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from setstream.errors import ConfigurationError


@dataclass(frozen=True)
class Activation:
    """A strictly positive function of the logits, element by element.

    A function that mixes elements (such as a softmax over the last axis) or gives negative weights is a ConfigurationError.

    Attributes:
        name: for error messages and fingerprints.
        weigh: logits (..., K, n) to weights of the same shape, or to log-weights if `log`.
        log: `weigh` gives log-weights; they are summed with a running maximum and never overflow.
        normalise: divide by the sum of the weights over the set, so that each slot is a weighted mean.

    >>> import torch, setstream as ss
    >>> softplus = ss.Activation("softplus", torch.nn.functional.softplus)
    >>> pool = ss.UMBC(8, num_slots=4, out_dim=8, activation=softplus)
    >>> pool(torch.randn(2, 10, 8)).shape
    torch.Size([2, 4, 8])
    >>> ss.Activation("wrong", lambda logits: logits.softmax(-1))
    Traceback (most recent call last):
    ...
    setstream.errors.ConfigurationError: activation 'wrong' mixes the elements of a set: ...
    """

    name: str
    weigh: Callable[[Tensor], Tensor]
    log: bool = False
    normalise: bool = True

    def __post_init__(self) -> None:
        with torch.device("cpu"):  # its values are needed, on any default device
            logits = torch.linspace(-8.0, 8.0, 24, dtype=torch.float64)[torch.arange(24) * 7 % 24].reshape(4, 6)
        with torch.no_grad():
            weights = self.weigh(logits.clone())
            if not isinstance(weights, Tensor) or weights.shape != logits.shape:
                came = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
                raise ConfigurationError(f"activation {self.name!r} must keep the shape of its logits {(4, 6)}; it gave {came}")
            if not bool(torch.isfinite(weights).all()) or not (self.log or bool((weights > 0).all())):
                raise ConfigurationError(
                    f"activation {self.name!r} must be strictly positive and finite; on logits in [-8, 8] it gave values in "
                    f"[{weights.min():.3g}, {weights.max():.3g}]. Use exp, softplus, elu + 1, ..., or log=True for log-weights."
                )
            parts = torch.cat([self.weigh(logits[:, :1].clone()), self.weigh(logits[:, 1:].clone())], dim=-1)
            if not torch.allclose(parts, weights, rtol=1e-6, atol=1e-12):
                raise ConfigurationError(
                    f"activation {self.name!r} mixes the elements of a set: on a part of the set it gives other weights than "
                    "on the whole. It may normalise over the slots (axis -2), not over the elements (axis -1)."
                )


def _identity(logits: Tensor) -> Tensor:
    return logits


def _slot_softmax(logits: Tensor) -> Tensor:
    return logits.log_softmax(-2)


def _slot_exp(logits: Tensor) -> Tensor:
    return logits - logits.amax(-2, keepdim=True)


def _slot_sigmoid(logits: Tensor) -> Tensor:
    weights = F.logsigmoid(logits)
    return weights - weights.logsumexp(-2, keepdim=True)


ACTIVATIONS = {
    activation.name: activation
    for activation in (
        Activation("softmax", _identity, log=True),
        Activation("sigmoid", F.logsigmoid, log=True),
        Activation("slot-softmax", _slot_softmax, log=True),
        Activation("slot-exp", _slot_exp, log=True),
        Activation("slot-sigmoid", _slot_sigmoid, log=True, normalise=False),
    )
}


def resolve(activation: str | Activation, normalise: bool | None = None) -> Activation:
    """The activation with this name, or the user's own; `normalise` overrides its default."""
    if isinstance(activation, str):
        if activation not in ACTIVATIONS:
            raise ConfigurationError(
                f"unknown activation {activation!r}: choose one of {', '.join(ACTIVATIONS)}, or pass your own ss.Activation"
            )
        activation = ACTIVATIONS[activation]
    if not isinstance(activation, Activation):
        raise ConfigurationError(f"activation must be a name or an ss.Activation; got {type(activation).__name__}")
    return activation if normalise in (None, activation.normalise) else replace(activation, normalise=normalise)
