"""Parts of the package that controls take away, each with its stand-in.

A control shows that a test fails where a guarantee is not kept. The fixture ``without`` puts the stand-ins in place.
"""

from functools import partialmethod

from handlepool import ParallelStates
from handlepool.pool import context
from handlepool.pool.slot import Slot
from handlepool.recording.program import Program

_release, _follow = Slot.release_unless_busy, Program._follow


def _released_although_busy(slot, closed):
    slot.busy = False
    return _release(slot, closed)


def _followed_at_once(program, stream):
    wait, program._driver.wait_event = program._driver.wait_event, lambda *_: None
    try:
        _follow(program, stream)
    finally:
        program._driver.wait_event = wait


CONTROLS = {
    "a look at launches under way": {"handlepool.pool.slot.Slot.release_unless_busy": _released_although_busy},
    "the abandoning of regions": {"handlepool.regions.memory.Region.abandon": lambda region: None},
    "all calls so far": {"handlepool.order.books.DataOrder.all_calls": lambda order: {}},
    "barriers": {
        "handlepool.order.books.DataOrder.behind_barrier": lambda order, needs: needs,
        "handlepool.order.books.DataOrder.all_calls": lambda order: {},
    },
    "the codes of functions": {
        "handlepool.order.plain_calls._codes": lambda values: (),
        # A write that is found too late would otherwise be an error.
        "handlepool.order.books.DataOrder.waits_for_all": lambda *_: True,
    },
    "the errors of late writes": {"handlepool.order.books.DataOrder.waits_for_all": lambda *_: True},
    "the needs of nodes": {"handlepool.recording.lanes.needs_of": lambda reads, writes: {}},
    "the last users of memory": {"handlepool.recording.lanes.Lanes.may_have": lambda lanes, start, stop: True},
    "held tensors": {"handlepool.recording.held.HeldTensors.read": lambda *call: None},
    "the order of forks": {"handlepool.ParallelStates.fork": partialmethod(ParallelStates.fork, ordered=False)},
    "waits for the last replay": {"handlepool.recording.program.Program._follow": _followed_at_once},
    "owners of programs": {"handlepool.recording.program.Program._check_owner": lambda program: None},
    "restoring after a tuning": {"handlepool.recording.outside.Outside.restore": lambda outside: None},
    "exact dependencies": {"handlepool.drivers.host.driver.HostDriver.dependencies": lambda driver, pointer: None},
    "torch's forgotten workspaces": {"handlepool.foreign.torch.RecordingPool._forget_workspaces": lambda pool: None},
    "known items of spreads": {"handlepool.spreading.worker.DeviceWorker._learn": lambda *_: None},
    "claims of instances": {
        "handlepool.recording.instances.Instance.claimable": lambda instance, stream: True,
        "handlepool.recording.instances.Instance.claim": lambda instance, stream: True,
        "handlepool.recording.variants.Variant.grow": lambda *_: None,
    },
    "arrays of attributes": {"handlepool.order.reached.attribute_leaves": lambda _: []},
    "arrays of tokens": {"handlepool.order.operation.pieces_of": lambda driver, *values, calls=False: []},
    "writes of failed calls": {"handlepool.order.plain_calls.PlainCall.failed": lambda *_: ([], [])},
    "checked drivers of one device": {"handlepool.regions.memory.unchecked": lambda driver: driver},
    "users of returned memory": {"handlepool.recording.lanes.Lanes._users_of": lambda *_: []},
    "kept values": {
        "handlepool.recording.capture.KeptValues.add": lambda kept, *values: None,
        # The inputs of a program would keep a function that `map` was given.
        "handlepool.recording.update._fixed": lambda value: None if callable(value) else value,
    },
    "copies of written arguments": {"handlepool.recording.variants.written_places": lambda *_: []},
    "guards": {"handlepool.recording.guards.Guards._compiled": lambda guards: lambda: True},
    "scratch of programs": {"handlepool.pool.workspace.DeviceScratch.keep_recorded": lambda scratch, capture: None},
    "copies of constants": {"handlepool.recording.host_copies.HostCopies._copied": lambda copies, constant: constant},
    "comparison by memory": {"handlepool.recording.rehearsal.share": lambda *_: False},
    "copies of inputs": {"handlepool.recording.update.Inputs.copied": lambda *_: None},
    "deferred ends of programs": {"handlepool.recording.program.defer": lambda step: None},
    "the reuse of memory on a GPU": {
        "handlepool.drivers.cuda.capture.CudaRecordingMemory.set_reuse_policy": lambda memory, *_: False
    },
    "followed readers": {"handlepool.recording.held.HeldTensors.follow": lambda *call: None},
    "new streams of side slots": {"handlepool.pool.side_streams.SideSlots.replace_stream": lambda sides, slot: None},
    "the order with torch's stream": {"handlepool.recording.program_call.in_order": lambda pool, device, pointer, step: step()},
    "streams of regions": {
        "handlepool.regions.fork.inherited": lambda *_: context.thread.region,
        "handlepool.regions.memory._allocator_of": lambda _: context.thread.region.allocator,
    },
    "inherited regions": {"handlepool.regions.fork.inherited": lambda *_: None},
    "relations of arrays": {
        "handlepool.spreading.worker.copier": lambda driver, value, copy: copy,
        "handlepool.spreading.worker.relation": lambda driver, value: (),
    },
}
