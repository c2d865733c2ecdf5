"""The monoids that a state is made of.

A part is a few named tensors with the batch in front, and a law by which two of them become one:

    Sums       a + b                                          totals, for pools of your own
    LogSums    (v, m) stands for the sums v·e^m               sums and weighted sums with a running maximum m
    Maximum    max(a, b)                                      feature-wise extremes
    Minimum    min(a, b)
    Shared     a = b, or it is an error                       what all chunks of one pass must agree on

Parts are immutable: every operation gives a new one, and autograd follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor

from setstream.errors import ConfigurationError, MismatchError, PrecisionError, RemovalError

# The shift of a LogSums that has seen nothing. Finite on purpose: e^(NOTHING - NOTHING) is 1 and not NaN, and the
# sums it multiplies are zero. It is exact in bfloat16 and up, and far below any logit.
NOTHING = -(2.0**120)

# Forgetting moves what lies beyond a factor e^FADED from the sums into the shift, well before they would underflow in float32.
FADED = 22.0

# How many ε the sums of one chunk may be off: measured, with room to spare (tests/laws/test_sequences.py).
UNSURE = 4.0

# Removal is refused once its rounding error may exceed this share of what is left.
REMOVAL_TOLERANCE = 1e-3


def accumulator_dtype(device: torch.device) -> torch.dtype:
    """The dtype that sums over a set are kept in: float64, or float32 where the device has no float64 (MPS).

    A sum of 10^6 single elements in float32 loses what one product over the same elements keeps; the state is small, so
    the wide type costs nothing that can be measured.
    """
    return torch.float32 if device.type == "mps" else torch.float64


def must_be_empty(nothing: Tensor, mine: Tensor, theirs: Tensor) -> None:
    """Raise unless the part that is not as wide as the other has seen `nothing`: only then its width is not known yet."""
    if not bool(nothing.all()):
        raise MismatchError(
            f"these sets have features of different widths, {tuple(mine.shape[1:])} and {tuple(theirs.shape[1:])}: the "
            "elements that were added before had another width"
        )


def align(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor` with trailing axes of size one until it has as many axes as `like`."""
    return tensor.reshape(tensor.shape + (1,) * (like.dim() - tensor.dim()))


