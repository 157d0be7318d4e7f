"""The code blocks of a page, with their marks."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
_BLOCK = re.compile(
    r"(?:^<!-- needs (?P<needs>[^>]*?) -->\n)?^```(?P<language>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """A block: its language, its first line in the page, and what it needs, as ``["torch", "a GPU"]``."""

    language: str
    line: int
    code: str
    needs: tuple[str, ...]


def blocks_of(page):
    """Return the blocks of a page in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            found["language"],
            text.count("\n", 0, found.start("code")) + 1,
            found["code"],
            tuple(filter(None, (found["needs"] or "").split(" and "))),
        )
        for found in _BLOCK.finditer(text)
    ]
