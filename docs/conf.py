"""The configuration of the site: Markdown (MyST), Google-style docstrings (napoleon), the furo theme. `make docs` builds it."""

import setstream

project = "setstream"
author = "The setstream developers"
copyright = author
version = release = setstream.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

# -- Markdown: headings have the same anchors as on a git host
myst_heading_anchors = 4
myst_links_external_new_tab = False

# -- docstrings: Google style; a method without one shows its base class's
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # an `Attributes:` section and a documented member do not collide
napoleon_use_rtype = False
autodoc_inherit_docstrings = True
autodoc_default_options = {
    "members": True,
    "member-order": "bysource",
    "show-inheritance": True,
    # scikit-learn adds these to every estimator
    "exclude-members": "set_fit_request, set_partial_fit_request, set_predict_request, set_predict_proba_request, "
    "set_score_request, set_transform_request",
}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
maximum_signature_line_length = 100
python_use_unqualified_type_names = True
add_module_names = False
default_role = "py:obj"  # `name` links to the name if the reference has it, and is plain code if not
trim_doctest_flags = True

# -- the theme: nothing is loaded from other hosts
html_theme = "furo"
html_title = "setstream"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
