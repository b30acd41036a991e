"""Settings of Sphinx for `make docs`: pages and notebooks with MyST, an API reference."""

from __future__ import annotations

import sys
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

# The package beside these pages, also where another checkout is installed.
sys.path.insert(0, str(Path(__file__).parent.parent))

project = "distmp"
author = "the distmp authors"
version = release = version_of("distmp")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
templates_path: list[str] = []
html_theme = "furo"
html_title = "distmp"
html_static_path = ["_static"]
html_css_files = ["distmp.css"]
html_show_copyright = False

# Headings are link targets, as on GitHub: `precision.md#presets`.
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

# The notebooks of labs/ have no outputs, so each build executes them, in temporary directories.
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_merge_streams = True

# Docstrings write code in single backquotes.
default_role = "literal"
# Keep `--option` and "auto" as they are written.
smartquotes = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"

# References inside of distmp have to resolve. Those to Python and torch would need the network.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(?!distmp\.).*"),
    # Annotations of internal types, which are not part of the API reference.
    (r"py:class", r"distmp\..*"),
]


def setup(app: Any) -> None:
    """Connect the functions below."""
    app.connect("autodoc-process-signature", _without_settings_signature)
    app.connect("autodoc-skip-member", _skip_methods_of_settings)
    # Before napoleon, which has the usual priority of 500.
    app.connect("autodoc-process-docstring", _without_type_before_colon, priority=400)


def _without_settings_signature(
    app: Any, what: str, name: str, obj: object, options: Any, signature: str, returned: str
) -> tuple[str, None] | None:
    """Leave out the signature of a section of the settings: the page describes each field."""
    if what == "class" and name.startswith("distmp.") and name.endswith("Config"):
        return "", None
    return None


def _skip_methods_of_settings(
    app: Any, what: str, name: str, obj: object, skip: bool, options: Any
) -> bool | None:
    """Leave out what is not a field of a section of the settings."""
    function = obj.fget if isinstance(obj, property) else obj
    owner = getattr(function, "__qualname__", "").partition(".")[0]
    return True if owner.endswith(("Config", "Settings")) else None


def _without_type_before_colon(
    app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]
) -> None:
    """Keep napoleon from reading `Steps between saves; 0: never` as a type and a description."""
    if what in ("attribute", "data", "property") and lines:
        lines.insert(0, "\\")  # joined with the line below it
