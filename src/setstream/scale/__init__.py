"""Sets that outgrow one process: over ranks, over files, over a Ray cluster."""

from setstream.scale.scatter import scatter_sets

__all__ = ["scatter_sets"]
