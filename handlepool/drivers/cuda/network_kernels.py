"""Choose variant, geometry and grid for each `NetworkKernel`.

This module needs no CUDA. The source is ``network.cu``, which follows ``kernels.cu``.
"""

import math
import struct
from collections.abc import Sequence

from handlepool.drivers.cuda import kernels
from handlepool.drivers.cuda.kernels import Axes, Launch, Macros, merged
from handlepool.drivers.kernel import Affine, Excite, Layer, NetworkKernel, Normalise, Pad, Resample, Shuffle, Squeeze
from handlepool.tensors.layout import Layout

MOST_KEPT, MOST_EACH = 32, 8
"""The maximum of row elements, and of packs, in a thread's registers."""
LEAST_PACKS = 64
"""The number of packs per row below which packs become smaller.

Packs become smaller only if the launch has too few threads for the GPU.
"""
SECTOR, FEW_LANES = 32, 8
"""Bytes of a memory sector, and a small number of lanes.

A lane is a pack across rows. If a launch has too few threads, a block with more than `FEW_LANES` lanes gets fewer lanes, and a
block with `FEW_LANES` or fewer gets smaller packs.
"""
PACKS_EACH = 4
"""Packs of a row per thread, if there are enough rows."""
WARP = 32
"""Threads of a warp, which combine their numbers without a block's barrier."""
SQUEEZED_LANES, SQUEEZED_THREADS = 8, 256
"""The maximum of channel packs and of threads per `Squeeze` block."""
LAYER_THREADS = 128
"""Threads of a block that computes a `Layer`."""
EXCITED_LANES, EXCITED_THREADS, EXCITED_EACH, EXCITED_BLOCKS = 16, 512, 2, 132
"""For `Excite`: channel packs and threads per block, packs per thread, blocks.

The numbers of channel packs and of blocks are maximums. Each block computes the first layer anew, so more blocks than a GPU has
processors cost more than they gain.
"""
ROW_RANKS = (1, 2, 3, 4, 8, 16, 32, 64)
"""Numbers of merged axes that variants for rows are compiled for."""
WORDS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}
"""C++ types by their size in bytes."""


def plan(kernel: NetworkKernel, operands: Sequence[Layout]) -> Launch:
    """Return the launch of a kernel for inputs and an output."""
    if isinstance(kernel, Normalise):
        return _normalise(kernel, operands)
    if isinstance(kernel, Affine):
        return _affine(kernel, operands)
    if isinstance(kernel, Resample):
        return _resample(kernel, *operands)
    if isinstance(kernel, Pad):
        return _pad(kernel, *operands)
    if isinstance(kernel, Squeeze):
        return _squeeze(kernel, *operands)
    if isinstance(kernel, Layer):
        return _layer(kernel, operands)
    if isinstance(kernel, Excite):
        return _excite(kernel, operands)
    return _shuffle(kernel, *operands)


def _bits(value: float) -> int:
    """Return the integer with the same bits as a float32."""
    found: int = struct.unpack("i", struct.pack("f", value))[0]
    return found


def _power(count: int) -> int:
    """Return the smallest power of two that is not below a count."""
    return 1 << max(count - 1, 0).bit_length()


def _single(x: Layout, parameters: Sequence[Layout]) -> Macros:
    return {"SINGLE": int(bool(parameters) and parameters[0].dtype != x.dtype)}


