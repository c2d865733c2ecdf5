"""Files that are whole or not there, whenever the process or the machine stops."""

from __future__ import annotations

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Make sure that a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, text: str) -> None:
    """Replace a text file at once."""
    hidden = path.with_name(f".{path.name}.writing")
    hidden.write_text(text)
    flush(hidden)
    hidden.replace(path)
