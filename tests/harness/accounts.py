"""What a pool must be able to account for at any time between two calls, on the host driver."""

from collections import Counter

from harness.insides import leases_of, queue_of, scratch_of, streams_of, take_memory

from handlepool.drivers.streams import LEGACY_STREAM, PER_THREAD_STREAM
from handlepool.order import books
from handlepool.pool import deferred
from handlepool.pool.context import active, unchecked
from handlepool.regions.future import Task
from handlepool.regions.join import Join

RESTORES = {"set_device", "swap_allocator", "use_stream", "pop_stream"}
"""Calls that make current what was current before; they fail in no context that lives, and nothing could be done then."""


class CostlyDriver:
    """Mixed into a host driver: a handle takes device memory, and with too little of it cuDNN says "not initialized"."""

    HANDLE_BYTES = 4096

    def create_handle(self):
        memory = self._memory.current
        if not memory._reserve(self.HANDLE_BYTES):
            self._note("create_handle")
            raise RuntimeError("cudnnHandle Create failed: CUDNN_STATUS_NOT_INITIALIZED")
        try:
            return super().create_handle()
        except BaseException:
            with memory._lock:
                memory.used -= self.HANDLE_BYTES
            raise

    def destroy_handle(self, handle):
        alive = handle.backend_handle is not None
        super().destroy_handle(handle)
        if alive:
            take_memory(self, handle.device, -self.HANDLE_BYTES)


def forgotten(pool):
    """Return the deferred joins of a pool's forks, which no thread left."""
    joins = [join for step in list(deferred.deferred) if isinstance(join := step.__self__, Join)]
    return [join for join in joins if join.pool is pool.internals]


def books_of(driver):
    """The books of a driver's forks that are open, in whatever thread."""
    return [order for order in active if isinstance(order, books.DataOrder) and unchecked(order.driver) is unchecked(driver)]


def left_tasks():
    """Tasks whose executors are gone, and whose ends the GPU has not passed."""
    return [step.__self__ for step in list(deferred.deferred) if isinstance(step.__self__, Task)]


def events_of_tasks():
    """How many events those have."""
    return sum(event is not None for task in left_tasks() for event in (task._start, task._end))


def streams_of_books(driver):
    """Streams that open books keep, since they may record on them."""
    return [track.stream for order in books_of(driver) for track in order.tracks.values()]


def waiting(pool):
    """Side slots that a closed pool still has: they, or the stream that waits for them, take part in a capture under way."""
    held = [slot for device in pool.internals.devices.values() for slot in device.sides.capturing]
    return held + [slot for join in forgotten(pool) for slot in join.leases.slots]


def blocks_of(slot):
    """Scratch of a slot: for eager work, and for the capture that it serves."""
    eager = [workspace.block for workspace in slot._eager or (slot._launching, slot._handed)]
    captured = [slot._launching.block, slot._handed.block] if slot._eager else []
    return [block for block in eager if block.nbytes], [block for block in captured if block.nbytes]


