"""Blocks of the host driver's memory, and what arrays have below them.

An array's memory belongs to an owner object below it. The last view may go in a collection, inside any lock: that appends to a
list and no more (G10). Queued operations hold the raw memory and never the owner, so that a block is given back as on a GPU and
nothing crashes.

Fresh memory is filled with 0xFF (NaN in every floating-point type). A reused block keeps what it held: on a GPU, too.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from handlepool.drivers.host.race_checker import Access, Past
from handlepool.errors import ContractError

Array = np.ndarray[Any, Any]

ALIGNMENT = 256


class Block:
    """A piece of device memory."""

    __slots__ = ("address", "device", "freed", "generation", "memory", "nbytes", "past")

    def __init__(self, device: int, nbytes: int) -> None:
        raw = np.full(nbytes + ALIGNMENT, 0xFF, np.uint8)
        offset = -address_of(raw) % ALIGNMENT
        self.memory = raw[offset : offset + nbytes]
        self.address = address_of(self.memory)
        self.device = device
        self.nbytes = nbytes
        self.freed = False
        self.generation = 0
        """How many owners it had before; a new one counts as a write."""
        self.past: list[Past] = []
        """Accesses, where their order is checked."""

    def __repr__(self) -> str:
        return f"<{self.nbytes} bytes at {self.address:#x} of device {self.device}>"

    def check_live(self, label: str) -> None:
        """Raise if it was given back to the device."""
        if self.freed:
            raise ContractError(f"{label or 'an operation'} ran and touches {self!r}, which was freed before")


class Owner:
    """What the arrays over a block have as their base; the block goes back to its arena when it goes."""

    __slots__ = ("__weakref__", "_bin", "_nbytes", "block", "offset")

    def __init__(self, block: Block, home: list[Block], nbytes: int) -> None:
        self.block = block
        self.offset = 0
        self._bin = home
        self._nbytes = nbytes

    def __del__(self) -> None:
        self._bin.append(self.block)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return _interface(self.block.address, self._nbytes)


class Lease:
    """What a scratch array has as its base: part of a block, and whoever owns the block."""

    __slots__ = ("__weakref__", "_nbytes", "_owner", "block", "offset")

    def __init__(self, block: Block, offset: int, nbytes: int, owner: object) -> None:
        self.block = block
        self.offset = offset
        self._nbytes = nbytes
        self._owner = owner

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return _interface(self.block.address + self.offset, self._nbytes)


def _interface(address: int, nbytes: int) -> dict[str, Any]:
    return {"version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (address, False)}


def address_of(array: Array) -> int:
    """The address of an array's first element."""
    address: int = array.__array_interface__["data"][0]
    return address


def owner_of(array: Array) -> Owner | Lease | None:
    """What stands below all views of an array; None for an array that this driver did not make."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, Owner | Lease) else None


def raw_view(array: Array) -> tuple[Array, Block | None]:
    """The same elements over the block's memory, which does not keep the array's owner alive, and the block."""
    owner = owner_of(array)
    if owner is None:
        return array, None
    block = owner.block
    offset = address_of(array) - block.address
    return np.ndarray(array.shape, array.dtype, block.memory, offset, array.strides), block


def accesses(views: Sequence[tuple[Array, Block | None]], *, writes: bool) -> list[Access]:
    """Accesses to what `raw_view` gave; none to arrays that this driver did not make."""
    return [Access(block, view, writes) for view, block in views if block is not None]
