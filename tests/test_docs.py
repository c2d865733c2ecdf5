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
    from rich.console import Console

    from setstream.cli.demo import run_demo

    console = Console(record=True, width=160)
    run_demo(tmp_path, seed=3, points=64, console=console)
    text = console.export_text()
    assert "the oracle" in text
    assert "set-transformer" in text
    for name in ("streams.png", "streams.gif", "report.html"):
        assert (tmp_path / name).stat().st_size > 10_000
