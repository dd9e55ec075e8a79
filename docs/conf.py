"""How the documentation is built: ``make docs``."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
from pygments.lexers.special import TextLexer
from sphinx.ext.napoleon import Config, GoogleDocstring

if TYPE_CHECKING:
    from sphinx.application import Sphinx

_ROOT = Path(__file__).parents[1]
_PROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = "hotkv-trio"
author = "the hotkv-trio authors"
copyright = "the hotkv-trio authors"  # ruff: ignore[builtin-variable-shadowing] - Sphinx reads this name
version = release = _PROJECT["version"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinxcontrib_trio",
    "cyclopts.ext.sphinx",
]
exclude_patterns = ["_build", "changelog.d"]
suppress_warnings = ["config.cache"]

html_theme = "furo"
html_title = f"hotkv-trio {version}"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_copy_source = False
html_show_sphinx = False

# Docstrings name things in single backticks; what is not ours (`trio.Cancelled`) is set as code, without a link.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "undoc-members": True}
autodoc_typehints = "signature"
# sphinxcontrib-trio, which marks what is awaited and what is entered, extends the classes.
autodoc_use_legacy_class_based = True
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
add_module_names = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
# A shell prints what it printed: output is not code.
highlight_language = "text"

_NAPOLEON = Config(napoleon_use_rtype=False, napoleon_numpy_docstring=False)


def _read_sections(app: Sphinx, what: str, name: str, member: object, options: object, lines: list[str]) -> None:
    """Turn the sections of a docstring (Args, Returns, Raises) into fields.

    Napoleon as an extension would take the first words of what is said of an attribute for its type.
    """
    if what not in {"attribute", "data", "property"}:
        lines[:] = GoogleDocstring(lines, _NAPOLEON, app, what, name, member, options).lines()


def _read_signature(
    _app: Sphinx, _what: str, _name: str, member: object, _options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Say of a context manager what ``as`` gives, and of attrs' classes what the defaults are."""
    given = re.fullmatch(r"(?:Async)?Generator\[(.*)\]", returns or "")
    if signature is not None and isinstance(member, type) and attrs.has(member):
        defaults = {field.name: repr(field.default) for field in attrs.fields(member)}
        signature = re.sub(r"attr_dict\['(\w+)'\]\.default", lambda found: defaults[found[1]], signature)
    return signature, given[1] if given else returns


def setup(app: Sphinx) -> None:
    """Connect to Sphinx."""
    app.connect("autodoc-process-docstring", _read_sections)
    app.connect("autodoc-process-signature", _read_signature)
    app.add_lexer("wire", TextLexer)
