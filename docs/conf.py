"""Build the documentation as a site: ``sphinx-build -W -c docs . OUT`` from the root of the checkout.

The root is the source folder, since pages of ``docs`` link the README, the changelog, figures and code beside them. GitHub shows
the same pages. So the table of contents comes from the links of ``docs/index.md``, and GitHub's own forms are translated.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import handlepool

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]

project = "handlepool"
author = "the handlepool contributors"
release = version = handlepool.__version__
root_doc = "docs/index"
include_patterns = ["README.md", "CHANGELOG.md", "docs/**.md", "benchmarks/results/*/README.md"]
exclude_patterns = ["docs/examples/**"]
extensions = ["myst_parser", "numpydoc", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx_copybutton"]

myst_enable_extensions = ["colon_fence"]
# Pages link headings by the anchors that GitHub gives them.
myst_heading_anchors = 5
suppress_warnings = ["config.cache"]

default_role = "py:obj"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
numpydoc_xref_param_type = False

html_theme = "furo"
html_title = f"handlepool {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["_root"]
html_show_sourcelink = False
html_copy_source = False
copyright = "Apache License 2.0"

_SECTION = re.compile(r"^## (.*)$", re.MULTILINE)
_PAGE = re.compile(r"\[([^\]]+)\]\(([^)#:]+)\.md(?:#[^)]*)?\)")
_PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)">\s*'
    r'<img src="([^"]+)" alt="([^"]*)">\s*</picture>'
)


def contents(text: str) -> str:
    """Return the tables of contents of the index, one for each of its sections."""
    _, *sections = _SECTION.split(text)
    seen: set[str] = set()
    tables = []
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        entries = []
        for text, page in _PAGE.findall(body):
            # A page stands where it is linked first, under the text of the link.
            if page not in seen:
                entries.append(f"{text[0].upper()}{text[1:]} <{page}>")
            seen.add(page)
        if entries:
            tables.append("\n".join(["```{toctree}", ":hidden:", f":caption: {title}", "", *entries, "```"]))
    return "\n\n" + "\n\n".join(tables) + "\n"


def pictures(text: str) -> str:
    """Return a page whose pictures in two forms follow the theme of the site."""

    def both(found: re.Match[str]) -> str:
        forms = ((found[2], "light"), (found[1], "dark"))
        return "\n\n".join(f"```{{image}} {path}\n:class: only-{form}\n:alt: {found[3]}\n```" for path, form in forms)

    return _PICTURE.sub(both, text)


def translate(app: "Sphinx", page: str, source: list[str]) -> None:
    """Translate a page from GitHub's forms to the site's."""
    source[0] = pictures(source[0])
    if page == root_doc:
        source[0] += contents(source[0])


def setup(app: "Sphinx") -> dict[str, Any]:
    """Register the translation."""
    app.connect("source-read", translate)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
