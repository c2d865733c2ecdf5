import pytest
import torch

from tests.states.builders import make


@pytest.fixture
def encoder():
    return make()


@pytest.fixture
def x():
    return torch.randn(3, 20, 3)
