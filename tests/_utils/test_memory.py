"""Freed memory that lies between pieces in use goes back to the system."""

from pathlib import Path

import pytest

from setstream._utils.memory import release_freed


def resident():
    """The resident memory of this process, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith("VmRSS"))


@pytest.mark.skipif(not release_freed(), reason="this C library cannot")
def test_freed_memory_between_pieces_in_use_is_given_back():
    pieces = [bytes(30_000 if number % 2 else 600) for number in range(8000)]
    full = resident()
    pieces = pieces[::2]
    kept = resident()
    release_freed()
    assert kept > full - 10  # otherwise there is nothing to do
    assert resident() < full - 80
    assert len(pieces) == 4000
