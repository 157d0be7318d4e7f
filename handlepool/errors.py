"""Define every error that handlepool raises on purpose.

Each error derives from `HandlePoolError` and from a suitable built-in error. Each message tells the event, the values that
matter, and the remedy.
"""


class HandlePoolError(Exception):
    """The base class of the errors that handlepool raises."""


class DeviceMismatchError(HandlePoolError, ValueError):
    """A stream, array or handle does not belong to the current device."""


class StreamError(HandlePoolError, TypeError):
    """An object passed as a stream is not usable as a stream."""


class CaptureError(HandlePoolError, RuntimeError):
    """A capture or a recording cannot contain a call, or has failed."""


class ForkedProcessError(HandlePoolError, RuntimeError):
    """A forked child used a pool whose driver its parent had loaded.

    CUDA does not survive ``os.fork``: start the child with spawn, or fork before anything uses CUDA.
    """


class PoisonedContextError(HandlePoolError, RuntimeError):
    """An earlier error has destroyed the CUDA context of the process.

    An example is a kernel that accesses an illegal address. Restart the process.
    """


class PoolClosedError(HandlePoolError, RuntimeError):
    """A call used a pool, program or fork that is not open.

    The pool or the program was closed earlier, or the call stands outside the fork's ``with`` statement.
    """


class OutOfMemoryError(HandlePoolError, MemoryError):
    """Device memory or the scratch limit is too small for a request.

    The request failed even after idle resources were destroyed.
    """


class OwnershipError(HandlePoolError, RuntimeError):
    """A thread or stream used a resource of another thread or stream.

    Such a resource is a fork, a handle, a state or a program, for example.
    """


class StateBusyError(HandlePoolError, RuntimeError):
    """A thread that holds a state asked for a busy state.

    The thread asked for the state by its index. The call raises an error instead of waiting, because waiting could deadlock.
    """


class StateIndexError(HandlePoolError, IndexError):
    """A state index is out of the range of its `ParallelStates`."""


class ArgumentError(HandlePoolError, ValueError):
    """An argument has a value with which the call cannot succeed.

    Such an argument may be a size, a count, an option, a shape or a type.
    """


class SignatureError(ArgumentError, TypeError):
    """A keyword-only argument was given by position."""


class TraceError(ArgumentError, AttributeError, TypeError):
    """An elementwise function does something that no elementwise kernel can do."""


class ArrayTypeError(HandlePoolError, TypeError):
    """An array or its type cannot be used with this driver."""


class GraphNotSupportedError(HandlePoolError, RuntimeError):
    """cuDNN, or the host driver's evaluator, cannot run this graph."""


class DriverNotAvailableError(HandlePoolError, RuntimeError):
    """The requested driver cannot run here.

    There is no GPU, or a package is missing. For a package, the message names the extra of handlepool that installs it.
    """


class PackageMissingError(HandlePoolError, ImportError):
    """An optional package is not installed; the message names the package."""


class ContractError(HandlePoolError, RuntimeError):
    """A check found a broken rule that cuDNN and CUDA leave unchecked."""


class ItemError(HandlePoolError, RuntimeError):
    """An item of `handlepool.spread` failed; ``__cause__`` has the item's error.

    Attributes
    ----------
    index, device : int
        The item's place among the items, and the ordinal of its device.
    """

    index: int = -1
    device: int = -1
