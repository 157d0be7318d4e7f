"""Generate functions that compare a call's arrays with a program's inputs.

A loop over the arrays would take 50 % more time than the same code without a loop. So the text of each function is generated,
as `dataclasses` generates an ``__init__``. The text contains the values to compare with.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from handlepool.drivers.protocol import Driver
from handlepool.order.stream_order import integration
from handlepool.recording.tensors import modes
from handlepool.recording.tensors import piece_of as piece_of_tensor
from handlepool.recording.update import piece_of

_MATCH = """\
def match(arrays):
    try:
        {names}, = arrays
        if {differ}:
            return False
        {read}
    except Exception:  # another number of arrays, or objects that are no arrays
        return False
    return not ({meet})
"""


def matcher(driver: Driver, arrays: Sequence[Any], device: int | None, edges: list[int]) -> Callable[[Sequence[Any]], bool]:
    """Return a function that compares the arrays of a call with ``arrays``.

    The function returns True if all layouts are equal, and no array of the call shares memory with the pieces in ``edges``.

    Parameters
    ----------
    device : int or None
        The device that each array must be on. None on a machine with one device, where this is not compared.
    edges : list of int
        Begin and end of each piece of memory, ascending.
    """
    names = [f"x{place}" for place in range(len(arrays))]
    differ, read, space = compared(driver, dict(zip(names, arrays, strict=True)), device)
    meet = " or ".join(meets(name) for name in names)
    text = _MATCH.format(names=", ".join(names), differ=" or ".join(differ), read="; ".join(read), meet=meet)
    function: Callable[[Sequence[Any]], bool] = made(text, "match", space | {"edges": edges})
    return function


def compared(driver: Driver, arrays: dict[str, Any], device: int | None) -> tuple[list[str], list[str], dict[str, Any]]:
    """Return code that compares variables with ``arrays``, and its namespace.

    ``arrays`` maps the name of each variable to the array to compare with. The first list has expressions that are true if a
    variable differs. The second list has statements that compute the begin and the end of each variable's memory.
    """
    differ, read, space = list[str](), list[str](), dict[str, Any]()
    for name, array in arrays.items():
        shape, strides = (tuple([int(each) for each in lie]) for lie in (array.shape, array.strides))
        # The class is compared first, because reading an attribute of another class may run code.
        differ += [f"{name}.__class__ is not kind", f"{name}.shape != {shape}", f"{name}.strides != {strides}"]
        differ.append(f"({name}.dtype is not d{name} and {name}.dtype != d{name})")
        if device is not None:
            differ.append(f"device_of({name}) != {device}")
        space[f"d{name}"] = array.dtype
        begin, end, _ = piece_of(driver, array)
        offset = begin - driver.array_pointer(array)
        read += [f"b{name} = address_of({name})" + (f" + {offset}" if offset else ""), f"e{name} = b{name} + {end - begin}"]
    space |= {"kind": driver.array_types[0], "address_of": driver.array_pointer, "device_of": driver.array_device}
    return differ, read, space | {"bisect_left": bisect_left, "bisect_right": bisect_right}


def compared_tensors(tensors: dict[str, Any]) -> tuple[list[str], list[str], dict[str, Any]]:
    """Return code that compares variables with tensors, and its namespace.

    The values are as in `compared`. The expressions also compare torch's modes with the present modes. In the namespace, the
    function ``theirs`` returns torch's current stream.
    """
    torch = integration()
    differ, read = ["modes() != mode", "derives()"], list[str]()
    space: dict[str, Any] = {"modes": modes, "mode": modes(), "derives": torch.derives, "theirs": torch.current_stream}
    for name, tensor in tensors.items():
        shape, strides = (tuple([int(each) for each in lie]) for lie in (tensor.shape, tensor.stride()))
        differ += [f"{name}.__class__ is not kind", f"{name}.shape != {shape}", f"{name}.stride() != {strides}"]
        differ += [f"{name}.dtype is not d{name}", f"{name}.get_device() != {tensor.get_device()}", f"{name}.is_neg()"]
        differ += [f"{name}.is_conj()", f"{name}.requires_grad is not {tensor.requires_grad}"]
        space[f"d{name}"], space["kind"] = tensor.dtype, type(tensor)
        begin, end, _ = piece_of_tensor(tensor)
        offset = begin - tensor.data_ptr()
        read += [f"b{name} = {name}.data_ptr()" + (f" + {offset}" if offset else ""), f"e{name} = b{name} + {end - begin}"]
    return differ, read, space | {"bisect_left": bisect_left, "bisect_right": bisect_right}


def meets(name: str) -> str:
    """Return an expression that tests whether an array overlaps the pieces."""
    # If the number of edges up to the array's begin is odd, the array begins inside a piece. If the number up to its end differs,
    # a piece begins inside the array.
    return f"((at := bisect_right(edges, b{name})) & 1 or bisect_left(edges, e{name}, at) != at)"


def made(text: str, name: str, space: dict[str, Any]) -> Any:
    """Compile the text of a function, and return the function."""
    exec(compile(text, "<a prepared call>", "exec"), space)
    # The function is removed from its namespace. Otherwise function and namespace would form a reference cycle, and only the
    # garbage collector would free the objects in the namespace.
    return space.pop(name)
