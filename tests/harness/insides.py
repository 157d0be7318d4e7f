"""The private parts of the package that many tests look at: each is named here and nowhere else."""

from handlepool import drivers
from handlepool.order import plain_calls
from handlepool.pool import context, default, deferred, process_end
from handlepool.recording.program import Program


def streams_of(driver):
    """Return the table of a host driver's streams, with its captures and its scheduler."""
    return driver._streams


def memory_of(driver):
    """Return the memory of a host driver's devices."""
    return driver._memory


def _devices_of(driver):
    return memory_of(driver)._devices


def _take(driver, device, count):
    memory = _devices_of(driver)[device]
    with memory._lock:
        taken = count(memory.total - memory.used)
        memory.used += taken
    return taken


def take_memory(driver, device, nbytes):
    """Count bytes of a host driver's device as used; a negative number gives them back."""
    _take(driver, device, lambda free: nbytes)


def squeeze(driver, device, left):
    """Leave at most so many bytes free on a host driver's device, and return how many were taken."""
    return _take(driver, device, lambda free: max(0, free - left))


def scratch_of(driver):
    """Return the scratch memory that is allocated on each device of a host driver, by its pointer."""
    return [memory._scratch for memory in _devices_of(driver)]


def finish_queues(driver, where):
    """Wait on the host until all work that a host driver was given has run."""
    streams = streams_of(driver)
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
    return list(recording_of(program)._plans.values())


def lock_of(program):
    """Return the lock that a use of a program holds."""
    return program._lock


def is_free(program):
    """Return whether no use of a program is under way."""
    return program._busy is None and not lock_of(program)._is_owned()


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
    return leases_of(fork).mark


def ordinal_of(fork):
    """Return the device of a fork."""
    return fork._ordinal


def order_of(fork):
    """Return the books that order the branches of a fork; None without order."""
    return leases_of(fork).order


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


def loaded_drivers():
    """Return the drivers that this process has loaded."""
    return drivers._loaded


def made_default():
    """Return the default pool, or None where no call has made it yet."""
    return default._default


def inputs_of(program):
    """Return the arrays that a program's positional arguments were recorded with."""
    return program._inputs._positional


def streams_of_programs():
    """Return the table of the streams that programs were replayed on last."""
    return Program._streams


def queue_of(stream):
    """Return the queue of a host driver's stream; None once the stream is destroyed."""
    return stream._queue


def is_ordered(fork):
    """Return whether a fork orders its branches by their data."""
    return fork._ordered


def cudnn_binding():
    """Return the frontend's binding, whose enumerations are public nowhere."""
    import cudnn

    return cudnn._pybind_module


def lowered(graph):
    """Return the native graph that a frontend's graph was built to."""
    return graph._lowered_graph


def torch_sleep(cycles):
    """Hold torch's current stream back for some cycles of the GPU's clock."""
    import torch

    torch.cuda._sleep(cycles)


def version_of(tensor):
    """Return how often torch counts a tensor as written."""
    return tensor._version


def record_elsewhere():
    """Count a recording of another thread, until a test clears the lists of `handlepool.pool.context`."""
    watcher = object()
    for known in (context.active, context.recordings):
        known.append(watcher)
