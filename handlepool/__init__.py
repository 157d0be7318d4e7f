"""Provide cuDNN handles and workspaces, and concurrent cuDNN calls on side streams.

Each handle and each workspace belongs to a thread, a device and a stream. Importing this package imports neither CuPy nor
torch, and creates nothing. The driver is loaded at the first use.
"""

from typing import Any

from handlepool.errors import (
    ArgumentError,
    ArrayTypeError,
    CaptureError,
    ContractError,
    DeviceMismatchError,
    DriverNotAvailableError,
    ForkedProcessError,
    GraphNotSupportedError,
    HandlePoolError,
    ItemError,
    OutOfMemoryError,
    OwnershipError,
    PackageMissingError,
    PoisonedContextError,
    PoolClosedError,
    SignatureError,
    StateBusyError,
    StateIndexError,
    StreamError,
    TraceError,
)
from handlepool.graphs.annotations import Array, Graph, GraphTensor
from handlepool.graphs.function import GraphFunction, graph
from handlepool.graphs.tuning import tune
from handlepool.ops import (
    ElementwiseFunction,
    add,
    asarray,
    asnumpy,
    avg_pool2d,
    batch_norm,
    channel_shuffle,
    concat,
    conv1d,
    conv2d,
    conv2d_input_grad,
    conv2d_weight_grad,
    conv_transpose1d,
    conv_transpose2d,
    elementwise,
    group_norm,
    instance_norm,
    interpolate2d,
    layer_norm,
    linear,
    math,  # noqa: F401 - a module of the public face, as `ops`
    matmul,
    max_pool2d,
    mean2d,
    multiply,
    pad,
    rms_norm,
    scaled_dot_product_attention,
    softmax,
    squeeze_excite,
    to_channels_last,
    to_contiguous,
)
from handlepool.order.operation import operation
from handlepool.pool.default import close, default_pool, get_handle, get_workspace, prewarm, set_default_pool, stats, trim
from handlepool.pool.pool import HandlePool
from handlepool.recording.decorator import recorded
from handlepool.recording.program import Program
from handlepool.recording.record import record
from handlepool.recording.recorded import RecordedFunction
from handlepool.recording.variant_table import RecordedStats
from handlepool.regions.executor import ParallelStateExecutor
from handlepool.regions.future import StreamFuture
from handlepool.regions.states import Fork, ParallelStates
from handlepool.spreading.mapping import spread
from handlepool.tensors.device_properties import DeviceProperties
from handlepool.tensors.layout import ArraySpec

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "Array",
    "ArraySpec",
    "ArrayTypeError",
    "CaptureError",
    "ContractError",
    "DeviceMismatchError",
    "DeviceProperties",
    "DriverNotAvailableError",
    "ElementwiseFunction",
    "Fork",
    "ForkedProcessError",
    "Graph",
    "GraphFunction",
    "GraphNotSupportedError",
    "GraphTensor",
    "HandlePool",
    "HandlePoolError",
    "ItemError",
    "OutOfMemoryError",
    "OwnershipError",
    "PackageMissingError",
    "ParallelStateExecutor",
    "ParallelStates",
    "PoisonedContextError",
    "PoolClosedError",
    "Program",
    "RecordedFunction",
    "RecordedStats",
    "SignatureError",
    "StateBusyError",
    "StateIndexError",
    "StreamError",
    "StreamFuture",
    "TraceError",
    "add",
    "asarray",
    "asnumpy",
    "avg_pool2d",
    "batch_norm",
    "channel_shuffle",
    "close",
    "concat",
    "conv1d",
    "conv2d",
    "conv2d_input_grad",
    "conv2d_weight_grad",
    "conv_transpose1d",
    "conv_transpose2d",
    "default_pool",
    "elementwise",
    "get_handle",
    "get_workspace",
    "graph",
    "group_norm",
    "instance_norm",
    "interpolate2d",
    "layer_norm",
    "linear",
    "matmul",
    "max_pool2d",
    "mean2d",
    "multiply",
    "operation",
    "pad",
    "prewarm",
    "record",
    "recorded",
    "rms_norm",
    "scaled_dot_product_attention",
    "set_default_pool",
    "softmax",
    "spread",
    "squeeze_excite",
    "stats",
    "to_channels_last",
    "to_contiguous",
    "trim",
    "tune",
    "with_cudnn_state",
]

CAFFE2_STATES = 4

_states: dict[HandlePool, ParallelStates] = {}

_MODULES = ("drivers", "errors", "math", "ops", "testing")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", *(name for name in _MODULES if name in globals())])


def with_cudnn_state(index: int, function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Run ``function(state, *args, **kwargs)`` on a shared state.

    The whole process shares four states. The function's work follows the caller's stream, and the caller's stream waits for
    that work when the call returns.

    Parameters
    ----------
    index : int
        0 to 3.
    function : callable
        As in `ParallelStates.with_state`.
    *args, **kwargs
        Further arguments of the function, after the state.

    Returns
    -------
    object
        The function's return value, ready on the caller's stream.

    Raises
    ------
    StateIndexError, StateBusyError, OwnershipError
        As in `ParallelStates.with_state`.
    """
    pool = default_pool()
    states = _states.get(pool)
    # Two threads may come here at once, and must get the same states: a state excludes other users only within its own
    # `ParallelStates`. `setdefault` is atomic, so both threads get the object that was added first.
    if states is None:
        states = _states.setdefault(pool, ParallelStates(CAFFE2_STATES, pool=pool))
    return states.with_state(index, function, *args, **kwargs)
