"""The README and the docs: code blocks run (in order, one namespace per page), links and navigation work, the site builds."""

import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKED = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"]
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


def prose_of(page):
    """The page without its code blocks."""
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors_of(page):
    """The anchors of a page's headings, as git hosts and the site make them."""
    headings = re.findall(r"^#{1,6} +(.*?) *$", prose_of(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", text)).lower().replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)]*)\)", prose_of(page)):
        if target.startswith(("http://", "https://")):
            continue
        place = (page.parent / target).resolve() if target else page
        assert place.is_file(), f"{name_of(page)} links to {target}"
        assert not anchor or anchor in anchors_of(place), (
            f"{name_of(page)} links to {target}#{anchor}; there are {anchors_of(place)}"
        )


def test_contributing_names_files_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`([\w/.-]+/[\w.-]*)`", text)
    missing = [path for path in named if not any((base / path).exists() for base in (ROOT, ROOT / "src/setstream"))]
    assert not missing


def test_every_page_is_in_the_navigation():
    listed = set()
    for page in (ROOT / "docs").rglob("*.md"):
        for content in re.findall(r"^```\{toctree\}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            for entry in (line for line in content.splitlines() if line and not line.startswith(":")):
                listed |= {path.resolve() for path in page.parent.glob(f"{entry}.md")}
    assert {page for page in (ROOT / "docs").rglob("*.md") if page not in listed} == {ROOT / "docs/index.md"}


PUBLIC = ["", "data", "data/slides", "integrations/sklearn", "nn", "serve", "testing", "training"]


@pytest.mark.parametrize("folder", PUBLIC)
def test_every_public_name_is_in_the_reference(folder):
    pages = "".join(page.read_text() for page in (ROOT / "docs/api").glob("*.md"))
    documented = set(re.findall(r"auto(?:class|function):: (\S+)", pages))
    documented |= {"setstream.training.Batch", "setstream.training.Encode"}  # types, named in a sentence
    prefix = ".".join(["setstream", *Path(folder).parts])
    package = importlib.import_module(prefix)
    names = {name for name in package.__all__ if not inspect.ismodule(getattr(package, name))}
    assert {f"{prefix}.{name}" for name in names} <= documented


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path):
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-b",
        "html",
        "-W",
        "--keep-going",
        "-q",
        "-d",
        tmp_path / "trees",
        ROOT / "docs",
        tmp_path / "site",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        loaded = re.findall(r"<(?:script|img|link|iframe|source)\b[^>]*?(?:src|href)=\"(https?:)?//[^\"]*", page.read_text())
        assert not loaded, f"{page.name} loads {loaded}"
    for sheet in (tmp_path / "site").rglob("*.css"):
        assert not re.findall(r"(?:@import|url\()[\s\"']*(?:https?:)?//", sheet.read_text()), sheet.name


def test_the_demo_runs(tmp_path, capsys):
    from setstream.cli.report import run_demo

    run_demo(tmp_path, seed=3, points=64)
    text = capsys.readouterr().out
    assert "the oracle" in text
    assert all(name in text for name in ("set-transformer", "deepsets", "sse", "umbc+set-transformer"))
    for name in ("streams.png", "streams.gif", "report.html"):
        assert (tmp_path / name).stat().st_size > 10_000
