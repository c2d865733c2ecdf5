"""Sums of weighted features and of their weights, relative to a running maximum.

    numerator  v = Σ_j e^(l_j - m) φ_j      (B, ..., E)       l_j  log-weight of element j
    normaliser c = Σ_j e^(l_j - m)          (B, ...)          m    shift: the largest l_j so far, less the decay
    shift      m                            (B, ...)          -inf or NOTHING where nothing was seen
    error                                   (B, ..., 2)       the rounding error that c and |v| may hold

    merge      (v, m) + (w, n) = (v e^(m - s) + w e^(n - s), s)       s = max(m, n)

Plain sums have weight one and shift zero.
"""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from setstream.errors import PrecisionError
from setstream.states.accumulators.base import NOTHING, Accumulator, Group, accumulator_dtype, align, all_reduce, must_be_empty

# Decay moves factors beyond e^FADED from the sums into the shift, well before they would underflow in float32.
FADED = 22.0
# The error of the sums of one chunk in multiples of ε: measured, with a margin (tests/laws/test_sequences.py).
UNSURE = 4.0
# Sums of at most this many numbers are merged by NumPy.
FEW = 2**15
# Removal raises PrecisionError if its rounding error may exceed this share of the rest.
REMOVAL_TOLERANCE = 1e-3


