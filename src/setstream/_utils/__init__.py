"""Helpers for every folder, which use none: atomic files, optional imports, import paths, prefetching, freed memory."""
