"""Random functions over elements with arrays for them, and what NumPy computes of them in float64: for the CPU and for a GPU."""

from types import SimpleNamespace

import numpy as np
import scipy.special
from harness.kernel_cases import placed, random_layout

import handlepool
from handlepool.graphs.expression import trace
from handlepool.tensors.layout import Layout

FLOATING = ("float16", "bfloat16", "float32")
OTHERS = ("uint8", "uint16", "int32", "bool", "int8", "int16")
ROUNDING = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-22}
"""Of a result, relative, with room for functions that are not rounded rightly."""
LARGEST = {"float16": 65504.0, "bfloat16": 3.38e38, "float32": 3.4e38}
SMALLEST = {"float16": 1e-7, "bfloat16": 1e-37, "float32": 1e-37}
NOISE, RUNS, MARGIN = 4 * 2.0**-23, 6, 12
"""Of each operation in a run that shows how rounding grows, how many of these there are, and how much more is accepted."""

REFERENCES = {
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "hardsigmoid": lambda x: np.clip(x + 3, 0, 6) / 6,
    "hardswish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "gelu": lambda x: x * (scipy.special.erfc(-x * np.sqrt(0.5)) / 2),
    "erf": scipy.special.erf,
    "rsqrt": lambda x: 1 / np.sqrt(x),
}
"""Functions that NumPy has not."""
OF_NUMPY = ("exp", "expm1", "log", "log1p", "log2", "log10", "sqrt", "sin", "cos", "tanh", "abs", "floor", "ceil", "trunc")
OF_NUMPY += ("rint", "negative", "reciprocal", "square")
BINARY = ("{} + {}", "{} - {}", "{} * {}", "{} / {}", "np.maximum({}, {})", "np.minimum({}, {})", "abs({}) ** {}", "{} ** 3 + {}")
"""Powers of negative numbers are real by chance."""
COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")


class Noisy(np.lib.mixins.NDArrayOperatorsMixin):
    """An array that is rounded to float32 and made a little wrong by each operation, as another machine may."""

    def __init__(self, values, random, noise):
        self.values, self._random, self._noise = np.asarray(values), random, noise

    def _of(self, function, args, options):
        values = np.asarray(function(*(arg.values if isinstance(arg, Noisy) else arg for arg in args), **options))
        if values.dtype != bool:
            values = values * (1 + self._noise * self._random.choice([-1.0, 1.0], values.shape))
            values = values.astype(np.float32).astype(np.float64)  # which is an integer where it is large
        return Noisy(values, self._random, self._noise)

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        return self._of(ufunc, inputs, options)

    def __array_function__(self, function, types, args, options):
        return self._of(function, args, options)


class Writer:
    """Writes a function's text."""

    def __init__(self, random, numbers, truths):
        self._random, self._numbers, self._truths = random, numbers, truths

    def _one(self, values):
        return values[self._random.integers(len(values))]

    def number(self, depth):
        kind = self._random.integers(10)
        if depth == 0 or kind == 0:
            if not self._numbers or self._random.integers(4) == 0:
                return self._one(["2", "0.5", "-1.25", "3", "1e-3", "np.float32(0.75)", "-0.0"])
            return self._one(self._numbers)
        below = depth - 1
        if kind < 5:
            pair = [f"({self._traced(below)})", f"({self.number(below)})"]  # Python's numbers alone would be Python's to compute
            return self._one(BINARY).format(*(pair if self._random.integers(2) else pair[::-1]))
        if kind < 7:
            return f"np.{self._one(OF_NUMPY)}({self._traced(below)})"
        if kind == 7:
            return f"m.{self._one([*REFERENCES])}({self._traced(below)})"
        if kind == 8:
            return f"np.where({self.truth(below)}, {self.number(below)}, {self.number(below)})"
        return f"np.clip({self._traced(below)}, -1.5, {self._one(['2.5', '0.25'])})"

    def truth(self, depth):
        kind = self._random.integers(6)
        if self._truths and (depth == 0 or kind == 0):
            return self._one(self._truths)
        below = max(depth - 1, 0)
        if kind < 4 or depth == 0:
            return f"(({self._traced(below)}) {self._one(COMPARISONS)} ({self.number(below)}))"
        if kind == 4:
            return f"({self.truth(below)} {self._one('&|^')} {self.truth(below)})"
        return f"~{self.truth(below)}"

    def _traced(self, depth):
        """A number that is computed from an array, so that a function of it is traced."""
        made = self.number(depth)
        return made if any(name in made for name in self._numbers) else f"({made}) * {self._numbers[0]}"


