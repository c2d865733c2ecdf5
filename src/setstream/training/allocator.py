"""Keep freed memory in the process instead of giving it back between two steps.

Tensors of some megabytes are made and freed at every step. The C library's default returns such memory to the system, and
each step then pays for having it mapped and zeroed again, page by page: measured on the clustering step, a fifth of its time.
"""

import ctypes
import sys

# Options of glibc's mallopt(3).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_LARGEST_ON_HEAP = 32 * 2**20  # the most that mallopt accepts
_KEPT = 512 * 2**20


def keep_freed_memory() -> bool:
    """Tell the C library to keep up to 512 MiB of freed memory for the next step; returns whether it will.

    Does nothing where the C library is not glibc. What the process has in use does not change, only what it gives back.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    options = ((_MMAP_THRESHOLD, _LARGEST_ON_HEAP), (_TRIM_THRESHOLD, _KEPT), (_TOP_PAD, 64 * 2**20))
    return all(mallopt(option, value) == 1 for option, value in options)
