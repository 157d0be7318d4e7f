"""Items whose arrays share memory, and a function that shows by its values which do."""

import numpy as np

from handlepool._util.protocols import holds_values
from handlepool.recording.sharing import rebuilt

ALIASES = {
    "one twice": lambda x: (x, x),
    "in two lists": lambda x: {"a": [x], "b": ([x], x)},
    "one list twice": lambda x: ([x],) * 2,
    "all and a part": lambda x: (x, x[1:3, 2:]),
    "a part and all": lambda x: [x[1:], x],
    "windows": lambda x: (x[:, :-1], x[:, 1:]),
    "a transpose": lambda x: (x, x.T),
    "backwards": lambda x: (x, x[::-1, ::2]),
    "three in a row": lambda x: (x[:2], x[1:3], x[2:]),
    "two pairs": lambda x: (x[:2], x[:1], x[2:], x[3:]),
    "other types": lambda x: (x[1:], x.view(np.uint8)[0, 3:5]),
    "rows between rows": lambda x: (x[::2], x[1::2]),
    "columns between columns": lambda x: (x[:, ::2], x[:, 1::2], x[:, ::4]),
    "apart": lambda x: (x[:2], x[2:]),
    "without elements": lambda x: (x, x[4:]),
}


def in_place(item, *_):
    """Write each array in turn, and return all, so that whatever shares memory sees it."""
    found = []
    rebuilt(item, lambda leaf: found.append(leaf) if holds_values(leaf) else None)
    for number, each in enumerate(found, 1):
        each += each.dtype.type(number)
    return [each * each.dtype.type(1) for each in found]


def base(value):
    return (np.arange(24, dtype=np.float32) + value).reshape(4, 6)