class LogSums(Accumulator):
    """Sums of weighted features and of their weights, relative to a running maximum: numerator, normaliser, shift, error.

    Merging rescales both sides to the larger shift, so nothing overflows for logits of any size. The shift carries no gradient:
    it cancels in v / c and in v·e^m. A chunk's sums come in float32, as computed; merging widens them.

    Every chunk adds the rounding error of its sums, ε (1 + |l|) of each (ε of the logits' dtype). Errors add up in squares,
    when chunks are merged and when they are removed. The sums of one block may have `reach`, the largest |l|, instead: their
    error is then computed when it is needed.
    """

    kind = "log-sums"

    def __getitem__(self, name: str) -> Tensor:
        if name == "error" and name not in self.tensors:
            reach = self.tensors.get("reach")
            reach = self["shift"].clamp(min=NOTHING) if reach is None else reach
            return rounding_error(self["numerator"], self["normaliser"], reach)
        return self.tensors[name]

    @classmethod
    def nothing(cls, numerator: Sequence[int], slots: Sequence[int], device: torch.device) -> Self:
        """The sums of no elements, by the shapes of numerator and normaliser."""
        normaliser = torch.zeros(slots, dtype=accumulator_dtype(device), device=device)
        value, error = normaliser.new_zeros(numerator), normaliser.new_zeros((*slots, 2))
        return cls(numerator=value, normaliser=normaliser, shift=torch.full_like(normaliser, NOTHING), error=error)

    @classmethod
    def of_ones(cls, total: Tensor, count: Tensor, dtype: torch.dtype) -> Self:
        """Plain sums: every element weighs one. dtype: that of the features."""
        error = sizes(total, count).mul_(UNSURE * torch.finfo(torch.promote_types(dtype, torch.float32)).eps)
        return cls(numerator=total, normaliser=count, shift=torch.zeros_like(count), error=error)

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], version: int) -> Self:
        """Sums of 0.1 (version 1) had `spent`, the squares of weights that were removed, instead of `error`."""
        spent = tensors.get("spent") if version == 1 else None
        if spent is None:
            return cls(**tensors)
        sums = cls(**{name: tensor for name, tensor in tensors.items() if name not in ("spent", "error")})
        if sums._is_whole() and spent.shape == sums["normaliser"].shape and spent.is_floating_point():
            normaliser = sums["normaliser"]
            ever = normaliser.square().add(spent).sqrt() / normaliser.masked_fill(normaliser == 0, 1.0)
            sums.tensors["error"] = sums["error"] * ever.unsqueeze(-1)
        return sums

    def _is_whole(self) -> bool:
        """Whether the tensors are those of sums: data from outside may be anything."""
        if not {"numerator", "normaliser", "shift"} <= self.tensors.keys():
            return False
        numerator, normaliser, shift = self["numerator"], self["normaliser"], self["shift"]
        fitting = numerator.shape[: normaliser.dim()] == normaliser.shape == shift.shape
        return fitting and all(tensor.is_floating_point() for tensor in self.tensors.values())

    def merge(self, other: Self) -> Self:
        a, b = self["shift"], other["shift"]
        # Plain sums are wide and at one shift, and need no rescaling. Compared only where it is free.
        cheap = not torch.compiler.is_compiling() and a.device.type == "cpu" and a.dtype == b.dtype == torch.float64
        same = cheap and self["numerator"].dtype == other["numerator"].dtype == a.dtype and torch.equal(a, b)
        if not same and (few := self._merge_few(other)) is not None:
            return few
        return self._add(other, a if same else torch.maximum(a, b).clamp(min=NOTHING), 1.0)

    def _merge_few(self, other: Self) -> Self | None:
        """`merge` of a few numbers without a graph, by NumPy: its operations start in less time than torch's."""
        first, second = self["numerator"], other["numerator"]
        if torch.compiler.is_compiling():  # first: a question about sizes would limit the number of sets of a graph
            return None
        if first.numel() > FEW or first.shape != second.shape or first.device.type != "cpu":
            return None
        try:
            (v, c, m, error), (w, d, n, other_error) = self._arrays(), other._arrays()
        except (RuntimeError, TypeError):  # a graph, a transform of torch.func, or a type that NumPy does not have
            return None
        shift = np.maximum(np.maximum(m, n), NOTHING, dtype=np.float64)
        growth, other_growth = np.exp(m - shift)[..., None], np.exp(n - shift)[..., None]
        sums = {"numerator": v * growth, "normaliser": c * growth[..., 0] + d * other_growth[..., 0], "shift": shift}
        sums["numerator"] += w * other_growth
        sums["error"] = np.hypot(error * growth, other_error * other_growth)
        numerator = torch.from_numpy(sums.pop("numerator")).view(first.shape)
        return type(self)(numerator=numerator, **{name: torch.from_numpy(array) for name, array in sums.items()})

    def _arrays(self) -> tuple[Any, ...]:
        """Numerator, as (..., E), normaliser, shift and error as NumPy's arrays."""
        normaliser, shift = self.tensors["normaliser"].numpy(), self.tensors["shift"].numpy()
        numerator = self.tensors["numerator"].numpy().reshape(*normaliser.shape, -1)
        if "error" in self.tensors:
            return numerator, normaliser, shift, self.tensors["error"].numpy()
        reach = self.tensors["reach"].numpy() if "reach" in self.tensors else np.maximum(shift, NOTHING)
        error = np.empty((*normaliser.shape, 2))
        error[..., 0] = normaliser
        np.sqrt(np.einsum("...e,...e->...", numerator, numerator, dtype=np.float64), out=error[..., 1])
        error *= ((np.abs(reach) + 1.0) * (UNSURE * np.finfo(reach.dtype).eps))[..., None]
        return numerator, normaliser, shift, error

    def remove(self, other: Self, emptied: Tensor, tolerance: float) -> Self:
        """The difference, at this accumulator's shift; error is compared with each slot's remaining weight and numerator."""
        rest = self._add(other, self["shift"].clamp(min=NOTHING), -1.0)
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
        empty = {"shift": NOTHING}
        return type(self)(**{n: t.masked_fill(align(emptied, t), empty.get(n, 0.0)) for n, t in rest.tensors.items()})

    def scale(self, factor: Tensor) -> Self:
        """Sums times the factor. Before they underflow or overflow, the excess goes into the shift."""
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
        if not self._is_whole():
            return None  # other tensors: an encoder, or the state it is merged with, will raise the error
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

    def reduce(self, group: Group) -> Self:
        shift = all_reduce(self["shift"], dist.ReduceOp.MAX, group)
        sums = self._times(self._growth(shift))
        return type(self)(**{name: all_reduce(tensor, dist.ReduceOp.SUM, group) for name, tensor in sums.items()}, shift=shift)

    def graded(self) -> tuple[str, ...]:
        return ("numerator", "normaliser")

    def contribution(self, whole: Self, owned: Tensor | None = None) -> dict[str, Tensor]:
        """The whole holds this chunk's sums times e^(m_chunk - m_whole)."""
        return self._times(self._growth(whole["shift"]).to(self["normaliser"].dtype), self.graded())

    def to_tensors(self) -> dict[str, Tensor]:
        if "error" in self.tensors or not self._is_whole():
            return self.tensors
        return {name: self[name] for name in ("numerator", "normaliser", "shift", "error")}

    def widened(self) -> Self:
        dtype = accumulator_dtype(self["shift"].device)
        return type(self)(**{name: tensor.to(dtype) for name, tensor in self.to_tensors().items()})

    def narrowed(self) -> Self:
        """The numerator in float32, with its rounding error. Normaliser, a count in plain sums, and shift are few numbers."""
        numerator, error = self["numerator"], self["error"]
        norm = sizes(numerator, self["normaliser"])[..., 1] * (torch.finfo(torch.float32).eps / 2)
        error = torch.stack([error[..., 0], torch.hypot(error[..., 1], norm)], -1)
        return type(self)(**self.tensors | {"numerator": numerator.float(), "error": error.float()})

    def merge_rows(self, owner: Sequence[int], batch: int) -> Self:
        index, shifts = torch.tensor(owner, device=self["shift"].device), self["shift"].detach()
        even = len(owner) % batch == 0 and [*owner] == [row // (len(owner) // batch) for row in range(len(owner))]
        wide = accumulator_dtype(shifts.device)

        def add(rows: Tensor) -> Tensor:
            if even:  # torch adds in pairs: accurate in the type of the rows
                return rows.unflatten(0, (batch, -1)).sum(1)
            return rows.new_zeros(batch, *rows.shape[1:], dtype=wide).index_add(0, index, rows.to(wide))

        def most(rows: Tensor) -> Tensor:
            if even:
                return rows.unflatten(0, (batch, -1)).amax(1)
            nothing = rows.new_full((batch, *rows.shape[1:]), NOTHING)
            return nothing.scatter_reduce_(0, align(index, rows).expand_as(rows), rows, "amax")

        shift = most(shifts).clamp_(min=NOTHING)
        growth = (shifts - shift.index_select(0, index)).exp_()
        merged = {name: add(rows) for name, rows in self._times(growth, self.graded()).items()} | {"shift": shift}
        if "reach" in self.tensors:
            merged["reach"] = most(self["reach"])
        elif "error" in self.tensors:
            error = self["error"] * growth.unsqueeze(-1)
            largest = error.amax().clamp_(min=torch.finfo(error.dtype).tiny)  # no square overflows
            merged["error"] = add((error / largest).square_()).sqrt_() * largest
        return type(self)(**merged)

    def cat(self, others: Sequence[Accumulator]) -> Self:
        alike = all(other.tensors.keys() == self.tensors.keys() for other in others)
        return super().cat(others) if alike or "error" in self.tensors else self.widened().cat(others)

    def mean(self) -> Tensor:
        """v / c, and zero where nothing was seen."""
        numerator, normaliser = self["numerator"], self["normaliser"]
        return numerator / align(normaliser.masked_fill(normaliser == 0, 1.0), numerator)

    def shares(self, weights: Tensor, shift: Tensor) -> Tensor:
        """Weights e^(l - shift) (B, ..., n) of a chunk as shares of all weights; zero in an empty set."""
        total = self["normaliser"] * (self["shift"] - shift).to(self["normaliser"].dtype).exp()
        return weights / total.masked_fill(total == 0, float("inf")).to(weights.dtype).unsqueeze(-1)

    def true_sums(self) -> tuple[Tensor, Tensor]:
        """numerator·e^m and normaliser·e^m, for weights that are not normalised over the set."""
        growth = self["shift"].to(self["normaliser"].dtype).exp()
        return self["numerator"] * align(growth, self["numerator"]), self["normaliser"] * growth

    def _growth(self, shift: Tensor) -> Tensor:
        """The factor that makes the sums relative to another shift."""
        wide = accumulator_dtype(shift.device)
        return (self["shift"].to(wide) - shift).exp_()

    def _times(self, factor: Tensor, names: tuple[str, ...] = ("numerator", "normaliser", "error")) -> dict[str, Tensor]:
        return {name: tensor * align(factor, tensor) for name, tensor in ((name, self[name]) for name in names)}

    def _add(self, other: Self, shift: Tensor, sign: float) -> Self:
        """The sum (or difference, sign -1) of both at `shift`; at their own if that is the shift of both."""
        numerator, other_numerator = self["numerator"], other["numerator"]
        if numerator.shape != other_numerator.shape:
            narrow, wide = sorted((self, other), key=lambda sums: (sums["numerator"].dim(), sums["numerator"].shape[-1]))
            must_be_empty(narrow["normaliser"] == 0, narrow["numerator"], wide["numerator"])
            numerator, other_numerator = align(numerator, other_numerator), align(other_numerator, numerator)
        error, other_error = self["error"], other["error"]
        if shift is self["shift"]:
            total = torch.add(numerator, other_numerator, alpha=sign)
            weight = torch.add(self["normaliser"], other["normaliser"], alpha=sign)
        else:
            growth, other_growth = self._growth(shift), other._growth(shift)
            total, factor = numerator * align(growth, numerator), align(other_growth, other_numerator)
            add = total.addcmul_ if total.shape == other_numerator.shape else total.addcmul  # in place: one large tensor
            total = add(other_numerator, factor, value=sign)
            weight = torch.addcmul(self["normaliser"] * growth, other["normaliser"], other_growth, value=sign)
            error, other_error = error * growth.unsqueeze(-1), other_error * other_growth.unsqueeze(-1)
        return type(self)(numerator=total, normaliser=weight, shift=shift, error=_root_of_squares(error, other_error))


def _root_of_squares(a: Tensor, b: Tensor) -> Tensor:
    """√(a² + b²) of numbers that are not negative, without overflow."""
    if torch.compiler.is_compiling():  # ONNX has no hypot
        most, least = torch.maximum(a, b), torch.minimum(a, b)
        root = most * ((least / most.masked_fill(most == 0, 1.0)).square() + 1.0).sqrt()
    else:
        root = torch.hypot(a, b)
    return root.clamp(max=torch.finfo(root.dtype).max)


def sizes(numerator: Tensor, normaliser: Tensor) -> Tensor:
    """c and the norm of v, side by side: (B, ..., 2)."""
    wide = accumulator_dtype(numerator.device)  # the squares of numbers that float32 holds overflow in float32
    norm = torch.linalg.vector_norm(numerator.detach().flatten(normaliser.dim()), dim=-1, dtype=wide)
    return torch.stack([normaliser.detach().to(wide), norm], -1).clamp_(max=torch.finfo(wide).max)


def rounding_error(numerator: Tensor, normaliser: Tensor, reach: Tensor) -> Tensor:
    """The rounding error in the sums of one chunk: ε (1 + |l|) of each. `reach`: the largest |l|, in the logits' dtype."""
    share = reach.abs().add_(1.0).mul_(UNSURE * torch.finfo(reach.dtype).eps)
    return sizes(numerator, normaliser).mul_(share.unsqueeze(-1))
