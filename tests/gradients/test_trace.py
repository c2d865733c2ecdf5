"""A reader of one mode meets at most eight files, beside those of the pool."""

import pytest
from benchmarks.trace_modes import POOL, trace

from setstream.gradients.encode import GRADIENTS


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_a_mode_goes_through_at_most_eight_files(gradient):
    counted = [name for name in trace(gradient) if not name.startswith(POOL)]
    assert f"gradients/{gradient}.py" in counted
    assert len(counted) <= 8, counted
