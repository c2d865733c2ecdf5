"""The accumulators of a state: named tensors whose first axis is the batch, and a law by which two of them merge.

    Sums       a + b                                          totals, for your own pools
    LogSums    (v, m) stands for the sums v·e^m               sums and weighted sums with a running maximum m
    Maximum    max(a, b)                                      feature-wise extremes
    Minimum    min(a, b)
    MaximumBy  the one with the larger score                  the features of one element
    Chunks     a + b                                          the number of chunks of each set
    Shared     a = b, or it is an error                       what all chunks of one pass must agree on

Accumulators are immutable: every operation returns a new one, with its gradient. A new kind is a subclass of `Accumulator`
and needs no change anywhere else.
"""

import warnings
from typing import Any

from setstream.states.accumulators.base import NOTHING, Accumulator, accumulator_dtype, align
from setstream.states.accumulators.elementary import Chunks, Maximum, Minimum, Shared, Sums
from setstream.states.accumulators.log_sums import REMOVAL_TOLERANCE, LogSums, rounding_error
from setstream.states.accumulators.maximum_by import MaximumBy

__all__ = ["NOTHING", "REMOVAL_TOLERANCE", "Accumulator", "accumulator_dtype", "align", "rounding_error"]
__all__ += ["Chunks", "LogSums", "Maximum", "MaximumBy", "Minimum", "Shared", "Sums"]


def __getattr__(name: str) -> Any:
    if name == "Part":
        warnings.warn("Part is now Accumulator; the old name is removed in 0.3", DeprecationWarning, stacklevel=2)
        return Accumulator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
