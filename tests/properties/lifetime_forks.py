"""The forks of the state machine: chains of branches over a few arrays, which NumPy computes as well."""

import contextlib

import numpy as np
from harness.graphs import double, plus
from harness.insides import is_ordered, mark_of, order_of, ordinal_of, stream_of
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

import handlepool
from handlepool import CaptureError, ParallelStateExecutor

INDEX = st.integers(0, 7)
SIZES = st.sampled_from([0, 1, 256, 300, 1000, 5000])
MOSTLY = st.sampled_from([True, True, True, True, False])
TIMEOUT = 60


class Oops(Exception):
    """What a branch raises."""


class Value:
    """An array, and what NumPy says is in it.

    Attributes
    ----------
    expected : ndarray or None
        None once a step over it has failed.
    streams : set of int
        The callers' streams of the forks whose branches had it.
    forks : set of object
        The marks of those of them that are open.
    wrote, read : int or None, set of int
        Whose work wrote it and read it that no books have: of one caller's stream, and of any.
    """

    def __init__(self, array, expected, wrote=None):
        self.array, self.expected, self.wrote = array, expected, wrote
        self.streams, self.forks, self.read = set(), set(), set()

    def set(self, expected):
        """Note what was written, or that it is not known."""
        self.expected = expected


def computed(function, *values):
    """What NumPy makes of values; None where one of them is not known."""
    known = [value.expected for value in values]
    return None if any(each is None for each in known) else function(*known)


# What branches run. The machine is among the arguments of some: nobody looks for arrays in it.


def plain(machine, nbytes, x):
    """Return new arrays: x + 1, and twice that by a graph function."""
    driver = machine.driver
    driver.use_handle(machine.pool.get_handle(), int)
    machine.use_scratch(nbytes)
    y = machine.array(0)
    pointer = driver.current_stream().ptr
    driver.enqueue(pointer, lambda out, x: np.add(x, 1, out=out), writes=[y], reads=[x], label="a branch's work")
    return [y, double(y, out=machine.out())]


def add_to(y, x):
    y += x


@handlepool.operation(mutates="y")
def accumulate(y, x):
    y += x


@handlepool.operation(mutates="y")
def accumulate_and_raise(y, x):
    y += x
    raise Oops


def task(machine, x):
    driver, y = machine.driver, machine.array(0)
    pointer = driver.current_stream().ptr
    driver.enqueue(pointer, lambda out, x: np.add(x, 3, out=out), writes=[y], reads=[x], label="a task's work")
    return y


