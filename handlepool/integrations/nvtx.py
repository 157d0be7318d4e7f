"""Show forks, branches and programs in Nsight's time line.

`install` replaces methods of the public classes by methods that open an NVTX range around each call. Without `install`, calls
run no code of this module.
"""

from collections.abc import Callable
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

from handlepool import Fork, PackageMissingError, Program, RecordedFunction

try:
    import nvtx
except ImportError as error:
    raise PackageMissingError("nvtx is not installed: pip install 'handlepool[nvtx]'") from error

DOMAIN = "handlepool"
"""The NVTX domain of all ranges."""


class _Method(NamedTuple):
    kind: Any
    name: str
    title: Callable[..., str]


_METHODS = (
    _Method(Fork, "run", lambda fork, function, *_, **__: f"branch {_name_of(function)}"),
    _Method(Fork, "__exit__", lambda *_: "join"),
    _Method(Program, "replay", lambda program, *_, **__: f"replay {_program(program)}"),
    _Method(Program, "__call__", lambda program, *_, **__: f"call {_program(program)}"),
    _Method(RecordedFunction, "__call__", lambda function, *_, **__: f"recorded {_name_of(function)}"),
)
_replaced: dict[tuple[Any, str], Any] = {}


def install() -> None:
    """Open a range around each branch, join, replay and recorded call.

    A range shows the time that the call takes on the host, in the domain ``handlepool``. Nsight Systems also shows when the
    kernels of a range ran. A second call changes nothing.

    Raises
    ------
    PackageMissingError
        From the import of this module, if the package `nvtx` is missing.
    """
    for kind, name, title in _METHODS:
        if (kind, name) not in _replaced:
            _replaced[kind, name] = method = getattr(kind, name)
            setattr(kind, name, _ranged(method, title))


def uninstall() -> None:
    """Restore the methods that `install` replaced."""
    while _replaced:
        (kind, name), method = _replaced.popitem()
        setattr(kind, name, method)


def is_installed() -> bool:
    """Tell whether calls open ranges now."""
    return bool(_replaced)


@contextmanager
def ranges() -> "Iterator[None]":
    """Keep `install` in force until a ``with`` statement ends."""
    before = is_installed()
    install()
    try:
        yield
    finally:
        if not before:
            uninstall()


def _ranged(method: Callable[..., Any], title: Callable[..., str]) -> Callable[..., Any]:
    @wraps(method)
    def ranged(*args: Any, **kwargs: Any) -> Any:
        nvtx.push_range(title(*args, **kwargs), domain=DOMAIN)
        try:
            return method(*args, **kwargs)
        finally:
            nvtx.pop_range(domain=DOMAIN)

    return ranged


def _name_of(function: object) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _program(program: Program) -> str:
    # Only the text form of a program contains the program's name.
    return repr(program).removeprefix("<Program ").partition(" of device ")[0]
