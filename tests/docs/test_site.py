"""The translation of pages for the site: every page has a place, and every picture its two forms."""

import importlib.util
import re

import pytest
from docs.blocks import ROOT

import handlepool

if not (ROOT / "docs").exists():
    pytest.skip("docs/ is not here", allow_module_level=True)
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks" / "results").glob("*/README.md")]


@pytest.fixture(scope="module")
def conf():
    """The site's configuration, as a module."""
    spec = importlib.util.spec_from_file_location("conf", ROOT / "docs" / "conf.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_stands_in_the_contents_once(conf):
    tables = conf.contents((ROOT / "docs" / "index.md").read_text(encoding="utf-8"))
    found = re.findall(r"^.* <(.*)>$", tables, re.MULTILINE)
    paths = [(ROOT / "docs" / f"{page}.md").resolve() for page in found]
    assert sorted(paths) == sorted({*PAGES, ROOT / "CHANGELOG.md"} - {ROOT / "docs" / "index.md"})


def test_every_picture_in_two_forms_follows_the_theme(conf):
    count = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        translated = conf.pictures(text)
        assert "<picture>" not in translated, page
        assert translated.count(":class: only-dark") == translated.count(":class: only-light") == text.count("<picture>")
        for path in re.findall(r"```\{image\} (.*)", translated):
            assert (page.parent / path).exists()
            count += 1
    assert count >= 10


def test_the_citation_has_the_version_of_the_package():
    text = (ROOT / "docs" / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)$", text, re.MULTILINE) == [handlepool.__version__]
