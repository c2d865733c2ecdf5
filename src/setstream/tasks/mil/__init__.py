"""Multiple instance learning: labels for bags, none for their instances."""

from setstream.tasks.mil.task import Bags, Mil, classic, folds, read_bags

__all__ = ["Bags", "Mil", "classic", "folds", "read_bags"]
