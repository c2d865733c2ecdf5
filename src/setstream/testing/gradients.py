"""The laws of gradients: exact is exact, unbiased is unbiased.

exact      |g_exact - g| <= 2 |g_full - g|            g: the full gradient in float64
unbiased   z = |mean_d ĝ_d - g| / (std_d ĝ_d / √D)    over D draws, below what chance allows for the largest of all entries
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from setstream.errors import LawViolation
from setstream.gradients.encode import encode
from setstream.models.model import SetModel
from setstream.pools.base import named_tensors
from setstream.sets.layout import Sets, pack
from setstream.testing.laws import Mask, Model, allowed_error, in_float64

SLACK_GRADIENT = 64.0  # gradients are longer sums: the full one is exact to the last place by chance more often
Loss = Callable[[Any], Tensor]
Estimate = Callable[[Model, Sets, torch.Generator], dict[str, Tensor]]


def default_loss(output: Any) -> Tensor:
    """A loss with curvature and without symmetry, for any output: Σ (o² / 2 + o · cos(3 i))."""
    terms = []
    for _, tensor in named_tensors(output):
        tilt = torch.arange(tensor.numel(), dtype=tensor.dtype, device=tensor.device).mul(3.0).cos().view(tensor.shape)
        terms.append((tensor.square() / 2 + tensor * tilt).sum())
    return torch.stack(terms).sum()


def parameter_gradients(model: Model, sets: Sets, loss: Loss, **options: Any) -> dict[str, Tensor]:
    """∂L/∂θ of every trainable parameter, by name, through `encode(**options)`."""
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    encoder, head = (model.encoder, model.head) if isinstance(model, SetModel) else (model, nn.Identity())
    value = loss(head(encode(encoder, sets, **options)))
    if not value.requires_grad:  # sets without elements, and no trainable parameter after the pool
        return {name: torch.zeros_like(p) for name, p in learned.items()}
    gradients = torch.autograd.grad(value, list(learned.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(learned.items(), gradients, strict=True)}


def check_exact_gradient(model: Model, sets: Sets, mask: Mask = None, *, loss: Loss = default_loss, **options: Any) -> float:
    """`encode(gradient="exact")` gives every parameter the gradient of `full`, as close to float64 as `full` is.

    Further options go to `encode` (chunk_size is 16 by default): any mode that should be exact can be checked. Returns the
    largest error, relative to the largest entry of that parameter's gradient.

    >>> encoder = ss.SetEncoder(torch.nn.Linear(3, 8), ss.UMBC(8, num_slots=4, slot_residual=True))
    >>> ss.testing.check_exact_gradient(ss.SetModel(encoder, ss.nn.SetTransformer(8)), torch.randn(2, 50, 3)) < 1e-4
    True
    """
    packed = pack(sets, mask)
    ragged = list(packed.elements.detach().split(packed.lengths))
    subject = copy.deepcopy(model).eval()
    reference = parameter_gradients(copy.deepcopy(model).double().eval(), in_float64(ragged), loss, gradient="full")
    full = parameter_gradients(subject, ragged, loss, gradient="full")
    exact = parameter_gradients(subject, ragged, loss, **{"gradient": "exact", "chunk_size": 16, **options})
    largest = 0.0
    # A gradient that nearly cancels (a key bias before a softmax) is mostly rounding: compare it with the others' size.
    size = max((float(g.abs().max()) for g in reference.values() if g.numel()), default=0.0)
    for name, expected in reference.items():
        scale = max(float(expected.abs().max()), 0.05 * size) or 1.0
        error, one_shot = (float((mode[name].double() - expected).abs().max()) / scale for mode in (exact, full))
        allowed = allowed_error(one_shot, full[name].dtype, SLACK_GRADIENT)
        if not error <= allowed:
            raise LawViolation(
                f"exact gradient is broken: that of {name} is off by {error:.3g} (relative to its largest entry, against "
                f"float64); {allowed:.3g} is allowed"
            )
        largest = max(largest, error)
    return largest


def z_bound(entries: int, level: float = 1e-3) -> float:
    """The absolute z that the largest of `entries` standard normal numbers exceeds with probability `level` at most.

    >>> round(z_bound(1), 2), round(z_bound(10_000), 2)
    (3.29, 5.33)
    """
    return float(torch.special.ndtri(torch.tensor(1 - level / (2 * max(entries, 1)), dtype=torch.float64)))


def check_unbiased_gradient(
    model: Model,
    sets: Sets,
    mask: Tensor | None = None,
    *,
    draws: int = 2000,
    chunk_size: int = 8,
    seed: int = 0,
    loss: Loss = default_loss,
    estimate: Estimate | None = None,
    **options: Any,
) -> float:
    """The mean of `draws` estimates agrees with the full gradient, for every entry of every parameter.

    Each entry gives a z-score, its distance from the full gradient in standard errors. The largest must stay below what as
    many normal numbers as there are entries exceed once in a thousand times (`z_bound`). Works in float64. Further options
    (gradient, grad_chunks, replacement, ...) go to `encode`; `estimate` checks your own estimator. Returns the largest z.

    >>> encoder = ss.SetEncoder(torch.nn.Linear(3, 4), ss.UMBC(4, num_slots=2))
    >>> ss.testing.check_unbiased_gradient(encoder, torch.randn(2, 30, 3), draws=200) < 6
    True
    """
    packed = pack(sets, mask)
    ragged = in_float64(list(packed.elements.detach().split(packed.lengths)))
    subject = copy.deepcopy(model).double().eval()
    full = parameter_gradients(subject, ragged, loss, gradient="full")
    generator = torch.Generator().manual_seed(seed)
    settings = {"gradient": "unbiased", "partition": "random", "chunk_size": chunk_size, "generator": generator, **options}
    totals = {name: torch.zeros_like(g) for name, g in full.items()}
    squares = {name: torch.zeros_like(g) for name, g in full.items()}
    estimate = estimate or (lambda model, sets, generator: parameter_gradients(model, sets, loss, **settings))
    for _ in range(draws):
        for name, gradient in estimate(subject, ragged, generator).items():
            distance = gradient - full[name]
            totals[name] += distance
            squares[name] += distance.square()
    bound = z_bound(sum(g.numel() for g in full.values()))
    # An entry that never varies must be right, and rounding is not noise.
    rounding = 1e-9 * max((float(g.abs().max()) for g in full.values() if g.numel()), default=0.0) + 1e-300
    largest = 0.0
    for name, total in totals.items():
        mean = total / draws
        error = (squares[name] / draws - mean.square()).clamp(min=0.0).sqrt() / math.sqrt(draws) + rounding
        z = float((mean.abs() / error).max())
        if not z <= bound:
            raise LawViolation(
                f"unbiased gradient is broken: over {draws} draws the mean for {name} is {z:.1f} standard errors from the full "
                f"gradient; {bound:.1f} is what chance allows among all entries"
            )
        largest = max(largest, z)
    return largest