def _pack(axes: Axes, others: Axes, itemsize: int) -> int:
    """Return the number of elements of a pack along the first axis."""
    (extent, inner), *outer = axes
    if inner[0] != 1 or inner[-1] != 1:
        return 1
    steps = [step for _, each in (*outer, *others) for step in (each[0], each[-1])]
    return math.gcd(kernels.LARGEST_PACK // itemsize, extent, *steps)


def _ways(axes: Axes, others: Axes, pack: int) -> list[int]:
    """Return a number per parameter that says how a pack loads it.

    The parameters are the operands between x and the result, such as the weight. The number is 0 if one element serves the whole
    pack, 1 if the pack's elements are neighbours in memory, and 2 if they lie at a step. The number is the argument ``WAY`` of
    ``load`` in ``network.cu``.
    """
    (_, inner), *outer = axes
    found = []
    for place in range(1, len(inner) - 1):
        aligned = all(each[place] % pack == 0 for _, each in (*outer, *others))
        found.append(0 if not inner[place] else 1 if inner[place] == 1 and aligned else 2)
    return found


def _counted(axes: Axes, pack: int, rank: int, packed: bool = True) -> list[int]:
    """Return extents, then the steps of each operand.

    Steps of x and y are in packs, steps of parameters in elements. ``packed`` is whether packs lie along the first axis.
    """
    extents, steps = [], []
    for place, (extent, (x, *rest, y)) in enumerate(axes):
        along = packed and not place
        extents.append(extent // pack if along else extent)
        steps.append((x, *(step * pack for step in rest), y) if along else (x // pack, *rest, y // pack))
    more = rank - len(axes)
    steps += [(0,) * len(axes[0][1])] * more
    return [*extents, *[1] * more, *(step for each in zip(*steps, strict=True) for step in each)]


def _kept(count: int, shares: int, pack: int) -> int:
    """Return the number of packs that a thread keeps in registers.

    Return 0 if the packs are too many for the registers.
    """
    each = -(-count // shares)
    return each if each <= MOST_EACH and each * pack <= MOST_KEPT else 0


def _threads(rows: int, count: int, pack: int) -> tuple[int, int]:
    """Return the rows per block, and the threads per row.

    A row has ``count`` packs. A pack is a vector of neighbouring elements of one row.
    """
    # If a single warp computes a row, that row needs no barriers.
    if rows * WARP >= kernels.PLENTY and count > WARP * PACKS_EACH and _kept(count, WARP, pack):
        return max(1, kernels.THREADS // WARP), WARP
    most = min(_power(count), kernels.LARGEST_BLOCK)
    shares = min(_power(-(-count // PACKS_EACH)), most)
    # Few rows would leave part of the GPU idle, so each row gets more threads.
    while shares < most and rows * shares < kernels.PLENTY:
        shares *= 2
    return max(1, kernels.THREADS // shares), shares


def _threads_across(rows: int, count: int, pack: int, itemsize: int) -> tuple[int, int, int]:
    """Return the pack size, lanes per block, and threads per lane.

    A lane is a pack across rows: a vector of elements of neighbouring rows. If there are few rows, pack size and lanes become
    smaller, as long as neighbouring threads together read a whole sector of memory.
    """
    lanes = min(kernels.LANES, _power(rows // pack))
    while rows // (pack * lanes) * kernels.THREADS < kernels.PLENTY and lanes * pack * itemsize > SECTOR:
        if pack > 1 and lanes <= FEW_LANES:
            pack //= 2
        else:
            lanes //= 2
    shares = kernels.SHARES
    while lanes * shares < 2 * kernels.THREADS and shares * PACKS_EACH < count:
        shares *= 2
    while count > shares * kernels.MOST_PIXELS and 2 * lanes * shares <= kernels.LARGEST_BLOCK:
        shares *= 2
    return pack, lanes, shares


def _rows(kernel: Normalise, operands: Sequence[Layout]) -> tuple[list[int], list[list[int]], set[int]]:
    """Return extents, steps of each operand, and the axes of a row.

    If the kernel has groups, the channels become two axes: the groups, and the channels of a group.
    """
    x, *parameters, y = operands
    extents, ends = [*x.shape], [kernels.steps_of(x), kernels.steps_of(y)]
    reduced = set(kernel.axes)
    beside: list[list[int]] = []
    for there, place in _optional(kernel):
        found = [0] * x.ndim
        if there:
            for axis, step in zip([1] if kernel.groups else kernel.axes, kernels.steps_of(parameters[place]), strict=True):
                found[axis] = step
        beside.append(found)
    steps = [ends[0], *beside, ends[1]]
    if kernel.groups:
        own = x.shape[1] // kernel.groups
        # The channels are split into two axes, so that a row can take the channels of one group alone.
        extents[1:2] = [kernel.groups, own]
        for each in steps:
            each[1:2] = [each[1] * own, each[1]]
        reduced = {2, *(axis + 1 for axis in kernel.axes)}
    return extents, steps, reduced


def _normalise(kernel: Normalise, operands: Sequence[Layout]) -> Launch:
    x, *parameters, y = operands
    extents, steps, reduced = _rows(kernel, operands)
    inner, outer = (
        merged(
            [extent for axis, extent in enumerate(extents) if (axis in reduced) is rows],
            *([step for axis, step in enumerate(each) if (axis in reduced) is rows] for each in steps),
        )
        for rows in (True, False)
    )
    itemsize = x.dtype.itemsize
    along, beside = _pack(inner, outer, itemsize), _pack(outer, inner, itemsize)
    nearer = outer[0][0] > 1 and (inner[0][0] == 1 or outer[0][1][-1] < inner[0][1][-1])
    across = beside > along or (along == beside == 1 and nearer)
    rows, elements = (math.prod(extent for extent, _ in axes) for axes in (outer, inner))
    if across:
        pack, lanes, shares = _threads_across(rows, elements, beside, itemsize)
        rows, count = rows // pack, elements
    else:
        pack = along
        # If there are few elements, smaller packs give the GPU more threads.
        while pack > 1 and y.size // pack < kernels.PLENTY and elements // pack < LEAST_PACKS:
            pack //= 2
        count = elements // pack
        lanes, shares = _threads(rows, count, pack)
    first, other = (outer, inner) if across else (inner, outer)
    weight, bias = _ways(first, other, pack)
    down, within = (kernels.fitting(len(axes), ROW_RANKS) for axes in (outer, inner))
    macros: Macros = {
        **kernels.type_of(x),
        **_single(x, parameters),
        "PACK": pack,
        "ACROSS": int(across),
        "LANES": lanes,
        "SHARES": shares,
        "EACH": _kept(count, shares, pack),
        "OUTER": down,
        "INNER": within,
        "OPERANDS": len(operands),
        "MEAN": int(kernel.kind == "mean"),
        "SOFTMAX": int(kernel.kind == "softmax"),
        "WEIGHTED": int(kernel.weighted),
        "BIASED": int(kernel.biased),
        "WEIGHT_WAY": weight,
        "BIAS_WAY": bias,
    }
    geometry = [rows, count, elements, _bits(kernel.eps), *first[0][1][1:-1]]
    geometry += _counted(outer, pack, down, across) + _counted(inner, pack, within, not across)
    return kernels.launch_of("normalise", macros, operands, geometry, rows, threads=lanes * shares, a_block=lanes)


def _affine(kernel: Affine, operands: Sequence[Layout]) -> Launch:
    x, *parameters, y = operands
    slots = [*parameters[:2], *(parameters[place] if there else None for there, place in _optional(kernel))]
    vectors = [[0] * x.ndim for _ in slots]
    for vector, slot in zip(vectors, slots, strict=True):
        vector[1] = kernels.steps_of(slot)[0] if slot is not None else 0
    axes = merged(x.shape, kernels.steps_of(x), *vectors, kernels.steps_of(y))
    pack = kernels.thinned(_pack(axes, [], x.dtype.itemsize), y.size)
    ways = _ways(axes, [], pack)
    rank = kernels.fitting(len(axes), kernels.RANKS)
    macros: Macros = {
        **kernels.type_of(x),
        **_single(x, parameters),
        **kernels.activation_of(kernel.activation),
        "PACK": pack,
        "RANK": rank,
        "OPERANDS": len(operands),
        "WEIGHTED": int(kernel.weighted),
        "BIASED": int(kernel.biased),
        **dict(zip(("MEAN_WAY", "VARIANCE_WAY", "WEIGHT_WAY", "BIAS_WAY"), ways, strict=True)),
    }
    count = y.size // pack
    geometry = [count, _bits(kernel.eps), *axes[0][1][1:-1], *_counted(axes, pack, rank)]
    return kernels.launch_of("affine", macros, operands, geometry, count)


def _optional(kernel: Normalise | Affine) -> list[tuple[bool, int]]:
    """Return whether weight and bias exist, and their indices.

    The indices count the parameters: the operands between x and the result.
    """
    first = 2 if isinstance(kernel, Affine) else 0
    return [(kernel.weighted, first), (kernel.biased, first + kernel.weighted)]


def _gather(
    x: Layout,
    y: Layout,
    extents: Sequence[int],
    steps: Sequence[Sequence[int]],
    before: Sequence[int],
    within: Sequence[int],
    mode: str,
    bits: int,
) -> Launch:
    """Return the launch of a copy that pads or reorders.

    Along each axis, ``before`` is the padding before the input. ``within`` is the input's extent, or 0 for an axis without
    padding.
    """
    itemsize = y.dtype.itemsize
    padded = sorted((axis for axis, inside in enumerate(within) if inside), key=lambda axis: steps[1][axis])
    plain = [axis for axis in range(len(extents)) if axis not in padded]
    axes = merged([extents[axis] for axis in plain], *([each[axis] for axis in plain] for each in steps))
    rest: Axes = [(extents[axis], (steps[0][axis], steps[1][axis])) for axis in padded]
    pack = kernels.thinned(_pack(axes, rest, itemsize), y.size)
    rank = kernels.fitting(len(axes) + len(rest), kernels.RANKS)
    edges = [(0, 0)] * len(axes) + [(before[axis], within[axis]) for axis in padded]
    both = [(extent, each, edge) for (extent, each), edge in zip([*axes, *rest], edges, strict=True)]
    # The output's innermost axis comes first, so that neighbouring threads write neighbours in memory. Packs lie along the first
    # axis. An axis of extent 1 comes last, because its step is 0 and no pack fits into it.
    both.sort(key=lambda axis: (axis[0] == 1, axis[1][1]))
    more = rank - len(both)
    first, last = zip(*[edge for _, _, edge in both], strict=True)
    macros: Macros = {"ELEMENT": WORDS[itemsize], "PACK": pack, "RANK": rank, mode.upper(): 1}
    counted = _counted([(extent, each) for extent, each, _ in both], pack, rank)
    count = y.size // pack
    words = struct.unpack("2i", bits.to_bytes(8, "little"))
    geometry = [count, *words, *counted, *first, *[0] * more, *last, *[0] * more]
    wide = max((abs(step) + inside for step, inside in zip(before, within, strict=True)), default=0) >= 1 << 29
    return kernels.launch_of("gather", macros, (x, y), geometry, count, wide=wide)


def _pad(kernel: Pad, x: Layout, y: Layout) -> Launch:
    axes = zip(kernel.before, x.shape, y.shape, strict=True)
    # An axis without padding needs no test of bounds, so its extent within is 0.
    within = [inside if before or inside != extent else 0 for before, inside, extent in axes]
    steps = kernels.steps_of(x), kernels.steps_of(y)
    return _gather(x, y, y.shape, steps, kernel.before, within, kernel.mode, kernel.bits)


def _shuffle(kernel: Shuffle, x: Layout, y: Layout) -> Launch:
    each = x.shape[1] // kernel.groups
    extents = (x.shape[0], each, kernel.groups, *x.shape[2:])
    (n, c, *rest), (m, d, *others) = kernels.steps_of(x), kernels.steps_of(y)
    steps = (n, c, c * each, *rest), (m, d * kernel.groups, d, *others)
    nothing = [0] * len(extents)
    return _gather(x, y, extents, steps, nothing, nothing, "plain", 0)


def _resample(kernel: Resample, x: Layout, y: Layout) -> Launch:
    macros, images = kernels.images_of(x, y, y.size)
    macros |= {kernel.mode.upper(): 1, "CORNERS": int(kernel.corners)}
    count = y.size // int(macros["PACK"])
    geometry = (*images, count, *y.shape[2:], *map(_bits, kernel.scale))
    return kernels.launch_of("resample", macros, (x, y), geometry, count)


def _lanes(channels: int, most: int) -> tuple[int, int]:
    """Return the blocks for all channel packs, and the packs per block."""
    tiles = -(-channels // most)
    return tiles, -(-channels // tiles)


def _squeeze(kernel: Squeeze, x: Layout, y: Layout) -> Launch:
    # Each thread sums many pixels, so packs stay large even if there are few channels.
    macros, images = kernels.images_of(x, x, kernels.PLENTY * kernels.LARGEST_PACK)
    tiles, lanes = _lanes(images[0], SQUEEZED_LANES)
    each = -(-math.prod(x.shape[2:]) // kernel.parts)
    threads = lanes * max(1, SQUEEZED_THREADS // lanes)
    macros["MOST"] = SQUEEZED_THREADS
    blocks = x.shape[0] * tiles
    geometry = (*images, blocks, lanes, each, kernel.parts)
    return kernels.launch_of("squeeze", macros, (x, y), geometry, blocks, parts=kernel.parts, threads=threads, a_block=1)


def _layer(kernel: Layer, operands: Sequence[Layout]) -> Launch:
    x, sums, w, _, y = operands
    pack = math.gcd(kernels.LARGEST_PACK // w.dtype.itemsize, w.shape[1])
    macros: Macros = {
        **kernels.type_of(w),
        **kernels.activation_of(kernel.activation),
        "PACK": pack,
        "OPERANDS": len(operands),
        "THREADS": LAYER_THREADS,
    }
    geometry = (w.shape[1] // pack, sums.shape[1], w.shape[0], y.size, math.prod(x.shape[2:]))
    return kernels.launch_of("layer", macros, operands, geometry, y.size, threads=LAYER_THREADS, a_block=LAYER_THREADS // WARP)


def _excite(kernel: Excite, operands: Sequence[Layout]) -> Launch:
    x, given, *_, y = operands
    macros, images = kernels.images_of(x, y, kernels.PLENTY * kernels.LARGEST_PACK)
    squeezed, pixels = operands[-3].shape[1], math.prod(x.shape[2:])
    tiles, lanes = _lanes(images[0], EXCITED_LANES)
    blocks = x.shape[0] * tiles
    parts = min(max(1, EXCITED_BLOCKS // blocks), -(-pixels * lanes // (EXCITED_THREADS * EXCITED_EACH)))
    each = -(-pixels // parts)
    macros |= {
        **kernels.activation_of(kernel.activation),
        "LAYERED": int(kernel.layered),
        "HARD_GATE": int(kernel.gate == "hardsigmoid"),
        "OPERANDS": len(operands),
        "THREADS": EXCITED_THREADS,
        "LANES": EXCITED_LANES,
        "CHANNELS": _power(x.shape[1]),
        "SQUEEZED": _power(squeezed),
    }
    geometry = (*images, blocks, lanes, each, given.shape[1], squeezed)
    return kernels.launch_of(
        "excite", macros, operands, geometry, blocks, parts=-(-pixels // each), threads=EXCITED_THREADS, a_block=1
    )
