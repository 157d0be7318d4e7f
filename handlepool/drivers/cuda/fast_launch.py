"""Generate functions that launch one plan of the cuda driver quickly.

Apart from cuDNN's launch, most of the cost of a call is attribute access of arrays. A loop over operands costs half as much again
as the same code written out. A plan's function is therefore generated, as `dataclasses` generates an ``__init__``, with the
compared values in its text.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import cupy

from handlepool.drivers.cuda.early import barrier
from handlepool.drivers.executable import AliasPair
from handlepool.drivers.operands import TENSOR_ALIGNMENT

MOST_TOGETHER = 1 << 20
"""The maximum number of bytes of outputs that share one block.

Allocating one shared block takes three quarters of the time of separate blocks. The shared block lives as long as any of the
outputs. So larger outputs, for which the time matters less, have blocks of their own.
"""
BLOCK = 512
"""CuPy rounds sizes up to a multiple of this number of bytes."""

_TEXT = """\
def launch(begin, arrays, out, fresh=None):
    if out is {unwanted}:
        return NOT_CACHED
    try:
        {inputs}, = arrays
        {unpack}
        if {differ}:
            return NOT_CACHED
        {read}
    except Exception:  # another number of arrays, or another library's
        return NOT_CACHED
    if ({addresses}) % {alignment}{overlap}:
        return NOT_CACHED  # the long way says why
    try:
        {made}
        if begin is None:
            try:
                slot = current_stream({device}).handlepool.slot
                handle = slot.handle
            except AttributeError:  # the stream never had a slot, or no longer has one
                slot = find()
                handle = slot.handle
            if handle.stream is not slot.pointer or slot.owner is not status{elsewhere}:
                slot = find()
        else:
            slot = begin(({operands},), launch, ({pointers},), ({blocks},))
            if slot.handle.stream is not slot.pointer:
                repaired(slot)
        if slot.busy:
            return NOT_CACHED  # a finalizer inside another launch of this slot: the long way refuses it
        if cache.recent is not entry:
            cache.recent = entry
            entry.used = tick()
        try:
            slot.busy = True
            workspace = {workspace}
            buffer, location = slot.buffer
            {store}
            # The handle is read again after `busy` was set, as `Slot.release_unless_busy` expects.
            {barrier}raw(location, {count}, workspace, slot.handle.{bound}, index)
        finally:
            slot.busy = False
    except Exception as error:
        diagnose(error)
        raise
    return {result}

def allocate(count):
    if count * {step} > {most_together}:
        made = []
        for _ in range(count):
            {allocate}
            made.append(({ys},))
        return made
    block = alloc(count * {step})
    return [({slices},) for at in range(0, count * {step}, {step})]
