"""Count how much the tests hold to internals: accesses to private names, and patches of the package."""

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]
OF_TUPLES = {"_asdict", "_fields", "_make", "_replace"}
"""Public methods of named tuples."""


def private_names(tree: ast.AST) -> list[ast.Attribute]:
    """List the accesses to private attributes of objects other than ``self`` and ``cls``."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in OF_TUPLES
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]


def imported(tree: ast.AST) -> set[str]:
    """Return the names that a module imports from the package."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "handlepool":
            names.update(each.asname or each.name for each in node.names)
        elif isinstance(node, ast.Import):
            known = [each for each in node.names if each.name.partition(".")[0] == "handlepool"]
            names.update(each.asname or "handlepool" for each in known)
    return names


def patches(tree: ast.AST) -> list[ast.Call]:
    """List the calls of a ``monkeypatch`` that change an attribute of the package."""
    ours, found = imported(tree), []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
            continue
        if node.func.attr not in ("setattr", "delattr") or not isinstance(node.func.value, ast.Name):
            continue
        target = node.args[0]
        while isinstance(target, ast.Attribute | ast.Call | ast.Subscript):
            target = target.func if isinstance(target, ast.Call) else target.value
        named = isinstance(target, ast.Name) and target.id in ours
        if named or (isinstance(target, ast.Constant | ast.JoinedStr) and "handlepool." in ast.unparse(target)):
            found.append(node)
    return found


def by_file(count) -> dict[str, list[str]]:
    """Return the places that a function lists, by test file, the file with most places first."""
    found = {}
    for path in sorted(TESTS.rglob("*.py")):
        places = [f"{node.lineno}: {ast.unparse(node)}" for node in count(ast.parse(path.read_text(encoding="utf-8")))]
        if places:
            found[str(path.relative_to(TESTS))] = places
    return dict(sorted(found.items(), key=lambda each: -len(each[1])))


if __name__ == "__main__":
    for count in (private_names, patches):
        found = by_file(count)
        print(f"{count.__name__}: {sum(map(len, found.values()))}")
        for file, places in found.items():
            print(f"  {file}", *places, sep="\n    ")
