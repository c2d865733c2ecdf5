"""The names that examples in docstrings assume to be imported, as those of NumPy and PyTorch do."""

import numpy as np
import pytest
import torch

import setstream as ss


@pytest.fixture(autouse=True)
def imports_of_examples(doctest_namespace):
    doctest_namespace.update(np=np, ss=ss, torch=torch)
