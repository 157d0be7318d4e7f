"""Write the stub ``handlepool/tensors/frontend_types.pyi`` from the installed frontend.

The stub types the graph and the tensors that a graph function builds with. Only type checkers read it.
``python tests/frontend_types.py`` takes methods from the frontend's classes, tensors and attributes from the tables behind its
generated methods, and types from the docstrings of its C++ binding. A test compares the stub with the installed version.
"""

import __future__

import inspect
import re
from dataclasses import fields
from pathlib import Path

import cudnn
from cudnn import _pybind_module, _pygraph
from cudnn.graph_types import Tensor

PATH = Path(__file__).parent.parent / "handlepool" / "tensors" / "frontend_types.pyi"
WIDTH = 130
PLAIN = {"int", "float", "bool", "str", "None", "Any", "GraphTensor"}
DIMENSIONS = "Sequence[int] | Mapping[str, Sequence[int]] | None"
HEADER = f'''"""Type the graph of a graph function, `Graph`, and its tensors, `GraphTensor`.

Generated from nvidia-cudnn-frontend {cudnn.__version__} by ``python tests/frontend_types.py``: do not edit. Methods of
`cudnn.pygraph` that plan or launch are left out, since a graph function must not call them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol
'''


def type_of(text):
    """A type in the words of Python's annotations or of the binding, as we write it; Any for enumerations and the like."""
    text = text.replace("cudnn._compiled_module.tensor", "GraphTensor").replace("cudnn.graph_types.", "").replace("typing.", "")
    text = re.sub(r"ForwardRef\('(\w+)'\)", r"\1", text.replace("collections.abc.", "")).strip("'\"")
    text = re.sub(r"\bTensor\b", "GraphTensor", text)
    alternatives = split(text, "|")
    if len(alternatives) > 1:
        return " | ".join(dict.fromkeys(map(type_of, alternatives)))
    if outer := re.fullmatch(r"(Optional|Union|List|list|Sequence|Dict)\[(.*)\]", text):
        inner = [type_of(part) for part in split(outer[2], ",")]
        match outer[1]:
            case "Optional":
                return f"{inner[0]} | None"
            case "Union":
                return " | ".join(inner).replace("NoneType", "None")
            case word:
                return f"{word.replace('List', 'list').replace('Dict', 'dict')}[{', '.join(inner)}]"
    return "None" if text == "NoneType" else text if text in PLAIN else "Any"


def split(text, separator):
    """The parts of a text between separators that stand in no brackets and in no quotation marks."""
    parts, depth, quoted = [""], 0, False
    for character in text:
        quoted ^= character == "'"
        depth += 0 if quoted else (character in "[(") - (character in "])")
        if character == separator and not depth and not quoted:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def bound(name):
    """The parameters of the binding's method in order, from all its overloads: name to type, and whether it is needed."""
    overloads = []
    for line in (getattr(getattr(_pybind_module.backend_graph, name, None), "__doc__", None) or "").splitlines():
        if not (found := re.match(rf"{name}\((.*)\) -> ", line)):
            break
        written = [re.fullmatch(r"(\w+): (.*?)( = .*)?", part) for part in split(found[1], ",")]
        overloads.append({part[1]: (type_of(part[2]), not part[3] and "None" not in part[2]) for part in written if part})
    merged = {}
    for parameter in dict.fromkeys(parameter for parameters in overloads for parameter in parameters):
        kinds, needed = zip(*[parameters[parameter] for parameters in overloads if parameter in parameters], strict=True)
        merged[parameter] = type_of(" | ".join(kinds)), all(needed) and len(needed) == len(overloads)
    return merged


def annotation(value):
    return "Any" if value is inspect.Parameter.empty else value if isinstance(value, str) else inspect.formatannotation(value)


def explicit(name, method):
    """The parameters of a method that is written out; those without a type take the binding's."""
    known = bound(name)
    for parameter in list(inspect.signature(method).parameters.values())[1:]:
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        kind = type_of(annotation(parameter.annotation)).replace("list[", "Sequence[")
        if kind == "Any" and parameter.name in known:
            kind = known[parameter.name][0]
        optional = parameter.default is not parameter.empty
        yield f"{parameter.name}: {kind}" + (f" = {parameter.default!r}".replace("'", '"') if optional else "")


def optional(name, kind):
    return f"{name}: {kind if kind == 'Any' or kind.endswith('| None') else f'{kind} | None'} = None"


