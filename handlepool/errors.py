"""Every error that handlepool raises on purpose.

Each derives from `HandlePoolError` and from the built-in that a person would catch; each message says what happened, for
which key, and what to do.
"""


class HandlePoolError(Exception):
    """Root of the errors that handlepool raises."""


class DeviceMismatchError(HandlePoolError, ValueError):
    """A stream, an array or a handle belongs to another device than the current one."""


class StreamError(HandlePoolError, TypeError):
    """An object that was passed as a stream is none, or cannot be used as one here."""


class CaptureError(HandlePoolError, RuntimeError):
    """Something was asked for that cannot be done while a stream is being captured."""


class ForkedProcessError(HandlePoolError, RuntimeError):
    """A forked child used a pool whose driver its parent had loaded.

    CUDA does not survive ``os.fork``: start the child with spawn, or fork before anything uses CUDA.
    """


class PoisonedContextError(HandlePoolError, RuntimeError):
    """An earlier error, as an illegal address in a kernel, cost the process its CUDA context; restart the process."""


class PoolClosedError(HandlePoolError, RuntimeError):
    """The pool or the program was closed, or the fork was left."""


class OutOfMemoryError(HandlePoolError, MemoryError):
    """Device memory, or the pool's scratch limit, does not allow what was asked for, also after what was idle was destroyed."""


class OwnershipError(HandlePoolError, RuntimeError):
    """A fork, a handle or a workspace was used by a thread or a stream that does not own it."""


class StateBusyError(HandlePoolError, RuntimeError):
    """A state was asked for by index that is busy, by a thread that holds a state: waiting could deadlock."""


class StateIndexError(HandlePoolError, IndexError):
    """A state index outside the range of its `ParallelStates`."""


class ArgumentError(HandlePoolError, ValueError):
    """A value that no call could succeed with: a size, a count, an option, a shape or a type."""


class SignatureError(ArgumentError, TypeError):
    """An argument was given by position that is taken by keyword alone."""


class TraceError(ArgumentError, AttributeError, TypeError):
    """An elementwise function does more than a kernel over elements can."""


class ArrayTypeError(HandlePoolError, TypeError):
    """An array of a kind that this driver cannot take."""


class GraphNotSupportedError(HandlePoolError, RuntimeError):
    """cuDNN, or the host driver's evaluator, has no way to run this graph."""


class DriverNotAvailableError(HandlePoolError, RuntimeError):
    """The driver that was asked for cannot run here: no GPU, or a package is missing (the message names the extra)."""


class PackageMissingError(HandlePoolError, ImportError):
    """A package that only this needs is not installed; the message says which."""


class ContractError(HandlePoolError, RuntimeError):
    """A rule that cuDNN and CUDA leave unchecked was broken, and a check was on to see it."""


class ItemError(HandlePoolError, RuntimeError):
    """An item of `handlepool.spread` failed; its cause says why.

    Attributes
    ----------
    index, device : int
        The item's place among the items, and the ordinal of the device that it was given to.
    """

    index: int = -1
    device: int = -1