class Body:
    """The body of a fork, which is given steps: what its branches have is ordered by the package, and by nobody else.

    Parameters
    ----------
    machine : Forks
    fork : Fork
    values : list of Value
        What earlier branches made, of which its own take some. What they make is added.
    rest : list
        What a fork inside of it does.
    hidden : collection of Value
        What the function that it stands in was not given: branches and graph functions may have it, and plain code may not.
    key : int
        The outermost caller's stream.
    """

    def __init__(self, machine, fork, values, rest=(), hidden=(), key=0):
        self.machine, self.fork, self.values, self.rest, self.hidden, self.key = machine, fork, values, rest, hidden, key
        self.ordered = is_ordered(fork)
        self.made = []

    def step(self, kind, i, j, nbytes):
        getattr(self, kind)(i, j, nbytes)

    # Values

    def fresh(self, number=1):
        value = self.add(self.machine.array(number), np.full(16, float(number)))
        value.wrote = self.key
        return value

    def usable(self, *, written):
        known = self.values if self.ordered else []  # without order branches share nothing that one of them writes
        known = [value for value in known if value.wrote in (None, self.key)]
        return [value for value in known if not written or value.read <= {self.key}]

    def pick(self, i, *, written=False):
        """A value, the newest for 0."""
        known = self.usable(written=written)
        value = known[-1 - i % len(known)] if known and i < 7 else self.fresh(i)
        value.streams.add(self.key)
        value.forks.add(mark_of(self.fork))
        return value

    def add(self, array, expected):
        value = Value(array, expected)
        value.streams.add(self.key)
        value.forks.add(mark_of(self.fork))
        self.made.append(value)
        if self.ordered:
            self.values.append(value)
        return value

    # Graph functions

    def graph(self, i, j, nbytes):
        x = self.pick(i)
        self.add(self.fork.run(double, x.array, out=self.machine.out()), computed(lambda x: 2 * x, x))

    def chain(self, i, j, nbytes):
        """What anybody writes first."""
        x, run, out = self.pick(i), self.fork.run, self.machine.out
        if self.ordered:
            self.add(run(double, run(double, x.array, out=out()), out=out()), computed(lambda x: 4 * x, x))

    def two(self, i, j, nbytes):
        x, y = self.pick(i), self.pick(j)
        self.add(self.fork.run(plus, x.array, y.array, out=self.machine.out()), computed(np.add, x, y))

    def half(self, i, j, nbytes):
        """From the first half of one into the second half of another, or of the same."""
        x, y = self.pick(i), self.pick(j, written=True)
        self.fork.run(double, x.array[:8], out=y.array[8:])
        y.set(computed(lambda x, y: np.concatenate([y[:8], 2 * x[:8]]), x, y))

    def together(self, i, j, nbytes):
        x, y = self.pick(i), self.pick(j)
        outs = [self.machine.out(), self.machine.out()]
        made = self.fork.map(double, [x.array, y.array], **({} if outs[0] is None else {"out": outs}))
        for array, value in zip(made, (x, y), strict=True):
            self.add(array, computed(lambda x: 2 * x, value))

    def together_in_place(self, i, j, nbytes):
        """A map whose second call may read what its first one writes."""
        x, y, z = self.pick(i), self.pick(j, written=True), self.fresh()
        if x is not y and self.ordered:
            self.fork.map(double, [x.array, y.array], out=[y.array, z.array])
            y.set(computed(lambda x: 2 * x, x))
            z.set(computed(lambda y: 2 * y, y))

    def call(self, i, j, nbytes):
        """A graph function and an operation in the body itself."""
        x, y = self.pick(i), self.pick(j, written=True)
        array = double(x.array, out=self.machine.out())
        self.add(array, computed(lambda x: 2 * x, x)).wrote = self.key
        accumulate(y.array, x.array)
        y.set(computed(np.add, y, x))
        for value in (x, y):
            value.read.add(self.key)
        y.wrote = self.key

    # Python functions

    def plain(self, i, j, nbytes):
        x = self.pick(i)
        y, z = self.fork.run(plain, self.machine, nbytes, x.array)
        self.add(y, computed(lambda x: x + 1, x))
        self.add(z, computed(lambda x: 2 * (x + 1), x))

    def in_place(self, i, j, nbytes, function=add_to):
        y, x = self.pick(i, written=True), self.pick(j)
        y.set(computed(np.add, y, x))
        with contextlib.suppress(Oops):
            self.fork.run(function, y.array, x.array)

    def operation(self, i, j, nbytes):
        self.in_place(i, j, nbytes, accumulate)

    def caught(self, i, j, nbytes):
        """An error that the body catches: what the branch wrote, it wrote."""
        self.in_place(i, j, nbytes, accumulate_and_raise)

    def fails(self, i, j, nbytes):
        """An error that the body does not catch."""
        self.fork.run(accumulate_and_raise, self.fresh().array, self.pick(i).array)

    def nested(self, i, j, nbytes, hidden=()):
        """A fork in a branch, which was given all values that it has."""
        given = list(self.values) if self.ordered else []
        made, machine, rest, key = [], self.machine, self.rest, self.key  # and not the fork, whose region keeps the branch

        def branch(arrays):
            made.extend(machine.region(rest, given, hidden, key))
            return [value.array for value in made]

        if self.rest:
            self.fork.run(branch, [] if hidden else [value.array for value in given])
            for value in made:  # the branch's, whatever happened to it there
                value.wrote = None
            self.own(made)

    def deeper(self, i, j, nbytes):
        """A fork in a branch that was given nothing: its own branches are ordered with everybody's all the same."""
        self.nested(i, j, nbytes, hidden=[*self.values, None])

    def inside(self, i, j, nbytes):
        """A fork in the body of this one.

        Its join is on this one's stream. Where this one has had no branch yet, the order by data ends with the join, so a fork on
        another stream may not have the values.
        """
        if self.rest and self.ordered:
            made = self.machine.region(self.rest, list(self.values), self.hidden, self.key)
            for value in made:
                value.wrote = self.key
            self.own(made)

    def own(self, made):
        for value in made:
            value.forks = {mark_of(self.fork)}
        self.made += made
        if self.ordered:
            self.values += made

    def task(self, i, j, nbytes):
        x, machine = self.pick(i), self.machine
        stream = machine.driver.current_stream().ptr
        if x in self.hidden or stream == 2 or self.key == 2 or machine.driver.capture_id(stream):
            return
        machine.driver.fail_at(0)  # what becomes of tasks whose calls fail is known from others
        with ParallelStateExecutor(1, pool=machine.pool) as executor:
            array = executor.submit(task, machine, x.array).result(TIMEOUT)
        x.read.add(self.key)
        self.add(array, computed(lambda x: x + 3, x)).wrote = self.key

    # The body itself

    def wait(self, i, j, nbytes):
        """Plain code in the body, behind a wait."""
        x = self.pick(i)
        if self.ordered and x not in self.hidden:
            assert self.fork.wait(x.array) is x.array
            self.machine.look(x)
            x.read.add(self.key)

    def drop(self, i, j, nbytes):
        if self.ordered and self.values and len(self.values[i % len(self.values)].streams) < 2:
            del self.values[i % len(self.values)]


