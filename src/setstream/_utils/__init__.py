"""Helpers that every folder may use and that use none of them: atomic files, optional imports, import paths, prefetching."""
