"""Type annotations of arrays, graph tensors and calls of graph functions.

The module only defines names for annotations.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeAlias, TypeVar, overload


class Array(Protocol):
    """An array of CuPy, torch, NumPy or another library.

    The protocol has the attributes that these libraries share.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The extent of each axis."""

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
    """Annotate a parameter that holds a graph tensor.

    Inside the function, the parameter has the methods of a graph tensor. A call of the graph function passes an array
    for the parameter.
    """

    Q = ParamSpec("Q")
    Outs = TypeVar("Outs", bound=Array | Sequence[Array])

    class ArrayCall(partial[Any], Generic[P, R_co]):
        """Give type checkers the calls of a graph function ``P -> R``.

        P are the parameters after the graph, and R is the result. An output that the call allocates has the type of the first
        array. The result's type is Any if the function does not return its outputs. For mypy, it is also Any if the function
        takes any number of tensors. If a call has ``out=``, type checkers do not check the other arguments, because Python's
        types cannot express that call.
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
        # Python's types cannot express "any number of tensors". A function that takes eight positional arguments counts as such a
        # function, and its result is Any.
        @overload
        def __call__(
            self: "ArrayCall[Concatenate[Any, Any, Any, Any, Any, Any, Any, Any, ...], Any]", *args: P.args, **options: P.kwargs
        ) -> Any: ...
        @overload
        def __call__(self, *arrays: object, out: Outs, **options: object) -> Outs: ...
        @overload
        def __call__(self: "ArrayCall[..., Tensor]", x: ArrayT, /, *arrays: object, out: None, **options: object) -> ArrayT: ...
        @overload
        def __call__(self, *arrays: object, out: None, **options: object) -> Any: ...
        def __call__(self, *_: object, **__: object) -> Any:  # type: ignore[misc]
            """Launch; see `GraphFunction`."""
else:
    ArrayCall = partial

    # The stub tensors/frontend_types.pyi has the methods, and Python cannot import a stub. Annotations such as
    # ``GraphTensor | None`` are evaluated when a function is defined, so both names are classes at run time.
    class Graph(Protocol):
        """The graph that a graph function builds.

        Type checkers know the methods of `cudnn.pygraph` that add nodes.
        """

    class GraphTensor(Protocol):
        """A tensor of a graph.

        Graph functions get and return such tensors. Type checkers know its attributes and methods.
        """
