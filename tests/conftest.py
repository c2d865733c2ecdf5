"""Shared by all tests: fixed seeds, and how hard hypothesis searches (HYPOTHESIS_PROFILE=deep for more)."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

slow_ok = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("default", max_examples=60, deadline=None, suppress_health_check=slow_ok, derandomize=True)
settings.register_profile("deep", max_examples=1500, deadline=None, suppress_health_check=slow_ok)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
