"""What the tests of the pool share: kinds of streams, counted calls, calls that fail, and a check that all is in order."""

from collections import Counter

from handlepool import HandlePoolError, ParallelStateExecutor, ParallelStates

ASKING = {"current_device", "current_stream", "owns_stream"}
"""Driver calls that touch neither CUDA nor cuDNN, beside asking CuPy for the current device and stream."""

EFFECTS = {"create_handle", "create_stream", "create_event", "bind_handle", "record_event", "wait_event", "allocate", "launch"}

STREAMS = {
    "null": lambda driver: driver.legacy_stream,
    "per-thread": lambda driver: driver.per_thread_stream,
    "owned": lambda driver: driver.create_stream(),
}


class Foreign:
    """Another library's stream object, which keeps no stream alive."""

    def __init__(self, pointer):
        self.pointer = pointer

    def __cuda_stream__(self):
        return 0, self.pointer


FOREIGN = {
    "pointer": lambda driver, stream: stream.ptr,
    "wrapper": lambda driver, stream: driver.wrap_stream(stream.ptr, None),
    "protocol": lambda driver, stream: Foreign(stream.ptr),
}


def in_a_branch(scene, act):
    with scene.states.fork() as fork:
        fork.run(act)


def in_a_task(scene, act):
    with ParallelStateExecutor(1, pool=scene.pool) as executor:
        executor.submit(act).result()


def in_a_state(scene, act):
    scene.states.with_state(0, lambda _: act())


ON_A_SIDE_STREAM = [in_a_branch, in_a_task, in_a_state]


def calls(driver, function, *args):
    driver.calls.clear()
    function(*args)
    return Counter({name: count for name, count in driver.calls.items() if count})


def fails_at(k, driver, function, *args, method=None):
    """Call with the k-th driver call failing; False when there were fewer calls."""
    error = RuntimeError(f"injected failure of call {k}")
    driver.fail_at(k, method, error)
    try:
        function(*args)
    except (RuntimeError, HandlePoolError):  # itself, or what the pool made of it
        pass
    driver.fail_at(0)
    return error.__traceback__ is not None


def assert_usable(pool):
    """Handle, scratch and a fork work on the caller's stream, which is in order."""
    driver = pool.driver
    ran = []
    driver.use_handle(pool.get_handle(), lambda: ran.append("handle"))
    assert pool.get_workspace(1000).shape == (1000,)
    ParallelStates(2, pool=pool).map(lambda i: driver.use_handle(pool.get_handle(), lambda: ran.append(i)), range(2))
    driver.synchronize_stream(driver.current_stream().ptr)
    assert ran[0] == "handle"
    assert set(ran[1:]) == {0, 1}
