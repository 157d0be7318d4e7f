"""Each class writes its own attributes alone: held over the syntax trees of five rooms.

A function may assign to an attribute of ``self``, of an object that it has made itself, and of an object of a class in the same
module. A method that does nothing but store its argument counts as an assignment from outside.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[1] / "handlepool"
ROOMS = ("order", "regions", "recording", "graphs", "spreading")
FOREIGN = {
    "graphs/compile.py": {"drafted.graph.context.io_data_type": "the frontend's graph has no method for it"},
    "graphs/operand_forms.py": {
        "tensor.dim": "the frontend's method would count as the user's own assignment",
        "tensor.stride": "the frontend's method would count as the user's own assignment",
    },
    "graphs/launch.py": {
        "function.__signature__": "Python reads the signature of a function there",
        "setattr(function, LAUNCHES, function)": "a function keeps a mark nowhere else",
        "launch.operands": "a driver makes the function, whose attributes are its only place for the plan's geometry",
        "launch.plan": "a driver makes the function, whose attributes are its only place for the plan",
    },
    "order/plain_calls.py": {"setattr(function, ORDERS_ITSELF, function)": "a function keeps a mark nowhere else"},
    "recording/keys.py": {
        "object.__setattr__(new, name, rebuilt(each) if place is None else [*_entries_of(new)][place])": (
            "a copy of a container gets its attributes"
        )
    },
    "recording/state_kinds.py": {
        "owner.__class__": "a user's object gets its class back",
        "cell.cell_contents": "a user's variable gets its value back",
        "delattr(kind, key)": "a user's class loses what a recording put there",
        "setattr(kind, key, value)": "a user's class gets its attributes back",
        "function.__defaults__": "a user's function gets its defaults back",
        "function.__kwdefaults__": "a user's function gets its defaults back",
        "getattr(generator, 'bit_generator', generator).state": "NumPy's generator has no method for it",
    },
}
"""Writes to objects of users, Python, NumPy and the frontend, whose classes are not ours to change, with the reason for each."""

CLASS = re.compile(r"_*[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*$|_*[A-Z]$")
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class Violation(NamedTuple):
    """A place where a function writes to an object of another class."""

    line: int
    text: str


class Module:
    """The classes of a module, and the classes of its values as far as annotations tell them."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.classes = {each.name: each for each in ast.walk(tree) if isinstance(each, ast.ClassDef)}
        self.returns: dict[str, ast.expr] = {}
        self.attributes: dict[str, ast.expr] = {}
        for each in ast.walk(tree):
            if isinstance(each, ast.FunctionDef) and each.returns is not None:
                self.returns[each.name] = each.returns
            elif isinstance(each, ast.AnnAssign):
                name = each.target.attr if isinstance(each.target, ast.Attribute) else getattr(each.target, "id", "")
                known = self.attributes.setdefault(name, each.annotation)
                if ast.unparse(known) != ast.unparse(each.annotation):
                    self.attributes[name] = ast.Name("object")  # attributes of two classes, whose types differ

    def own(self, annotation: ast.expr | None) -> bool:
        """Whether an annotation names a class of this module, or such a class or None."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        if isinstance(annotation, ast.BinOp):
            sides = [each for each in (annotation.left, annotation.right) if getattr(each, "value", 0) is not None]
            return all(map(self.own, sides))
        return isinstance(annotation, ast.Name) and annotation.id in self.classes


def parts(annotation: ast.expr | None) -> list[ast.expr]:
    """Return the parameters of a generic type."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    if not isinstance(annotation, ast.Subscript):
        return []
    return annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]


