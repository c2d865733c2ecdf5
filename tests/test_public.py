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


#: What each room may import besides itself; the core imports none but `sets`, as all may.
MAY_IMPORT = {
    "core": set(),
    "sets": set(),
    "pools": set(),
    "nn": {"data"},  # backbones fetch their weights
    "testing": set(),
    "data": set(),
    "scale": {"data"},
    "training": {"data", "scale"},
    "tasks": {"pools", "nn", "data", "scale", "training"},
    "report": {"pools", "nn", "data", "scale", "training", "tasks"},
    "integrations": {"pools", "nn", "data", "scale", "training", "tasks"},
    "serve": {"pools", "nn", "data", "scale", "training", "tasks"},  # the playground shows shipped models
    "cli": {"data", "scale", "training", "tasks", "report", "serve"},
}


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_arrows_point_up_only(path):
    parts = path.relative_to(SOURCE).parts
    room = parts[0] if len(parts) > 1 else "core"
    if parts == ("__init__.py",):
        return
    forbidden = set(MAY_IMPORT) - MAY_IMPORT[room] - {room, "core", "sets"}
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            found = name.split(".")
            assert not (found[0] == "setstream" and len(found) > 1 and found[1] in forbidden), f"{path}: {name}"
