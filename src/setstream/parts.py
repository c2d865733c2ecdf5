"""The monoids that a state is made of.

A part is a few named tensors with the batch in front, and a law by which two of them become one:

    Sums       a + b                                          totals, masses
    LogSums    (v, m) stands for the sums v·e^m               weighted sums with a running maximum m
    Maximum    max(a, b)                                      feature-wise extremes
    Minimum    min(a, b)
    Shared     a = b, or it is an error                       what all chunks of one pass must agree on

Parts are immutable: every operation gives a new one, and autograd follows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor

from setstream.errors import ConfigurationError, MismatchError, PrecisionError, RemovalError

# The shift of a LogSums that has seen nothing. Finite on purpose: e^(NOTHING - NOTHING) is 1 and not NaN, and the
# sums it multiplies are zero. It is exact in bfloat16 and up, and far below any logit.
NOTHING = -(2.0**120)

# Forgetting moves a factor 2^FADED from the sums into the shift, well before either would underflow in float32.
FADED = 32.0

# Removal is refused once its rounding error may exceed this share of what is left.
REMOVAL_TOLERANCE = 1e-3


def accumulator_dtype(device: torch.device) -> torch.dtype:
    """The dtype that sums over a set are kept in: float64, or float32 where the device has no float64 (MPS).

    A sum of 10^6 single elements in float32 loses what one product over the same elements keeps; the state is small, so
    the wide type costs nothing that can be measured.
    """
    return torch.float32 if device.type == "mps" else torch.float64


def align(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor` with trailing axes of size one until it has as many axes as `like`."""
    return tensor.reshape(tensor.shape + (1,) * (like.dim() - tensor.dim()))


