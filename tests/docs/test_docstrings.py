"""Public docstrings are numpydoc: what there is of parameters and values has a section. (Ruff holds the first lines.)"""

import inspect
import re

import pytest

import handlepool
from handlepool import errors, ops
from handlepool.graphs.plan import Plan

GENERATED = (handlepool.Graph, handlepool.GraphTensor)  # the frontend documents them
OF_ROOMS = {"GraphFunction.prepare", "GraphFunction.plan"}
"""What other rooms call, and users do not."""
EMPTY = (None, "None", inspect.Signature.empty)


def public():
    """The functions and methods that users call, by name."""
    classes = [value for name in handlepool.__all__ if inspect.isclass(value := getattr(handlepool, name))]
    for kind in [*classes, Plan]:
        if kind not in GENERATED and not issubclass(kind, errors.HandlePoolError):
            own = [base for base in kind.__mro__ if base.__module__.startswith("handlepool.")]
            found = {name: value for base in own for name, value in vars(base).items()}
            methods = [name for name, value in found.items() if inspect.isfunction(value) and name[0] != "_"]
            yield from ((f"{kind.__name__}.{name}", getattr(kind, name)) for name in methods)
    for module in (handlepool, ops):
        for name in module.__all__:
            if inspect.isroutine(value := getattr(module, name)):
                yield name, value


PUBLIC = {name: function for name, function in public() if name not in OF_ROOMS}


def sections_of(function):
    found = re.split(r"^(\w+)\n-+$", inspect.getdoc(function), flags=re.MULTILINE)
    return dict(zip(found[1::2], found[2::2], strict=True))


@pytest.mark.parametrize("name", PUBLIC)
def test_parameters_and_values_have_sections(name):
    function = PUBLIC[name]
    signature, sections = inspect.signature(function), sections_of(function)
    described = re.findall(r"\w+", " ".join(re.findall(r"^\S.*", sections.get("Parameters", ""), re.MULTILINE)))
    assert set(signature.parameters) - {"self"} <= set(described)
    assert ("Returns" in sections) is (signature.return_annotation not in EMPTY)
