"""Files that are whole or not there, whenever the process or the machine stops; and a lock for a folder.

Each writer has a hidden file of its own, `.NAME.<machine>-<process>-<number>.writing.SUFFIX`, so two writers of one file do not
collide: the last to finish wins. What a killed process left behind is removed by the next process that writes there.
"""

import hashlib
import os
import platform
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from setstream._utils.optional import need
from setstream.errors import ConfigurationError

FORGOTTEN = 86_400.0  # seconds without a write after which a hidden file counts as left over, from any machine
#: The names of our hidden files; SQLite adds files beside one (-wal, -shm).
HIDDEN = re.compile(r"\..*\.(?P<machine>[0-9a-f]{8})-(?P<process>\d+)-\d+\.writing(\.\w+)?(-\w+)?")
_numbers = count()
_tidy: set[Path] = set()  # folders that this process has looked through
_writing: set[str] = set()  # hidden names that this process writes to now


def flush(path: Path) -> None:
    """Flush a file or folder to the disk."""
    if os.name == "nt" and path.is_dir():  # Windows cannot flush a folder
        return
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def whole_or_nothing(path: Path) -> Iterator[Path]:
    """A hidden path to write to; it is renamed to `path` on success, and removed on failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_left_over(path.parent)
    hidden = path.with_name(f".{path.stem}.{_machine()}-{os.getpid()}-{next(_numbers)}.writing{path.suffix}")
    _writing.add(hidden.name)
    try:
        yield hidden
        flush(hidden)
        hidden.replace(path)
        with suppress(OSError):  # not every file system can do it for a folder
            flush(path.parent)
    finally:
        _remove(hidden)
        _writing.discard(hidden.name)


def write_atomically(path: Path, text: str) -> None:
    """Replace a text file at once."""
    with whole_or_nothing(path) as hidden:
        hidden.write_text(text)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _machine() -> str:
    """The machine, and the container on it: process numbers mean something within one, and several may share a disk."""
    space = ""
    with suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return hashlib.blake2b(f"{platform.node()} {space}".encode(), digest_size=4).hexdigest()


def _remove_left_over(folder: Path) -> None:
    """Remove the hidden files of writers that no longer run, the first time that this process writes to a folder."""
    if folder.resolve() in _tidy:
        return
    _tidy.add(folder.resolve())
    for entry in os.scandir(folder):
        hidden = HIDDEN.fullmatch(entry.name)
        if hidden is None or entry.name.startswith(tuple(_writing)):  # of another thread
            continue
        with suppress(OSError):  # another process may remove it, too
            ended = hidden["machine"] == _machine() and not _lives(int(hidden["process"]))
            if ended or time.time() - entry.stat().st_mtime > FORGOTTEN:
                _remove(Path(entry.path))


def _lives(process: int) -> bool:
    """Whether another process with this number runs; always true on Windows, where asking could end it."""
    if process == os.getpid() or os.name == "nt":
        return process != os.getpid()  # this process knows its own files: an earlier one had its number
    try:
        os.kill(process, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


@contextmanager
def locked(folder: Path, doing: str) -> Iterator[None]:
    """Lock a folder, so that no other process is `doing` the same in it; the lock ends with the process that holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as file:
        try:
            try:
                fcntl = need("fcntl")
            except ConfigurationError:  # Windows has another lock
                msvcrt = need("msvcrt")
                file.seek(0)
                msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigurationError(f"{folder}: another process is {doing} in this folder") from error
        yield
