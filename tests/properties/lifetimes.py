"""The state machine of `test_lifetimes_machine.py`: threads that do what they are told, and the rules."""

import os
import queue
import threading
import weakref

from harness import measuring
from harness.accounts import (
    RESTORES,
    Accounts,
    CostlyDriver,
    events_of_tasks,
    forgotten,
    left_tasks,
    streams_of_books,
    waiting,
)
from harness.insides import abandoned, finish_queues, queue_of, scratch_of, squeeze, stream_of, take_memory
from harness.process import leave, set_default
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from lifetime_forks import INDEX, SIZES, TIMEOUT, Forks, Oops

from handlepool import ForkedProcessError, HandlePool, HandlePoolError, ParallelStates, PoolClosedError
from handlepool.drivers.host.driver import HostDriver
from handlepool.pool import context, deferred, side_streams
from handlepool.regions.memory import branch_regions

DEVICES = 2
MEMORY = 1 << 19
FORMS = st.sampled_from(["current", "object", "pointer", "wrapper"])
MODES = st.sampled_from(["global", "thread_local", "relaxed"])


class Driver(CostlyDriver, HostDriver):
    pass


class Injected(RuntimeError):
    """What an armed driver call raises."""


class Actor:
    """A thread that runs one function at a time, while whoever asked waits."""

    def __init__(self):
        self.forks = []  # open ones; changed by the thread alone
        self.values = {}  # by device, what they may have
        self.later = {}  # by fork, what others may have once it was left
        self.captures = 0
        self._asked, self._answers = queue.SimpleQueue(), queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while (box := self._asked.get()) is not None:
            self._call(box)
            self._answers.put(None)

    @staticmethod
    def _call(box):
        function = box.pop()
        try:
            box += function(), None
        except BaseException as error:
            box += None, error

    def do(self, function):
        """The function's value and its error; once it is known, the thread refers to neither, nor to the function."""
        box = [function]
        del function
        self._asked.put(box)
        self._answers.get(timeout=TIMEOUT)
        value, error = box
        box.clear()
        return value, error

    def end(self):
        self._asked.put(None)
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive()


def count_streams(streams):
    """How many of them there are and are not destroyed."""
    return len({id(stream) for stream in streams if stream is not None and queue_of(stream) is not None})


class Recording:
    """A capture under way, and what it must keep."""

    def __init__(self, actor, stream, device, mode, serial):
        self.actor, self.stream, self.device, self.mode = actor, stream, device, mode
        self.serial = serial
        self.kept = []
        self.broken = False  # by a failure that was injected
        self.foreign = False  # whether its stream was passed as something that cannot be asked later


