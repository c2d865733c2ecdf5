"""The public face: names, docstrings with examples, and nothing imported against the arrows."""

import ast
import inspect
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


def test_every_error_is_ours_and_documented():
    for name, error in vars(ss.errors).items():
        if inspect.isclass(error):
            assert issubclass(error, ss.errors.SetstreamError)
            assert error.__doc__, name


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_arrows_point_up_only(path):
    """The core imports no room below it; pools import no set functions, set functions no pools."""
    room = {"pools": "pools", "nn": "nn"}.get(path.relative_to(SOURCE).parts[0], "core")
    forbidden = {"core": {"pools", "nn"}, "pools": {"nn"}, "nn": {"pools"}}[room]
    if path.name == "__init__.py" and room == "core":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            parts = name.split(".")
            assert not (parts[0] == "setstream" and len(parts) > 1 and parts[1] in forbidden), f"{path}: {name}"
