"""Every Python block of the README and the docs runs, in order, one namespace a page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for number, code in enumerate(BLOCK.findall(page.read_text())):
        exec(compile(code, f"{page.name}, block {number}", "exec"), namespace)


def test_there_are_blocks_to_run():
    assert BLOCK.findall((ROOT / "README.md").read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_demo_runs(tmp_path):
    import subprocess
    import sys

    out = tmp_path / "demo.png"
    command = [sys.executable, str(ROOT / "examples" / "demo.py"), "--out", str(out), "--size", "64"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert "the same answer" in done.stdout
    assert "another answer each time" in done.stdout
    assert out.stat().st_size > 10_000