class Names:
    """The names of a function that stand for objects that it may write to.

    A name counts only where each of its assignments gives it such an object.
    """

    def __init__(self, module: Module, function: Function, outer: "Names | None", method_of: ast.ClassDef | None) -> None:
        self._module = module
        self._outer = outer
        self._mine: dict[str, bool] = {}
        self._types: dict[str, ast.expr] = {}
        arguments = function.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        for each in every:
            self._mine[each.arg] = module.own(each.annotation)
            if each.annotation is not None:
                self._types[each.arg] = each.annotation
        for each in (arguments.vararg, arguments.kwarg):
            if each is not None:
                self._mine[each.arg] = False
        static = any(getattr(each, "id", "") == "staticmethod" for each in getattr(function, "decorator_list", ()))
        if method_of is not None and not static and every:
            self._mine[every[0].arg] = True
        for statement in nodes_of(function):
            self._take(statement)

    def _take(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind(target, node.value, None)
        elif isinstance(node, ast.AnnAssign):
            self._bind(node.target, node.value, node.annotation)
        elif isinstance(node, ast.NamedExpr):
            self._bind(node.target, node.value, None)
        elif isinstance(node, ast.For | ast.comprehension):
            if isinstance(node.iter, ast.Tuple | ast.List):
                for each in node.iter.elts:
                    self._bind(node.target, each, None)
            else:
                self._bind(node.target, None, self._each_of(node.iter))
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._bind(node.optional_vars, node.context_expr, None)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            self._set(node.name, True)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            self._set(node.name, False)

    def _bind(self, target: ast.expr, value: ast.expr | None, annotation: ast.expr | None) -> None:
        if isinstance(target, ast.Name):
            known = annotation if annotation is not None else self._type_of(value)
            if known is not None:
                self._types[target.id] = known
            if annotation is not None:
                self._set(target.id, self._module.own(annotation) or (value is not None and self._made(value)))
            else:
                self._set(target.id, value is not None and self.may_write(value))
        elif isinstance(target, ast.Tuple | ast.List):
            values = value.elts if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts) else None
            annotations = parts(annotation if annotation is not None else self._type_of(value))
            for number, each in enumerate(target.elts):
                known = annotations[number] if number < len(annotations) else None
                self._bind(each, values[number] if values else None, known)

    def _set(self, name: str, mine: bool) -> None:
        self._mine[name] = self._mine.get(name, True) and mine

    def _type_of(self, value: ast.expr | None) -> ast.expr | None:
        """Return the annotation of a value: of its name, of the function that it comes from, or of the attribute that has it."""
        if isinstance(value, ast.Name):
            return self._types.get(value.id) or (self._outer._type_of(value) if self._outer is not None else None)
        if isinstance(value, ast.ListComp):
            return ast.Subscript(ast.Name("list"), self._class_of(value.elt))
        if isinstance(value, ast.Call):
            name = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
            if name in ("get", "pop", "setdefault") and isinstance(value.func, ast.Attribute):
                inside = parts(self._type_of(value.func.value))
                return inside[-1] if inside else None
            local = not isinstance(value.func, ast.Attribute) or self.may_write(value.func.value)
            return self._module.returns.get(name) if local else None
        if isinstance(value, ast.Attribute) and self.may_write(value.value):
            return self._module.attributes.get(value.attr)
        return None

    def _each_of(self, value: ast.expr) -> ast.expr | None:
        """Return the annotation of what a loop over a value gives."""
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in ("values", "items"):
            inside = parts(self._type_of(value.func.value))
            if value.func.attr == "values":
                return inside[-1] if inside else None
            return ast.Subscript(ast.Name("tuple"), ast.Tuple(inside)) if inside else None
        inside = parts(self._type_of(value))
        return inside[0] if inside else None

    @staticmethod
    def _class_of(value: ast.expr) -> ast.expr:
        return value.func if isinstance(value, ast.Call) else ast.Name("object")

    def _made(self, value: ast.expr) -> bool:
        """Whether a value is an object that this expression makes."""
        if isinstance(value, ast.Call):
            name = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
            return bool(CLASS.match(name)) or name in ("__new__", "cls")
        return isinstance(value, ast.Lambda)

    def may_write(self, value: ast.expr) -> bool:
        """Whether an expression stands for an object that this function may write to."""
        if isinstance(value, ast.Name):
            if value.id in self._mine:
                return self._mine[value.id]
            if self._outer is not None:
                return self._outer.may_write(value)
            return value.id in self._module.classes or self._module.own(self._module.attributes.get(value.id))
        if isinstance(value, ast.IfExp):
            return self.may_write(value.body) and self.may_write(value.orelse)
        if isinstance(value, ast.Subscript):
            inside = parts(self._type_of(value.value))
            return bool(inside) and self._module.own(inside[-1])
        return self._made(value) or self._module.own(self._type_of(value))


def nodes_of(function: Function) -> Iterator[ast.AST]:
    """Walk a function in the order of its text, and not into the functions and classes inside it."""
    left: list[ast.AST] = [*reversed(function.body)] if isinstance(function.body, list) else [function.body]
    while left:
        node = left.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            left += reversed([*ast.iter_child_nodes(node)])


