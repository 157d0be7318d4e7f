"""Convert between torch's tensors and the values that a driver's operations take.

On a GPU, the operations take the tensors themselves. The host driver records no tensors, so there the values are arrays of the
host driver, which are copies of CPU tensors. The host driver cannot queue torch's own operations either. Tests replace `_host`
by a place that can queue these operations.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

import handlepool
from handlepool.integrations.torch.held import Held
from handlepool.integrations.torch.refusals import NotTaken

View = Callable[[Tensor], Tensor]
Function = Callable[..., Any]


class Place(Protocol):
    """The conversions between torch's tensors and one driver's arrays.

    Attributes
    ----------
    kind : str
        Torch's device type.
    """

    kind: str

    def array(self, tensor: Tensor) -> Any:
        """Return a constant tensor as the value that operations read."""

    def refresh(self, array: Any, tensor: Tensor) -> None:
        """Copy new values of a constant tensor into its array."""

    def tensors(self, values: object) -> Any:
        """Return a call's value with tensors in place of arrays."""

    def arrays(self, values: object) -> Any:
        """Return a call's arguments with arrays in place of tensors."""

    def view(self, function: View, value: Any) -> Any:
        """Return the view of ``value`` that ``function`` would make of a tensor."""

    def pointer(self, value: Any) -> int:
        """Return the address of a value."""

    def operation(self, name: str, function: Function) -> Function:
        """Return a torch function as an operation with declared reads and writes."""


class Cuda:
    """The place of tensors on a GPU: the arrays are the tensors."""

    kind = "cuda"

    def array(self, tensor: Tensor) -> Any:
        """Return the tensor itself."""
        return tensor

    def refresh(self, array: Any, tensor: Tensor) -> None:
        """Do nothing: the array is the tensor."""

    def tensors(self, values: object) -> Any:
        """Return ``values``, whose arrays are tensors already."""
        return values

    def arrays(self, values: object) -> Any:
        """Return ``values``, because the arrays are the tensors."""
        return values

    def view(self, function: View, value: Any) -> Any:
        """Return the view that ``function`` makes of the tensor."""
        return function(value)

    def pointer(self, value: Any) -> int:
        """Return the tensor's address."""
        address: int = value.data_ptr()
        return address

    def operation(self, name: str, function: Function) -> Function:
        """Return ``function`` as an operation that writes none of its arguments."""
        # The function refers to nodes, and a node refers to the whole graph. `Held` hides the function, so that the walk over a
        # call's arguments does not enter the graph.
        held = Held(function)

        def work(*args: Any) -> Any:
            return held.value(*args)

        work.__name__ = work.__qualname__ = name
        return handlepool.operation(work, mutates=())


class Host:
    """The place of CPU tensors: arrays of the host driver are copies."""

    kind = "cpu"

    def __init__(self) -> None:
        self._driver = handlepool.default_pool().driver

    def array(self, tensor: Tensor) -> Any:
        """Return an array with a tensor's values and strides."""
        return self._driver.asarray(_numpy(tensor.detach()))

    def refresh(self, array: Any, tensor: Tensor) -> None:
        """Copy the values of a tensor into its array."""
        array[...] = self.array(tensor)

    def tensors(self, values: object) -> Any:
        """Wait for the values, and return them as tensors."""
        return torch.utils._pytree.tree_map(self._tensor, values)

    def arrays(self, values: object) -> Any:
        """Return copies of the tensors as arrays."""
        return torch.utils._pytree.tree_map(lambda each: self.array(each) if isinstance(each, Tensor) else each, values)

    def _tensor(self, value: Any) -> Any:
        kinds: Any = self._driver.array_types
        if not isinstance(value, kinds) or isinstance(value, np.ndarray):
            return value
        strides = [step // value.dtype.itemsize for step in value.strides]
        found = _torch(self._driver.asnumpy(value))
        return torch.empty_strided(value.shape, strides, dtype=found.dtype).copy_(found)

    def view(self, function: View, value: Any) -> Any:
        """Return the view of an array that ``function`` would make of tensors."""
        size, driver = value.dtype.itemsize, self._driver
        lie = torch.empty_strided(value.shape, [step // size for step in value.strides], dtype=torch.int8, device="meta")
        found = function(lie)
        address = driver.array_pointer(value) + found.storage_offset() * size
        return driver.part(value, address, tuple(found.shape), tuple([step * size for step in found.stride()]), value.dtype)

    def pointer(self, value: Any) -> int:
        """Return the array's address."""
        return self._driver.array_pointer(value)

    def operation(self, name: str, function: Function) -> Function:
        """Raise, because the host driver queues no work of torch."""
        raise NotTaken(
            f"the model's operation {name} has to run in torch, and the host driver cannot run operations of torch: use a GPU"
        )


def _numpy(tensor: Tensor) -> Any:
    if tensor.dtype is not torch.bfloat16:
        return tensor.numpy()
    # NumPy has no bfloat16 of its own, and the package is optional.
    import ml_dtypes

    return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def _torch(array: Any) -> Tensor:
    if array.dtype.name != "bfloat16":
        return torch.from_numpy(np.ascontiguousarray(array) if array.ndim else array.copy())
    return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16)


_host: Callable[[], Place] = Host
"""The function that makes the host driver's place. Tests replace it."""


def place_for(device: torch.device) -> Place:
    """Return the `Place` for tensors on ``device``.

    Raises
    ------
    NotTaken
        If the pool's driver cannot use tensors of this device.
    """
    try:
        name = handlepool.default_pool().driver.name
    except handlepool.DriverNotAvailableError as error:
        raise NotTaken(f"the model's tensors are on {device}, and there is no driver for a GPU ({error})") from error
    if (name, device.type) == ("cuda", "cuda"):
        return Cuda()
    if (name, device.type) == ("host", "cpu"):
        return _host()
    raise NotTaken(f"the model's tensors are on {device}, and handlepool's driver {name!r} cannot use such tensors")