class Lifetimes(Forks):
    @initialize(
        schedule=st.integers(0, 1 << 16),
        idle=st.sampled_from([32, 32, 1, 0]),
        limit=st.sampled_from([None, None, 8192]),
        sides=st.sampled_from([32, 32, 32, 32, 2, 1, 0]),
    )
    def begin(self, schedule, idle, limit, sides=32):
        self.former = set_default(None), side_streams.MOST_SIDE_SLOTS
        side_streams.MOST_SIDE_SLOTS = sides
        for left in (context.active, deferred.deferred, abandoned(), branch_regions):  # by an example that failed
            left.clear()
        measuring.forget()  # of a function's first call more is ordered
        self.driver = Driver(devices=DEVICES, scheduler="adversarial", seed=schedule, memory=MEMORY, check_order=True)
        self.options = {"idle_limit": idle, "scratch_limit": limit}
        self.actors = [Actor(), Actor()]
        self.streams = []
        self.watches = []  # weak references to all streams that were made
        self.recordings, self.graphs = [], []
        self.gone = []  # what graphs wrote to that nobody replays again
        self.old = []
        self.squeezed = [0] * DEVICES
        self.kept = []
        self.held = []  # what streams had that knew nothing of each other
        self.wrong = []  # what was read, and what should have been
        self.forked = False
        self.fails_next = 0
        self.serial = 0
        self.open_pool()

    def open_pool(self):
        self.pool = HandlePool(driver=self.driver, **self.options)
        set_default(self.pool)  # graph functions in the body of a fork ask for that
        self.states = [ParallelStates(count, pool=self.pool) for count in (1, 2, 3, 6)]
        self.keys = {}  # (actor, identity): device, weak reference to the stream or None. No `id`, which Python gives out again
        self.most_keys, self.most_sides = [0] * DEVICES, [0] * DEVICES

    # Telling threads what to do

    def actor(self, i):
        return self.actors[i % len(self.actors)]

    def stream(self, i):
        """A stream and its device: one of ours, or a default stream."""
        choices = [*self.streams, *((None, device) for device in range(DEVICES)), *(("ptds", d) for d in range(DEVICES))]
        stream, device = choices[i % len(choices)]
        if stream is None:
            stream = self.driver.legacy_stream
        elif stream == "ptds":
            stream = self.driver.per_thread_stream
        return stream, device

    def do(self, actor, function, *expected):
        """Run a function in a thread; an error is one that is expected, or comes of what was injected or is short."""
        injected = Injected("injected")

        def call():
            if self.fails_next:
                self.driver.fail_at(self.fails_next, None, injected, RESTORES)
            try:
                return function()
            finally:
                self.driver.fail_at(0)

        value, error = actor.do(call)
        self.fails_next = 0
        fired = injected.__traceback__ is not None
        injected.__traceback__ = injected.__context__ = injected.__cause__ = None  # lead to itself, and to streams
        if error is None:
            return value, True
        short = any(self.squeezed) or self.options["scratch_limit"] is not None
        if not (isinstance(error, expected or ()) or fired or (short and isinstance(error, MemoryError))):
            raise error
        if fired:
            assert isinstance(error, (Injected, HandlePoolError, Oops, *([MemoryError] if short else []))), repr(error)
            for recording in self.recordings:  # the join of a branch may have failed
                recording.broken = True
        return None, False

    def on(self, actor, device, stream, function, *expected):
        """`do`, with a device and a stream of it current."""
        actor.do(lambda: (self.driver.set_device(device), stream.use()))
        return self.do(actor, function, *expected)

    def recording(self, stream, device):
        """The capture that a stream takes part in."""
        return next((r for r in self.recordings if r.stream is stream and r.device == device), None)

    def asked(self, actor, stream, device, form):
        """Note that a key is asked for, before it is."""
        pointer = stream.ptr
        watch = None
        if pointer in (0, 2):
            identity = (device, pointer)
        elif form in ("current", "object"):
            identity = ("object", getattr(stream, "serial", None))
            watch = weakref.ref(stream)
        else:
            recording = self.recording(stream, device)
            identity = ("pointer", stream.serial) if recording is None else ("capture", recording.serial)
            if recording is not None:
                recording.foreign = True
        key = (actor, identity)
        if key not in self.keys:
            self.keys[key] = device, watch
            self.count_keys()

    def count_keys(self):
        self.keys = {
            key: (device, watch)
            for key, (device, watch) in self.keys.items()
            if key[0] in self.actors and (watch is None or watch() is not None)
        }
        for ordinal in range(DEVICES):
            count = sum(device == ordinal for device, _ in self.keys.values())
            self.most_keys[ordinal] = max(self.most_keys[ordinal], count)

    def watch_sides(self, device):
        """Count the most side slots that were out at a time."""
        slots = self.pool.internals.device(device)
        if "lease" not in vars(slots.sides):
            lease = slots.sides.lease

            def counted():
                slot = lease()
                out = slots.sides.made - len(slots.sides.free)
                self.most_sides[device] = max(self.most_sides[device], out)
                return slot

            slots.sides.lease = counted

    @staticmethod
    def passed(driver, stream, form):
        if form == "current":
            return None
        return {"object": stream, "pointer": stream.ptr, "wrapper": driver.wrap_stream(stream.ptr, None)}[form]

    # Threads and streams

    @precondition(lambda self: len(self.actors) < 4)
    @rule()
    def a_thread_starts(self):
        self.actors.append(Actor())

    @precondition(lambda self: len(self.actors) > 1)
    @rule(i=INDEX)
    def a_thread_ends(self, i):
        actor = self.actor(i)
        if not actor.captures and len(self.actors) > 1:
            self.actors.remove(actor)
            # CuPy's arena of a per-thread stream goes to the next thread of the same identifier, pending work and all.
            for device in range(DEVICES):
                actor.do(lambda device=device: (self.driver.set_device(device), self.wait(self.driver.per_thread_stream)))
            actor.forks.clear() if not actor.forks else actor.do(actor.forks.clear)
            for values in actor.values.values():
                self.forget(values, list(values))
            actor.end()

    @precondition(lambda self: len(self.streams) < 5)
    @rule(device=st.integers(0, DEVICES - 1))
    def a_stream_comes(self, device):
        with self.driver.device(device), self.driver.relaxed():
            stream = self.driver.create_stream()
        stream.serial = self.serial = self.serial + 1
        stream.allocates = False
        self.streams.append((stream, device))
        self.watches.append(weakref.ref(stream))

    @precondition(lambda self: self.streams)
    @rule(i=INDEX)
    def a_stream_goes(self, i):
        stream, device = self.streams[i % len(self.streams)]
        forks = [*(fork for actor in self.actors for fork in actor.forks), *forgotten(self.pool)]
        if self.recording(stream, device) is None and not any(stream_of(fork) is stream for fork in forks):
            self.streams.remove((stream, device))
            if (
                stream.allocates
            ):  # CuPy's arena goes to the next stream at the same pointer; scratch is what must be safe by itself
                self.wait(stream)

    @rule(a=INDEX, s=INDEX, then=INDEX, form=FORMS, nbytes=SIZES)
    def a_thread_follows_another(self, a, s, then, form, nbytes):
        self.a_workspace_grows(a, s, form, nbytes)
        self.a_thread_ends(a)
        self.actors.append(Actor())
        self.a_workspace_grows(len(self.actors) - 1, then, form, nbytes)

    @precondition(lambda self: self.streams)
    @rule(a=INDEX, s=INDEX, form=FORMS, nbytes=SIZES)
    def a_stream_follows_another(self, a, s, form, nbytes):
        """Mostly at the same address."""
        s %= len(self.streams)
        device = self.streams[s][1]
        self.a_workspace_grows(a, s, form, nbytes)
        self.a_stream_goes(s)
        self.a_stream_comes(device)
        self.a_workspace_grows(a, len(self.streams) - 1, form, nbytes)

    # Handles and scratch

    @rule(a=INDEX, s=INDEX, form=FORMS)
    def a_handle_is_taken(self, a, s, form):
        actor, (stream, device) = self.actor(a), self.stream(s)
        self.asked(actor, stream, device, form)

        def take():
            handle = self.pool.get_handle(self.passed(self.driver, stream, form))
            assert handle.device == device
            self.driver.use_handle(handle, int)  # checks that it is bound to the stream that has the pointer now
            assert self.pool.get_handle(self.passed(self.driver, stream, form)) is handle

        self.on(actor, device, stream, take)

    def use_scratch(self, nbytes, form="current", stream=None):
        scratch = self.pool.get_workspace(nbytes, self.passed(self.driver, stream, form))
        pointer = self.driver.current_stream().ptr
        self.driver.enqueue(pointer, lambda memory: memory.fill(1), writes=[scratch], label="into a workspace")
        slot = self.pool.internals.slot(self.passed(self.driver, stream, form))
        if address := slot.reserve(nbytes):
            own = self.driver.scratch_array(address, nbytes, None)
            self.driver.enqueue(pointer, lambda memory: memory.fill(2), writes=[own], label="into a launch's scratch")

    @rule(a=INDEX, s=INDEX, form=FORMS, nbytes=SIZES)
    def a_workspace_grows(self, a, s, form, nbytes):
        actor, (stream, device) = self.actor(a), self.stream(s)
        self.asked(actor, stream, device, form)
        self.on(actor, device, stream, lambda: self.use_scratch(nbytes, form, stream))

    @rule(a=INDEX, s=INDEX)
    def a_handle_is_destroyed_by_its_caller(self, a, s):
        actor, (stream, device) = self.actor(a), self.stream(s)
        self.asked(actor, stream, device, "current")

        def destroy():
            handle = self.pool.get_handle()
            with self.driver.relaxed():
                self.driver.destroy_handle(handle)

        self.on(actor, device, stream, destroy)

    # Captures

    @precondition(lambda self: self.streams and len(self.recordings) < 2)
    @rule(a=INDEX, s=INDEX, mode=MODES)
    def a_capture_begins(self, a, s, mode):
        actor, (stream, device) = self.actor(a), self.streams[s % len(self.streams)]
        forked = any(stream_of(fork) is stream for other in self.actors for fork in other.forks)
        if forked or self.recording(stream, device) is not None:
            return
        if (
            stream.allocates
        ):  # the graph gets blocks of the stream's arena, and may be replayed on a stream that waits for nothing
            self.wait(stream)
        self.on(actor, device, stream, lambda: stream.begin_capture(mode))
        if stream.is_capturing():
            self.serial += 1
            self.recordings.append(Recording(actor, stream, device, mode, self.serial))
            actor.captures += 1

    @precondition(lambda self: self.recordings)
    @rule(i=INDEX)
    def a_capture_ends(self, i):
        recording = self.recordings[i % len(self.recordings)]
        actor = recording.actor
        if any(stream_of(fork) is recording.stream for other in self.actors for fork in other.forks):
            return

        def end():
            graph = recording.stream.end_capture()
            graph.kept = recording.kept
            return graph

        self.recordings.remove(recording)
        actor.captures -= 1
        graph, done = self.on(actor, recording.device, recording.stream, end, *([RuntimeError] if recording.broken else []))
        if done:
            self.graphs.append((graph, recording.device))

    @precondition(lambda self: self.graphs)
    @rule(a=INDEX, s=INDEX, i=INDEX)
    def a_graph_is_replayed(self, a, s, i):
        graph, device = self.graphs[i % len(self.graphs)]
        stream, other = self.stream(s)
        if other == device and self.recording(stream, device) is None:
            self.on(self.actor(a), device, stream, lambda: graph.launch(stream))

    # Bad luck

    @rule(device=st.integers(0, DEVICES - 1), left=st.sampled_from([0, 300, 2048, 6000]))
    def memory_runs_short(self, device, left):
        self.squeezed[device] += squeeze(self.driver, device, left)

    @precondition(lambda self: any(self.squeezed))
    @rule()
    def memory_is_back(self):
        for device, taken in enumerate(self.squeezed):
            take_memory(self.driver, device, -taken)
        self.squeezed = [0] * DEVICES

    @rule(k=st.integers(1, 60))
    def a_driver_call_will_fail(self, k):
        self.fails_next = k

    # What empties the pool is one rule, so that most of the time there is something in it.
    @rule(a=INDEX, what=st.sampled_from(["trim", "trim captured", "fork", "close"]))
    def all_changes(self, a, what):
        actor = self.actor(a)
        if what == "trim":
            self.do(actor, self.pool.trim)
        elif what == "trim captured" and not any(recording.foreign for recording in self.recordings):
            # CuPy's arena would pass it on while a replay is pending on another stream; scratch is what must be safe by itself.
            self.gone += [graph.kept for graph, _ in self.graphs]
            self.graphs.clear()
            self.do(actor, lambda: self.pool.trim(captured=True))
        elif what == "fork" and hasattr(os, "fork") and not self.forked:
            self.the_process_forks()
        elif what == "close" and not any(actor.forks for actor in self.actors):
            self.the_pool_is_closed_and_another_made(actor)

    @rule(a=INDEX, s=INDEX)
    def the_host_waits(self, a, s):
        stream, device = self.stream(s)
        if self.recording(stream, device) is None:
            self.on(self.actor(a), device, stream, lambda: self.wait(stream))

    def the_pool_is_closed_and_another_made(self, actor):
        pool = self.pool
        self.do(actor, pool.close)
        _, error = actor.do(pool.get_handle)
        assert isinstance(error, PoolClosedError)
        self.do(actor, pool.close)
        deferred.deferred.run(1000)
        self.closed(pool)
        self.open_pool()

    def closed(self, pool):
        pool.close()
        for device in pool.internals.devices.values():  # what captures were given stays for their graphs
            for block in [block for blocks in device.scratch.captured.values() for block in blocks]:
                del scratch_of(self.driver)[device.device][block.pointer]
                device.scratch.nbytes -= block.nbytes
            device.scratch.captured.clear()
        self.old.append(pool)
        assert all(stream_of(fork).is_capturing() for old in self.old for fork in forgotten(old))  # or it would have been joined
        held = [slot for old in self.old for slot in waiting(old)]
        scratch = sum(slot.scratch_bytes for slot in held)
        expected = {"handles": len(held), "events": 2 * len(held) + events_of_tasks(), "scratch_bytes": scratch}
        alive = self.driver.alive()
        assert {name: alive[name] for name in expected} == expected, "something survives close"

    def the_process_forks(self):
        self.forked = True
        child = os.fork()
        if child == 0:
            code = 1
            try:
                self.driver.fail_at(0)
                self.driver.calls.clear()
                try:
                    self.pool.get_handle()
                except ForkedProcessError:
                    self.pool.close()
                    code = 0 if not self.driver.calls.keys() & {"destroy_handle", "free", "destroy_event"} else 2
            finally:
                leave(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    # What holds after every step

    @invariant()
    def all_is_accounted_for(self):
        self.count_keys()
        forks = [fork for actor in self.actors for fork in actor.forks]
        accounts = Accounts(self.pool, forks, self.old)
        accounts.check()
        assert not self.driver.order.found
        assert not self.wrong
        for recording in self.recordings:
            capture = queue_of(recording.stream).capture
            assert recording.broken or not capture.spoiled, capture.spoiled
        for device in accounts.devices:
            handles = sum(handle.device == device.device for handle in accounts.handles()) - (device.handles.builder is not None)
            most = self.most_keys[device.device] + self.most_sides[device.device]
            assert handles <= most, f"{handles} handles on device {device.device}, and at most {most} were in use at once"
        streams = [watch() for watch in self.watches] + [slot.side_stream for slot in accounts.sides + accounts.late]
        # An inner fork's is a side stream that may have been given back.
        streams += [stream_of(fork) for fork in forgotten(self.pool)]
        streams += [task.stream for task in left_tasks()]
        count = self.driver.alive()["streams"]
        if count != count_streams(streams):  # to look for books is slow
            streams += streams_of_books(self.driver)
        assert count == count_streams(streams)

    def teardown(self):
        if not hasattr(self, "driver"):
            return
        former, side_streams.MOST_SIDE_SLOTS = self.former
        set_default(former)
        for actor in self.actors:
            actor.later.clear()
            while actor.forks:
                fork = actor.forks.pop()
                actor.do(lambda fork=fork: fork.__exit__(None, None, None))
                del fork
        for recording in self.recordings:
            recording.actor.do(recording.stream.end_capture)
        for actor in self.actors:
            actor.end()
        deferred.deferred.run(1000)
        self.closed(self.pool)
        assert self.driver.alive()["handles"] == 0
        assert not context.active
        finish_queues(self.driver, "the end of an example")
        assert not self.wrong
        assert not self.driver.order.found
        abandoned().clear()
