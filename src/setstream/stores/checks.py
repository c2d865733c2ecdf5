"""What a store takes: changes of sets whose ids are text, and states that the model can read, as running its head shows."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from setstream.errors import ConfigurationError, MismatchError, NonFiniteError, SetstreamError, StateFormatError, StoreError
from setstream.models.phi import all_finite
from setstream.states import serialization
from setstream.states.accumulators import Accumulator
from setstream.states.fingerprint import Origin
from setstream.states.state import State
from setstream.stores.backend import Row, Rows

# The versions of a store. One with tiles must not be changed by a program that does not know them.
PLAIN, TILED = "1", "2"
# The types of sums at rest, by the name that a store remembers.
DTYPES, DTYPE = {"float32": torch.float32, "float64": torch.float64}, "dtype"
# States per call of the head.
CHECKED_TOGETHER = 256


@dataclass(frozen=True)
class Change:
    """A change of one set: add a part (a state, or another set of the store), or replace the set by it.

    Args:
        id: The set.
        part: What to add.
        replace: Replace the set by the part instead.
        tiles: In a store with tiles, the states whose sum the part is, by the number of their tile; None: it has no time.
        key: Make the change once: if the set has had a change with this key, its first result is returned.
        digest: What the contents are recognised by: the same key with another digest is a KeyReusedError.
    """

    id: str
    part: State | str
    replace: bool = False
    tiles: Mapping[int, State] | None = None
    key: str | None = None
    digest: str = ""


@dataclass(frozen=True)
class Changed:
    """The result of a change: how many elements the set has now, whether it was created, and whether this is an old result."""

    count: int
    began: bool
    replayed: bool = False


def check_facts(facts: Mapping[str, str], place: str, versions: Sequence[str], origin: Origin) -> None:
    """Raise an error unless the database is a store of one of these versions, and of this encoder."""
    if not {"version", "fingerprint"} <= set(facts):
        raise StoreError(f"{place}: is a database, but not a store of states")
    if facts["version"] not in versions:
        raise StoreError(f"{place}: was written by a newer setstream (version {facts['version']} of the store)")
    if not Origin(None, facts["fingerprint"]).same_as(origin):
        raise MismatchError(
            f"{place}: holds states of another encoder (fingerprint {facts['fingerprint']}) than this model's "
            f"({origin.fingerprint}): load the weights that made them, or start a new store in another place"
        )


def is_text(id: str) -> bool:
    """Whether a database can hold it: no half of a surrogate pair."""
    return not any("\ud800" <= letter <= "\udfff" for letter in id)


def checked_id(id: object) -> str:
    """An id, which is text that a database can hold. SQLite would look up a number under another key than it stores it."""
    if not isinstance(id, str):
        raise ConfigurationError(f"the id of a set is a str; got {type(id).__name__} {id!r}: use str(id)")
    if not is_text(id):
        raise ConfigurationError(f"the id of a set is text; {id!r} holds half of a surrogate pair")
    return id


def digest(contents: Sequence[Any]) -> str:
    """What contents of a change are recognised by: states, tensors and arrays by their bytes, others as they are written."""
    hasher = hashlib.blake2b(digest_size=16)
    for one in contents:
        if isinstance(one, State):
            hasher.update(one.to_bytes())
        elif isinstance(one, Tensor | np.ndarray):
            array = one.numpy(force=True) if isinstance(one, Tensor) else np.asarray(one)
            hasher.update(repr((array.dtype.str, array.shape)).encode() + array.tobytes())
        elif isinstance(one, list | tuple):
            hasher.update(digest(one).encode())
        else:
            hasher.update(repr(one).encode())
    return hasher.hexdigest()


def stack(states: Sequence[State]) -> State:
    """`State.cat`, faster for states that one encoder has checked: it compares less."""
    first, kinds = states[0], states[0].kinds()

    def cat(name: str) -> Accumulator:
        parts = [state.accumulators[name] for state in states]
        return type(parts[0])(**{key: torch.cat([part[key] for part in parts]) for key in parts[0].tensors})

    if all(one.origin is first.origin and one.kinds() == kinds for one in states):
        with suppress(RuntimeError, KeyError):  # some may have no elements, and no width yet
            return State({name: cat(name) for name in kinds}, torch.cat([state.count for state in states]), first.origin)
    return State.cat(states)


def parse_batch(data: Sequence[bytes]) -> State:
    """The states in several blobs as one batch, checked together."""
    alike = serialization.parse_all(data)
    return State.cat([State.from_bytes(one) for one in data]) if alike is None else State(*alike).checked()


def dump_rows(batch: State, narrow: bool = False) -> list[bytes]:
    """`to_bytes` of each set of a batch; `narrow`: with sums in float32, unless one of them is too large for it."""
    if narrow:
        narrowed = batch.narrowed()
        overflow = any(tensor.isinf().any() for name, tensor in narrowed.tensors().items() if name.endswith(".numerator"))
        batch = batch if overflow else narrowed
    return serialization.dump_all(batch.accumulators, batch.count, batch.fingerprint)


def to_rows(states: Sequence[tuple[str, State]], narrow: bool = False) -> list[Row]:
    """Rows of states of one set each, as `dump_rows`: together, if they differ in their numbers only."""
    shapes = [(one.kinds(), [(name, t.dtype, t.shape) for name, t in one.tensors().items()]) for _, one in states]
    alike = len(states) > 1 and all(shape == shapes[0] for shape in shapes)
    batches = [stack([state for _, state in states])] if alike else [state for _, state in states]
    data = [one for batch in batches for one in dump_rows(batch, narrow)]
    return [(id, int(state.count), one) for (id, state), one in zip(states, data, strict=True)]


def choose_dtype(rows: Rows, facts: Mapping[str, str], dtype: torch.dtype | None) -> torch.dtype:
    """The type of the sums that a store writes; it remembers the last one that was given."""
    if dtype is None:
        return DTYPES.get(facts.get(DTYPE, ""), torch.float64)
    names = [name for name, known in DTYPES.items() if known == dtype]
    if not names:
        raise ConfigurationError(f"a store keeps sums in torch.float32 or torch.float64 (the default); got dtype={dtype!r}")
    if facts.get(DTYPE, "float64") != names[0]:
        with rows.transaction([]) as transaction:
            transaction.remember({DTYPE: names[0]})
    return dtype


def sums(pairs: Sequence[tuple[State, State]]) -> list[State | SetstreamError]:
    """a + b of each pair, or the error: all in one sum, or by halves if one of them fails."""
    try:
        return list(stack([a for a, _ in pairs]) + stack([b for _, b in pairs])) if pairs else []
    except SetstreamError as error:
        half = len(pairs) // 2
        return sums(pairs[:half]) + sums(pairs[half:]) if half else [error]


def must_be_readable(finalize: Callable[[State], Any], states: Sequence[State]) -> None:
    """Raise NonFiniteError unless all predictions are finite, MismatchError if the model fails; the head runs once."""
    distinct = [state for state in {id(state): state for state in states}.values() if int(state.count)]
    for start in range(0, len(distinct), CHECKED_TOGETHER):
        some = distinct[start : start + CHECKED_TOGETHER]
        try:
            finite = all(all_finite(tensor) for tensor in _tensors(finalize(stack(some).checked())))
        except (NonFiniteError, StateFormatError):
            finite = False
        except (RuntimeError, ValueError, TypeError, LookupError) as error:
            if isinstance(error, SetstreamError):
                raise
            raise MismatchError(f"the model cannot read this state: {error}") from error
        if not finite:
            raise NonFiniteError("with these elements the model's prediction is NaN or infinity: they are too large for it")


def unreadable(finalize: Callable[[State], Any], states: Sequence[State]) -> dict[int, SetstreamError]:
    """The states that the model cannot read, by `id(state)`, with the reason; found by bisection."""
    distinct = list({id(state): state for state in states}.values())
    try:
        must_be_readable(finalize, distinct)
    except SetstreamError as error:
        if len(distinct) == 1:
            return {id(distinct[0]): error}
        half = len(distinct) // 2
        return unreadable(finalize, distinct[:half]) | unreadable(finalize, distinct[half:])
    return {}


def _tensors(output: Any) -> Iterator[Tensor]:
    """The tensors of a prediction: one, or several by name or in order."""
    output = output.named() if hasattr(output, "named") and not isinstance(output, Tensor) else output
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping | tuple | list):
        for value in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(value)
