"""Provide the demo's filters: eleven built-in filters, or a file's filters."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as _short
from typing import Any

import numpy as np
from numpy.typing import NDArray

from handlepool.errors import ArgumentError

_MOST_FILTERS, _LARGEST_KERNEL, _LONGEST_NAME = 64, 31, 32
_LARGEST_NUMBER = float(np.finfo(np.float32).max)
_EXPECTED = 'expected {"name": [[...], ...], ...} or [{"name": ..., "kernel": [[...], ...]}, ...]'


@dataclass(frozen=True, slots=True, eq=False)
class Filter:
    """Hold a named square kernel of odd size, in float32."""

    name: str
    kernel: NDArray[np.float32]

    @property
    def size(self) -> int:
        """Return the number of rows, and columns, of the kernel."""
        return int(self.kernel.shape[0])

    def weights(self) -> NDArray[np.float32]:
        """Return weights that filter each of three channels separately.

        The shape is (3, 3, size, size), with the kernel on the diagonal. A convolution with ``groups=3`` would give the same
        result with a third of the numbers. But cuDNN has more engines for this dense form, and these engines are faster.
        """
        dense = np.zeros((3, 3, self.size, self.size), dtype=np.float32)
        for channel in range(3):
            dense[channel, channel] = self.kernel
        return dense


def builtin_filters() -> tuple[Filter, ...]:
    """Return the built-in filters.

    Six filters are 3 by 3, and five are 5 by 5.
    """
    binomial = np.outer([1, 4, 6, 4, 1], [1, 4, 6, 4, 1]) / 256
    unsharp = -binomial
    unsharp[2, 2] += 2.0
    kernels: dict[str, Any] = {
        "edges": [[1, 1, 1], [1, -8, 1], [1, 1, 1]],
        "sobel x": [[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]],
        "sobel y": [[-1, -2, -1], [0, 0, 0], [1, 2, 1]],
        "sharpen": [[0, -1, 0], [-1, 5, -1], [0, -1, 0]],
        "emboss": [[-2, -1, 0], [-1, 1, 1], [0, 1, 2]],
        "box blur": np.full((3, 3), 1 / 9),
        "gaussian blur": binomial,
        "motion blur": np.eye(5)[::-1] / 5,
        "unsharp mask": unsharp,
        "laplacian of gaussian": [
            [0, 0, -1, 0, 0],
            [0, -1, -2, -1, 0],
            [-1, -2, 16, -2, -1],
            [0, -1, -2, -1, 0],
            [0, 0, -1, 0, 0],
        ],
        "diagonal gradient": np.outer([1, 2, 4, 2, 1], [1, 2, 4, 2, 1]) * np.add.outer(range(-2, 3), range(-2, 3)) / 64,
    }
    return tuple(Filter(name, np.asarray(kernel, dtype=np.float32)) for name, kernel in kernels.items())


def chain_of(filters: Sequence[Filter]) -> tuple[Filter, Filter]:
    """Return two filters for a chain.

    The second filter processes the result of the first filter. The two filters are "box blur" and "edges". If ``filters`` lacks
    one of these names, the first or the last filter takes its place.
    """
    named = {filter.name: filter for filter in filters}
    return named.get("box blur", filters[0]), named.get("edges", filters[-1])


def load_filters(path: Path) -> tuple[Filter, ...]:
    """Read filters from a JSON file.

    Parameters
    ----------
    path : Path
        UTF-8 JSON, either ``{"name": kernel, ...}`` or ``[{"name": ..., "kernel": kernel}, ...]``, where a kernel is a
        square list of rows with 1, 3, 5, ... 31 finite numbers each.

    Raises
    ------
    ArgumentError
        For a file that cannot be read, and for an invalid filter. The message names the file, the filter and the value.
    """
    where = f"filter file {str(path)!r}"
    try:
        # Some editors begin a file with a byte-order mark, which plain UTF-8 would pass to the JSON reader.
        document = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_without_duplicates)
    except OSError as error:
        raise ArgumentError(f"cannot read {where}: {error.strerror or error}; pass a JSON file") from error
    except ArgumentError as error:
        raise ArgumentError(f"{where}: {error}") from error
    # A ValueError comes from invalid JSON, from invalid UTF-8, and from a number with thousands of digits.
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{where} is not JSON: {error}; {_EXPECTED}") from error
    try:
        return _parse(document)
    except ArgumentError as error:
        raise ArgumentError(f"{where}: {error}") from error


def _parse(document: object) -> tuple[Filter, ...]:
    if isinstance(document, Mapping):
        pairs = list(document.items())
    elif isinstance(document, list):
        for entry in document:
            if not isinstance(entry, Mapping) or set(entry) != {"name", "kernel"}:
                raise ArgumentError(f"the entry {_short(entry)} is not a filter; {_EXPECTED}")
        pairs = [(entry["name"], entry["kernel"]) for entry in document]
    else:
        raise ArgumentError(f"the document is {_short(document)}; {_EXPECTED}")
    if not 1 <= len(pairs) <= _MOST_FILTERS:
        raise ArgumentError(f"the file has {len(pairs)} filters; give 1 to {_MOST_FILTERS}")
    names = [_checked_name(name) for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ArgumentError(f"{names.count(name)} filters have the name {name!r}; give each filter its own name")
    return tuple(Filter(name, _checked_kernel(name, kernel)) for name, (_, kernel) in zip(names, pairs, strict=True))


def _checked_name(name: object) -> str:
    text = name.strip() if isinstance(name, str) else ""
    if not text or len(text) > _LONGEST_NAME or not text.isprintable():
        raise ArgumentError(f"{_short(name)} is no name for a filter; give 1 to {_LONGEST_NAME} printable characters")
    return text


def _checked_kernel(name: str, kernel: object) -> NDArray[np.float32]:
    if not isinstance(kernel, list) or not kernel or not all(isinstance(row, list) for row in kernel):
        raise ArgumentError(f"the kernel of {name!r} is {_short(kernel)}; give a list of rows of numbers")
    rows, lengths = len(kernel), sorted({len(row) for row in kernel})
    if lengths != [rows]:
        shape = f"{rows} rows of {' and '.join(map(str, lengths))} numbers"
        raise ArgumentError(f"the kernel of {name!r} has {shape}; give as many columns as rows")
    if rows % 2 == 0 or rows > _LARGEST_KERNEL:
        raise ArgumentError(f"the kernel of {name!r} is {rows} by {rows}; give an odd size of 1 to {_LARGEST_KERNEL}")
    for value in (value for row in kernel for value in row):
        # Python counts True and False as integers, and its JSON reader accepts NaN and Infinity. A kernel may contain none of
        # these values.
        usable = isinstance(value, int | float) and not isinstance(value, bool)
        # The comparison is negated, so that it refuses NaN as well.
        if not usable or not abs(value) <= _LARGEST_NUMBER:
            raise ArgumentError(f"the kernel of {name!r} holds {_short(value)}; give finite float32 numbers")
    return np.asarray(kernel, dtype=np.float32)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    # For equal keys, the JSON reader would keep only the last value without an error, and a filter would be lost.
    for name, value in pairs:
        if name in document:
            raise ArgumentError(f"the file has the key {_short(name)} more than once; give each filter its own name")
        document[name] = value
    return document
