"""Trained completion models that come with the package: of CIFAR-10's 32x32 images."""

from __future__ import annotations

from pathlib import Path

from setstream.tasks.completion.models import MODELS
from setstream.tasks.shelf import Shelf

SHELF = Shelf(Path(__file__).parent / "weights", MODELS)
