"""The arrays that a program reads, and what may be copied into them."""

from collections.abc import Iterator
from typing import Any

from handlepool.drivers.base import Driver
from handlepool.errors import ArgumentError, ArrayTypeError, DeviceMismatchError

Pairs = list[tuple[Any, Any]]


class Inputs:
    """The arguments that a function was recorded with. Those without an array cannot be updated."""

    def __init__(self, driver: Driver, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kind = driver.array_type
        self._positional = [argument for argument in args if _has_array(argument, kind)]
        self._named = {name: argument for name, argument in kwargs.items() if _has_array(argument, kind)}

    def match(self, driver: Driver, name: str, device: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pairs:
        """The recorded arrays, each with the one to copy into it.

        Raises
        ------
        ArgumentError
            For another count, shape, strides or type.
        ArrayTypeError
            For what is no array of the driver's.
        DeviceMismatchError
            For an array on another device.
        """
        if len(args) > len(self._positional):
            raise ArgumentError(
                f"{name} was recorded with {len(self._positional)} positional arguments that hold arrays, and update was given "
                f"{len(args)}; leave arguments without arrays out"
            )
        if len(args) < len(self._positional) and not kwargs:
            raise ArgumentError(
                f"{name} was recorded with {len(self._positional)} positional arguments that hold arrays, and update was given "
                f"{len(args)}; pass None for what is to stay as it is"
            )
        unknown = [key for key in kwargs if key not in self._named]
        if unknown:
            raise ArgumentError(f"{name} was not recorded with an array for {unknown[0]!r}; there is: {', '.join(self._named)}")
        pairs: Pairs = []
        places = [(f"argument {place}", old, new) for place, (old, new) in enumerate(zip(self._positional, args, strict=False))]
        places += [(key, self._named[key], new) for key, new in kwargs.items()]
        for place, old, new in places:
            if new is not None:
                pairs += _paired(driver, f"{name}: {place}", device, old, new)
        return pairs


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for entry in value:
            yield from _leaves(entry)
    elif isinstance(value, dict):
        for key in value:
            yield from _leaves(value[key])
    else:
        yield value


def _has_array(value: Any, kind: type) -> bool:
    return any(isinstance(leaf, kind) for leaf in _leaves(value))


def _paired(driver: Driver, place: str, device: int, old: Any, new: Any) -> Iterator[tuple[Any, Any]]:
    targets, sources = list(_leaves(old)), list(_leaves(new))
    if len(targets) != len(sources):
        raise ArgumentError(f"{place} was recorded with {len(targets)} entries, and update was given {len(sources)}")
    for index, (target, source) in enumerate(zip(targets, sources, strict=True)):
        if isinstance(target, driver.array_type) and source is not target:
            _check_alike(driver, place if len(targets) == 1 else f"{place}, entry {index}", device, target, source)
            yield target, source


def _check_alike(driver: Driver, place: str, device: int, target: Any, source: Any) -> None:
    if not isinstance(source, driver.array_type):
        raise ArrayTypeError(
            f"{place} is a {type(source).__module__}.{type(source).__qualname__}; the {driver.name} driver takes "
            f"{driver.array_type.__module__}.{driver.array_type.__qualname__}"
        )
    found: Any = source
    for what, recorded, given in (
        ("shape", target.shape, found.shape),
        ("type", target.dtype, found.dtype),
        ("strides", _strides(target), _strides(found)),
    ):
        if recorded != given:
            raise ArgumentError(
                f"{place} was recorded with {what} {recorded} and now has {what} {given}; record it again for that"
            )
    where = driver.array_device(source)
    if where != device:
        raise DeviceMismatchError(f"{place} is on device {where}, and the program on device {device}; copy it there first")


def _strides(array: Any) -> tuple[int, ...]:
    """Strides in bytes of the axes that have any: those of extent 1 say nothing."""
    return tuple([step for extent, step in zip(array.shape, array.strides, strict=True) if extent != 1])
