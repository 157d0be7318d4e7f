"""Run the package's kernels (`handlepool.drivers.kernel`) with NumPy.

Each kernel is one step, and computes in float32.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from handlepool.drivers.expression import Elementwise
from handlepool.drivers.host import elementwise
from handlepool.drivers.host.convolution import Array
from handlepool.drivers.host.evaluator import Evaluation, EvaluationStep
from handlepool.drivers.host.network_kernels import computation
from handlepool.drivers.host.pointwise import activated
from handlepool.drivers.kernel import Add, Concat, Depthwise, Kernel, NetworkKernel, Windows


def evaluation(kernel: Kernel, inputs: int) -> Evaluation:
    """Plan a kernel with ``inputs`` inputs and one output.

    The kernel needs no workspace.
    """
    if isinstance(kernel, Add):
        name, compute = "add", _add(kernel)
    elif isinstance(kernel, Concat):
        name, compute = "concat", _concat(kernel)
    elif isinstance(kernel, NetworkKernel):
        name, compute = type(kernel).__name__.lower(), computation(kernel)
    elif isinstance(kernel, Depthwise):
        name, compute = "depthwise", _depthwise(kernel)
    elif isinstance(kernel, Elementwise):
        name, compute = "elementwise", elementwise.computation(kernel)
    else:
        name, compute = kernel.kind, _windows(kernel)
    step = EvaluationStep(name, tuple(range(inputs)), (inputs,), lambda arrays, _: compute(arrays[:-1], arrays[-1]))
    return Evaluation(f"host_{name}", 0, (step,))


def _add(kernel: Add) -> Callable[[Sequence[Array], Array], None]:
    def compute(xs: Sequence[Array], y: Array) -> None:
        total = xs[0].astype(np.float32) if xs else np.zeros(y.shape, np.float32)
        for x in xs[1:]:
            total += x.astype(np.float32)
        y[...] = activated(kernel.activation, total)

    return compute


def _concat(kernel: Concat) -> Callable[[Sequence[Array], Array], None]:
    def compute(xs: Sequence[Array], y: Array) -> None:
        # Each input begins where the previous input ends along the axis.
        ends = accumulate((x.shape[kernel.axis] for x in xs), initial=0)
        for x, (start, stop) in zip(xs, pairwise(ends), strict=True):
            y[(*(slice(None),) * kernel.axis, slice(start, stop))] = x

    return compute


def _windows(kernel: Windows) -> Callable[[Sequence[Array], Array], None]:
    def slid(x: Array, outside: float, beyond: float) -> Array:
        counts = kernel.count(*x.shape[-2:])
        padded = x.astype(np.float32)
        before = ((0, 0),) * (x.ndim - 2)
        padded = np.pad(padded, before + tuple((padding, padding) for padding in kernel.padding), constant_values=outside)
        axes = zip(counts, kernel.stride, kernel.window, padded.shape[-2:], strict=True)
        # The last window may exceed the padded image, so the image is extended until that window fits.
        more = tuple((0, max(0, (count - 1) * stride + window - extent)) for count, stride, window, extent in axes)
        padded = np.pad(padded, before + more, constant_values=beyond)
        rows, columns = kernel.stride
        return sliding_window_view(padded, kernel.window, (-2, -1))[..., ::rows, ::columns, :, :]

    def compute(xs: Sequence[Array], y: Array) -> None:
        (x,) = xs
        if kernel.kind == "max":
            y[...] = slid(x, -np.inf, -np.inf).max((-2, -1))
            return
        # The divisor of a mean is the number of pixels in each window. Padded pixels count only if `kernel.counted` is true.
        inside = np.ones(x.shape[-2:], np.float32)
        y[...] = slid(x, 0, 0).sum((-2, -1)) / slid(inside, kernel.counted, 0).sum((-2, -1))

    return compute


def _depthwise(kernel: Depthwise) -> Callable[[Sequence[Array], Array], None]:
    def compute(xs: Sequence[Array], y: Array) -> None:
        x, w, *biases = xs
        axes = zip(x.shape[2:], y.shape[2:], w.shape[2:], kernel.stride, kernel.padding, kernel.dilation, strict=True)
        reaches = [(count - 1) * stride + 1 for count, stride in zip(y.shape[2:], kernel.stride, strict=True)]
        margins = [(p, max(0, (count - 1) * s + (taps - 1) * d + 1 - p - extent)) for extent, count, taps, s, p, d in axes]
        padded = np.pad(x.astype(np.float32), ((0, 0), (0, 0), *margins))
        total = np.zeros(y.shape, np.float32)
        for tap in np.ndindex(w.shape[2:]):
            begins = [place * step for place, step in zip(tap, kernel.dilation, strict=True)]
            rows, columns = (slice(b, b + reach, s) for b, reach, s in zip(begins, reaches, kernel.stride, strict=True))
            total += padded[:, :, rows, columns] * w[:, 0, *tap, None, None].astype(np.float32)
        for bias in biases:
            total += bias[:, None, None].astype(np.float32)
        y[...] = activated(kernel.activation, total)

    return compute
