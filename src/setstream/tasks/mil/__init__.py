"""Multiple instance learning: labels for bags, none for their instances."""

from setstream.tasks.mil.bags import Bags, classic, read_bags
from setstream.tasks.mil.splits import folds
from setstream.tasks.mil.task import Mil

__all__ = ["Bags", "Mil", "classic", "folds", "read_bags"]
