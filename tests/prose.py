"""Measure the prose of the package, and hold it to the limits of the writing rules: ``python tests/prose.py [--list MEASURE]``.

The rules stand in docs/contributing.md. The script counts docstrings and comments of the package and the benchmarks, the prose of
the maintainers' pages and of the changelog, texts of errors and warnings, and the subjects of commits since a named base. The
exit status is 1 if a limit does not hold.
"""

import argparse
import ast
import io
import random
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("CHANGELOG.md", "docs/architecture.md", "docs/contributing.md", "docs/glossary.md", "docs/testing.md")
BASE = "caa9c37"
"""The last commit before the rule for subjects. Every commit after it has the form, merges included."""
MOST_SUBJECT = 72


class Limit(NamedTuple):
    """The bound of one measure; ``least`` says that the figure must not be below the bound."""

    bound: float
    unit: str
    least: bool = False


LIMITS = {
    "noun clauses": Limit(0.5, "per 1,000 words"),
    "nobody": Limit(0, "per 1,000 words"),
    "bare pronouns": Limit(1.6, "per 1,000 words"),
    "own-line comments": Limit(5, "% of code lines", least=True),
    "trailing comments": Limit(60, "in the package"),
    "long first lines": Limit(0, "first docstring lines over 12 words"),
    "sentence length": Limit(15, "words, mean"),
    "long messages": Limit(0, "messages over two sentences"),
    "message clauses": Limit(0.5, "per 1,000 words that users see"),
    "message nobody": Limit(0, "per 1,000 words that users see"),
    "commit subjects": Limit(0, "since the base"),
}

CLAUSE = re.compile(r"\b(?:what|who|whoever|whatever)\b(?!\s*\?)", re.IGNORECASE)
_QUESTION = re.compile(r"^(?:what|who)\b.*\?$", re.IGNORECASE)
NOBODY = re.compile(r"\b(?:nobody|somebody|everybody)\b", re.IGNORECASE)
# A demonstrative or a numeral that no noun follows: a verb, a preposition, a relative or a stop comes next.
_NO_NOUN = (
    r"(?=\s*(?:[.,;:)]|$)|\s+(?:is|are|was|were|has|have|that|which|who|of|in|on|at|for|to|with|by|from|and|or|may|must"
    r"|can|do|does)\b)"
)
BARE = re.compile(r"\b(?:those|others|(?<!\bthe\s)(?<!\bno\s)one)\b" + _NO_NOUN, re.IGNORECASE)
_CODE = re.compile(r"``[^`]*``|`[^`]*`|\"[^\"\n]*\"|https?://\S+")
# A sentence of a message ends before the next sentence. The last sentence has no full stop.
ENDS = re.compile(r"[.!?]\s+(?=[A-Z])")
SUBJECT = re.compile(r"[a-z_][a-z0-9 _/.,-]*: [^\s].*[^.]")
_UNIT = re.compile(r"#\s*(?:noqa|type:|pragma|doctest|fmt:)|#\s*(?:[kMG]i?B|bytes|ns|us|ms|s|seconds|elements|pixels|%)\s*$")


@dataclass(frozen=True)
class Piece:
    """One docstring, comment or paragraph."""

    path: str
    line: int
    text: str


def docstrings(path: Path, tree: ast.Module) -> Iterator[Piece]:
    """Yield the docstrings of a module, of its classes and functions, and of its assignments."""
    name = str(path.relative_to(ROOT))
    for node in ast.walk(tree):
        for statement in getattr(node, "body", ()) if not isinstance(node, (ast.Lambda, ast.IfExp)) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield Piece(name, statement.lineno, value.value)


def prose_of(docstring: str) -> str:
    """Return the sentences of a docstring without its examples, underlines and names of parameters."""
    kept, examples = [], False
    for line in map(str.strip, docstring.splitlines()):
        examples = (examples or line.startswith((">>>", "Examples"))) and not line.startswith(("Notes", "Returns"))
        if examples or set(line) <= {"-", "=", " "} or re.fullmatch(r"[\w*, ]+ : .*|[A-Z]\w*(?:Error|s)?", line):
            kept.append("")
        else:
            kept.append(line)
    return "\n".join(kept)


def comments(path: Path, source: str) -> Iterator[tuple[bool, Piece]]:
    """Yield comments, each with whether it has a line of its own."""
    name = str(path.relative_to(ROOT))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield not token.line[: token.start[1]].strip(), Piece(name, token.start[0], token.string)


