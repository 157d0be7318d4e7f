"""Generate one function that does all steps of a known call.

For a call like an earlier call of a recorded function, the generated function compares the key, checks the guards, leases an
instance and uses its program. As separate functions, these steps would cost a third of the host time of the call.
"""

from collections.abc import Callable, Sequence
from typing import Any

from handlepool.pool.context import active, recordings
from handlepool.pool.default import current_pool
from handlepool.pool.internals import PoolInternals
from handlepool.recording.instances import Instance, lease, submitted
from handlepool.recording.matching import compared, compared_tensors, made, meets
from handlepool.recording.state_kinds import is_tensor

Hit = Callable[..., Any]
"""A generated function, which does all steps of a known call.

Its arguments are the tuple of the call's arguments, optionally a stream, and optionally a function that it calls before the first
copy.
"""

MISSED: Any = object()
"""The value of a hit that does not serve the call.

Then the arguments differ, or the call needs the long way (`RecordedFunction.__call__`). The hit has enqueued nothing.
"""
_PLAIN = (bool, int, str, bytes, type(None))
"""Types of plain values, which a hit compares by type and equality."""

_HIT = """\
def hit(args, stream=None, begin=None):
    try:
        {names}, = args
        if {differ}:
            return MISSED
        {read}
    except Exception:  # another number of arguments, or objects that are no arrays
        return MISSED
    # The long way serves calls in forks and recordings, and on streams that are being captured.
    if active or recordings or status.unusable or current_pool() is not pool{meet}:
        return MISSED
    if stream is None:
        stream = current_stream(){elsewhere}
    pointer = stream.ptr
    if {apart}pointer and is_capturing(pointer) or not holds():
        return MISSED
    for instance in instances:
        if instance.stream is stream and not instance.away{claim}:
            break
    else:
        # The long way captures a further instance.
        if len(instances) < {limit}:
            return MISSED
        instance = lease(instances, stream, {reused})
        if instance is None:
            return MISSED
    instance.number, instance.stream = next(submitted), stream
    return {build}
"""


def hit(
    pool: PoolInternals,
    args: Sequence[Any],
    device: int,
    edges: list[int],
    instances: list[Instance],
    limit: int,
    holds: Callable[[], bool],
    reused: bool,
) -> Hit | None:
    """Return a function that calls a recorded function's program.

    The returned function takes positional arguments, and returns `MISSED` if they are not like ``args``. If no argument is an
    array, or an argument is neither an array nor a plain value, there is no such function, and the result is None.

    Parameters
    ----------
    pool : PoolInternals
    args : sequence
        Arguments of the key, whose arrays share no memory.
    device : int
        Ordinal of the programs' device.
    edges : list of int
        Begin and end of each piece of memory that the recorded function reaches, ascending.
    instances : list of Instance
        The instances of the key. The list is shared, and may grow later.
    limit : int
        Maximum number of instances.
    holds : callable
        Returns whether the guards hold, see `Guards`.
    reused : bool
        Whether calls return the programs' own outputs.
    """
    driver = pool.driver
    kind: Any = driver.array_types[0]
    named = {f"x{place}": each for place, each in enumerate(args)}
    arrays = {name: each for name, each in named.items() if type(each) is kind and each.size}
    plain = {name: each for name, each in named.items() if type(each) in _PLAIN}
    tensors = {name: each for name, each in named.items() if is_tensor(each) and each.numel()}
    # A hit compares either arrays or tensors. If a call has both, the next test returns None, so the call takes the long way.
    arrays = arrays or tensors
    if not arrays or len(arrays) + len(plain) < len(named):
        return None
    apart = ""
    if tensors:
        differ, read, space = compared_tensors(arrays)
        # If torch's current stream differs from CuPy's, the call takes the long way, which makes torch's stream current.
        apart = f"theirs({device}) != pointer or "
    else:
        differ, read, space = compared(driver, arrays, device if driver.device_count() > 1 else None)
        # Only arrays of the host driver can be read-only. A call with a read-only array takes the long way.
        if driver.name == "host":
            differ += [f"not {name}.flags.writeable" for name in arrays]
    differ += [f"{name}.__class__ is not k{name} or {name} != v{name}" for name in plain]
    space |= {f"k{name}": type(each) for name, each in plain.items()} | {f"v{name}": each for name, each in plain.items()}
    meet = [meets(name) for name in arrays]
    if len(arrays) == 2:
        one, two = arrays
        meet.append(f"b{one} < e{two} and b{two} < e{one}")
    elif len(arrays) > 2:
        begins, ends = (", ".join(f"{end}{name}" for name in arrays) for end in "be")
        meet.append(f"overlap(({begins}), ({ends}))")
    given = f"({', '.join(arrays)},)" if plain else "args"
    turn = f"instance.program._turn(instance.run, {given}, stream, begin, True)"
    text = _HIT.format(
        names=", ".join(named),
        differ=" or ".join(differ),
        read="; ".join(read),
        apart=apart,
        meet="".join(f" or {each}" for each in meet),
        claim=" and instance.claim(stream)" if reused else "",
        # A call with a given stream takes the long way in two cases. Arrays with gaps can only be copied on the current stream,
        # and reused outputs are only reserved for the current stream.
        elsewhere="" if instances[0].direct and not reused else "\n    else:\n        return MISSED",
        limit=limit,
        reused=reused,
        build=f"{turn}[0]" if instances[0].single else f"instance.built({turn}, {given})",
    )
    space |= {"MISSED": MISSED, "active": active, "recordings": recordings, "status": pool.status, "pool": pool}
    space |= {"current_pool": current_pool, "current_stream": driver.current_stream, "is_capturing": driver.is_capturing}
    space |= {"holds": holds, "instances": instances, "lease": lease, "submitted": submitted, "edges": edges, "overlap": _overlap}
    function: Hit = made(text, "hit", space)
    return function


def _overlap(begins: Sequence[int], ends: Sequence[int]) -> bool:
    """Return whether any two pieces of memory share an address."""
    begins, ends = sorted(begins), sorted(ends)
    # If no two pieces share an address, the order by begin equals the order by end. So each piece begins at or after the end of
    # the piece before it.
    return any(map(int.__lt__, begins[1:], ends))