def targets(node: ast.AST) -> Iterator[tuple[ast.expr, ast.AST]]:
    """Give each object whose attribute a node writes or deletes."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
        yield node.value, node
    elif isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ("setattr", "delattr", "__setattr__", "__delattr__"):
            bound = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") not in ("object", "type")
            yield (node.func.value if bound else node.args[0]), node  # type: ignore[union-attr]


def is_setter(function: ast.AST) -> bool:
    """Whether a method does nothing but store its arguments."""
    if not isinstance(function, ast.FunctionDef) or function.name.startswith("__"):
        return False
    body = [each for each in function.body if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))]
    if len(body) != 1 or not isinstance(body[0], ast.Assign | ast.AnnAssign):
        return False
    value = body[0].value
    given = {each.arg for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)[1:]}
    stored = value.elts if isinstance(value, ast.Tuple) else [value]
    where = body[0].targets if isinstance(body[0], ast.Assign) else [body[0].target]
    flat = [each for target in where for each in (target.elts if isinstance(target, ast.Tuple) else [target])]
    stores = bool(stored) and all(getattr(each, "id", "") in given for each in stored)
    return stores and all(isinstance(each, ast.Attribute) for each in flat)


def violations(source: str) -> list[Violation]:
    """Return the writes of a module to objects of other classes, by line."""
    module = Module(ast.parse(source))
    found: list[Violation] = []

    def visit(body: list[ast.AST], outer: Names | None, method_of: ast.ClassDef | None) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                visit([*node.body], outer, node)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                if method_of is not None and is_setter(node):
                    found.append(Violation(node.lineno, f"def {node.name}: stores its argument"))  # type: ignore[union-attr]
                check(node, Names(module, node, outer, method_of))
            else:
                visit([*ast.iter_child_nodes(node)], outer, None)

    def check(function: Function, names: Names) -> None:
        for node in nodes_of(function):
            for owner, where in targets(node):
                if not names.may_write(owner):
                    found.append(Violation(where.lineno, ast.unparse(where)))  # type: ignore[attr-defined]
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
                visit([node], names, None)

    visit([*module.tree.body], None, None)
    return sorted(found)


def modules() -> list[str]:
    """Return the modules of the rooms, by their paths in the package."""
    return sorted(str(path.relative_to(PACKAGE)) for room in ROOMS for path in (PACKAGE / room).rglob("*.py"))


@pytest.mark.parametrize("module", modules())
def test_a_module_writes_the_attributes_of_its_own_classes_alone(module):
    foreign = FOREIGN.get(module, {})
    found = [each for each in violations((PACKAGE / module).read_text(encoding="utf-8")) if each.text not in foreign]
    listed = "\n".join(f"  {module}:{each.line}: {each.text}" for each in found)
    assert not found, f"{len(found)} writes to objects of other classes:\n{listed}"


def test_foreign_writes_are_of_modules_that_exist():
    assert not {*FOREIGN} - {*modules()}


def test_each_write_to_a_foreign_object_is_still_made():
    for module, texts in FOREIGN.items():
        found = {each.text for each in violations((PACKAGE / module).read_text(encoding="utf-8"))}
        assert not {*texts} - found, f"{module} no longer has these: remove them from FOREIGN"


CASES = {
    "other.x = 1": 1,
    "other.x += 1": 1,
    "other.x: int = 1": 1,
    "del other.x": 1,
    "self.y, other.x = 1, 2": 1,
    "[self.y, *other.x] = 1, 2": 1,
    "for other.x in (): pass": 1,
    "with open('') as other.x: pass": 1,
    "setattr(other, 'x', 1)": 1,
    "delattr(other, 'x')": 1,
    "object.__setattr__(other, 'x', 1)": 1,
    "other.__setattr__('x', 1)": 1,
    "self.other.x = 1": 1,
    "lambda: setattr(other, 'x', 1)": 1,
    "def inner(): other.x = 1": 1,
    "made = make(); made.x = 1": 1,
    "made = Made(); made = other; made.x = 1": 1,
    "for each in other: each.x = 1": 1,
    "self.x = 1": 0,
    "self.x += 1": 0,
    "object.__setattr__(self, 'x', 1)": 0,
    "made = Made(); made.x = 1": 0,
    "made = module.Made(); made.x = 1": 0,
    "made = [Mine() for _ in other]; made[0].x = 1": 0,
    "for made in [Made(), other]: made.x = 1": 1,
    "found = other.get(1); found.x = 1": 1,
    "for made in [Made()]: made.x = 1": 0,
    "mine.x = 1": 0,
    "perhaps.x = 1": 0,
    "self.mine.x = 1": 0,
    "self.listed[0].x = 1": 0,
    "for each in self.listed: each.x = 1": 0,
    "for key, each in self.named.items(): each.x = 1": 0,
    "found = self.named.get(1); found.x = 1": 0,
    "def inner(): mine.x = 1": 0,
    "def inner(): pass\ninner.x = 1": 0,
}
"""Statements of a method, and how many violations each is."""


@pytest.mark.parametrize("statement", CASES)
def test_statements_are_told_apart(statement):
    lines = [
        "class Mine:",
        "    mine: 'Mine'",
        "    listed: list['Mine']",
        "    named: dict[int, 'Mine']",
        "    def method(self, other, mine: 'Mine', perhaps: 'Mine | None'):",
        *[f"        {line}" for line in statement.splitlines()],
    ]
    assert len(violations("\n".join(lines))) == CASES[statement]


@pytest.mark.parametrize(
    ("body", "count"),
    [("self.x = x", 1), ("self.x, self.y = x, y", 1), ("self.x = x + 1", 0), ("self.x = None", 0), ("self.x = x; self.y = y", 0)],
)
def test_a_setter_of_one_line_counts(body, count):
    assert len(violations(f"class Mine:\n    def give(self, x, y):\n        'Take.'\n        {body}")) == count


if __name__ == "__main__":
    for name in modules():
        for each in violations((PACKAGE / name).read_text(encoding="utf-8")):
            if each.text not in FOREIGN.get(name, {}):
                print(f"{name}:{each.line}: {each.text}")
