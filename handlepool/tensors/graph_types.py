"""Define protocols for driver arrays, and for the frontend's graphs.

The protocols have only the attributes that this package reads.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np


class DeviceArray(Protocol):
    """An array of a driver.

    The protocol has the attributes that arrays of CuPy and of the host driver share.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The extent of each axis."""

    @property
    def strides(self) -> tuple[int, ...]:
        """For each axis, the step from element to element, in bytes."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements."""

    @property
    def ndim(self) -> int:
        """Number of axes."""

    @property
    def size(self) -> int:
        """Number of elements."""

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""


class Named(Protocol):
    """A member of one of the frontend's enumerations."""

    @property
    def name(self) -> str:
        """The member's name."""


class FrontendTensor(Protocol):
    """A tensor of a frontend's graph."""

    name: str
    uid: int
    dim: list[int]
    stride: list[int]
    data_type: Any
    is_virtual: bool
    is_pass_by_value: bool
    pass_by_value: int | float | None
    dim_assigned: bool
    stride_assigned: bool
    ragged_offset: Any

    def set_dim(self, dim: Sequence[int]) -> "FrontendTensor":
        """Set the extents."""

    def set_stride(self, stride: Sequence[int]) -> "FrontendTensor":
        """Set the stride of each axis, in elements."""

    def set_data_type(self, dtype: object) -> "FrontendTensor":
        """Set the type of the elements."""

    def set_output(self, value: bool) -> "FrontendTensor":
        """Mark the tensor as an output."""

    def set_uid(self, uid: int) -> "FrontendTensor":
        """Set the number by which launches identify the tensor."""


class FrontendNode(Protocol):
    """A node of a frontend's graph."""

    name: str
    params: dict[str, Any]

    @property
    def node_type(self) -> Named:
        """The kind of operation."""

    @property
    def inputs(self) -> Mapping[str, FrontendTensor]:
        """The input tensors, by the name of their port."""

    @property
    def outputs(self) -> Mapping[str, Any]:
        """The output tensors by port name; None for an unused port."""


class FrontendGraph(Protocol):
    """The part of a `cudnn.pygraph` that this package reads."""

    context: Any

    @property
    def nodes(self) -> Sequence[FrontendNode]:
        """The nodes, in the order in which they were added."""
