"""Files that are whole or not there, whenever the process or the machine stops."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def flush(path: Path) -> None:
    """Make sure that a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def whole_or_nothing(path: Path) -> Iterator[Path]:
    """A hidden path to write to; it becomes `path` when all went well, and is removed when not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.with_name(f".{path.stem}.writing{path.suffix}")
    _remove(hidden)  # of a process that was killed
    try:
        yield hidden
        flush(hidden)
        hidden.replace(path)
    finally:
        _remove(hidden)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Replace a text file at once."""
    with whole_or_nothing(path) as hidden:
        hidden.write_text(text)
