"""Plan the launches of our own kernels (`handlepool.drivers.kernel`).

A launch has a variant, a geometry and a grid. This module needs no CUDA.

The CUDA source is ``common.cu``, followed by the files of `SOURCES` or by the code that is generated for an expression. Two axes
are merged if all operands allow it. Elements are read in packs of up to 16 bytes if strides and extents allow it. Offsets have 64
bits if 32 bits do not suffice.
"""

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

from handlepool.drivers.expression import Elementwise
from handlepool.drivers.kernel import Add, Concat, Depthwise, Kernel, NetworkKernel, Windows
from handlepool.tensors.layout import Layout

THREADS = 128
"""Threads per block."""
MOST_BLOCKS = 1 << 20
"""The maximum number of blocks along the grid's first axis."""
PLENTY = 1 << 15
"""Number of threads that keep a large GPU busy.

If a launch would have fewer threads, its packs are made smaller. The figure has not been measured.
"""
LARGEST_PACK = 16
"""Largest size of a pack, in bytes."""
CAPACITIES = (2, 3, 4, 5, 8, 16, 32, 64)
"""Operand counts that variants are compiled for.

A launch uses the variant of the smallest count that is not below the launch's own.
"""
EXACT = 5
"""The maximum operand count with a variant for exactly that count."""
MOST_UNROLLED = 5
"""The maximum of rows and columns in windows with their own variant.

All windows with more rows or columns share one variant.
"""
RANKS = (1, 2, 3, 4, 8, 16, 32, 64)
"""Numbers of merged axes that variants are compiled for.

NumPy's arrays have up to 64 axes.
"""
LANES, SHARES = 32, 8
"""Outputs per block, and threads per output, for windows over whole images.

If channels are not innermost in memory, the two numbers change places.
"""
MOST_PIXELS, LARGEST_BLOCK = 16, 1024
"""The maximum of pixels per thread, and of threads per block.

If a window over a whole image has more pixels, each output gets more threads.
"""
MOST_PARTS = 65535
"""CUDA's limit of blocks along the grid's second axis."""
MOST_TURNS = 8
"""The maximum number of pixels per thread of a depthwise convolution."""
SOURCES = ("kernels.cu", "network.cu")
"""Files of the kernels, in the order of their joint compilation."""
SHARED = 40 << 10
"""Bytes of a block's shared memory for filters and biases.

A block has 48 KiB of shared memory on every GPU.
"""
ELEMENTS = {"float16": ("unsigned short", "HALF"), "bfloat16": ("unsigned short", "BFLOAT"), "float32": ("float", "FLOAT")}

Macros = dict[str, int | str]
Axes = list[tuple[int, tuple[int, ...]]]
"""For each axis, its extent and the step of each operand.

The axes are in the order of the last operand's memory, the innermost axis first.
"""


@dataclass(frozen=True, slots=True)
class Launch:
    """Describe a single launch of a kernel.

    Attributes
    ----------
    entry : str
        The function's name in the source.
    macros : tuple of (str, str)
        Macros that select the kernel's variant.
    geometry : array
        The kernel's second argument: extents, steps and other integers of the computation.
    grid : (int, int)
        Number of blocks along each of the grid's two axes.
    threads : int
        Threads per block.
    code : str
        Code that follows ``common.cu`` in the source; "" for the files of `SOURCES`.
    """

    entry: str
    macros: tuple[tuple[str, str], ...]
    geometry: "array[int]"
    grid: tuple[int, int]
    threads: int = THREADS
    code: str = ""


