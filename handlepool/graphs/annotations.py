"""What types are written with: arrays, graph tensors, and what a call of a graph function takes and gives. Nothing here runs."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeAlias, TypeVar, overload


class Array(Protocol):
    """An array of CuPy, torch, NumPy or another library, as far as they are alike."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents."""

    @property
    def dtype(self) -> Any:
        """The library's own data type."""


P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
ArrayT = TypeVar("ArrayT", bound=Array)

if TYPE_CHECKING:
    # Import the stub from its package: import-linter knows no module of the stub's name.
    from handlepool.tensors import frontend_types

    Graph: TypeAlias = frontend_types.Graph
    Tensor: TypeAlias = frontend_types.GraphTensor
    GraphTensor: TypeAlias = Tensor | Any
    """Of a parameter: the function has no other methods than a graph tensor's, and a call may pass an array."""

    Q = ParamSpec("Q")
    Outs = TypeVar("Outs", bound=Array | Sequence[Array])

    class ArrayCall(partial[Any], Generic[P, R_co]):
        """How a function is called over arrays that has the parameters P behind the graph, and returns R.

        A new array has the type of the first one. It is Any where the function does not return what is output, and, for mypy, of
        a function of any number of tensors. With ``out=`` other arguments are not checked: Python's types cannot say it.
        """

        @overload
        def __call__(
            self: "ArrayCall[Concatenate[Tensor, Q], Tensor]", x: ArrayT, /, *args: Q.args, **options: Q.kwargs
        ) -> ArrayT: ...
        @overload
        def __call__(
            self: "ArrayCall[Concatenate[Tensor, Q], Sequence[Tensor]]", x: ArrayT, /, *args: Q.args, **options: Q.kwargs
        ) -> tuple[ArrayT, ...]: ...
        @overload
        def __call__(self: "ArrayCall[P, Mapping[str, Any] | None]", *args: P.args, **options: P.kwargs) -> Any: ...
        @overload  # of any number: no more than seven are written out
        def __call__(
            self: "ArrayCall[Concatenate[Any, Any, Any, Any, Any, Any, Any, Any, ...], Any]", *args: P.args, **options: P.kwargs
        ) -> Any: ...
        @overload
        def __call__(self, *arrays: object, out: Outs, **options: object) -> Outs: ...
        @overload
        def __call__(self: "ArrayCall[..., Tensor]", x: ArrayT, /, *arrays: object, out: None, **options: object) -> ArrayT: ...
        @overload
        def __call__(self, *arrays: object, out: None, **options: object) -> Any: ...
        def __call__(self, *_: object, **__: object) -> Any:  # type: ignore[misc]  # it takes what the overloads take
            """Launch; see `GraphFunction`."""
else:
    ArrayCall = partial

    # The stub tensors/frontend_types.pyi has the methods, and Python cannot import a stub. Annotations such as
    # ``GraphTensor | None`` are evaluated when a function is defined, so both names are classes at run time.
    class Graph(Protocol):
        """The graph that a graph function builds: type checkers know its methods, those of `cudnn.pygraph` that add nodes."""

    class GraphTensor(Protocol):
        """A tensor of a graph, as a graph function gets and returns it: type checkers know its attributes and methods."""