class Case:
    """A function, and its arguments as NumPy's arrays, whose memory lies in many ways.

    ``args`` are arrays and numbers, and ``memories`` what the arrays lie in; ``traced`` is for handlepool, ``plain`` for NumPy.
    """

    def __init__(self, seed, types=(*FLOATING, *OTHERS)):
        self.random = random = np.random.default_rng(seed)
        shape = [int(random.choice([1, 2, 3, 5, 8, 16, 24])) for _ in range(random.integers(0, 6))]
        while np.prod(shape, dtype=int) > 20_000:
            shape.pop()
        kinds = [str(random.choice(FLOATING if place == 0 else types)) for place in range(random.integers(1, 5))]
        self.numbers = [float(random.choice([0.5, -2.0, 3.0, 1e-3, 0.0])) for _ in range(random.integers(0, 3))]
        self.layouts = [self._layout(shape, kind, place) for place, kind in enumerate(kinds)]
        made = [placed(layout, self._values(layout)) for layout in self.layouts]
        self.arrays, self.memories = [array for array, _ in made], [memory for _, memory in made]
        names = [f"a{place}" for place in range(len(kinds))]
        numeric = [name for name, kind in zip(names, kinds, strict=True) if kind != "bool"]
        truths = [name for name, kind in zip(names, kinds, strict=True) if kind == "bool"]
        of_numbers = [f"n{place}" for place in range(len(self.numbers))]
        writer = Writer(random, numeric + of_numbers, truths)
        gives_truth = random.integers(8) == 0
        made = writer.number(int(random.integers(1, 5)))
        for name in names:
            if name not in made:
                made = f"np.where({name}, {made}, 1 - ({made}))" if name in truths else f"({made}) + {name}"
        if gives_truth:
            made = f"({made}) > 0.25"
        self.text = f"def f({', '.join(names + of_numbers)}):\n    return {made}\n"
        self.args = [*self.arrays, *self.numbers]
        self.traced, self.plain = self._function(handlepool.math), self._function(SimpleNamespace(**REFERENCES))

    def result(self):
        """The expression, and the shape and type of its result."""
        return trace("f", self.traced, [*self.layouts, *(None for _ in self.numbers)], {})

    def _function(self, m):
        space = {"np": np, "m": m}
        exec(self.text, space)
        return space["f"]

    def _layout(self, shape, kind, place):
        if place and self.random.integers(2):  # broadcast
            shape = [1 if self.random.integers(2) else extent for extent in shape]
            shape = shape[self.random.integers(len(shape) + 1) :] if self.random.integers(3) == 0 else shape
        layout = lying(self.random, shape, kind)
        if place and self.random.integers(6) == 0:  # expanded: one element for all of an axis
            strides = [0 if self.random.integers(2) else step for step in layout.strides]
            layout = Layout(layout.shape, tuple(strides), layout.dtype)
        return layout

    def _values(self, layout):
        kind = layout.dtype.kind
        values = self.random.standard_normal(layout.shape) * self.random.choice([0.3, 1, 3])
        if kind == "b":
            return values > 0
        if kind in "iu":
            return self.random.integers(0 if kind == "u" else -100, 100, layout.shape)
        special = self.random.random(layout.shape)
        for chance, value in ((0.01, np.nan), (0.02, np.inf), (0.03, -np.inf), (0.05, 0.0), (0.06, -0.0), (0.07, 1e4)):
            values = np.where((special < chance) & (special > chance - 0.01), value, values)
        return values

    def _double(self):
        """The arguments as NumPy takes them in float64, without shared memory."""
        arrays = [array.astype(bool if array.dtype == bool else np.float64) for array in self.arrays]
        return [*arrays, *map(np.float64, self.numbers)]

    def check(self, found, what=""):
        """Raise unless an array has what NumPy computes in float64, within what rounding may do; how many elements count."""
        what = f"{self.text}of {', '.join(map(str, self.layouts))} and {self.numbers} {what}"
        with np.errstate(all="ignore"):
            clean = np.asarray(self.plain(*self._double()))
            random = np.random.default_rng(1)
            noisy = [
                self.plain(*(Noisy(each, random, NOISE if run else 0) for each in self._double())).values for run in range(RUNS)
            ]
        found = np.asarray(found)
        assert found.shape == clean.shape, what
        if clean.dtype == bool:
            assert found.dtype == bool, what
            sure = np.all([run == clean for run in noisy], 0)
            assert np.array_equal(found[sure], clean[sure]), what
            return int(sure.sum())
        name = found.dtype.name
        found = found.astype(np.float64)
        with np.errstate(all="ignore"):
            alike = [np.isnan(run) == np.isnan(clean) for run in noisy]
            infinite = np.where(np.isinf(clean), clean, 0)
            alike += [np.where(np.isinf(run), run, 0) == infinite for run in noisy] + [np.abs(clean) < 0.9 * LARGEST[name]]
            wrong = [np.where(run == clean, 0, np.abs(run - clean)) for run in noisy]
            bound = MARGIN * np.max(np.nan_to_num(wrong), 0) + ROUNDING[name] * np.abs(clean) + SMALLEST[name]
            sure = np.all(alike[:-1], 0) & (alike[-1] | ~np.isfinite(clean))
            right = np.where(
                np.isfinite(clean), np.abs(found - clean) <= bound, (found == clean) | (np.isnan(found) & np.isnan(clean))
            )
        if not np.all(right[sure]):
            place = np.argmax(sure & ~right)
            values = [np.broadcast_to(each, clean.shape).ravel()[place] for each in self._double()]
            raise AssertionError(f"{what}: {found.ravel()[place]} is to be {clean.ravel()[place]} of {values}")
        tight = sure & (~np.isfinite(clean) | (bound <= 0.05 * np.abs(clean) + SMALLEST[name]))
        return int(tight.sum())


def lying(random, shape, dtype):
    """A random layout, of a type that may be none of cuDNN's."""
    as_wide = {"uint16": "float16", "int16": "float16"}.get(dtype, dtype)
    layout = random_layout(random, shape, as_wide)
    return Layout(layout.shape, layout.strides, layout.dtype if as_wide == dtype else np.dtype(dtype))


def around(array, memory):
    """The bytes of a memory that are not an array's."""
    inside = np.zeros(memory.nbytes, bool)
    first = array.__array_interface__["data"][0] - memory.ctypes.data
    steps = (*array.strides, 1)
    np.lib.stride_tricks.as_strided(inside[first:], (*array.shape, array.itemsize), steps)[...] = True
    return memory.view(np.uint8)[~inside].tobytes()