@cache
def _text(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def source(code: str = "") -> str:
    """Return the CUDA source that consists of ``common.cu`` and ``code``.

    If ``code`` is empty, the files of `SOURCES` take its place.
    """
    return "\n".join((_text("common.cu"), *([code] if code else map(_text, SOURCES))))


def plan(kernel: Kernel, operands: Sequence[Layout]) -> Launch:
    """Return the launch of a kernel for inputs and an output."""
    if isinstance(kernel, NetworkKernel):
        # `network_kernels` uses helpers of this module, so it is imported at the first use.
        from handlepool.drivers.cuda import network_kernels

        return network_kernels.plan(kernel, operands)
    if isinstance(kernel, Elementwise):
        # `elementwise` uses helpers of this module, so it is imported at the first use.
        from handlepool.drivers.cuda import elementwise

        return elementwise.plan(kernel, operands)
    if isinstance(kernel, Add):
        return _add(kernel, operands)
    if isinstance(kernel, Concat):
        return _concat(kernel, operands)
    if isinstance(kernel, Depthwise):
        return _depthwise(kernel, operands)
    x, y = operands
    whole = kernel.window == x.shape[2:] and kernel.padding == (0, 0)
    return _whole(kernel, x, y) if whole else _windows(kernel, x, y)


def merged(extents: Sequence[int], *steps: Sequence[int]) -> Axes:
    """Sort axes by the last operand's steps, and merge neighbouring axes.

    Two axes are merged if a single axis can take their place for every operand.
    """
    axes = sorted(
        ((extent, step) for extent, *step in zip(extents, *steps, strict=True) if extent > 1), key=lambda axis: axis[1][-1]
    )
    found: Axes = []
    for extent, step in axes:
        if found and all(here == inner * found[-1][0] for here, inner in zip(step, found[-1][1], strict=True)):
            found[-1] = (found[-1][0] * extent, found[-1][1])
        else:
            found.append((extent, tuple(step)))
    return found or [(1, (1,) * len(steps))]


def _packed(axes: Axes, most: int) -> int:
    """Return the number of elements of a pack along the innermost axis.

    The number is a power of two, up to ``most``, that divides the extent and all outer steps.
    """
    (extent, inner), *outer = axes
    if any(step != 1 for step in inner):
        return 1
    return math.gcd(most, extent, *chain.from_iterable(steps for _, steps in outer))


def _in_packs(axes: Axes, pack: int, rank: int) -> Axes:
    """Return the axes, with innermost extent and outer steps counted in packs.

    Axes of extent 1 are added until there are ``rank`` axes.
    """
    (extent, inner), *outer = axes
    found = [(extent // pack, inner), *((extent, tuple(step // pack for step in steps)) for extent, steps in outer)]
    return found + [(1, (0,) * len(inner))] * (rank - len(axes))


def thinned(pack: int, elements: int) -> int:
    """Return ``pack``, halved until the elements keep `PLENTY` threads busy."""
    while pack > 1 and elements // pack < PLENTY:
        pack //= 2
    return pack


def steps_of(layout: Layout) -> list[int]:
    """Return a layout's strides in elements.

    An axis of extent 1 may have any stride, so its stride is returned as 0.
    """
    sizes = zip(layout.shape, layout.strides, strict=True)
    return [stride // layout.dtype.itemsize if extent > 1 else 0 for extent, stride in sizes]


def fitting(count: int, sizes: Sequence[int]) -> int:
    """Return the first of ``sizes`` that is not below ``count``."""
    return next(size for size in sizes if size >= count)


def launch_of(
    entry: str,
    macros: Macros,
    operands: Sequence[Layout],
    geometry: Iterable[int],
    units: int,
    *,
    wide: bool = False,
    parts: int = 1,
    threads: int = THREADS,
    a_block: int = THREADS,
) -> Launch:
    """Return a launch for a number of units of work.

    Each block does ``a_block`` units. The geometry describes as many operands as the macro OPERANDS says.
    """
    wide = wide or any(max(layout.size, layout.reach // layout.dtype.itemsize) >= 1 << 31 for layout in operands)
    values: Macros = {entry.upper(): 1, "WIDE": int(wide), "OPERANDS": 2, **macros}
    blocks = min(max(-(-units // a_block), 1), MOST_BLOCKS)
    written = tuple((name, str(value)) for name, value in values.items())
    return Launch(entry, written, array("q" if wide else "i", geometry), (blocks, parts), threads)


def type_of(layout: Layout) -> Macros:
    """Return the macros of an array's type."""
    element, kind = ELEMENTS[layout.dtype.name]
    return {"ELEMENT": element, kind: 1}


def activation_of(activation: str | None) -> Macros:
    """Return the macro of an activation, if there is any."""
    return {} if activation is None else {activation.upper(): 1}


def _add(kernel: Add, operands: Sequence[Layout]) -> Launch:
    y = operands[-1]
    axes = merged(y.shape, *map(steps_of, operands))
    most = LARGEST_PACK // y.dtype.itemsize
    flat = len(axes) == 1 and all(step == 1 for step in axes[0][1])
    pack = thinned(most if flat else _packed(axes, most), y.size)
    tail = y.size % pack
    rank, capacity = fitting(len(axes), RANKS), fitting(len(operands), CAPACITIES)
    axes = _in_packs(axes, pack, rank)
    count = y.size // pack
    steps = [each[operand] for operand in range(len(operands)) for _, each in axes]
    steps += [0] * (capacity - len(operands)) * rank
    macros: Macros = {"PACK": pack, "RANK": rank, "OPERANDS": capacity, "EXACT": int(1 < len(operands) <= EXACT), **type_of(y)}
    macros |= activation_of(kernel.activation)
    geometry = (len(operands) - 1, count, tail, *(extent for extent, _ in axes), *steps)
    return launch_of("add", macros, operands, geometry, max(count, tail))


def _concat(kernel: Concat, operands: Sequence[Layout]) -> Launch:
    *xs, y = operands
    itemsize = y.dtype.itemsize
    starts = kernel.firsts(xs, y)
    # Steps are counted in bytes, so that one variant serves all types.
    each = [merged((*x.shape, itemsize), (*x.strides, 1), (*y.strides, 1)) for x in xs]
    # Each array begins at a byte offset in the output, so the pack size must divide these offsets, too.
    pack = math.gcd(*(_packed(axes, LARGEST_PACK) for axes in each), *starts)
    while pack > itemsize and sum(x.size for x in xs) * itemsize // pack < PLENTY:
        pack //= 2
    rank, capacity = fitting(max(map(len, each)), RANKS[1:]), fitting(len(operands), CAPACITIES)
    geometry, units = [len(xs)], 0
    for x, axes, first in zip(xs, each, starts, strict=True):
        axes = _in_packs(axes, pack, rank)
        count = x.size * itemsize // pack
        units = max(units, count)
        columns = ([extent for extent, _ in axes], [steps[0] for _, steps in axes], [steps[1] for _, steps in axes])
        geometry += [count, first // pack, *chain(*columns)]
    geometry += [0] * (capacity - len(operands)) * (2 + 3 * rank)
    macros: Macros = {"PACK": pack, "RANK": rank, "OPERANDS": capacity, "ELEMENT": "unsigned char"}
    wide = any(max(layout.reach, layout.size * itemsize) >= 1 << 31 for layout in operands)
    return launch_of("concat", macros, operands, geometry, units, wide=wide, parts=len(xs))


def images_of(x: Layout, y: Layout, units: int) -> tuple[Macros, list[int]]:
    """Return the macros, and the geometry, of a kernel over images."""
    pack, last = 1, y.shape[1] > 1 and all(steps_of(each)[1] == 1 for each in (x, y))
    if last:
        strides = [step for each in (x, y) for axis, step in enumerate(steps_of(each)) if axis != 1]
        pack = thinned(math.gcd(LARGEST_PACK // x.dtype.itemsize, x.shape[1], *strides), units)
    steps = [[step // pack if axis != 1 else step for axis, step in enumerate(steps_of(each))] for each in (x, y)]
    macros = {"PACK": pack, "CHANNELS_INNERMOST": int(last), **type_of(x)}
    return macros, [x.shape[1] // pack, *x.shape[2:], *chain(*steps)]


def _windows(kernel: Windows, x: Layout, y: Layout) -> Launch:
    macros, images = images_of(x, y, y.size)
    unrolled = max(kernel.window) <= MOST_UNROLLED
    rows, columns = kernel.window if unrolled else (0, 0)
    macros |= {"ROWS": rows, "COLUMNS": columns, "MAXIMUM": int(kernel.kind == "max")}
    count = y.size // int(macros["PACK"])
    most = [extent + 2 * padding for extent, padding in zip(x.shape[2:], kernel.padding, strict=True)]
    # A stride beyond the padded extent leaves the image in one step. So larger strides are cut to that extent.
    stride = map(min, kernel.stride, most)
    geometry = (*images, count, *y.shape[2:], *kernel.window, *stride, *kernel.padding, int(kernel.counted))
    return launch_of("windows", macros, (x, y), geometry, count, wide=max(most) >= 1 << 30)


def _whole(kernel: Windows, x: Layout, y: Layout) -> Launch:
    macros, images = images_of(x, y, y.size * SHARES)
    lanes, shares = (LANES, SHARES) if macros["CHANNELS_INNERMOST"] else (SHARES, LANES)
    while math.prod(kernel.window) > shares * MOST_PIXELS and 2 * lanes * shares <= LARGEST_BLOCK:
        shares *= 2
    macros |= {"LANES": lanes, "SHARES": shares, "MAXIMUM": int(kernel.kind == "max")}
    outputs = y.size // int(macros["PACK"])
    return launch_of("whole", macros, (x, y), (*images, outputs), outputs, threads=lanes * shares, a_block=lanes)


def _depthwise(kernel: Depthwise, operands: Sequence[Layout]) -> Launch:
    x, w, *biases, y = operands
    macros, images = images_of(x, y, y.size)
    (rows, columns), channels, pack = w.shape[2:], images[0], int(macros["PACK"])
    pixels = y.size // y.shape[1]
    most = min(LANES, SHARED // (4 * pack * (rows * columns + 1)))
    # The channels are divided among as few blocks as possible, and equally if possible.
    lanes = -(-channels // -(-channels // most))
    # If channels are not innermost, neighbours in memory belong to the same channel. So a block takes fewer channels and more
    # pixels.
    if not macros["CHANNELS_INNERMOST"]:
        lanes = min(lanes, max(1, THREADS // pixels))
    together = max(1, THREADS // lanes)
    # Number of pixels per thread. A thread loads the filters once for all its pixels.
    turns = min(MOST_TURNS, max(1, pixels * channels // (4 * PLENTY or 1)))
    macros |= {"ROWS": rows, "COLUMNS": columns, "LANES": most, "BIAS": len(biases), "OPERANDS": len(operands)}
    macros |= activation_of(kernel.activation)
    most_of = [
        e + 2 * p + (r - 1) * d for e, p, r, d in zip(x.shape[2:], kernel.padding, w.shape[2:], kernel.dilation, strict=True)
    ]
    # A step beyond this extent leaves the image at once. So strides and dilations are cut to this extent.
    stride, dilation = map(min, kernel.stride, most_of), map(min, kernel.dilation, most_of)
    step = steps_of(biases[0])[0] if biases else 0
    # `own` is the step from one channel's filter to the next. It is 0 if a single filter serves all channels.
    own = steps_of(w)[0]
    geometry = (*images, pixels, *y.shape[2:], *stride, *kernel.padding, *dilation, lanes, together, step, own)
    parts = min(-(-channels // lanes), MOST_PARTS)
    wide = max(*most_of, *(p + e * s for p, e, s in zip(most_of, y.shape[2:], kernel.stride, strict=True) if e > 1)) >= 1 << 30
    return launch_of(
        "depthwise",
        macros,
        operands,
        geometry,
        pixels,
        wide=wide,
        parts=parts,
        threads=lanes * together,
        a_block=together * turns,
    )
