"""Compute convolutions by unfolding.

The first step gathers, for each element of the output, the inputs that it depends on into columns. The second step multiplies the
columns by the filters. The caller passes the memory for the columns, and a scheduler may run other work between the two steps.

The convolution and its two gradients use the same two steps. For the gradient of the image, the loss takes the image's place. For
the gradient of the filters, the loss takes the filters' place. If the columns do not fit into the caller's memory, the work is
cut into `Tile`s.
"""

import math
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import numpy as np

from handlepool.tensors.inference import Convolution, Shape

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Tile:
    """A part of the work: ranges of images, groups and rows.

    A row is a position along the first spatial axis.
    """

    images: slice
    groups: slice
    rows: slice


@dataclass(frozen=True, slots=True)
class Unfolding:
    """A map from positions and filter taps to elements of ``source``.

    Each position of ``domain`` has at most one element of ``source`` under each tap of the filter.

    Parameters
    ----------
    geometry : Convolution
    groups : int
    source : tuple of int
        Shape of the gathered array, (N, channels, …): the image, or the loss if ``transposed``.
    domain : tuple of int
        Spatial extents of the positions: the result's extents, or the image's extents if ``transposed``.
    taps : tuple of int
        Spatial extents of the filter.
    transposed : bool
        True for the gradient of the image. Then positions belong to the image, and elements to the loss. If False, positions
        belong to the result, and elements to the image.
    """

    geometry: Convolution
    groups: int
    source: Shape
    domain: Shape
    taps: Shape
    transposed: bool = False

    @property
    def elements_per_row(self) -> int:
        """Number of column elements for one row, group and image.

        A row is the smallest part of the work that can be unfolded at once.
        """
        return self.source[1] // self.groups * math.prod(self.taps) * math.prod(self.domain[1:])

    def columns(self, tile: Tile) -> Shape:
        """Return the columns' shape: (images, groups, channels, taps …, positions …)."""
        counts = [part.stop - part.start for part in (tile.images, tile.groups, tile.rows)]
        return (*counts[:2], self.source[1] // self.groups, *self.taps, counts[2], *self.domain[1:])

    def tiles(self, elements: int) -> list[Tile]:
        """Cut the work into tiles of at most ``elements`` column elements.

        A tile has at least one row, even if one row has more elements.
        """
        images, rows = self.source[0], self.domain[0]
        per_group = self.elements_per_row * rows
        per_image = per_group * self.groups
        if per_image <= elements:
            parts = (_cut(images, elements // per_image), [slice(0, self.groups)], [slice(0, rows)])
        elif per_group <= elements:
            parts = (_cut(images, 1), _cut(self.groups, elements // per_group), [slice(0, rows)])
        else:
            parts = (_cut(images, 1), _cut(self.groups, 1), _cut(rows, max(1, elements // self.elements_per_row)))
        return [Tile(*part) for part in product(*parts)]

    def gather(self, source: Array, columns: Array, tile: Tile) -> None:
        """Fill ``columns`` from the whole ``source``.

        ``columns`` has the shape from `columns`, and any floating type.
        """
        width = self.source[1] // self.groups
        part = source[tile.images, tile.groups.start * width : tile.groups.stop * width]
        part = part.reshape(part.shape[0], -1, width, *part.shape[2:]) if self.groups > 1 else part[:, None]
        spatial = len(self.domain)
        bounds = [(tile.rows.start, tile.rows.stop), *((0, extent) for extent in self.domain[1:])]
        every: tuple[Any, ...] = (slice(None),) * 3
        for tap in product(*map(range, self.taps)):
            target = columns[every + tap]
            # A position without an element under this tap reads the padding, which is zero.
            target[...] = 0
            met = [self._meet(axis, tap[axis], *bounds[axis]) for axis in range(spatial)]
            if all(met):
                there, here = zip(*(pair for pair in met if pair), strict=True)
                target[every + there] = part[every + here]

    def _meet(self, axis: int, tap: int, low: int, high: int) -> tuple[slice, slice] | None:
        """Return the positions with an element under a tap, and the elements.

        Both are slices. Only positions from ``low`` to before ``high`` count, and the first slice counts from ``low``. Return
        None if no position has an element.
        """
        geometry, extent = self.geometry, self.source[axis + 2]
        step = geometry.stride[axis]
        offset = tap * geometry.dilation[axis] - geometry.before[axis]
        # If transposed, position = element * step + offset.
        if self.transposed:
            first, stop = max(0, _ceil(low - offset, step)), min(extent, _ceil(high - offset, step))
            start = first * step + offset - low
            pair = slice(start, start + (stop - first - 1) * step + 1, step), slice(first, stop)
        else:
            # If not transposed, element = position * step + offset.
            first, stop = max(low, _ceil(-offset, step)), min(high, _ceil(extent - offset, step))
            start = first * step + offset
            pair = slice(first - low, stop - low), slice(start, start + (stop - first - 1) * step + 1, step)
        return pair if first < stop else None


def filter_matrix(weight: Array, unfolding: Unfolding, dtype: np.dtype[Any]) -> Array:
    """Return the filters as (groups, rows, columns per position).

    `multiply` multiplies this matrix by the columns of `Unfolding.gather`.
    """
    groups, taps = unfolding.groups, math.prod(unfolding.taps)
    weight = flip(weight, unfolding.geometry)
    matrix = np.asarray(weight, dtype).reshape(groups, weight.shape[0] // groups, weight.shape[1], taps)
    if unfolding.transposed:
        # The gradient of the image exchanges the roles of input and output channels.
        matrix = matrix.swapaxes(1, 2)
    return matrix.reshape(*matrix.shape[:2], -1)


def multiply(matrix: Array, columns: Array, output: Array, tile: Tile) -> None:
    """Multiply filters by columns, and write the tile's part of ``output``.

    ``output`` has the shape (N, channels, …).
    """
    images, groups = columns.shape[:2]
    width = matrix.shape[1]
    result = matrix[tile.groups] @ columns.reshape(images, groups, matrix.shape[2], -1)
    part = output[tile.images, tile.groups.start * width : tile.groups.stop * width, tile.rows]
    part[...] = result.reshape(part.shape)


def accumulate(loss: Array, columns: Array, total: Array, tile: Tile) -> None:
    """Multiply the loss by columns, and add the product to ``total``.

    ``total`` has the shape (groups, filters per group, columns per position).
    """
    images, groups = columns.shape[:2]
    width = total.shape[1]
    part = loss[tile.images, tile.groups.start * width : tile.groups.stop * width, tile.rows]
    rows = np.asarray(part, total.dtype).reshape(images, groups, width, -1)
    flat = columns.reshape(images, groups, total.shape[2], -1).swapaxes(2, 3)
    for image in range(images):
        total[tile.groups] += rows[image] @ flat[image]


def flip(weight: Array, geometry: Convolution) -> Array:
    """Return the filters, flipped if ``geometry.flipped`` is true."""
    return np.flip(weight, tuple(range(2, weight.ndim))) if geometry.flipped else weight


def _ceil(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def _cut(count: int, most: int) -> list[slice]:
    """Cut a range into as few parts as possible.

    A part has at most ``most`` elements. The parts have nearly equal sizes.
    """
    parts = _ceil(count, min(count, most))
    edges = [count * part // parts for part in range(parts + 1)]
    return [slice(low, high) for low, high in pairwise(edges)]
