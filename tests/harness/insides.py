"""The private parts of the package that many tests look at: each is named here and nowhere else."""

from handlepool.order import plain_calls
from handlepool.pool import deferred


def streams_of(driver):
    """Return the table of a host driver's streams, with its captures and its scheduler."""
    return driver._streams


def memory_of(driver):
    """Return the memory of a host driver's devices."""
    return driver._memory


def fault_by(driver, hook):
    """Have a host driver call a function with the name of each call; None ends that."""
    driver._log._fault = hook


def recording_of(program):
    """Return the recording that a program replays."""
    return program._recording


def plans_of(program):
    """Return the plans that a program launches."""
    return list(program._recording._plans.values())


def lock_of(program):
    """Return the lock that a use of a program holds."""
    return program._lock


def is_free(program):
    """Return whether no use of a program is under way."""
    return program._busy is None and not program._lock._is_owned()


def replace_launch(program, launch):
    """Have a program call a function in place of its launch, and return the launch."""
    former, program._launch = program._launch, launch
    return former


def end_at_exit(program, deadline):
    """End a program as the end of the process does."""
    program._end_at_exit(deadline)


def at_exit():
    """Do the work that the package does as the process ends."""
    deferred._at_exit()


def abandoned():
    """Return the objects that live as long as the process, since their ends could not be reached in safety."""
    return deferred._abandoned


def known_writes():
    """Return the writes that the package knows of plain functions."""
    return plain_calls._may_write


def stream_of(fork):
    """Return the stream that a fork was entered on."""
    return fork._stream


def mark_of(fork):
    """Return the mark of a fork, which its arrays carry."""
    return fork._mark


def ordinal_of(fork):
    """Return the device of a fork."""
    return fork._ordinal


def pool_of(fork):
    """Return the pool of a fork."""
    return fork._pool


def workers_of(executor):
    """Return the threads of an executor that run now."""
    return list(executor._threads._threads)


def functions_of(integration):
    """Return the functions that the Dask integration keeps programs of."""
    return integration._functions


def stations_of(results):
    """Return the stations of a spread."""
    return results._stations
