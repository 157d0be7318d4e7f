"""The first launches of a region: what is looked up nowhere, and what has to be."""

import itertools
import random
from collections import defaultdict

import numpy as np
import pytest

from handlepool import HandlePool
from handlepool.drivers.host.driver import HostDriver
from handlepool.order.books import DataOrder
from handlepool.order.recent import Recent
from handlepool.order.track import Track
from handlepool.order.uses import Operands
from handlepool.tensors.layout import Layout

SIZE = 64
BYTES = 4 * SIZE


def operands(inputs, fresh=False, outputs=1, strides=(4,)):
    layout = Layout((SIZE,), strides, np.dtype(np.float32))
    return Operands([layout] * (inputs + outputs), inputs, fresh)


def at(*numbers):
    """Addresses of arrays that lie one behind the other."""
    return tuple((1 << 40) + int(BYTES * number) for number in numbers)


class Block:
    """What a pool gave out: two arrays lie in each."""


BLOCKS = defaultdict(Block)


def blocks(addresses):
    return tuple([BLOCKS[address // (2 * BYTES)] for address in addresses])


def given(recent, track, addresses, spec):
    needs = recent.look_up(addresses, spec, blocks(addresses))
    assert needs is not None
    recent.note(addresses, spec, blocks(addresses), track, track.next_call())
    return needs


def test_g17_what_reads_an_output_waits_for_it_and_what_reads_others_for_nothing():
    recent, one, two = Recent(Block), Track(1), Track(2)
    assert given(recent, one, at(0, 4), operands(1)) == {}
    assert given(recent, two, at(0, 6), operands(1)) == {}
    assert given(recent, one, at(1, 8), operands(1)) == {}
    assert given(recent, two, at(4, 6, 10), operands(2)) == {one: 1, two: 1}
    assert given(recent, two, at(8, 4, 12), operands(2)) == {one: 2}
    assert [call for *_, call in recent] == [1, 1, 2, 2, 3]


@pytest.mark.parametrize(
    ("addresses", "spec", "why"),
    [
        (at(3, 5), operands(1), "writes what was written"),
        (at(3, 0), operands(1), "writes what was read"),
        (at(3, 1), operands(1), "writes beside what was read"),
        (at(5.5, 8), operands(1), "reads a part of an output, and more"),
        (at(4.5, 8), operands(1), "reads what ends in an output"),
        (at(6, 8), operands(1), "reads beside an output"),
        (at(3, 6.5), operands(1), "writes beside an output"),
        (at(3, 8), operands(1, strides=(8,)), "has gaps"),
        (at(5, 9), Operands([Layout((SIZE // 2,), (4,), np.dtype(np.float32))] * 2, 1, True), "reads half an output"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_g17_what_comes_near_others_is_looked_up(addresses, spec, why):
    recent = Recent(Block)
    given(recent, Track(1), at(0, 5), operands(1))
    given(recent, Track(1), at(2, 7), operands(1))
    assert recent.look_up(addresses, spec, blocks(addresses)) is None


@pytest.mark.parametrize("place", [0, 1, 2])
def test_g17_memory_that_is_no_block_of_the_pool_is_looked_up(place):
    recent = Recent(Block)
    given(recent, Track(1), at(0, 5), operands(1))
    addresses = at(8, 10, 12)
    mixed = [*blocks(addresses)]
    assert recent.look_up(addresses, operands(2), mixed) == {}
    mixed[place] = object()
    assert Recent(Block).look_up(addresses, operands(2), mixed) is None


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("fresh", [True, False])
def test_g17_memory_that_is_no_block_of_the_pool_is_looked_up_also_among_several_outputs(place, fresh):
    addresses, spec = at(8, 10, 12), operands(1, outputs=2, fresh=fresh)
    mixed = [*blocks(addresses)]
    assert Recent(Block).look_up(addresses, spec, mixed) == {}
    mixed[place] = object()
    assert Recent(Block).look_up(addresses, spec, mixed) is None


def dense(*sizes):
    return [Layout((size,), (4,), np.dtype(np.float32)) for size in sizes]


@pytest.mark.parametrize(("number", "size"), [(4, SIZE), (6, SIZE // 2), (8, 2 * SIZE)])
def test_g17_each_output_is_known_by_its_own_bytes_and_looked_up_by_any_other(number, size):
    for read in (SIZE // 2, SIZE, 2 * SIZE):
        recent, track = Recent(Block), Track(1)
        given(recent, track, at(0, 4, 6), Operands(dense(SIZE, SIZE, SIZE // 2), 1, False))
        given(recent, track, at(2, 8), Operands(dense(SIZE, 2 * SIZE), 1, False))
        given(recent, track, at(10, 12), Operands(dense(2 * SIZE, SIZE), 1, False))
        addresses, spec = at(number, 20), Operands(dense(read, SIZE), 1, True)
        needs = recent.look_up(addresses, spec, blocks(addresses))
        assert needs == ({track: 1 + (number == 8)} if read == size else None)
        addresses = at(12, 20)
        assert recent.look_up(addresses, spec, blocks(addresses)) == ({track: 3} if read == SIZE else None)


def test_g17_new_outputs_may_lie_anywhere():
    recent, track = Recent(Block), Track(1)
    given(recent, track, at(0, 9), operands(1))
    assert given(recent, track, at(0, 4), operands(1, fresh=True)) == {}
    assert given(recent, track, at(4, 3), operands(1, fresh=True)) == {track: 2}


@pytest.mark.parametrize("seed", range(20))
def test_g17_what_is_not_looked_up_needs_what_each_pair_of_calls_says(seed):
    """Random launches, whole arrays and halves: the needs are the last conflict on each stream, and none is missing."""
    rng = random.Random(seed)
    recent, tracks = Recent(Block), [Track(1), Track(2), Track(3)]
    half = Operands([Layout((SIZE // 2,), (4,), np.dtype(np.float32))] * 2, 1, False)
    calls, taken = [], 0
    for _ in range(200):
        spec = rng.choice([operands(1), operands(2), operands(1, fresh=True), operands(1, outputs=2), half])
        count = len(spec.layouts)
        known = [start for *_, written in calls for start, _ in written] or [at(0)[0]]
        addresses = [rng.choice([rng.choice(known), at(rng.randrange(8))[0]]) for _ in range(spec.inputs)]
        addresses += at(*[rng.choice([len(calls) * 2 + 20, rng.randrange(60)]) + each for each in range(count - spec.inputs)])
        addresses = [start + rng.choice([0] * 9 + [BYTES // 2]) * (start // BYTES % 2 == 0) for start in addresses]
        if spec.fresh:
            addresses[-1] = at(1000 + len(calls))[0]
        reaches = [layout.reach for layout in spec.layouts]
        spans = [(start, start + reach) for start, reach in zip(addresses, reaches, strict=True)]
        reads, writes = spans[: spec.inputs], spans[spec.inputs :]
        if any(meets(one, other) for one, other in itertools.combinations(writes, 2)):
            continue
        expected = {}
        for track, call, read, written in calls:
            near = [(reads, written), (writes, written), (writes, read)]
            if any(meets(one, other) for mine, theirs in near for one in mine for other in theirs):
                expected[track] = max(call, expected.get(track, 0))
        needs = recent.look_up(tuple(addresses), spec, blocks(addresses))
        if needs is None:  # of such a region everything is looked up from now on; here it goes on without that launch
            continue
        taken += 1
        assert needs == expected
        track = rng.choice(tracks)
        recent.note(tuple(addresses), spec, blocks(addresses), track, track.next_call())
        calls.append((track, track.count, reads, writes))
    assert taken > 10


def meets(one, other):
    return one[0] < other[1] and other[0] < one[1]


# Beside books that look everything up

PLACES = 12
"""Blocks that are given; each holds two arrays of `SIZE` elements."""
FORMS = [
    operands(1),
    operands(2),
    operands(3),
    operands(1, outputs=2),
    operands(2, fresh=True),
    operands(1, fresh=True, outputs=2),
    Operands([Layout((SIZE // 2,), (4,), np.dtype(np.float32))] * 2, 1, False),
    Operands([Layout((SIZE // 2,), (4,), np.dtype(np.float32))] * 2, 1, True),
    Operands([Layout((2 * SIZE,), (4,), np.dtype(np.float32)), Layout((SIZE,), (4,), np.dtype(np.float32))], 1, False),
    Operands([Layout((SIZE // 2,), (8,), np.dtype(np.float32)), Layout((SIZE,), (4,), np.dtype(np.float32))], 1, True),
]


class Launches:
    """Random launches over arrays that overlap, and new ones; few of them need to be looked up at first."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.daring = self.rng.choice([0.0, 0.02, 0.1, 0.5])  # how often something is given to be overwritten that may be known
        self.dense = self.rng.random() < 0.8
        self.known = [at(place * 2)[0] for place in range(PLACES)]
        self.next = 2 * PLACES

    def one(self):
        """The addresses of a launch, and what it reads and writes of these. No array goes over the end of its block."""
        rng, daring = self.rng, self.rng.random() < self.daring
        spec = rng.choice(FORMS[:-1] if self.dense else FORMS)
        reads = [rng.choice(self.known) for _ in range(spec.inputs)]
        if daring:
            reads[0] += rng.choice([-1, 1]) * BYTES // 2
        longest = max(layout.reach for layout in spec.layouts)
        reads = [start - max(0, start % (2 * BYTES) + longest - 2 * BYTES) for start in reads]
        outputs = len(spec.layouts) - spec.inputs
        if spec.fresh or not daring:
            writes = [self.new(beside=spec.fresh) for _ in range(outputs)]
        else:
            writes = at(*[2 * rng.randrange(PLACES) + place for place in range(outputs)])
        return (*reads, *writes), spec

    def new(self, beside):
        """The address of a new array, in a block of its own or, perhaps, in the last one."""
        self.next += 1 if self.next % 2 == 0 and beside and self.rng.random() < 0.7 else 2 - self.next % 2
        (start,) = at(self.next)
        self.known.append(start)
        return start


class Side:
    """Books with tracks of their own, and whether the first launches are looked up in them, too."""

    def __init__(self, pool, recent):
        self.tracks = [Track(pointer) for pointer in range(3)]
        self.order = DataOrder(pool.internals, 0, self.tracks[0])
        self.order.recent = Recent(Block) if recent else None
        self.quick = 0

    def launch(self, track, addresses, spec):
        """Give a launch to a stream, as a fork does; by stream, the call that it waits for."""
        order, track = self.order, self.tracks[track]
        recent = order.recent
        needs = None if recent is None else recent.look_up(addresses, spec, blocks(addresses))
        if needs is None:
            reads, writes, needs = order.look_up_launch(addresses, spec)
            order.note_launch(track, track.next_call(), reads, writes, addresses, spec)
        else:
            self.quick += 1
            recent.note(addresses, spec, blocks(addresses), track, track.next_call())
        return {each.pointer: call for each, call in needs.items()}


def beside_each_other(pool, seed, count):
    """Give launches to books of both kinds; how many were met quickly, and the first that waits for something else."""
    quick, slow, launches = Side(pool, True), Side(pool, False), Launches(seed)
    for number in range(count):
        addresses, spec = launches.one()
        track = launches.rng.randrange(3)
        found, expected = (side.launch(track, addresses, spec) for side in (quick, slow))
        if found != expected:
            return quick.quick, f"launch {number} waits for {found} in the place of {expected}"
    return quick.quick, ""


@pytest.fixture(scope="module")
def pool():
    with HandlePool(driver=HostDriver()) as pool:
        yield pool


def test_g17_random_launches_wait_for_what_they_wait_for_in_books_that_look_everything_up(pool):
    quick = 0
    for seed in range(400):
        met, fault = beside_each_other(pool, seed, 40)
        assert not fault, f"seed {seed}: {fault}"
        quick += met
    assert quick > 1500
