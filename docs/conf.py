"""The site: Markdown by MyST, docstrings by autodoc, furo's looks. `make docs` builds it; a warning is an error."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import setstream

project = "setstream"
author = "The setstream developers"
copyright = author
version = release = setstream.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "plain_docstrings"]
exclude_patterns = ["_ext"]

# -- Markdown: as a git host shows it, with the same anchors
myst_heading_anchors = 4
myst_links_external_new_tab = False

# -- docstrings
autodoc_default_options = {"members": True, "member-order": "bysource", "show-inheritance": True}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
maximum_signature_line_length = 100
python_use_unqualified_type_names = True
add_module_names = False
default_role = "py:obj"
trim_doctest_flags = True

# -- looks: nothing from other hosts
html_theme = "furo"
html_title = "setstream"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
