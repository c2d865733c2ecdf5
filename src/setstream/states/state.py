"""The state of a stream: all that is kept of the elements seen so far.

    state(X ∪ Y) = state(X) + state(Y)          for disjoint X, Y: a commutative monoid, `encoder.empty(B)` its zero
    state(X)     = state(X ∪ Y) - state(Y)      where the pool can (sums and weighted sums can, maxima cannot)
    state * γ                                   every element seen so far weighs γ times as much

A state holds a batch of B sets. It is small (slots x width, for any number of elements), knows which encoder made
it, and goes to bytes and back without pickle.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from pathlib import Path
from typing import Self, SupportsIndex

import torch
from torch import Tensor

from setstream._utils.atomic import whole_or_nothing
from setstream.errors import ConfigurationError, MismatchError, PrecisionError, RemovalError, ShapeError, StateFormatError
from setstream.states import serialization
from setstream.states.accumulators import REMOVAL_TOLERANCE, Accumulator, accumulator_dtype
from setstream.states.compat import read_as
from setstream.states.fingerprint import Origin

GIVEN = "given"  # the accumulator of slots that an earlier pass gives to a pool
MOST_ELEMENTS = 2**53  # larger counts are no longer exact in JSON, and soon not in 64 bits


class State:
    """A batch of B partial set encodings that add up.

    Users get states from `encoder.update` and `encoder.empty`; pools build them from accumulators.

    >>> import torch, setstream as ss
    >>> encoder = ss.SetEncoder(torch.nn.Linear(3, 8), ss.UMBC(8, num_slots=4, out_dim=8)).eval()
    >>> morning, evening = torch.randn(2, 5, 3), torch.randn(2, 7, 3)
    >>> a, b = encoder.update(None, morning), encoder.update(None, evening)
    >>> (a + b).count
    tensor([12, 12])
    >>> z = encoder(torch.cat([morning, evening], dim=1))
    >>> torch.allclose(encoder.finalize(a + b), z, atol=1e-5)
    True
    >>> torch.allclose(encoder.finalize(a + b - a), encoder(evening), atol=1e-5)
    True
    >>> len((a + b)[0])                            # one set of the batch, still a batch
    1
    >>> ss.State.from_bytes(a.to_bytes()).fingerprint == b.fingerprint
    True
    """

    __slots__ = ("accumulators", "context", "count", "origin")
    __array_ufunc__ = None  # numpy numbers and arrays leave arithmetic to State

    def __init__(
        self,
        accumulators: dict[str, Accumulator],
        count: Tensor,
        origin: Origin | None = None,
        context: dict[str, Tensor] | None = None,
    ) -> None:
        self.accumulators = accumulators
        #: Elements seen, per set: (B,) int64. Removal lowers it; decay does not.
        self.count = count
        self.origin = origin
        self.context = context  # what the pool computed from its weights alone; never saved

    def __add__(self, other: State) -> State:
        origin = self._must_match(other, "merge")
        merged = {name: accumulator.merge(other.accumulators[name]) for name, accumulator in self.accumulators.items()}
        return State(merged, self.count + other.count, origin, other.context)

    def __radd__(self, other: object) -> State:
        return self if isinstance(other, int) and other == 0 else NotImplemented  # so that sum(states) works

    def __sub__(self, other: State) -> State:
        return self.remove(other)

    def remove(self, part: State, *, tolerance: float = REMOVAL_TOLERANCE) -> State:
        """The state without the elements of `part`, which must have been merged into it before.

        Sums are subtracted: exact while the remaining elements have a fair share of each slot's weight and numerator. If heavy
        elements or large features are removed and light or small ones stay, the difference is smaller than the rounding error
        of what was removed, which is estimated over the whole life of the state. A set without elements left becomes empty.

        Features of width one sometimes raise PrecisionError needlessly: a signed sum that happens to be near zero has a large
        relative error, and the state cannot distinguish it from the remainder of large elements that were removed.

        After `state * 0.9`, elements from before are removed as `part * 0.9`. A part that was not scaled with the state gives a
        wrong result without an error: elements of any weight may have been added after the decay.

        Args:
            tolerance: the largest error, relative to the norm of each slot's sums, that is accepted.

        Raises:
            PrecisionError: if the error may be larger than `tolerance`; its `sets` says where.
            RemovalError: if there are fewer elements than to be removed, or for a maximum or minimum.
        """
        origin = self._must_match(part, "remove")
        count = self.count - part.count
        if bool((count < 0).any()):
            came = f"{part.count.tolist()} elements from sets that have seen {self.count.tolist()}"
            raise RemovalError(f"cannot remove {came}: only what was merged into a state can be removed from it.")
        rest = {}
        for name, accumulator in self.accumulators.items():
            try:
                rest[name] = accumulator.remove(part.accumulators[name], count == 0, tolerance)
            except (RemovalError, PrecisionError) as error:
                if member := name.rpartition("/")[0]:  # of a Parallel
                    error.args = (f"{member}: {error}",)
                raise
        return State(rest, count, origin)

    def __mul__(self, factor: Real | float | Tensor) -> State:
        if not isinstance(factor, Real | Tensor):
            return NotImplemented
        number, batch = factor if isinstance(factor, Tensor) else float(factor), len(self)
        factors = torch.as_tensor(number, dtype=accumulator_dtype(self.device), device=self.device)
        if factors.shape not in ((), (batch,)):
            raise ShapeError(f"a state of {batch} sets is scaled by a number or ({batch},) numbers, not {tuple(factors.shape)}")
        if not bool(((factors > 0) & torch.isfinite(factors)).all()):
            raise ConfigurationError(f"a state is scaled by positive finite numbers (such as 0.9), not by {factor}")
        return self._each(lambda accumulator: accumulator.scale(factors.expand(batch)))

    __rmul__ = __mul__

    def __len__(self) -> int:
        return len(self.count)

    def __getitem__(self, index: SupportsIndex | slice | Sequence[int] | Tensor) -> State:
        if isinstance(index, SupportsIndex) and (not isinstance(index, Tensor) or index.dim() == 0):
            row = operator.index(index)
            if not -len(self) <= row < len(self):
                raise IndexError(f"set {row} of a state that holds {len(self)}")
            index = slice(row, row + 1 or None)
        elif not isinstance(index, slice | Tensor):
            rows = torch.as_tensor(index, device=self.device)
            index = rows if rows.numel() else rows.long()  # an empty list has a floating-point type
        return self._map(lambda tensor: tensor[index])

    def __iter__(self) -> Iterator[State]:
        """The sets, each a batch of one; views of this state's tensors."""
        columns = {n: (type(a), {key: t.split(1) for key, t in a.tensors.items()}) for n, a in self.accumulators.items()}
        for row, count in enumerate(self.count.split(1)):
            accumulators = {n: kind(**{key: rows[row] for key, rows in split.items()}) for n, (kind, split) in columns.items()}
            yield State(accumulators, count, self.origin)

    @staticmethod
    def cat(states: Sequence[State]) -> State:
        """One state that holds the sets of all given ones, in their order (the batch grows; the sets stay apart)."""
        if not states:
            raise ShapeError("State.cat needs at least one state, got an empty list")
        first, *rest = states
        origins = [first._must_match(other, "cat", same_batch=False) for other in rest]
        origin = next((origin for origin in origins if origin is not first.origin), first.origin)
        joined = {name: one.cat([other.accumulators[name] for other in rest]) for name, one in first.accumulators.items()}
        return State(joined, torch.cat([state.count for state in states]), origin)

    def select(self, prefix: str) -> State:
        """The accumulators of one member of a `Parallel` pool, or of one pass; with slots that are given to all members."""
        start = prefix + "/"
        chosen = {name.removeprefix(start): one for name, one in self.accumulators.items() if name.startswith(start)}
        if GIVEN in self.accumulators:
            chosen[GIVEN] = self.accumulators[GIVEN]
        known = self.context and {name.removeprefix(start): t for name, t in self.context.items() if name.startswith(start)}
        return State(chosen, self.count, self.origin, known)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of all accumulators by name, `accumulator.tensor`; views, and without the count."""
        return {f"{name}.{key}": t for name, one in self.accumulators.items() for key, t in one.to_tensors().items()}

    def _each(self, change: Callable[[Accumulator], Accumulator]) -> State:
        changed = {name: change(one) for name, one in self.accumulators.items()}
        return State(changed, self.count, self.origin, self.context)

    def _map(self, change: Callable[[Tensor], Tensor]) -> State:
        return State({name: one.map(change) for name, one in self.accumulators.items()}, change(self.count), self.origin)

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.count.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together: the memory of an open stream."""
        return sum(tensor.nbytes for tensor in self.tensors().values()) + self.count.nbytes

    def to(self, target: torch.device | str | torch.dtype) -> State:
        """The state on another device, or with its sums in another floating-point type."""
        if isinstance(target, torch.dtype):
            if not target.is_floating_point:
                raise ConfigurationError(f"a state is kept in a floating-point type, not in {target}")
            return self._each(lambda accumulator: accumulator.to_dtype(target))
        dtype = accumulator_dtype(torch.device(target))
        narrow = self if dtype == torch.float64 else self.to(dtype)  # MPS
        return narrow._map(lambda tensor: tensor.to(target))

    def widened(self) -> State:
        """The state of one chunk as if added to an empty state."""
        return self._each(lambda accumulator: accumulator.widened())

    def narrowed(self) -> State:
        """The state with its sums in float32, for keeping in about half the bytes; `widened` reads it."""
        return self._each(lambda accumulator: accumulator.narrowed())

    @property
    def parts(self) -> dict[str, Accumulator]:
        """The old name of `accumulators`."""
        warnings.warn("State.parts is now State.accumulators; the old name is removed in 0.3", DeprecationWarning, stacklevel=2)
        return self.accumulators

    def detach(self) -> State:
        """The same values without a graph."""
        return self._map(Tensor.detach)

    @property
    def fingerprint(self) -> str | None:
        """The digest of the encoder that made this state; None for a state that a bare pool made."""
        return None if self.origin is None else self.origin.fingerprint

    def to_bytes(self) -> bytes:
        """The state as safetensors bytes, with format version, fingerprint and checksum in the header."""
        return serialization.dump(self.accumulators, self.count, self.fingerprint)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The state in `data`; StateFormatError when the bytes are truncated, edited or of another kind."""
        return cls(*serialization.parse(data)).checked()

    def save(self, path: str | Path) -> None:
        """Write the state to a file atomically: a crash leaves the old file or the new one."""
        path = Path(path)
        if not path.parent.is_dir():
            raise FileNotFoundError(f"cannot write {path}: there is no folder {path.parent}")
        with whole_or_nothing(path) as hidden:
            hidden.write_bytes(self.to_bytes())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a state that `save` wrote."""
        try:
            return cls.from_bytes(Path(path).read_bytes())
        except StateFormatError as error:
            raise StateFormatError(f"{path}: {error}") from None

    def __reduce__(self) -> tuple[Callable[[bytes], State], tuple[bytes]]:
        return State.from_bytes, (self.to_bytes(),)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in self.tensors().items())
        return f"State({len(self)} sets, count={self.count.tolist()}, {shapes}, device={self.device})"

    def _must_match(self, other: State, action: str, same_batch: bool = True) -> Origin | None:
        """Raise unless the two can be merged; returns the origin of the result."""
        if not isinstance(other, State):
            raise MismatchError(f"cannot {action} a State and a {type(other).__name__}")
        if self.kinds() != other.kinds():  # one may be of 0.1
            self.accumulators = read_as(self.accumulators, other.accumulators)
            other.accumulators = read_as(other.accumulators, self.accumulators)
        if self.kinds() != other.kinds():
            hint = " One in training mode, with drawn slots, the other in eval mode?" * (self.has_draw or other.has_draw)
            raise MismatchError(f"cannot {action} states of different pools: {self.kinds()} and {other.kinds()}.{hint}")
        origin, other_origin = self.origin, other.origin
        if origin is not other_origin and (origin is None or other_origin is None or not origin.same_as(other_origin)):
            raise MismatchError(
                f"cannot {action} states of different encoders: fingerprints {self.fingerprint} and {other.fingerprint}. "
                "States add up only when the same architecture with the same weights made them."
            )
        if same_batch and len(self) != len(other):
            raise ShapeError(f"cannot {action} a state of {len(self)} sets and one of {len(other)}: the batches differ")
        if self.device != other.device:
            raise MismatchError(f"cannot {action} states on {self.device} and {other.device}: move one with state.to(device)")
        if origin is other_origin and origin is not None:
            return origin
        tensors, others = self.tensors(), other.tensors()
        for name in tensors.keys() ^ others.keys():
            raise MismatchError(f"cannot {action} these states: only one of them has {name}")
        for name, a in tensors.items():
            b = others[name]
            if a.is_floating_point() != b.is_floating_point() or not (fits(self, a, b) or fits(other, b, a)):
                came = " and ".join(f"{t.dtype} {tuple(t.shape[1:])}" for t in (a, b))
                raise MismatchError(f"cannot {action} states of different shapes: {name} is {came}")
        # An encoder has not yet checked a state from elsewhere, nor what contains it.
        return other_origin if other_origin is not None and other_origin.loaded else origin

    def checked(self) -> Self:
        """The state; StateFormatError if no elements can give its numbers. For states from outside."""
        if bool(((self.count < 0) | (self.count > MOST_ELEMENTS)).any()):
            raise StateFormatError(f"a set counts 0 to {MOST_ELEMENTS} elements; this state says {self.count.tolist()}")
        for name, accumulator in self.accumulators.items():
            if fault := accumulator.fault(self.count > 0):
                raise StateFormatError(f"no elements give this state, it was edited or is damaged: {name}: {fault}")
        return self

    def kinds(self) -> dict[str, str]:
        """The kind of each accumulator."""
        return {name: accumulator.kind for name, accumulator in self.accumulators.items()}

    @property
    def has_draw(self) -> bool:
        """Whether it carries a random draw, as states of a training pass do."""
        return any(accumulator.shared for accumulator in self.accumulators.values())


def fits(state: State, tensor: Tensor, known: Tensor) -> bool:
    """Whether a tensor has the shape of a known one, up to the batch; axes of size one may be widths that are not known yet."""
    sizes = zip(tensor.shape[1:], known.shape[1:], strict=False)
    narrow = tensor.dim() <= known.dim() and all(size in (1, other) for size, other in sizes)
    return tensor.shape[1:] == known.shape[1:] or (narrow and not bool(state.count.any()))