class Accumulator:
    """Named tensors, each (B, ...), and the law by which two parts merge."""

    kind: ClassVar[str]
    _kinds: ClassVar[dict[str, type[Accumulator]]] = {}

    def __init_subclass__(cls) -> None:
        Accumulator._kinds[cls.kind] = cls

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    @staticmethod
    def of_kind(kind: str) -> type[Accumulator]:
        """The class that calls itself `kind`; a KeyError if there is none."""
        return Accumulator._kinds[kind]

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The part with every tensor changed."""
        return type(self)(**{name: change(tensor) for name, tensor in self.tensors.items()})

    def to_dtype(self, dtype: torch.dtype) -> Self:
        """The part in another floating-point type."""
        return self.map(lambda tensor: tensor.to(dtype))

    def cat(self, others: Sequence[Accumulator]) -> Self:
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

    def fault(self, seen: Tensor) -> str | None:
        """What cannot be in a part that comes from outside; `seen` (B,) is true for sets that have elements."""
        return None if all(bool(torch.isfinite(tensor).all()) for tensor in self.tensors.values()) else "NaN or infinity"

    def graded(self) -> tuple[str, ...]:
        """The names of the tensors that carry a gradient."""
        return tuple(self.tensors)

    def pull_back(self, whole: Self, cotangent: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """How the gradient of the whole state reaches this chunk of it: (tensor of this part, its cotangent) pairs."""
        return [(tensor, cotangent[name]) for name, tensor in self.tensors.items()]


class Sums(Accumulator):
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


class LogSums(Accumulator):
    """Sums of weighted features and of their weights, relative to a running maximum; plain sums have weight one and shift zero.

        numerator  v = Σ_j e^(l_j - m) φ_j      (B, ..., E)       l_j  log-weight of element j
        normaliser c = Σ_j e^(l_j - m)          (B, ...)          m    shift: the largest l_j so far, less what was forgotten
        shift      m                            (B, ...)          -inf or NOTHING where nothing was seen
        error                                   (B, ..., 2)       the rounding error that c and |v| may hold

    Merging rescales both sides to the larger shift, so nothing overflows however large the logits are. The shift carries
    no gradient: it cancels in v / c and in v·e^m. A chunk's own sums come as they were computed, in float32; merging widens
    them to the accumulators' type.

    Every chunk brings the rounding error of its own sums, ε (1 + |l|) of each (ε of the dtype that the logits were computed
    in). Errors add up in squares, when chunks are merged and when they are removed: what a removal leaves is compared with
    them. A part made without `error` gets that of one chunk; `spent`, which 0.1 kept instead, is read into it.
    """

    kind = "log-sums"

    def __init__(self, **tensors: Tensor) -> None:
        spent = tensors.pop("spent", None)
        super().__init__(**tensors)
        if "error" not in tensors and self._is_whole():
            normaliser, shift = tensors["normaliser"], tensors["shift"]
            error = rounding_error(tensors["numerator"], normaliser, shift.clamp(min=NOTHING))
            if spent is not None and spent.shape == normaliser.shape:
                ever = normaliser.square().add(spent).sqrt() / normaliser.masked_fill(normaliser == 0, 1.0)
                error = error * ever.unsqueeze(-1)
            self.tensors["error"] = error

    @classmethod
    def nothing(cls, numerator: Sequence[int], slots: Sequence[int], device: torch.device) -> Self:
        """The sums of no elements, by the shapes of numerator and normaliser."""
        dtype = accumulator_dtype(device)
        return cls(
            numerator=torch.zeros(numerator, dtype=dtype, device=device),
            normaliser=torch.zeros(slots, dtype=dtype, device=device),
            shift=torch.full(slots, NOTHING, dtype=dtype, device=device),
            error=torch.zeros(*slots, 2, dtype=dtype, device=device),
        )

    @classmethod
    def of_ones(cls, total: Tensor, count: Tensor, dtype: torch.dtype) -> Self:
        """Plain sums: every element weighs one. dtype: that of the features."""
        error = sizes(total, count).mul_(UNSURE * torch.finfo(torch.promote_types(dtype, torch.float32)).eps)
        return cls(numerator=total, normaliser=count, shift=torch.zeros_like(count), error=error)

    @classmethod
    def of_sums(cls, part: Accumulator) -> Self:
        """A total and a mass as 0.1 kept them, in plain sums."""
        total = part["total"]
        (mass,) = (tensor for name, tensor in part.tensors.items() if name != "total")
        return cls(numerator=total, normaliser=mass, shift=torch.where(mass > 0, 0.0, NOTHING))

    def _is_whole(self) -> bool:
        """Whether these are sums at all: what comes from outside may be anything."""
        numerator, normaliser, shift = (self.tensors.get(name) for name in ("numerator", "normaliser", "shift"))
        return (
            numerator is not None
            and normaliser is not None
            and shift is not None
            and numerator.shape[: normaliser.dim()] == normaliser.shape == shift.shape
            and all(tensor.is_floating_point() for tensor in self.tensors.values())
        )

    def graded(self) -> tuple[str, ...]:
        """The sums; shift and error are constants."""
        return ("numerator", "normaliser")

    def merge(self, other: Self) -> Self:
        """Both sums at the larger of the two shifts."""
        if self._adds_to(other):
            return type(self)._add(self.tensors, other.tensors, self["shift"], sign=1.0)
        shift = torch.maximum(self["shift"], other["shift"]).clamp(min=NOTHING)
        return type(self)._add(self.at(shift), other.at(shift), shift, sign=1.0)

    def _adds_to(self, other: Self) -> bool:
        """Whether both are wide and at one shift, as plain sums are. Only asked where the answer costs nothing."""
        mine, theirs = self["shift"], other["shift"]
        cheap = not torch.compiler.is_compiling() and mine.device.type == "cpu" and mine.dtype == torch.float64
        return cheap and self["numerator"].dtype == other["numerator"].dtype == mine.dtype and torch.equal(mine, theirs)

    def remove(self, other: Self, emptied: Tensor, tolerance: float) -> Self:
        """The difference, at this part's shift.

        Where heavy elements or large features go and light or small ones stay, the rounding error of what went may be all
        that is left. Once it could exceed `tolerance` of a slot's remaining weight, or of its remaining numerator,
        PrecisionError is raised and nothing is changed.
        """
        shift = self["shift"].clamp(min=NOTHING)
        rest = type(self)._add(self.at(shift), other.at(shift), shift, sign=-1.0)
        left = sizes(rest["numerator"], rest["normaliser"])
        # Written so that NaN is bad, too. Where nothing is removed, nothing is lost.
        bad = ~(rest["error"] <= tolerance * left) & ~align(emptied, left) & ~(other["normaliser"] == 0).unsqueeze(-1)
        if bool(bad.any()):
            slots = bad.any(-1)
            sets = bad.flatten(1).any(1).nonzero().flatten().tolist()
            raise PrecisionError(
                f"cannot remove: in {int(slots.sum())} of {slots.numel()} slots (sets {sets[:8]}) what would be left is less "
                f"than {1 / tolerance:.0f} times the rounding error of what was removed, or was never in the state. "
                "Encode the remaining elements anew, or pass a larger tolerance to State.remove().",
                tuple(sets),
            )
        fresh = {"shift": NOTHING}
        return type(self)(**{n: t.masked_fill(align(emptied, t), fresh.get(n, 0.0)) for n, t in rest.tensors.items()})

    def scale(self, factor: Tensor) -> Self:
        """Sums times the factor. Before they fade away, or grow beyond bounds, what is too much goes into the shift."""
        normaliser, shift = self["normaliser"].detach(), self["shift"]
        wide = accumulator_dtype(shift.device)
        factor = align(factor.to(wide), normaliser).expand_as(normaliser)
        size = normaliser.to(wide).log() + factor.log()
        away = (size.abs() > FADED) & (normaliser > 0)
        moved = torch.where(away, (shift.to(wide) + size).to(shift.dtype), shift)
        # By how much it really moved, after rounding.
        growth = torch.where(away, (factor.log() + (shift.to(wide) - moved.to(wide))).exp(), factor)
        return type(self)(**self._times(growth), shift=moved)

    def fault(self, seen: Tensor) -> str | None:
        """Sums are finite; weights and errors are not negative; nothing was summed where nothing was seen."""
        if not self._is_whole():
            return None  # not sums at all: an encoder, or the state it is merged with, will say so
        numerator, normaliser, shift, error = (self[name] for name in ("numerator", "normaliser", "shift", "error"))
        nothing = normaliser == 0
        if not all(bool(torch.isfinite(tensor).all()) for tensor in (numerator, normaliser, error)):
            return "sums hold NaN or infinity"
        if not bool((torch.isfinite(shift) | (nothing & (shift == float("-inf")))).all()):
            return "shift holds NaN or infinity"
        if bool((normaliser < 0).any()) or bool((error < 0).any()):
            return "normaliser or error is negative"
        # Weights that are not kept as logarithms (shift 0) may all be too small for a float; no others.
        if bool((nothing & align(seen, nothing) & (shift != 0)).any()):
            return "normaliser is zero in a set that has elements"
        if bool((~nothing & ~align(seen, nothing)).any()) or bool((align(nothing, numerator) & (numerator != 0)).any()):
            return "numerator or normaliser is not zero where no element has any weight"
        return None

    def pull_back(self, whole: Self, cotangent: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """The whole holds this chunk's sums times e^(m_chunk - m_whole); shift and error carry no gradient."""
        wide = accumulator_dtype(whole["shift"].device)
        growth = (self["shift"].to(wide) - whole["shift"].to(wide)).exp()
        return [(self[name], cotangent[name] * align(growth, self[name])) for name in self.graded()]

    def mean(self) -> Tensor:
        """v / c, and zero where nothing was seen."""
        numerator, normaliser = self["numerator"], self["normaliser"]
        return numerator / align(normaliser.masked_fill(normaliser == 0, 1.0), numerator)

    def true_sums(self) -> tuple[Tensor, Tensor]:
        """numerator·e^m and normaliser·e^m, for weights that are not normalised over the set."""
        growth = self["shift"].to(self["normaliser"].dtype).exp()
        return self["numerator"] * align(growth, self["numerator"]), self["normaliser"] * growth

    def at(self, shift: Tensor) -> dict[str, Tensor]:
        """The sums relative to another shift."""
        wide = accumulator_dtype(shift.device)
        return self._times((self["shift"].to(wide) - shift.to(wide)).exp_())

    def _times(self, factor: Tensor) -> dict[str, Tensor]:
        return {name: self[name] * align(factor, self[name]) for name in ("numerator", "normaliser", "error")}

    @classmethod
    def _add(cls, a: dict[str, Tensor], b: dict[str, Tensor], shift: Tensor, sign: float) -> Self:
        mine, theirs = a["numerator"], b["numerator"]
        if mine.shape != theirs.shape:
            narrow = a if mine.dim() < theirs.dim() or mine.shape[-1] < theirs.shape[-1] else b
            must_be_empty(narrow["normaliser"] == 0, mine, theirs)
            mine, theirs = align(mine, theirs), align(theirs, mine)
        return cls(
            numerator=torch.add(mine, theirs, alpha=sign),
            normaliser=torch.add(a["normaliser"], b["normaliser"], alpha=sign),
            shift=shift,
            error=_root_of_squares(a["error"], b["error"]),
        )


