"""Count the annotated parameters of the package, and those that are exactly `Any`, by room."""

import ast
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "handlepool"


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    """List the annotated parameters of one function."""
    arguments = function.args
    given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    return [argument for argument in given if argument is not None and argument.annotation is not None]


def is_any(annotation: ast.expr) -> bool:
    """Whether an annotation is `Any` alone."""
    text = ast.unparse(annotation)
    return text in ("Any", "typing.Any", "'Any'")


def counts(package: Path = PACKAGE) -> tuple[Counter[str], Counter[str]]:
    """Count, by room, all annotated parameters and those that are exactly `Any`."""
    every: Counter[str] = Counter()
    untyped: Counter[str] = Counter()
    for path in sorted(package.rglob("*.py")):
        room = path.relative_to(package).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found = parameters(node)
                every[room] += len(found)
                untyped[room] += sum(is_any(argument.annotation) for argument in found if argument.annotation)
    return every, untyped


def listing(package: Path = PACKAGE) -> list[str]:
    """List each parameter that is exactly `Any`, with file and line."""
    return [
        f"{path.relative_to(package)}:{argument.lineno} {node.name}({argument.arg})"
        for path in sorted(package.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for argument in parameters(node)
        if argument.annotation is not None and is_any(argument.annotation)
    ]


if __name__ == "__main__":
    every, untyped = counts()
    print("\n".join(listing()))
    for room in sorted(every):
        print(f"{room:20} {untyped[room]:4} of {every[room]:4}")
    print(f"{'all':20} {untyped.total():4} of {every.total():4}: {untyped.total() / every.total():.1%}")