def code_lines(source: str, tree: ast.Module) -> int:
    """Return the number of lines with code: no docstring, no comment, no blank line."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in skipped
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def messages(path: Path, tree: ast.Module) -> Iterator[Piece]:
    """Yield the texts of errors and warnings, with X for each value."""
    name, seen = str(path.relative_to(ROOT)), set()
    for node in ast.walk(tree):
        calls: list[ast.AST] = []
        if isinstance(node, ast.Raise) and node.exc is not None:
            calls = [each for each in ast.walk(node.exc) if isinstance(each, ast.Call)]
        elif isinstance(node, ast.Call) and _called(node).endswith(("warn", "Warning", "Error")):
            calls = [node]
        for argument in (argument for call in calls if isinstance(call, ast.Call) for argument in call.args):
            for part in _texts(argument):
                if id(part) not in seen and len(text := _text_of(part).strip()) and " " in text:
                    seen.add(id(part))
                    yield Piece(name, part.lineno, text)


def phrases(path: Path, tree: ast.Module) -> Iterator[Piece]:
    """Yield all literals of some words in a line, which a user may see; docstrings are not among them."""
    name, parts = str(path.relative_to(ROOT)), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            parts.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            parts.update(map(id, node.values))
    for node in ast.walk(tree):
        if isinstance(node, (ast.JoinedStr, ast.Constant)) and id(node) not in parts:
            text = "" if isinstance(node, ast.Constant) and not isinstance(node.value, str) else _text_of(node)
            if len(text.split()) > 2 and "\n" not in text:
                yield Piece(name, node.lineno, text)


def _called(call: ast.Call) -> str:
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))


def _texts(expression: ast.expr) -> Iterator[ast.expr]:
    """Yield the literal texts of an argument, without the texts inside of calls and values."""
    if isinstance(expression, ast.JoinedStr) or (isinstance(expression, ast.Constant) and isinstance(expression.value, str)):
        yield expression
    elif isinstance(expression, ast.IfExp):
        yield from (*_texts(expression.body), *_texts(expression.orelse))
    elif isinstance(expression, ast.BinOp):
        yield from (*_texts(expression.left), *_texts(expression.right))


def _text_of(expression: ast.expr) -> str:
    parts = expression.values if isinstance(expression, ast.JoinedStr) else [expression]
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in parts)


def paragraphs(path: Path) -> Iterator[Piece]:
    """Yield the paragraphs of a page, without code blocks, tables and headings."""
    fenced = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith(("|", "#", "    ")) and line.strip():
            yield Piece(str(path.relative_to(ROOT)), number, line)


def sentences(text: str) -> list[str]:
    """Split prose into sentences."""
    flat = re.sub(r"\s+", " ", re.sub(r"\n\s*\n", ". ", text)).strip()
    return [each for each in re.split(r"(?<=[.!?])\s+|\.\s*\.", flat) if re.search(r"\w", each)]


def words(text: str) -> int:
    """Return the number of words of a text."""
    return len(re.findall(r"[A-Za-z0-9_'`][\w'`.-]*", text))


def subjects(base: str) -> list[Piece] | None:
    """Return commit subjects since a base that break the form; None if the clone lacks the base."""
    try:
        log = subprocess.run(
            ["git", "log", "--format=%h %s", f"{base}..HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    # An unpacked sdist has no history, and its machine may have no git.
    except (OSError, subprocess.CalledProcessError):
        return None
    found = []
    for entry in log.stdout.splitlines():
        commit, _, subject = entry.partition(" ")
        if len(subject) > MOST_SUBJECT or not SUBJECT.fullmatch(subject):
            found.append(Piece(commit, 0, subject))
    return found


def measure(base: str) -> tuple[dict[str, float], dict[str, list[Piece]]]:
    """Return the figure of each measure, and the places that it counts."""
    places: dict[str, list[Piece]] = {name: [] for name in LIMITS}
    texts: list[Piece] = []
    said: list[Piece] = []
    shown: list[Piece] = []
    code = own = docstring_words = docstring_sentences = 0
    for path in sorted((ROOT / "handlepool").rglob("*.py")):
        source = path.read_text()
        tree = ast.parse(source)
        code += code_lines(source, tree)
        for alone, comment in comments(path, source):
            texts.append(comment)
            own += alone
            if not alone and not _UNIT.search(comment.text):
                places["trailing comments"].append(comment)
        said += messages(path, tree)
        shown += phrases(path, tree)
        for piece in docstrings(path, tree):
            first = piece.text.strip().splitlines()[0] if piece.text.strip() else ""
            if words(first) > 12:
                places["long first lines"].append(piece)
            prose = prose_of(piece.text)
            texts.append(Piece(piece.path, piece.line, prose))
            for sentence in sentences(prose):
                docstring_sentences += 1
                docstring_words += words(sentence)
                if words(sentence) > 2 * LIMITS["sentence length"].bound:
                    places["sentence length"].append(Piece(piece.path, piece.line, sentence))
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        source = path.read_text()
        texts += [comment for _, comment in comments(path, source)]
        texts += [Piece(each.path, each.line, prose_of(each.text)) for each in docstrings(path, ast.parse(source))]
    texts += [piece for page in PAGES if (ROOT / page).exists() for piece in paragraphs(ROOT / page)]
    total = 0
    for piece in texts:
        text = _CODE.sub("X", piece.text)
        total += words(text)
        for name, pattern in (("noun clauses", CLAUSE), ("nobody", NOBODY), ("bare pronouns", BARE)):
            if name == "noun clauses" and all(_QUESTION.match(each) for each in sentences(text)):
                continue
            places[name] += [Piece(piece.path, piece.line, text)] * len(pattern.findall(text))
    figures = {name: 1000 * len(places[name]) / total for name in ("noun clauses", "nobody", "bare pronouns")}
    places["long messages"] = [piece for piece in said if len(ENDS.findall(_CODE.sub("X", piece.text))) > 1]
    spoken = 0
    for piece in shown:
        text = _CODE.sub("X", piece.text)
        spoken += words(text)
        places["message clauses"] += [piece] * len(CLAUSE.findall(text))
        places["message nobody"] += [piece] * len(NOBODY.findall(text))
    figures |= {name: 1000 * len(places[name]) / spoken for name in ("message clauses", "message nobody")}
    wrong = subjects(base)
    figures |= {
        "own-line comments": 100 * own / code,
        "trailing comments": len(places["trailing comments"]),
        "long first lines": len(places["long first lines"]),
        "long messages": len(places["long messages"]),
        "sentence length": docstring_words / docstring_sentences,
    }
    if wrong is not None:
        places["commit subjects"] = wrong
        figures["commit subjects"] = len(wrong)
    return figures, places


def drawn(seed: int) -> Iterator[str]:
    """Yield places for a reader who has not seen the project: 20 docstrings, 25 comments and 15 messages.

    Each place comes with the code around it, as an editor shows it: a docstring with the head of its function or class, a comment
    with the lines that it stands above, a message with its condition.
    """
    texts: list[tuple[str, int, int]] = []
    blocks: list[tuple[str, int, int]] = []
    said: list[tuple[str, int, int]] = []
    files: dict[str, list[str]] = {}
    for path in sorted((ROOT / "handlepool").rglob("*.py")):
        source = path.read_text()
        tree = ast.parse(source)
        name = str(path.relative_to(ROOT))
        lines = files[name] = source.splitlines()
        heads = {
            node.body[0].lineno: min([node.lineno, *(each.lineno for each in node.decorator_list)])
            for node in ast.walk(tree)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        }
        for piece in docstrings(path, tree):
            if words(piece.text) > 4:
                begin = heads.get(piece.line, max(1, piece.line - 1))
                texts.append((name, begin, piece.line + piece.text.count("\n")))
        spans = sorted((node.end_lineno or 0, node.lineno) for node in ast.walk(tree) if isinstance(node, ast.stmt))
        for piece in messages(path, tree):
            if words(piece.text) > 4:
                # The innermost statement around the text ends first, and begins last.
                end, begin = min((end, -begin) for end, begin in spans if begin <= piece.line <= end)
                said.append((name, max(1, -begin - 5), end + 2))
        for number in range(1, len(lines) + 1):
            if lines[number - 1].lstrip().startswith("# ") and not lines[number - 2].lstrip().startswith("#"):
                end = next((at for at in range(number, len(lines)) if not lines[at].lstrip().startswith("#")), len(lines))
                if words("\n".join(lines[number - 1 : end])) > 4:
                    blocks.append((name, max(1, number - 4), end + 6))
    choice = random.Random(seed)
    for kind, places, count in (("docstring", texts, 20), ("comment", blocks, 25), ("message", said, 15)):
        for name, begin, end in choice.sample(places, count):
            shown = files[name][begin - 1 : end]
            body = "\n".join(f"{number:5} {line}" for number, line in enumerate(shown, begin))
            yield f"{kind}, {name}:\n{body}\n"


def main() -> int:
    """Print the measures; return 1 where a limit does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", choices=LIMITS, help="print the places that a measure counts")
    parser.add_argument("--under", default="", help="of --list, only the paths that begin with this")
    parser.add_argument("--base", default=BASE, help=f"the commit after which subjects are checked (default: {BASE})")
    parser.add_argument("--draw", type=int, metavar="SEED", help="print sixty places at random, for a reader's trial")
    given = parser.parse_args()
    if given.draw is not None:
        print(*drawn(given.draw), sep="\n")
        return 0
    figures, places = measure(given.base)
    if given.list:
        for piece in places[given.list]:
            if piece.path.startswith(given.under):
                print(f"{piece.path}:{piece.line}: {' '.join(piece.text.split())[:160]}")
        return 0
    failed = False
    for name, limit in LIMITS.items():
        if name not in figures:
            print(f"{name:20} not measured: this clone has no commit {given.base}")
            continue
        broken = figures[name] < limit.bound if limit.least else figures[name] > limit.bound
        failed |= broken
        sign = "at least" if limit.least else "at most"
        print(f"{name:20} {figures[name]:8.1f} {limit.unit}; {sign} {limit.bound}{'  BROKEN' if broken else ''}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