class Accounts:
    """Every slot of a pool, wherever it is.

    ``forks`` are those that are open; ``closed`` are pools of the same driver that were closed, some with captures under way,
    or with something that could not be destroyed yet.
    """

    def __init__(self, pool, forks=(), closed=()):
        self.closed = [device for other in closed for device in other.internals.devices.values()]
        self.late = [slot for other in closed for slot in waiting(other)]
        self.pool = pool
        self.live = list(pool.internals._live._slots)
        self.devices = list(pool.internals.devices.values())
        leases = [*map(leases_of, forks), *(join.leases for join in forgotten(pool))]
        self.leased = [slot for each in leases if each.pool is pool.internals for slot in each.slots]
        self.idle = [slot for device in self.devices for slot in device.idle]
        self.free = [slot for device in self.devices for slot in device.sides.free]
        self.held = [slot for device in self.devices for slot in device.sides.capturing]
        self.sides = [*self.free, *self.held, *self.leased]
        self.slots = [*self.live, *self.idle, *self.sides]
        self.doomed = [handle for device in self.devices for handle in device.handles.doomed]
        self.builders = [device.handles.builder for device in self.devices if device.handles.builder is not None]

    def check(self):
        """Raise for what is not in order."""
        self.check_owners()
        self.check_bindings()
        self.check_counts()
        self.check_scratch()

    def handles(self):
        """Handles that are not destroyed."""
        return [
            handle
            for handle in [slot.handle for slot in self.slots] + self.builders + self.doomed
            if handle.backend_handle is not None
        ]

    def check_owners(self):
        """One owner a handle, and nothing lost: what the driver made and nobody destroyed is somewhere, once."""
        known = Counter(slot.handle for slot in self.slots) + Counter(self.builders) + Counter(self.doomed)
        assert set(known.values()) <= {1}, f"handles with two owners: {[h for h, n in known.items() if n > 1]}"
        assert len({id(slot) for slot in self.slots}) == len(self.slots)
        assert {slot for device in self.devices for slot in device.slots} == set(self.slots), "lost or unknown slots"
        alive = self.pool.driver._handles_alive
        late = [slot.handle for slot in self.late] + [handle for device in self.closed for handle in device.handles.doomed]
        there = {*self.handles(), *(handle for handle in late if handle.backend_handle is not None)}
        assert alive == there, f"lost or unknown handles: {alive ^ there}"

    def check_bindings(self):
        """Who asks for the handle of a live key gets one that is truly bound to that very stream."""
        for slot in self.live:
            stream = slot.watch() if slot.watch is not None else None
            if slot.owner is None or slot.handle.stream is not slot.pointer or stream is None:
                continue  # a hit would fail, and the handle be bound anew
            if slot.pointer not in (LEGACY_STREAM, PER_THREAD_STREAM):
                assert slot.handle.queue is queue_of(stream), (slot, slot.handle.queue, stream)
        for slot in self.sides:
            if slot.handle.stream is not None:
                assert slot.handle.queue is queue_of(slot.side_stream)

    def check_counts(self):
        """The statistics tell what is so, and created = live + idle + leased + captured + building + destroyed."""
        stats = self.pool.stats()
        expected = {
            "handles_live": len(self.live),
            "handles_idle": len(self.idle) + len(self.free) + len(self.doomed),
            "handles_leased": len(self.leased),
            "handles_captured": len(self.held),
            "handles_building": len(self.builders),
        }
        assert {name: stats.get(name, 0) for name in expected} == expected
        assert stats.get("slots_lost", 0) == 0
        assert stats.get("handles_created", 0) == sum(expected.values()) + stats.get("handles_destroyed", 0), stats
        events = sum(event is not None for slot in self.sides + self.late for event in (slot.start_event, slot.end_event))
        events += sum(event is not None for device in self.devices + self.closed for event, _ in device.scratch.deferred_blocks)
        events += sum(len(device.edges.free) for device in self.devices + self.closed)
        events += sum(len(track.marks) for order in books_of(self.pool.driver) for track in order.tracks.values())
        events += events_of_tasks()
        assert self.pool.driver.alive()["events"] == events
        assert all(len(device.idle) <= device.idle_limit for device in self.devices)

    def check_scratch(self):
        """No block belongs to two slots; every block that the driver gave is somewhere; the counts and limits are kept."""
        driver = self.pool.driver
        slots = Counter()
        captured = set()
        under_way = {capture.id for capture in streams_of(driver).captures.active}
        for slot in self.slots + self.late:
            eager, under_capture = blocks_of(slot)
            slots.update(block.pointer for block in eager)
            if slot._capture in under_way:
                captured.update(block.pointer for block in under_capture)
        assert set(slots.values()) <= {1}, "scratch of two slots"
        retired = [block.pointer for d in self.devices + self.closed for _, block in d.scratch.deferred_blocks if block.nbytes]
        assert not slots.keys() & set(retired)
        captures = [blocks for d in self.devices for blocks in (*d.scratch.captured.values(), *d.scratch.recorded.values())]
        given = {block.pointer for blocks in captures for block in blocks}
        assert self.late or captured <= given
        assert not slots.keys() & given, "scratch of a capture serves eager work, too"
        known = [*slots, *retired, *given]
        there = {pointer for scratch in scratch_of(driver) for pointer in scratch}
        assert len(known) == len(set(known))
        assert set(known) == there, f"lost or unknown scratch: {set(known) ^ there}"
        assert sum(device.scratch.nbytes for device in self.devices + self.closed) == driver.alive()["scratch_bytes"]
        for device in self.devices:
            assert device.scratch.limit is None or device.scratch.nbytes <= device.scratch.limit
