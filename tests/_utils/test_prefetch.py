"""Reading ahead keeps the order."""

import pytest

from setstream._utils.prefetch import iterate_ahead, read_ahead


@pytest.mark.parametrize("ahead", [0, 1, 2, 9])
def test_the_order_stays(ahead):
    assert list(read_ahead([lambda n=n: n * n for n in range(4)], ahead)) == [0, 1, 4, 9]
    assert list(iterate_ahead(iter("abc"), ahead)) == ["a", "b", "c"]
