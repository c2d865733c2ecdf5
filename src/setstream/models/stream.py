"""SetStream: online use of a model, as elements arrive.

    state ← state + absorb(phi(chunk))       at each update
    y     = head(finalize(state))            at each predict, of everything seen so far

Memory is constant; the prediction does not depend on the order or the size of the chunks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from setstream.errors import MismatchError
from setstream.sets.layout import Sets
from setstream.states.state import State

if TYPE_CHECKING:
    from setstream.models.model import SetModel


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Eval mode and no graph inside; the mode of each submodule is restored afterwards."""
    training = [child for child in module.modules() if child.training]
    for child in training:
        child.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for child in training:
            child.training = True


class SetStream:
    """Online use of a SetModel: add chunks, get the prediction at any time.

    Always runs in eval mode and without a graph. `state` is the whole memory of the stream: save it, send it, merge it.

    Args:
        chunks: "average" lets a model that is not consistent average over its chunks; otherwise a second chunk is a
            ConsistencyError.

    Example:
        >>> import torch, setstream as ss
        >>> encoder = ss.SetEncoder(torch.nn.Linear(2, 16), ss.UMBC(16, num_slots=4, out_dim=16))
        >>> model = ss.SetModel(encoder, ss.nn.SetTransformer(16, out_dim=3))
        >>> x = torch.randn(1, 50, 2)
        >>> here, there = model.stream(), model.stream()
        >>> for element in x[:, :20].split(1, dim=1):
        ...     here.update(element)
        >>> there.update(x[:, 20:])
        >>> here.merge(there)
        >>> torch.allclose(here.predict(), model.eval()(x), atol=1e-5)
        True
        >>> here.state.count
        tensor([50])
    """

    def __init__(self, model: SetModel, *, chunks: str | None = None) -> None:
        self.model, self.chunks = model, chunks
        with evaluating(model):
            #: The state of the elements so far. Assign a loaded state to continue where another process stopped.
            self.state: State = model.encoder.empty(1)
        self._first = self.state

    def update(self, chunk: Sets, mask: Tensor | None = None) -> None:
        """Add the elements of `chunk` (B, n, ...), or of any other layout. The first chunk decides how many sets there are."""
        self.state = self._after(None if self.state is self._first else self.state, chunk, mask)

    def next_pass(self) -> None:
        """Begin the next pass of a model that reads its sets more than once: give it the same elements again."""
        with evaluating(self.model):
            self.state = self.model.encoder.next_pass(self.state)

    def remove(self, chunk: Sets, mask: Tensor | None = None) -> None:
        """Remove elements that were added before: with `update`, a sliding window. See `State.remove` for its limits."""
        self.state = self.state - self._after(None, chunk, mask)

    def decay(self, factor: float) -> None:
        """Multiply the weight of everything seen so far by `factor`; 0.99 before each update gives a soft window."""
        self.state = self.state * factor

    def forget(self, factor: float) -> None:
        """Deprecated name of `decay`."""
        warnings.warn("SetStream.forget is now decay; the old name is removed in 0.3", DeprecationWarning, stacklevel=2)
        self.decay(factor)

    def merge(self, other: SetStream | State) -> None:
        """Add the elements of another stream of the same model."""
        state = other.state if isinstance(other, SetStream) else other
        if state is self.state and bool(state.count.any()):
            raise MismatchError("a stream cannot be merged into itself: every element would count twice")
        with evaluating(self.model):
            self.model.encoder.check_state(state)
            if isinstance(other, SetStream) and other.state is other._first:
                return
            if bool(state.count.any()):
                self.model.finalize(state, chunks=self.chunks)  # an unreadable state would make this one unreadable
            self.state = state if self.state is self._first else self.model.encoder.merge(self.state, state, chunks=self.chunks)

    def predict(self) -> Any:
        """The model's output for everything seen so far."""
        with evaluating(self.model):
            return self.model.finalize(self.state, chunks=self.chunks)

    def _after(self, state: State | None, chunk: Sets, mask: Tensor | None) -> State:
        with evaluating(self.model):
            return self.model.encoder.update(state, chunk, mask, chunks=self.chunks)

    def __repr__(self) -> str:
        return f"SetStream(count={self.state.count.tolist()})"
