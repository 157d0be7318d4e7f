"""Check assumptions about nvidia-cudnn-frontend without a GPU.

`handlepool.integrations.cudnn` makes these assumptions. The checks are for versions of the frontend that the integration was
not written against. A check runs a copy of a frontend's function, and changes nothing. The copy calls a fake binding, which
only notes its calls. The copy cannot call the real binding, where cuDNN would crash on the fake handles.
"""

import inspect
from collections.abc import Callable, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any

import cudnn

Place = tuple[Any, str]
"""The owner and the name of a function of the frontend."""

_BUILTINS = {each.__name__: each for each in (isinstance, getattr, hasattr, type, int, TypeError, ValueError, RuntimeError)}
_POINTER = 4096
"""A number that stands for the pointer of a stream."""


def missing(places: Sequence[Place]) -> str | None:
    """Return the assumption that the first missing function or method breaks.

    The result is None if the frontend has all of ``places``.
    """
    return next((f"{called(*place)} exists" for place in places if not callable(getattr(*place, None))), None)


def broken() -> str | None:
    """Return the first assumption that fails, with its error.

    The result is None if all assumptions hold.
    """
    for assumption, check in _ASSUMPTIONS.items():
        try:
            holds = check()
        except Exception as error:
            return f"{assumption} ({type(error).__name__}: {error})"
        if not holds:
            return assumption
    return None


def called(owner: Any, name: str) -> str:
    """Return the name of a frontend function for messages."""
    return f"{owner.__name__}.{name}" if owner.__name__.startswith("cudnn") else f"cudnn.{owner.__name__}.{name}"


_ASSUMPTIONS: dict[str, Callable[[], bool]] = {}


def _assumption(text: str) -> Callable[[Callable[[], bool]], Callable[[], bool]]:
    def add(check: Callable[[], bool]) -> Callable[[], bool]:
        _ASSUMPTIONS[text] = check
        return check

    return add


def _own(owner: object, name: str) -> Any:
    """Return the frontend's own function, even while it is replaced."""
    return inspect.unwrap(getattr(owner, name))


def _over(binding: object, name: str) -> Any:
    """Return a copy of a `cudnn` function that calls ``binding``.

    Apart from ``binding``, the copy finds only some built-in names and the class `cudnn.Handle`.
    """
    function = _own(cudnn, name)
    found = {"__builtins__": _BUILTINS, "__name__": "cudnn", "_pybind_module": binding, "Handle": cudnn.Handle}
    return FunctionType(function.__code__, found, name, function.__defaults__, function.__closure__)


def _noted_handle() -> tuple[Any, list[tuple[str, Any]], Any]:
    """Return a fake handle, a list of notes, and a fake binding.

    Each use of the handle, and each call of cuDNN through the binding, adds a note to the list.
    """
    notes: list[tuple[str, Any]] = []

    class Noted(cudnn.Handle):  # type: ignore[misc]
        def __init__(self) -> None:
            self.given = iter(range(1, 100))

        @property
        def backend_handle(self) -> int:
            return next(self.given)

        @backend_handle.setter
        def backend_handle(self, value: object) -> None:
            notes.append(("backend_handle", value))

        @property
        def stream(self) -> int:
            return 0

        @stream.setter
        def stream(self, value: object) -> None:
            notes.append(("stream", value))

    binding = SimpleNamespace(
        _raw_set_stream=lambda handle, stream: notes.append(("bind", stream)),
        _raw_destroy_handle=lambda handle: notes.append(("destroy", None)),
    )
    return Noted(), notes, binding


# Handles


@_assumption("cudnn.Handle is a class of handles with the attributes backend_handle, stream and _ordinal")
def _handle_has_its_attributes() -> bool:
    handle = cudnn.Handle(7, 0, _POINTER)
    return (handle.backend_handle, handle.stream, handle._ordinal) == (7, _POINTER, 0)  # noqa: SLF001 - it has no public name


def _takes(name: str, *args: object, **kwargs: object) -> bool:
    inspect.signature(_own(cudnn, name)).bind(*args, **kwargs)
    return True


@_assumption("cudnn.create_handle takes no argument, and makes a cudnn.Handle")
def _create_takes_nothing() -> bool:
    return _takes("create_handle") and "Handle" in _own(cudnn, "create_handle").__code__.co_names


@_assumption(
    "cudnn.set_stream(handle, stream) binds cuDNN's handle to the stream, then sets handle.stream, and sets nothing else"
)
def _set_stream_binds_and_sets() -> bool:
    handle, notes, binding = _noted_handle()
    _over(binding, "set_stream")(handle=handle, stream=_POINTER)
    return notes == [("bind", _POINTER), ("stream", _POINTER)]


@_assumption("cudnn.get_stream(handle) returns handle.stream")
def _get_stream_returns_the_attribute() -> bool:
    handle, notes, binding = _noted_handle()
    return _over(binding, "get_stream")(handle) == 0 and not notes