def from_table(name, positional, keywords):
    """The parameters of a method that a table stands for: both are names with the types that the binding has not."""
    known, needed = bound(name), True
    for parameter, kind in positional.items():
        kind, needs = known.get(parameter, (kind, False))
        needed &= needs
        yield f"{parameter}: {kind}" if needed else optional(parameter, kind)
    yield "*"
    for parameter, kind in keywords.items():
        yield optional(parameter, known.get(parameter, (kind, False))[0])
    yield 'name: str = ""'
    yield "compute_data_type: Any = None"


def what_is_said_of(method):
    first = (inspect.getdoc(method) or "").partition("\n")[0]
    return first if first.endswith((".", ")")) else "See the frontend."


def builders():
    """Parameters, what is returned, and what is said of it, of each method that puts something into a graph."""
    tensor, tables = "GraphTensor", (_pygraph._STRUCTURED_OPS, _pygraph._CAPTURED_OPS)
    for name, method in vars(cudnn.pygraph).items():
        outputs: tuple[str, ...] = ()
        if name.startswith("_"):
            continue
        if isinstance(method, property):
            kind = annotation(inspect.signature(method.fget).return_annotation)
            parameters = None
        elif spec := tables[0].get(name):
            outputs = spec["outputs"]
            positional = dict.fromkeys(spec["inputs"], tensor) | dict.fromkeys(spec.get("attrs", ()), "Any")
            keywords = dict.fromkeys(spec.get("keyword_inputs", ()), tensor)
            keywords |= dict.fromkeys(spec.get("list_inputs", ()), f"Sequence[{tensor}]")
            parameters = [*from_table(name, positional, keywords), f"out_dims: {DIMENSIONS} = None"]
            kind = tensor if len(outputs) == 1 else f"list[{tensor}]"
        elif spec := tables[1].get(name):
            outputs, positional = spec["outputs"], dict.fromkeys(spec["pos"], tensor)
            keywords = {parameter: kind for parameter, (kind, _) in bound(name).items()}
            keywords |= dict.fromkeys((*spec.get("out_kwargs", ()), *spec.get("python_only_in_kwargs", ())), tensor)
            keywords |= dict.fromkeys(spec.get("python_only_attrs", ()), "Any")
            keywords = {key: kind for key, kind in keywords.items() if key not in {*positional, "name", "compute_data_type"}}
            parameters = [*from_table(name, positional, keywords), f"out_dims: {DIMENSIONS} = None"]
            kind = f"list[{tensor}]"
        elif method.__code__.co_name == "builder":
            tensors = cudnn.pygraph._POINTWISE_TENSOR_ARGS[name]
            parameters = [f"{parameter}: {tensor}" for parameter in tensors]
            parameters += ["*", 'name: str = ""', "compute_data_type: Any = None"]
            kind = tensor
        else:
            kind = annotation(inspect.signature(method).return_annotation)
            parameters = list(explicit(name, method))
        if re.search("Tensor|Node", kind):  # what else there is plans, launches, or says how
            yield name, parameters, type_of(kind), f"Give {', '.join(outputs)}." if outputs else what_is_said_of(method)


def of_tensors():
    for field in fields(Tensor):
        yield f"    {field.name}: {type_of(annotation(field.type))}"
    for name, method in vars(Tensor).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            kind = type_of(annotation(inspect.signature(method).return_annotation))
            yield from written(name, list(explicit(name, method)), kind, what_is_said_of(method))


def written(name, parameters, kind, said):
    yield ""
    if parameters is None:
        yield "    @property"
    line = f"    def {name}({', '.join(['self', *(parameters or ())])}) -> {kind}:"
    if len(line) <= WIDTH:
        yield line
    else:
        yield f"    def {name}("
        yield from (f"        {parameter}," for parameter in ["self", *parameters])
        yield f"    ) -> {kind}:"
    yield f'        """{said}"""'


def generate():
    lines = [
        HEADER,
        "class GraphTensor(Protocol):",
        '    """A tensor of a graph: an input, an output or an intermediate result."""',
    ]
    lines += ["", *of_tensors(), "", "class Graph(Protocol):"]
    lines += ['    """The graph that a graph function builds: the methods of `cudnn.pygraph` that add nodes and tensors."""']
    for builder in builders():
        lines += written(*builder)
    return "\n".join(lines) + "\n"


def stubbed(name):
    """Return a class of the stub, with its annotations as text."""
    namespace = {"__name__": PATH.stem}
    code = compile(PATH.read_text(encoding="utf-8"), PATH, "exec", flags=__future__.annotations.compiler_flag)
    exec(code, namespace)
    return namespace[name]


if __name__ == "__main__":
    PATH.write_text(generate(), encoding="utf-8")