class Part:
    """Named tensors, each (B, ...), and the law by which two parts merge."""

    kind: ClassVar[str]
    _kinds: ClassVar[dict[str, type[Part]]] = {}

    def __init_subclass__(cls) -> None:
        Part._kinds[cls.kind] = cls

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    @staticmethod
    def of_kind(kind: str) -> type[Part]:
        """The class that calls itself `kind`; a KeyError if there is none."""
        return Part._kinds[kind]

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The part with every tensor changed."""
        return type(self)(**{name: change(tensor) for name, tensor in self.tensors.items()})

    def to_dtype(self, dtype: torch.dtype) -> Self:
        """The part in another floating-point type."""
        return self.map(lambda tensor: tensor.to(dtype))

    def cat(self, others: Sequence[Part]) -> Self:
        """The batches of several parts, one after the other. A part that has seen nothing may not know its width yet."""
        joined = {}
        for name, first in self.tensors.items():
            pieces = [first, *(other[name] for other in others)]
            widest = max(pieces, key=lambda piece: (piece.dim(), piece.numel() // max(len(piece), 1)))
            shape = widest.shape[1:]
            if any(piece.shape[1:] != shape for piece in pieces):
                pieces = [align(piece, widest).expand(len(piece), *shape) for piece in pieces]
            joined[name] = torch.cat(pieces)
        return type(self)(**joined)

    def merge(self, other: Self) -> Self:
        """The part of the two sets together."""
        raise NotImplementedError

    def remove(self, other: Self, emptied: Tensor, tolerance: float) -> Self:
        """The part without the elements of `other`; `emptied` (B,) is true where no element is left."""
        raise NotImplementedError

    def scale(self, factor: Tensor) -> Self:
        """The part with every element's weight multiplied by `factor` (B,)."""
        raise NotImplementedError

    def graded(self) -> tuple[str, ...]:
        """The names of the tensors that carry a gradient."""
        return tuple(self.tensors)

    def pull_back(self, whole: Self, cotangent: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """How the gradient of the whole state reaches this chunk of it: (tensor of this part, its cotangent) pairs."""
        return [(tensor, cotangent[name]) for name, tensor in self.tensors.items()]


class Sums(Part):
    """Plain sums over the elements: merge adds, removal subtracts."""

    kind = "sums"

    def merge(self, other: Self) -> Self:
        """The sums of both."""
        return self._combine(other, torch.add)

    def remove(self, other: Self, emptied: Tensor, tolerance: float) -> Self:
        """The difference. Its error is the rounding error of the larger sum: signed sums hide how much that matters."""
        return self._combine(other, torch.sub).map(lambda value: value.masked_fill(align(emptied, value), 0.0))

    def scale(self, factor: Tensor) -> Self:
        """The sums times the factor."""
        return self.map(lambda value: value * align(factor.to(value.dtype), value))

    def _combine(self, other: Self, combine: Callable[[Tensor, Tensor], Tensor]) -> Self:
        values = {}
        for name, mine in self.tensors.items():
            theirs = other[name]
            values[name] = combine(align(mine, theirs), align(theirs, mine))
        return type(self)(**values)


class LogSums(Part):
    """Sums of positive weights and of weighted features, relative to a running maximum.

        numerator  v = Σ_j e^(l_j - m) φ_j      (B, H, K, E)      l_j  log-weight of element j
        normaliser c = Σ_j e^(l_j - m)          (B, H, K)         m    shift: the largest l_j so far
        shift      m                            (B, H, K)
        spent      Σ (what was removed)²        (B, H, K)         the rounding error that removals left behind

    Merging rescales both sides to the larger shift, so nothing overflows however large the logits are. The shift carries
    no gradient: it cancels in v / c and in v·e^m. A chunk's own sums come as they were computed, in float32; merging widens
    them to the accumulators' type.

    The shift keeps the dtype that the logits were computed in, and with it the knowledge of how exact the sums are.
    """

    kind = "log-sums"

    def graded(self) -> tuple[str, ...]:
        """The sums; shift and spent are constants."""
        return ("numerator", "normaliser")

    def to_dtype(self, dtype: torch.dtype) -> Self:
        """The sums in another type; the shift stays, as it tells the precision of the logits."""
        return type(self)(**{n: t if n == "shift" else t.to(dtype) for n, t in self.tensors.items()})

    def merge(self, other: Self) -> Self:
        """Both sums at the larger of the two shifts."""
        shift = torch.maximum(self["shift"], other["shift"])
        return type(self)._add(self.at(shift), other.at(shift), shift, sign=1.0)

    def remove(self, other: Self, emptied: Tensor, tolerance: float) -> Self:
        """The difference, at this part's shift.

        The subtraction is exact to about ε·|l| times the weight removed (ε of the logits' dtype), the rounding error of
        that weight. Where the heavy elements went and only light ones stay, this error may be all that is left. It is
        estimated over all removals so far, and once it could exceed `tolerance` of a slot's remaining weight,
        PrecisionError is raised and nothing is changed.
        """
        shift = self["shift"]
        rest = type(self)._add(self.at(shift), other.at(shift), shift, sign=-1.0)
        resolution = torch.finfo(shift.dtype).eps * shift.abs().clamp(min=1.0)
        error = resolution * rest["spent"].sqrt()
        # Written so that NaN is bad, too.
        bad = ~(error <= tolerance * rest["normaliser"]) & ~align(emptied, error)
        if bool(bad.any()):
            sets = bad.flatten(1).any(1).nonzero().flatten().tolist()
            raise PrecisionError(
                f"cannot remove: in {int(bad.sum())} of {bad.numel()} slots (sets {sets[:8]}) what would be left is less "
                f"than {1 / tolerance:.0f} times the rounding error of what was removed, or was never in the state. "
                "Encode the remaining elements anew, or pass a larger tolerance to State.remove()."
            )
        fresh = {"shift": NOTHING}
        return type(self)(**{n: t.masked_fill(align(emptied, t), fresh.get(n, 0.0)) for n, t in rest.tensors.items()})

    def scale(self, factor: Tensor) -> Self:
        """Sums times the factor, squares times its square. Before they fade away, part of the factor goes into the shift."""
        sums, shift = self._times(factor.to(self["normaliser"].dtype)), self["shift"]
        faint = (sums["normaliser"] < 2.0**-FADED) & (sums["normaliser"] > 0)
        scaled = type(self)(**sums, shift=torch.where(faint, shift - FADED * math.log(2.0), shift))
        return type(self)(**scaled._times(torch.where(faint, 2.0**FADED, 1.0)), shift=scaled["shift"])

    def pull_back(self, whole: Self, cotangent: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """The whole holds this chunk's sums times e^(m_chunk - m_whole); shift and spent carry no gradient."""
        wide = accumulator_dtype(whole["shift"].device)
        growth = (self["shift"].to(wide) - whole["shift"].to(wide)).exp()
        return [(self[name], cotangent[name] * align(growth, self[name])) for name in self.graded()]

    def true_sums(self) -> tuple[Tensor, Tensor]:
        """numerator·e^m and normaliser·e^m, for weights that are not normalised over the set."""
        growth = self["shift"].to(self["normaliser"].dtype).exp()
        return self["numerator"] * growth.unsqueeze(-1), self["normaliser"] * growth

    def at(self, shift: Tensor) -> dict[str, Tensor]:
        """The sums relative to another shift."""
        wide = accumulator_dtype(shift.device)
        return self._times((self["shift"].to(wide) - shift.to(wide)).exp_())

    def _times(self, factor: Tensor) -> dict[str, Tensor]:
        normaliser, spent = self["normaliser"], self["spent"]
        factor = align(factor, normaliser)
        return {
            "numerator": self["numerator"] * factor.unsqueeze(-1),
            "normaliser": normaliser * factor,
            "spent": spent * factor.square(),
        }

    @classmethod
    def _add(cls, a: dict[str, Tensor], b: dict[str, Tensor], shift: Tensor, sign: float) -> Self:
        spent = a["spent"] + b["spent"]
        return cls(
            numerator=torch.add(a["numerator"], b["numerator"], alpha=sign),
            normaliser=torch.add(a["normaliser"], b["normaliser"], alpha=sign),
            spent=spent if sign > 0 else spent + b["normaliser"].detach().square(),
            shift=shift,
        )


class _Extremum(Part):
    """A feature-wise maximum or minimum: it merges, but cannot lose or weigh elements."""

    kind = "extremum"
    _choose: ClassVar[Callable[[Tensor, Tensor], Tensor]]
    nothing: ClassVar[float]

    def merge(self, other: Self) -> Self:
        """The more extreme of the two, feature by feature."""
        choose = type(self)._choose
        return type(self)(value=choose(self["value"], other["value"]))

    def remove(self, other: Self, emptied: Tensor, tolerance: float) -> Self:
        """Not possible."""
        raise RemovalError(
            f"a {self.kind} cannot lose elements: once an element is gone nothing tells which was next. "
            "Encode the remaining elements anew, or use a mean, a sum or UMBC."
        )

    def scale(self, factor: Tensor) -> Self:
        """Not possible."""
        raise ConfigurationError(
            f"a {self.kind} cannot forget: its elements have no weights. Use a mean, a sum or UMBC for that."
        )


class Maximum(_Extremum):
    """Feature-wise maximum over the elements."""

    kind = "maximum"
    _choose = torch.maximum
    nothing = float("-inf")


class Minimum(_Extremum):
    """Feature-wise minimum over the elements."""

    kind = "minimum"
    _choose = torch.minimum
    nothing = float("inf")


class Shared(Part):
    """What every chunk of one pass must have in common, such as the slots' random draw."""

    kind = "shared"

    def graded(self) -> tuple[str, ...]:
        """None: a draw is a constant."""
        return ()

    def to_dtype(self, dtype: torch.dtype) -> Self:
        """A draw keeps its type: rounded, it would be another draw."""
        return self

    def merge(self, other: Self) -> Self:
        """Either of the two, which must be equal."""
        for name, mine in self.tensors.items():
            if mine is not other[name] and not torch.equal(mine, other[name]):
                raise MismatchError(
                    f"these states come from different random draws ({name}), so their sum means nothing. Start both "
                    "from one `state = encoder.empty(batch)`, or call encoder.eval() where no draw is wanted."
                )
        return self

    def remove(self, other: Self, emptied: Tensor, tolerance: float) -> Self:
        """What they share stays."""
        return self.merge(other)

    def scale(self, factor: Tensor) -> Self:
        """A draw has no weight to scale."""
        return self
