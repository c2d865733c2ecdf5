"""The public face: names, docstrings with examples, and nothing imported against the arrows."""

import ast
import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest

import setstream as ss

SOURCE = Path(ss.__file__).parent
PUBLIC = {name: getattr(ss, name) for name in ss.__all__ if not inspect.ismodule(getattr(ss, name))}
PUBLIC |= {f"nn.{name}": getattr(ss.nn, name) for name in ss.nn.__all__}
PUBLIC |= {f"testing.{name}": value for name, value in vars(ss.testing).items() if name.startswith("check_")}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_a_docstring_with_an_example(name):
    documentation = inspect.getdoc(PUBLIC[name])
    assert documentation
    assert ">>>" in documentation


@pytest.mark.parametrize("name", [name for name, value in PUBLIC.items() if inspect.isclass(value)])
def test_every_public_method_is_documented_where_it_is_defined_or_in_the_base_class(name):
    methods = {key for key in vars(PUBLIC[name]) if not key.startswith("_")}
    missing = [
        key for key in methods if callable(getattr(PUBLIC[name], key)) and not inspect.getdoc(getattr(PUBLIC[name], key))
    ]
    assert not missing


def test_every_error_is_ours_and_documented():
    for name, error in vars(ss.errors).items():
        if inspect.isclass(error):
            assert issubclass(error, ss.errors.SetstreamError)
            assert error.__doc__, name


#: The folders in the order in which they build on each other: each imports itself and those before it, nothing else.
ROOMS = (
    "errors", "_utils", "states", "sets", "pools", "models", "gradients", "testing", "nn", "stores", "data", "bulk", "training",
    "report", "tasks", "integrations", "serve", "cli",
)  # fmt: skip


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module == "setstream")
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_arrows_point_up_only(path):
    room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if room == "__init__":
        return
    later = set(ROOMS[ROOMS.index(room) + 1 :])
    for name in imports_of(path):
        found = name.split(".")
        assert found[0] != "setstream" or len(found) == 1 or found[1] not in later, f"{path}: {name}"


def test_the_root_holds_folders_only():
    assert {path.name for path in SOURCE.iterdir() if path.is_file()} == {"__init__.py", "errors.py", "py.typed"}
    assert {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"} == set(ROOMS) - {"errors"}


def test_modules_of_0_1_can_be_imported_under_their_old_names():
    from setstream._utils.moved import MOVED

    assert len(MOVED) > 30
    for old, new in MOVED.items():
        sys.modules.pop(f"setstream.{old}", None)
        with pytest.warns(DeprecationWarning, match=rf"setstream\.{re.escape(old)} is now setstream\.{re.escape(new)}"):
            found = importlib.import_module(f"setstream.{old}")
        assert found is importlib.import_module(f"setstream.{new}")
        assert found.__spec__.name == f"setstream.{new}"