"""
_MADE = """if fresh is None:
            {allocate}
        else:
            {ys}, = fresh
        {read}"""


def shortcut(
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    alias_pairs: Sequence[AliasPair] | None,
    single: bool,
    workspace_size: int,
    device: int | None,
    names: dict[str, Any],
    bound: str = "backend_handle",
    early: bool = False,
) -> Callable[..., Any]:
    """Make the launch function; see `Executable.shortcut`.

    Parameters
    ----------
    inputs, outputs, alias_pairs, single
        As in `Executable.shortcut`.
    workspace_size : int
        Bytes of scratch for a launch.
    device : int or None
        Ordinal of the plan's device, or None on a machine with one device.
    names : dict
        Names as in `Executable.shortcut`, with ``raw``, the raw entry, and ``index``, its last argument.
    bound : str
        Name of the handle's attribute that ``raw`` takes.
    early : bool
        Whether the launch needs a barrier, because its kernel begins before earlier work on the stream has ended.
    """
    xs, ys = [f"x{i}" for i in range(len(inputs))], [f"y{i}" for i in range(len(outputs))]
    given = alias_pairs is not None
    layouts = dict(zip(xs + ys, (*inputs, *outputs), strict=True))
    operands = list(layouts)
    compared = [(a, layouts[a]) for a in (operands if given else xs)]
    # The shape of the first array is a part of the shortcut's key, so the function need not compare that shape.
    differ = [f"{a}.shape != {_numbers(layout.shape)}" for a, layout in compared[1:]]
    differ += [f"{a}.strides != {_numbers(layout.strides)} or {a}.dtype is not dtype_{a}" for a, layout in compared]
    # An array of the host driver has the same attributes and would pass the other comparisons, so the class is compared, too.
    differ += [f"{a}.__class__ is not ndarray" for a, _ in compared]
    if device is not None:
        differ = [f"current_device() != {device}", *differ, *(f"{a}.data.device_id != {device}" for a, _ in compared)]
    allocate = "; ".join(f"{b} = {_array(b, layouts[b], f'alloc({layouts[b].reach})')}" for b in ys)
    offsets = list(accumulate((-(-layouts[b].reach // BLOCK) * BLOCK for b in ys), initial=0))
    text = _TEXT.format(
        inputs=", ".join(xs),
        unwanted="None" if given else "not None",
        unpack=_unpack(ys, single) if given else "pass",
        differ=" or ".join(differ),
        read=_read([a for a, _ in compared]),
        addresses=" | ".join(f"p{a}" for a, _ in compared),
        alignment=TENSOR_ALIGNMENT,
        overlap="".join(_overlap(operands, pair) for pair in alias_pairs or ()),
        device=0 if device is None else device,
        elsewhere="" if device is None else f" or slot.device != {device}",
        made="pass" if given else _MADE.format(allocate=allocate, ys=", ".join(ys), read=_read(ys)),
        allocate=allocate,
        slices=", ".join(_array(b, layouts[b], f"block + (at + {at})") for b, at in zip(ys, offsets, strict=False)),
        step=offsets[-1],
        most_together=MOST_TOGETHER,
        ys=", ".join(ys),
        operands=", ".join(operands),
        pointers=", ".join(f"p{a}" for a in operands),
        blocks=", ".join(f"{a}.data.mem" for a in operands),
        workspace=f"slot.reserve({workspace_size})" if workspace_size else 0,
        store="; ".join(f"buffer[{i}] = p{a}" for i, a in enumerate(operands)),
        barrier="barrier(slot.pointer); " if early else "",
        count=len(operands),
        bound=bound,
        result="out" if given else ys[0] if single else f"({', '.join(ys)},)",
    )
    values: dict[str, Any] = {f"dtype_{a}": layout.dtype for a, layout in layouts.items()}
    values |= {_meet(pair): pair.meet for pair in alias_pairs or ()}
    own = {"ndarray": cupy.ndarray, "alloc": cupy.cuda.alloc, "barrier": barrier, "__name__": __name__}
    space: dict[str, Any] = names | values | own
    exec(compile(text, "<a plan's launch>", "exec"), space)
    made: Callable[..., Any] = space["launch"]
    made.allocate = space["allocate"]  # type: ignore[attr-defined]
    return made


def reach(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Return the bytes from an array's first element to its end.

    The strides are not negative.
    """
    return 0 if 0 in shape else sum((extent - 1) * step for extent, step in zip(shape, strides, strict=True)) + itemsize


def _numbers(values: Sequence[int]) -> str:
    return repr(tuple(map(int, values)))


def _unpack(outputs: list[str], single: bool) -> str:
    return f"{outputs[0]} = out" if single else f"{', '.join(outputs)}, = out if isinstance(out, (tuple, list)) else ()"


def _array(b: str, layout: Any, memory: str) -> str:
    # If CuPy's constructor is given memory, it does not compute the size from the strides.
    return f"ndarray({_numbers(layout.shape)}, dtype_{b}, {memory}, {_numbers(layout.strides)})"


def _read(arrays: list[str]) -> str:
    return "; ".join(f"p{a} = {a}.data.ptr" for a in arrays)


def _overlap(operands: list[str], pair: AliasPair) -> str:
    """Return the code that tests whether an output overlaps another operand.

    The other operand is an input or another output. The code makes the same test as `Plan.check_aliases`.
    """
    start, begin = f"p{operands[pair.one]}", f"p{operands[pair.other]}"
    exact = "" if pair.same is None else f" and {begin} != {start} + {pair.same}"
    shared = f" and {_meet(pair)}({begin} - {start})" if pair.meet else ""
    return f" or {start} < {begin} + {pair.others} and {begin} < {start} + {pair.reach}{exact}{shared}"


def _meet(pair: AliasPair) -> str:
    return f"meet_{pair.one}_{pair.other}"