@_assumption("cudnn.destroy_handle(handle) destroys cuDNN's handle, then sets handle.backend_handle to None")
def _destroy_destroys_and_sets() -> bool:
    handle, notes, binding = _noted_handle()
    _over(binding, "destroy_handle")(handle)
    return notes[:2] == [("destroy", None), ("backend_handle", None)] and notes[2:] in ([], [("stream", None)])


# Graphs


def _names(function: Callable[..., Any]) -> tuple[str, ...]:
    names: tuple[str, ...] = function.__code__.co_names
    return names


def _parameters(owner: object, name: str) -> list[str]:
    return [*inspect.signature(_own(owner, name)).parameters]


@_assumption("a cudnn.pygraph keeps the handle that it is made with as _handle, and other code can set attributes of the graph")
def _graphs_keep_their_handle() -> bool:
    handle, _, _ = _noted_handle()
    graph, without = cudnn.pygraph(handle=handle), cudnn.pygraph()
    graph._handlepool = True  # noqa: SLF001 - as the integration does
    return graph._handle is handle and without._handle is None  # noqa: SLF001


@_assumption("cudnn.pygraph._backend_handle_for_lowering(settings) reads backend_handle of the graph's handle at each lowering")
def _lowering_asks_the_handle() -> bool:
    handle, _, _ = _noted_handle()
    lowering = _own(cudnn.pygraph, "_backend_handle_for_lowering")
    graph = cudnn.pygraph(handle=handle)
    users = [each for each in vars(cudnn.pygraph).values() if isinstance(each, FunctionType)]
    return (lowering(graph, {}), lowering(graph, {})) == (1, 2) and any(lowering.__name__ in _names(each) for each in users)


@_assumption("cudnn.pygraph.execute calls _execute(tensors, workspace, handle, ...)")
def _execute_is_called() -> bool:
    called_by = _names(_own(cudnn.pygraph, "execute"))
    return "_execute" in called_by and _parameters(cudnn.pygraph, "_execute")[2:4] == ["workspace", "handle"]


@_assumption("cudnn.pygraph.execute_plan_at_index takes (tensors, workspace, index, handle, ...)")
def _execute_at_takes_a_handle() -> bool:
    return _parameters(cudnn.pygraph, "execute_plan_at_index")[2:5] == ["workspace", "index", "handle"]


# `cudnn.Graph`


def _wrapped(**attributes: object) -> tuple[Any, list[dict[str, Any]]]:
    """Return a `cudnn.Graph` over a fake graph, and the graph's launches.

    The fake graph only notes the options of each launch. The ``with`` statement of the `cudnn.Graph` has not ended yet.
    """
    from cudnn import wrapper

    launches: list[dict[str, Any]] = []
    graph = SimpleNamespace(
        execute=lambda tensors, **options: launches.append(options),
        get_execution_plan_count=lambda: 1,
        create_execution_plans=lambda heuristics: None,
        **dict.fromkeys(("validate", "build_operation_graph", "check_support", "build_plans"), lambda: None),
    )
    wrapped = object.__new__(wrapper.Graph)
    known = {"graph": graph, "input_tuples": (), "output_tuples": (), "inputs": [], "outputs": [], "heuristics": []}
    known |= {"tensor_in": {}, "tensor_out": {}, "node_count": {}, **attributes}
    for name, value in known.items():
        setattr(wrapped, f"_Graph__{name}", value)
    return wrapped, launches


@_assumption("a new cudnn.Graph has no handle and no workspace, and keeps them later in the attributes __handle and __workspace")
def _wrapped_begins_without() -> bool:
    from cudnn import wrapper

    wrapped, _ = _wrapped()
    names = _names(_own(wrapper.Graph, "__init__"))
    kept = {"_Graph__graph", "_Graph__handle", "_Graph__workspace"} <= {*names}
    return kept and wrapped._Graph__handle is None and wrapped._Graph__workspace is None  # noqa: SLF001


@_assumption("cudnn.Graph allocates a workspace at the end of its with statement only if it has none")
def _wrapped_keeps_its_workspace() -> bool:
    from cudnn import wrapper

    workspace = object()
    wrapped, _ = _wrapped(workspace=workspace)
    _own(wrapper.Graph, "__exit__")(wrapped, None, None, None)
    return wrapped._Graph__workspace is workspace  # noqa: SLF001


@_assumption("a call of a cudnn.Graph executes its graph with the handle and the workspace that the call passes")
def _wrapped_executes_with_what_it_is_given() -> bool:
    from cudnn import wrapper

    wrapped, launches = _wrapped(workspace=object())
    given = {"handle": object(), "workspace": object()}
    _own(wrapper.Graph, "__call__")(wrapped, **given)
    return launches == [given]


@_assumption("a cudnn.Graph asks cudnn.wrapper.get_default_handle(stream=None) for a handle")
def _wrapped_asks_for_the_default_handle() -> bool:
    from cudnn import wrapper

    users = [each for each in vars(wrapper.Graph).values() if isinstance(each, FunctionType)]
    asked = any("get_default_handle" in _names(each) for each in users)
    return asked and _parameters(wrapper, "get_default_handle") == ["stream"]
