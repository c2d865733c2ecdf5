"""A little of `make fuzz`: the seeds that no full run has seen go wrong."""

import pytest

from tests.fuzz.children import attack
from tests.fuzz.server import attack_server
from tests.fuzz.targets import TARGETS

COUNTS = {"bodies": 400, "states": 300, "files": 200, "configs": 60}


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_input_is_an_error_of_ours(name):
    outcome = attack(name, COUNTS[name])
    assert outcome.inputs == COUNTS[name]
    assert not outcome.wrong
    assert outcome.memory < 2**30
    assert len(outcome.became) > 1  # some are read, some are refused


def test_hostile_requests_are_answered(tmp_path):
    outcome = attack_server(tmp_path, 300)
    assert outcome.inputs == 300
    assert not outcome.wrong
    assert outcome.memory < 2**30
