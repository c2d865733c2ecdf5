"""Every Python block of the README and the docs runs, and every bash block, in order, one namespace a page."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```", re.DOTALL | re.MULTILINE)
SLOW = {"docs/slides.md"}


def name_of(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow if name_of(page) in SLOW else ()) for page in PAGES],
    ids=map(name_of, PAGES),
)
def test_code_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    namespace = {}
    for number, (kind, code) in enumerate(BLOCK.findall(page.read_text())):
        if kind == "bash":
            done = subprocess.run(["bash", "-euc", code], capture_output=True, text=True, env=os.environ | {"PATH": path})
            assert done.returncode == 0, f"{page.name}, block {number}: {done.stdout}{done.stderr}"
        else:
            exec(compile(code, f"{page.name}, block {number}", "exec"), namespace)


def test_there_are_blocks_to_run():
    assert BLOCK.findall((ROOT / "README.md").read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", prose):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_demo_runs(tmp_path):
    from rich.console import Console

    from setstream.cli.demo import run_demo

    console = Console(record=True, width=160)
    run_demo(tmp_path, seed=3, points=64, console=console)
    text = console.export_text()
    assert "the oracle" in text
    assert "set-transformer" in text
    for name in ("streams.png", "streams.gif", "report.html"):
        assert (tmp_path / name).stat().st_size > 10_000