def _root_of_squares(a: Tensor, b: Tensor) -> Tensor:
    """√(a² + b²) of numbers that are not negative, without an overflow on the way."""
    most, least = torch.maximum(a, b), torch.minimum(a, b)
    ratio = least / most.masked_fill(most == 0, 1.0)
    return (most * (ratio.square() + 1.0).sqrt_()).clamp_(max=torch.finfo(most.dtype).max)


def sizes(numerator: Tensor, normaliser: Tensor) -> Tensor:
    """c and the norm of v, side by side: (B, ..., 2)."""
    wide = accumulator_dtype(numerator.device)  # the squares of numbers that float32 holds overflow in float32
    norm = torch.linalg.vector_norm(numerator.detach().flatten(normaliser.dim()), dim=-1, dtype=wide)
    return torch.stack([normaliser.detach().to(wide), norm], -1).clamp_(max=torch.finfo(wide).max)


def rounding_error(numerator: Tensor, normaliser: Tensor, reach: Tensor) -> Tensor:
    """The rounding error in the sums of one chunk: ε (1 + |l|) of each. `reach`: the largest |l|, in the logits' dtype."""
    share = reach.abs().add_(1.0).mul_(UNSURE * torch.finfo(reach.dtype).eps)
    return sizes(numerator, normaliser).mul_(share.unsqueeze(-1))


