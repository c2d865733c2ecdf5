"""Multiple instance learning."""

from setstream.tasks.mil.bags import Bags, classic, folds, read_bags
from setstream.tasks.mil.task import Mil

__all__ = ["Bags", "Mil", "classic", "folds", "read_bags"]
