"""The public face: names, docstrings with examples, and nothing imported against the arrows."""

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import setstream as ss
from tests import import_graph
from tests.import_graph import FOLDERS

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


def test_imports_point_one_way_without_circles_and_without_imports_in_functions():
    """Folder by folder, in the order of FOLDERS; the picture of it is drawn by `python -m tests.import_graph`."""
    assert not import_graph.problems()


def test_the_picture_of_the_imports_is_up_to_date():
    assert import_graph.PICTURE.read_text() == import_graph.draw(), "run python -m tests.import_graph"


def test_the_root_holds_folders_only():
    assert {path.name for path in SOURCE.iterdir() if path.is_file()} == {"__init__.py", "errors.py", "py.typed"}
    assert {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"} == set(FOLDERS) - {"errors"}


def test_public_names_load_when_they_are_used_and_without_torch_before():
    code = "import sys, setstream as ss; assert 'torch' not in sys.modules; assert set(ss.__all__) <= set(dir(ss)); "
    code += "from setstream import UMBC, data; assert ss.UMBC is UMBC and ss.data is data; ss.encode, ss.pure, ss.bulk; "
    code += "import pickle; assert pickle.loads(pickle.dumps(UMBC)) is UMBC; assert not hasattr(ss, 'umbc')"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_table_of_public_names_is_complete():
    for name in ss.__all__:
        assert getattr(ss, name) is not None


def test_every_module_of_0_1_is_there_or_has_moved():
    from setstream._utils.moved import MOVED

    # Their names are those of functions and objects of the package, or nothing of them is left in it.
    names = {"encode", "streamed_loss", "data.slides.overview", "nn.backbones.small"}
    names |= {"tasks.clustering.pretrained", "tasks.completion.pretrained"}
    gone = {"report.costs", "report.needles", "report.partitions", "serve.pages", "tasks.clustering.classical", "tasks.shelf"}
    gone |= {"tasks.mil.needles"}
    modules = (Path(__file__).parent / "compat/0.1/modules.txt").read_text().split()
    there = {name.removeprefix("setstream.") for name in import_graph.modules()}
    assert set(modules) - there - set(MOVED) == names | gone


def test_modules_of_0_1_can_be_imported_under_their_old_names():
    from setstream._utils.moved import MOVED

    assert len(MOVED) > 30
    for old, new in MOVED.items():
        sys.modules.pop(f"setstream.{old}", None)
        with pytest.warns(DeprecationWarning, match=rf"setstream\.{re.escape(old)} is now setstream\.{re.escape(new)}"):
            found = importlib.import_module(f"setstream.{old}")
        assert found is importlib.import_module(f"setstream.{new}")
        assert found.__spec__.name == f"setstream.{new}"
