"""Objects by import path, and what files may name."""

import math
from pathlib import Path

import pytest

from setstream._utils.import_path import find, named_by_file
from setstream.errors import ConfigurationError


def test_objects_are_found_by_name_and_by_key():
    assert find("math:pi", "number") == math.pi
    assert find("setstream.tasks.clustering.models:MODELS[deepsets]", "model").__name__ == "deepsets"


def test_a_file_names_what_is_ours_or_trusted():
    with named_by_file(Path("config.json"), trust=["math:pi"]):
        assert find("math:pi", "number") == math.pi
        with pytest.raises(ConfigurationError, match="config.json names the backbone 'os:system', which is not"):
            find("os:system", "backbone")