class _Extremum(Accumulator):
    """A feature-wise maximum or minimum: it merges, but cannot lose or weigh elements."""

    kind = "extremum"
    _choose: ClassVar[Callable[[Tensor, Tensor], Tensor]]
    nothing: ClassVar[float]

    def merge(self, other: Self) -> Self:
        """The more extreme of the two, feature by feature."""
        mine, theirs = self["value"], other["value"]
        if mine.shape[-1] != theirs.shape[-1]:
            must_be_empty((mine if mine.shape[-1] < theirs.shape[-1] else theirs) == self.nothing, mine, theirs)
        return type(self)(value=type(self)._choose(mine, theirs))

    def fault(self, seen: Tensor) -> str | None:
        """Extremes are finite, and infinite where nothing was seen."""
        value = self["value"]
        right = torch.where(align(seen, value), torch.isfinite(value), value == self.nothing)
        return None if bool(right.all()) else f"a {self.kind} is not finite, or is of no elements"

    def remove(self, other: Self, emptied: Tensor, tolerance: float) -> Self:
        """Not possible."""
        raise RemovalError(
            f"a {self.kind} cannot lose elements: once an element is gone nothing tells which was next. Encode the remaining "
            "elements anew, or use a model without it: pools that are means, sums or UMBC, and elements_stream=False in a "
            "SetClassifier."
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


class Chunks(Accumulator):
    """In how many chunks each set came, where that matters. Forgetting leaves it, and nothing can be taken out."""

    kind = "chunks"

    def graded(self) -> tuple[str, ...]:
        """None: they are counts."""
        return ()

    def to_dtype(self, dtype: torch.dtype) -> Self:
        """Whole numbers stay."""
        return self

    def merge(self, other: Self) -> Self:
        """The chunks of both."""
        return type(self)(seen=self["seen"] + other["seen"])

    def remove(self, other: Self, emptied: Tensor, tolerance: float) -> Self:
        """Not possible."""
        raise RemovalError(
            "a mean over chunks cannot lose elements: it does not know which chunk they came in. Encode the remaining elements "
            "anew, or use a consistent pool."
        )

    def scale(self, factor: Tensor) -> Self:
        """They weigh less, and came in as many chunks as before."""
        return self

    def fault(self, seen: Tensor) -> str | None:
        """Whole numbers, one at least where there are elements."""
        chunks = self.tensors.get("seen")
        if chunks is None or chunks.dtype != torch.int64 or bool((chunks < seen.to(chunks.dtype)).any()):
            return "the number of chunks is missing, or less than one for a set that has elements"
        return None


class Shared(Accumulator):
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
