"""Define every error that handlepool raises on purpose.

Each error derives from `HandlePoolError` and from the built-in error that a person would catch. Each message says the event,
the key, and the remedy.
"""


class HandlePoolError(Exception):
    """Root of the errors that handlepool raises."""


class DeviceMismatchError(HandlePoolError, ValueError):
    """A stream, array or handle belongs to another than the current device."""


class StreamError(HandlePoolError, TypeError):
    """An object passed as a stream is not usable as a stream."""


class CaptureError(HandlePoolError, RuntimeError):
    """A call is impossible while a stream is being captured."""


class ForkedProcessError(HandlePoolError, RuntimeError):
    """A forked child used a pool whose driver its parent had loaded.

    CUDA does not survive ``os.fork``: start the child with spawn, or fork before anything uses CUDA.
    """


class PoisonedContextError(HandlePoolError, RuntimeError):
    """An earlier error cost the process its CUDA context.

    An example is an illegal address in a kernel. Restart the process.
    """


class PoolClosedError(HandlePoolError, RuntimeError):
    """The pool or the program was closed, or the fork was left."""


class OutOfMemoryError(HandlePoolError, MemoryError):
    """Device memory or the scratch limit is too small for a request.

    The request failed also after idle resources were destroyed.
    """


class OwnershipError(HandlePoolError, RuntimeError):
    """A thread or stream used a resource of another owner.

    The resource is a fork, a handle or a workspace.
    """


class StateBusyError(HandlePoolError, RuntimeError):
    """A thread that holds a state asked for a busy state.

    The thread asked by index. Waiting could deadlock.
    """


class StateIndexError(HandlePoolError, IndexError):
    """A state index outside the range of its `ParallelStates`."""


class ArgumentError(HandlePoolError, ValueError):
    """A value with which no call could succeed.

    Examples are a size, a count, an option, a shape or a type.
    """


class SignatureError(ArgumentError, TypeError):
    """A keyword-only argument was given by position."""


class TraceError(ArgumentError, AttributeError, TypeError):
    """An elementwise function does more than a kernel over elements can."""


class ArrayTypeError(HandlePoolError, TypeError):
    """An array of a kind that this driver cannot take."""


class GraphNotSupportedError(HandlePoolError, RuntimeError):
    """cuDNN, or the host driver's evaluator, cannot run this graph."""


class DriverNotAvailableError(HandlePoolError, RuntimeError):
    """The requested driver cannot run here.

    There is no GPU, or a package is missing. The message names the extra.
    """


class PackageMissingError(HandlePoolError, ImportError):
    """An optional package is not installed; the message names the package."""


class ContractError(HandlePoolError, RuntimeError):
    """A check found a broken rule that cuDNN and CUDA leave unchecked."""


class ItemError(HandlePoolError, RuntimeError):
    """An item of `handlepool.spread` failed; its cause says why.

    Attributes
    ----------
    index, device : int
        The item's place among the items, and the ordinal of its device.
    """

    index: int = -1
    device: int = -1
