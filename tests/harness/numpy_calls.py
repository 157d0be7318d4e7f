"""Calls of every public function of NumPy's that takes arrays: found by trying forms of call on plain arrays."""

import contextlib
import io
import types
from functools import cached_property

import numpy as np

MODULES = {
    "numpy": np,
    "numpy.linalg": np.linalg,
    "numpy.fft": np.fft,
    "numpy.emath": np.emath,
    "numpy.random": np.random,
    "numpy.testing": np.testing,
    "numpy.lib.stride_tricks": np.lib.stride_tricks,
    "numpy.polynomial.polynomial": np.polynomial.polynomial,
    "Generator": np.random.Generator,
}

SKIPPED = {
    **dict.fromkeys(("empty", "empty_like", "ndarray", "may_share_memory", "shares_memory"), "it shows what memory there is"),
    **dict.fromkeys(("memmap", "test", "measure", "runstring", "rundocs", "seed", "default_rng", "spawn"), "it has no values"),
    "build_err_msg": "it shows what kind of array it was given",
    "shuffle": "it swaps elements by assignments of views, as it does with CuPy's, and warns of that",
}

OTHERWISE = {
    "numpy.bmat": "it asks for numpy.ndarray by name",
    "numpy.frombuffer": "host arrays have no buffer",
    "numpy.mintypecode": "it compares with strings, which no queued work does",
    "numpy.testing.assert_equal": "it asks for numpy.ndarray by name",
    "numpy.testing.assert_almost_equal": "it asks for numpy.ndarray by name",
    "numpy.polynomial.polynomial.polyval": "it asks for numpy.ndarray by name",
    "numpy.polynomial.polynomial.polyvalfromroots": "it asks for numpy.ndarray by name",
    "numpy.polynomial.polynomial.polygrid2d": "it asks for numpy.ndarray by name",
    "numpy.polynomial.polynomial.polygrid3d": "it asks for numpy.ndarray by name",
}
"""Functions that treat every array but NumPy's own otherwise, or not at all; they, too, must see no old value."""


class Plain:
    """Arrays of NumPy's, made when they are asked for."""

    def make(self, values):
        return values

    def __getattr__(self, name):
        values = {
            "m": np.arange(12.0).reshape(3, 4) / 12,
            "n": np.array([[3.0, 1, 2, 2], [5, 4, 1, 6], [2, 2, 8, 1]]),
            "s": np.array([[4.0, 1, 0], [1, 3, 1], [0, 1, 5]]),
            "v": np.array([0.25, 0.5, 0.625, 0.75]),
            "w": np.array([1.0, 2.0, 4.0]),
            "i": np.array([0, 2, 1]),
            "j": np.array([[0, 2, 1, 1], [1, 1, 0, 2]]),
            "b": np.array([[True, False, True, True], [False] * 4, [True] * 4]),
            "u": np.arange(12, dtype=np.uint8).reshape(3, 4),
            "c": np.array([1 + 2j, 3 - 1j, 2j]),
            "one": np.array([2]),
            "zero": np.array(3.0),
            "t": np.arange(24.0).reshape(2, 3, 4),
        }[name]
        self.__dict__[name] = made = self.make(values)
        return made

    @cached_property
    def file(self):
        return io.BytesIO()


FORMS = [
    lambda a: (a.m,), lambda a: (a.m, a.n), lambda a: ((a.m, a.n),), lambda a: (a.s,), lambda a: (a.v,), lambda a: (a.i,),
    lambda a: (a.v, a.v), lambda a: (a.i, a.i), lambda a: (a.c,), lambda a: (a.b,), lambda a: (a.u,), lambda a: (a.t,),
    lambda a: (a.zero,), lambda a: (a.one,), lambda a: (a.s, a.w), lambda a: (a.m, 1), lambda a: (a.m, 0, 1),
    lambda a: (a.m, a.i), lambda a: (a.m, (2, 6)), lambda a: (a.m, (3, 4)), lambda a: (a.m, 1, 0), lambda a: (a.i, (3, 4)),
    lambda a: ((a.i, a.i), (3, 4)), lambda a: (a.m, a.n, a.m), lambda a: (a.v, a.v, a.v), lambda a: (a.v, a.v, 1),
    lambda a: (a.m, a.b), lambda a: (a.b, a.m), lambda a: (a.m, a.b, a.v), lambda a: (a.b, a.m, a.n),
    lambda a: (a.m, a.j, a.zero, 0), lambda a: (a.m, a.j, 0), lambda a: ("ij,kj->ik", a.m, a.n), lambda a: (np.sum, 0, a.m),
    lambda a: (np.sum, a.m, [0]), lambda a: (a.m, [a.b], [1]), lambda a: ([a.b], [a.m]), lambda a: ([a.m, a.n.T],),
    lambda a: (a.m, 2, a.i), lambda a: (a.m, "float32"), lambda a: (a.file, a.m), lambda a: (a.m, a.n.T),
    lambda a: (a.i, [a.w, a.w, a.w]), lambda a: (a.m, -1, 0), lambda a: (a.m, "reflect"), lambda a: (a.i, a.w),
    lambda a: (a.j, a.n), lambda a: (a.v, a.n), lambda a: (3, a.v), lambda a: (a.m, 1, "constant"), lambda a: (5, a.v[:2], 3),
    lambda a: (a.i, a.i, 3), lambda a: (a.i, a.i, a.i), lambda a: (a.w, a.s), lambda a: (a.w, a.s, 4),
    lambda a: (np.zeros_like(a.m), a.m), lambda a: (np.greater, a.n, a.m),
]  # fmt: skip


def functions():
    """Every public function, by its full name."""
    for module, place in MODULES.items():
        for name in sorted(set(dir(place))):
            found = None if name.startswith(("_", "set", "show")) or name in SKIPPED else getattr(place, name, None)
            if callable(found) and not isinstance(found, (type, types.ModuleType)):
                if module == "Generator":
                    yield f"{module}.{name}", lambda *args, name=name: getattr(np.random.default_rng(3), name)(*args)
                else:
                    yield f"{module}.{name}", found


def called(function, form, arrays):
    """What a call gives and what it left in its arguments and its file, in plain values."""
    np.random.seed(5)
    args = form(arrays)
    found = function(*args)
    return plain(found), plain(list(args)), arrays.file.getvalue()


def plain(value):
    """A result in NumPy's arrays, numbers and lists, which have waited for it."""
    if hasattr(value, "get") and hasattr(value, "dtype"):
        return value.get()
    if isinstance(value, dict):
        return plain(list(value.items()))
    if isinstance(value, (list, tuple)) or hasattr(value, "__next__"):
        return [plain(entry) for entry in value]
    if isinstance(value, io.BytesIO):
        return None
    return value


def same(a, b):
    """Whether two results have the same values, types and shapes."""
    if isinstance(a, list) or isinstance(b, list):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (np.ndarray, np.generic)) and isinstance(b, (np.ndarray, np.generic)):
        a, b = np.asarray(a), np.asarray(b)
        return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
    return type(a) is type(b) and (a is b or a == b or repr(a) == repr(b))


def forms_of(function, most=2):
    """The first forms that a function takes."""
    found = []
    for form in FORMS:
        arrays = Plain()
        try:
            result, *_ = called(function, form, arrays)
            fine = not isinstance(result, contextlib.AbstractContextManager)
        except Exception:
            continue
        if fine:
            found.append(form)
        if len(found) == most:
            break
    return found
