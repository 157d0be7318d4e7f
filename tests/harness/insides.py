"""The private parts of the package that many tests look at: each is named here and nowhere else."""

from handlepool.order import plain_calls
from handlepool.pool import context, deferred, process_end


def streams_of(driver):
    """Return the table of a host driver's streams, with its captures and its scheduler."""
    return driver._streams


def memory_of(driver):
    """Return the memory of a host driver's devices."""
    return driver._memory


def take_memory(driver, device, nbytes):
    """Count bytes of a host driver's device as used; a negative number gives them back."""
    memory = driver._memory._devices[device]
    with memory._lock:
        memory.used += nbytes


def squeeze(driver, device, left):
    """Leave at most so many bytes free on a host driver's device, and return how many were taken."""
    memory = driver._memory._devices[device]
    with memory._lock:
        taken = max(0, memory.total - memory.used - left)
        memory.used += taken
    return taken


def scratch_of(driver):
    """Return the scratch memory that is allocated on each device of a host driver, by its pointer."""
    return [memory._scratch for memory in driver._memory._devices]


def finish_queues(driver, where):
    """Wait on the host until all work that a host driver was given has run."""
    streams = driver._streams
    for work in [work for work in streams._queues.values() if work.alive and not work.tail.done]:
        streams.wait_on_host(work.tail, where)


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
    process_end.process_end.run()


def abandoned():
    """Return the objects that stay alive to the end of the process."""
    return deferred.abandoned


def known_writes():
    """Return the writes that the package knows of plain functions."""
    return plain_calls._may_write


def stream_of(fork):
    """Return the stream that a fork was entered on."""
    return fork._stream


def mark_of(fork):
    """Return the mark of a fork, which its arrays carry."""
    return fork._leases.mark


def ordinal_of(fork):
    """Return the device of a fork."""
    return fork._ordinal


def order_of(fork):
    """Return the books that order the branches of a fork; None without order."""
    return fork._leases.order


def leases_of(fork):
    """Return the leases of a fork, which have its states."""
    return fork._leases


def workers_of(executor):
    """Return the threads of an executor that run now."""
    return list(executor._threads._threads)


def functions_of(integration):
    """Return the functions that the Dask integration keeps programs of."""
    return integration._functions


def device_workers_of(results):
    """Return the workers of a spread, one for each device."""
    return results._workers


def record_elsewhere():
    """Count a recording of another thread, until a test clears the lists of `handlepool.pool.context`."""
    watcher = object()
    for known in (context.active, context.recordings):
        known.append(watcher)