KINDS = [
    *("graph", "chain", "two", "half", "together", "together_in_place", "call", "plain", "in_place", "operation", "caught"),
    *("nested", "deeper", "inside", "wait", "drop"),
]
STEP = st.tuples(st.sampled_from([*KINDS, *KINDS, "fails", "task"]), INDEX, INDEX, SIZES)
PLAN = st.lists(st.tuples(INDEX, MOSTLY, st.lists(STEP, max_size=6)), min_size=1, max_size=3)


class Forks(RuleBasedStateMachine):
    """The rules of forks. All else they have from the machine.

    Values go from branch to branch, also of two forks of a thread that are open at a time, and NumPy computes them as steps are
    given. What a fork made is compared when its caller's stream reads it, which waits for nothing on the host.
    """

    def wait(self, stream):
        with self.driver.relaxed():
            stream.synchronize()

    def array(self, value):
        self.driver.current_stream().allocates = True
        with self.driver.relaxed():  # an allocation of a user's own, which harms the captures of others
            array = self.driver.empty((16,), (8,), np.dtype(np.float64))
        if self.driver.capture_id(pointer := self.driver.current_stream().ptr):
            self.kept.append(array)
        self.driver.enqueue(pointer, lambda out: out.fill(value), writes=[array], label="into an array")
        return array

    def out(self):
        """What a graph function is to write to: while there is a capture an array of the user's own, which `array` cares for."""
        return self.array(-1) if self.recordings else None

    def look(self, value):
        """Compare what the current stream reads, when it does, with what NumPy says is there."""
        expected = value.expected

        def compare(found):
            if expected is not None and not np.array_equal(found, expected):
                self.wrong.append((found.copy(), expected))

        self.driver.enqueue(self.driver.current_stream().ptr, compare, reads=[value.array], label="a look")

    def region(self, plan, values, hidden, key):
        """Run a fork on the current stream; what its branches made."""
        (width, ordered, steps), rest = plan[0], plan[1:]
        with self.states[width % 4].fork(ordered=ordered) as fork:
            body = Body(self, fork, values, rest, hidden, key)
            for step in steps:
                body.step(*step)
        if not ordered:
            for value in body.made:
                value.wrote = key
        return body.made

    @rule(a=INDEX, s=INDEX, plan=PLAN)
    def a_fork_runs(self, a, s, plan):
        actor, (stream, device) = self.actor(a), self.stream(s)
        self.watch_sides(device)
        self.asked(actor, stream, device, "current")  # where no side slot is to be had, branches run here
        recording = self.recording(stream, device)

        def run():
            values = [Value(self.array(1), np.ones(16), stream.ptr)]
            for value in values + self.region(
                plan, list(values), (), stream.ptr
            ):  # after the join; the next allocation may be one of their blocks
                self.look(value)

        # What a graph of the user's own writes to must live as long as the graph: that is the user's to see to.
        self.kept = [] if recording is None else recording.kept
        # A capture that began after another fork of the thread had branches is refused.
        refused = [CaptureError] if recording is not None and any(ordinal_of(fork) == device for fork in actor.forks) else []
        self.on(actor, device, stream, run, Oops, *refused)
        self.kept = []

    # Forks that stay open

    @rule(a=INDEX, s=INDEX, width=INDEX, ordered=MOSTLY)
    def a_fork_is_entered(self, a, s, width, ordered):
        actor, (stream, device) = self.actor(a), self.stream(s)
        if len(actor.forks) < 2 and self.recording(stream, device) is None:
            self.watch_sides(device)
            self.asked(actor, stream, device, "current")

            def enter():
                fork = self.states[width % 4].fork(ordered=ordered)
                fork.__enter__()
                actor.forks.append(fork)

            self.on(actor, device, stream, enter)

    def open_fork(self, f):
        forks = [(actor, fork) for actor in self.actors for fork in actor.forks]
        return forks[f % len(forks)]

    @precondition(lambda self: any(actor.forks for actor in self.actors))
    @rule(f=INDEX, steps=st.lists(STEP, min_size=1, max_size=4), rest=st.lists(st.deferred(lambda: PLAN), max_size=1))
    def a_fork_goes_on(self, f, steps, rest):
        """With branches over what those before made, also those of another fork of the thread that is open."""
        actor, fork = self.open_fork(f)
        device = ordinal_of(fork)
        values = actor.values.setdefault(device, [])

        def go_on():
            body = Body(self, fork, list(values), rest[0] if rest else (), (), stream_of(fork).ptr)
            for step in steps:
                body.step(*step)
            return body

        body, done = self.on(actor, device, stream_of(fork), go_on, Oops)
        if not done:
            for value in values:
                value.expected = None
            return
        self.forget(values, [value for value in values if value not in body.values] if is_ordered(fork) else ())
        if is_ordered(fork):
            values += body.made
        else:  # they are nobody's before the join
            actor.later.setdefault(mark_of(fork), []).extend(body.made)

    def forget(self, values, gone):
        """Have no more to do with values. What several streams had is theirs who made it to let go of."""
        for value in gone:
            values.remove(value)
            if len(value.streams) > 1:
                self.held.append(value.array)

    @precondition(lambda self: any(actor.forks for actor in self.actors))
    @rule(f=INDEX)
    def a_fork_is_left(self, f):
        actor, fork = self.open_fork(f)
        device, key = ordinal_of(fork), stream_of(fork).ptr
        order = order_of(fork)
        values = actor.values.setdefault(device, [])
        later = actor.later.pop(mark_of(fork), [])
        actor.forks.remove(fork)
        _, done = self.do(actor, lambda: fork.__exit__(None, None, None))
        mine = [value for value in values if mark_of(fork) in value.forks]
        for value in [*mine, *later]:
            value.forks.discard(mark_of(fork))
        if not done:  # branches may be under way for which nobody waits
            self.forget(values, mine)
            return
        values += later
        for value in later:
            value.wrote = key
        if order is not None and order.closed:  # from now on a value is what its one stream knows of, or of no use
            self.forget(values, [value for value in values if len(value.streams) > 1])
            for value in values:
                value.wrote = min(value.streams)
        seen = [value for value in [*mine, *later] if value in values and not value.forks and value.streams == {key}]
        for value in seen:
            value.read.add(key)
        self.on(actor, device, stream_of(fork), lambda: [self.look(value) for value in seen])
        if not any(ordinal_of(fork) == device for fork in actor.forks):
            self.forget(values, list(values))
