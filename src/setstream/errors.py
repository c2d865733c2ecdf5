"""The errors that setstream raises.

Every error of the library is a `SetstreamError` and, where Python has a fitting built-in (`ValueError`, `TypeError`,
`AssertionError`), that too, so that code that does not know setstream catches what it expects. A message says
what was given, what was expected and what to do.
"""


class SetstreamError(Exception):
    """The base of all errors that setstream raises on purpose.

    >>> import setstream as ss
    >>> issubclass(ss.errors.ShapeError, ss.errors.SetstreamError)
    True
    """


class ConfigurationError(SetstreamError, ValueError):
    """An option has an invalid value: an unknown activation, heads that do not divide the width."""


class ShapeError(SetstreamError, ValueError):
    """A tensor has the wrong shape, layout or batch size."""


class MaskError(SetstreamError, ValueError):
    """A mask is not a bool tensor of shape (B, N), or was given with a layout that needs none."""


class DeviceError(SetstreamError, ValueError):
    """A tensor is on another device than the module that should read it."""


class NonFiniteError(SetstreamError, ValueError):
    """The input contains NaN or infinity, or the output would."""


class BatchStatisticsError(SetstreamError, ValueError):
    """phi looks at other elements of its chunk (batch norm), so the answer would depend on the chunking."""


class ConsistencyError(SetstreamError, ValueError):
    """A set was given in several chunks, but the answer of the pool depends on where a set is cut."""


class LateError(SetstreamError, ValueError):
    """Elements are older than what is kept of their stream."""


class MismatchError(SetstreamError, ValueError):
    """Two states, or a state and an encoder, do not belong together."""


class RemovalError(SetstreamError, ValueError):
    """Elements cannot be removed from this state: a maximum does not keep the values below it."""


class PrecisionError(SetstreamError, ArithmeticError):
    """The rest after a removal would be smaller than the rounding error of what was removed; `sets` says where."""

    def __init__(self, message: str, sets: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.sets = list(sets)


class StateFormatError(SetstreamError, ValueError):
    """The bytes are not an intact setstream state: truncated, edited, foreign, or of a newer version."""


class LawViolation(SetstreamError, AssertionError):
    """A check of `setstream.testing` measured that an encoder breaks a law."""


class DataError(SetstreamError, ValueError):
    """A file of elements is missing, truncated, or does not hold what was expected."""


class StoreError(SetstreamError, RuntimeError):
    """A store of states cannot do what was asked: no such set, a file of another kind, another process that holds it."""


class CursorError(StoreError):
    """A consumer's position in a store is not where it believed: another consumer has moved it."""


class KeyReusedError(SetstreamError, ValueError):
    """A key that makes a change count once came again, with other contents."""


class UnknownSetError(StoreError, LookupError):
    """A store has no set of this id."""


class StoreFullError(StoreError):
    """A store is full: delete some sets, or raise the limit."""


def wrong_width(reader: str, width: object, which: str, came: object) -> str:
    """The message of errors about elements of the wrong width; `came`: a width, or a shape."""
    return f"{reader} takes elements of width {width}; {which} have {'shape' if isinstance(came, tuple) else 'width'} {came}"
