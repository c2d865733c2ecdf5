"""What every folder may use and what uses none of them: atomic files, optional imports, import paths, prefetching."""
