"""Random programs that keep state, as source text: a class with a method `step`, made of statements.

Each statement is of one of three kinds. `PURE` keeps no state, `IN_PLACE` writes state in one array: both must be accepted by
`record`. `KEPT` keeps state in a way that a replay cannot repeat: a program with such a statement gives the plain function's
values, or is refused.
"""

import random
import types
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import handlepool
from handlepool.drivers.host.driver import HostDriver
from handlepool.errors import CaptureError
from handlepool.testing.pools import substitute_default

CALLS = 6
SHAPE = (1, 4, 3, 4)

PURE = [
    "t = handlepool.add(t, self.w)",
    "t = t * 0.5 + self.w",
    "t = halved(t)",
    "t = handlepool.add(t, asarray(np.full(t.shape, 2, np.float32)))",
    "c = asarray(np.ones(t.shape, np.float32)); c += t; t = c",
    "t = t * self.scale",
    "parts = [t, self.w]; parts.append(halved(t)); t = handlepool.add(parts[0], parts[-1])",
    "kept = {}; kept['a'] = t + 1; t = handlepool.add(kept['a'], t)",
    "scratch = handlepool.add(t, t); add_to(scratch, self.w); t = scratch",
    "t = (t if len(self.items) == 3 else t * 5) + self.items[0]",
    "t = handlepool.add(t, self.table[1])",
    "t = made_once(self, t)",
    "t = handlepool.add(t[:, :, ::-1].copy(), self.w)",
    "t = repeated(t, asarray(np.full(t.shape, 3, np.float32)))",
    "self.fixed = np.random.default_rng(5); t = t * float(self.fixed.random())",
    "self.names = frozenset(['a', 'b']); t = t * len(self.names)",
    "self.config = Slots(); self.config.h = 3; t = t * self.config.h",
]
IN_PLACE = [
    "handlepool.add(self.h, t, out=self.h); t = handlepool.add(t, self.h)",
    "self.h[...] = self.h * 0.5 + t; t = t + self.h",
    "add_to(self.h, t); t = handlepool.add(self.h, t)",
    "self.h += t; t = self.h * 2",
    "self.inner.h[...] = self.inner.h + t; t = handlepool.add(self.inner.h, self.w)",
    "add_to(self.table[1], t); t = t + self.table[1]",
    "add_to(self.items[2], t); t = handlepool.add(t, self.items[2])",
    "v = self.h[:, :2]; v[...] = v * 0.25 + t[:, :2]; t = t + self.h",
    "self.buf[:, :, :-1] = self.buf[:, :, 1:].copy(); self.buf[:, :, -1:] = t[:, :, :1]; t = handlepool.add(t, self.buf)",
    "h = self.h; h -= t; self.h = h; t = handlepool.add(h, t)",
    "old = self.now * 1; handlepool.add(self.now, t, out=self.now); self.next[...] = old; t = t + self.next",
    "closed[...] = closed + t; t = t + closed",
    "H[...] = H * 0.5 + t; t = handlepool.add(t, H)",
]
KEPT = [
    "self.h = handlepool.add(self.h, t); t = t + self.h",
    "self.h = self.h + t; t = handlepool.add(t, self.h)",
    "self.h = halved(handlepool.add(self.h, t)); t = t + self.h",
    "y = handlepool.add(self.h, t); self.h = y[:]; t = y + 1",
    "y = handlepool.add(self.h, t); self.h = y.reshape(1, 4, 4, 3).reshape(y.shape); t = handlepool.add(y, y)",
    "y = handlepool.add(self.square, self.square); self.square = y.transpose(0, 1, 3, 2); t = t + y[:, :, :3]",
    "self.buf = handlepool.concat([self.buf[:, :, 1:], t[:, :, :1].copy()], 2); t = handlepool.add(t, self.buf)",
    "handlepool.add(self.now, t, out=self.next); self.now, self.next = self.next, self.now; t = t + self.now",
    "self.inner.h = handlepool.add(self.inner.h, t); t = t + self.inner.h",
    "self.inner.deep.h = self.inner.deep.h + t; t = handlepool.add(t, self.inner.deep.h)",
    "self.table[1] = handlepool.add(self.table[1], t); t = t + self.table[1]",
    "self.table['new', self.n] = t; t = t * len(self.table); self.n += 1",
    "self.items.append(self.items.pop(0)); t = handlepool.add(t, self.items[0])",
    "self.items.append(t * 1); t = handlepool.add(self.items[-1], self.items[len(self.items) // 2])",
    "self.queue.append(t + 0); t = handlepool.add(t, self.queue[0])",
    "self.pair = (handlepool.add(self.pair[0], t), self.pair[1]); t = t + self.pair[0]",
    "self.n += 1; t = t * self.n",
    "self.n += 1; t = t * 2 if self.n == 3 else t",
    "self.count[0] += 1; t = t * float(self.count[0])",
    "self.slots.h = handlepool.add(self.slots.h, t); t = t + self.slots.h",
    "self.data.n *= 2; t = t * self.data.n",
    "t = t + next(self.turns)",
    "t = t * next(self.numbers)",
    "t = handlepool.add(t, next(self.running))",
    "self.marks.add(len(self.marks)); t = t * len(self.marks)",
    "t = t * float(self.rng.random())",
    "t = t * self.python_rng.random()",
    "t = t * random.random()",
    "t = t * float(np.random.random())",
    "t = handlepool.add(t, asarray(self.rng.standard_normal(t.shape, dtype=np.float32)))",
    "self.rng.standard_normal(out=self.noise, dtype=np.float32); t = t + asarray(self.noise)",
    "self.device_noise.set(self.rng.standard_normal(t.shape, dtype=np.float32)); t = handlepool.add(t, self.device_noise)",
    "global H; H = handlepool.add(H, t); t = t + H",
    "global N; N += 1; t = t * N",
    "bump(); t = t * counter()",
    "module.h = handlepool.add(module.h, t); t = t + module.h",
    "type(self).total += 1; t = t * type(self).total",
    "halved.seen = getattr(halved, 'seen', 0) + 1; t = t * halved.seen",
    "t = remembered(t)",
    "self.state = {'h': self.state['h'] + t}; t = handlepool.add(t, self.state['h'])",
    "self.last = handlepool.add(t, t); t = handlepool.add(self.last, t)",
    "t, self.held.value = handlepool.add(t, self.held.value), t * 1",
    "self.previous, t = x, t - self.previous",
    "self.previous, t = x[:, :, ::2], handlepool.add(t, t) - self.previous[:, :, :1]",
    "t = handlepool.add(t, self.recent[0]); self.recent.append(x)",
    "t = t * self.counted",
    "self.described = self.described + t; t = t + self.described",
    "t = self.called(t)",
    "self.order.move_to_end(next(iter(self.order))); t = t + self.order[next(iter(self.order))]",
    "first = next(iter(self.plain)); self.plain[first] = self.plain.pop(first); t = handlepool.add(t, self.plain[first])",
    "shared()['n'] += 1; t = t * shared()['n']",
    "shared()['h'] = handlepool.add(shared()['h'], t); t = t + shared()['h']",
    "t = t * next(self.steps)",
    "t = t * int(next(self.digits))",
    "self.chain['n'] += 1; t = t * self.chain['n']",
    "self.ticks[0] += 1; t = t * self.ticks[0]",
    "self.view[0] += 1; t = t * self.view[0]",
    "t = t * float(self.rng.spawn(1)[0].random())",
    "t = t * float(np.random.default_rng(self.seeds.spawn(1)[0]).random())",
    "t = t * type(self).bumped()",
    "self.mode.__class__ = Outer if type(self.mode) is Inner else Inner; t = t * (2 if type(self.mode) is Inner else 3)",
    "self.ones.reverse(); t = t * (2 if self.ones[0] is self.two else 3)",
]

_SOURCE = """
class Inner:
    def __init__(self, h, deep=None):
        self.h, self.deep = h, deep

class Outer(Inner):
    pass

class Slots:
    __slots__ = ("h",)

def running(h):
    while True:
        h = h + 1
        yield h

def remembered(t, seen=[]):
    seen.append(1)
    return t * len(seen)

def counting():
    count = 0
    def bump():
        nonlocal count
        count += 1
    return bump, lambda: count

bump, counter = counting()
N = 1

@handlepool.operation
def halved_operation(a):
    return a * 0.5

def halved(a):
    return halved_operation(a)

@handlepool.operation(mutates="h")
def add_to(h, a):
    h += a

def made_once(net, t):
    if not hasattr(net, "cached"):
        net.cached = net.w + net.w
    return t + net.cached

def repeated(t, c):
    def again(t, n):
        return t if n == 0 else again(handlepool.add(t, c), n - 1)
    return again(t, 2)

class Counted:
    def __init__(self):
        self.n = 0
    def __get__(self, owner, kind):
        self.n += 1
        return self.n

class Described:
    def __init__(self):
        self.values = weakref.WeakKeyDictionary()
    def __get__(self, owner, kind):
        return self.values[owner]
    def __set__(self, owner, value):
        self.values[owner] = value

class Calls:
    def __init__(self, function):
        self.function, self.n = function, 0
    def __get__(self, owner, kind):
        return functools.partial(self, owner)
    def __call__(self, *args):
        self.n += 1
        return self.function(*args) * self.n

class Meta(type):
    number = 1
    def bumped(cls):
        Meta.number += 1
        return Meta.number

@functools.cache
def shared():
    return {{"n": 1, "h": make(24)}}

closed = make(3)
H = make(4)
module.h = make(5)

class Net(metaclass=Meta):
    total = 0
    counted, described = Counted(), Described()
    @Calls
    def called(self, t):
        return t * 0.5
    def __init__(self):
        self.w, self.h, self.now, self.next = (make(n) for n in range(4))
        self.scale, self.n = 0.75, 1
        self.inner = Inner(make(6), Inner(make(7)))
        self.table = {{1: make(8), "name": "text"}}
        self.items = [make(9), make(10), make(11)]
        self.queue = collections.deque([make(12), make(13)], maxlen=2)
        self.pair = (make(14), 3)
        self.buf, self.square = make(15), make(16, (1, 4, 4, 4))
        self.count, self.noise = np.ones(1), np.zeros({shape}, np.float32)
        self.device_noise = make(17)
        self.slots = Slots()
        self.slots.h = make(18)
        self.data = Data()
        self.turns, self.numbers, self.running = itertools.cycle([make(19), make(20)]), itertools.count(1), running(make(21))
        self.marks = {{0}}
        self.rng, self.python_rng = np.random.default_rng(3), random.Random(3)
        self.state = {{"h": make(22)}}
        self.last = None
        self.held = threading.local()
        self.held.value = make(23)
        self.previous, self.recent, self.described = make(25), collections.deque([make(26)], maxlen=1), make(27)
        self.order = collections.OrderedDict((n, make(n)) for n in (28, 29, 30))
        self.plain = {{n: make(n) for n in (28, 29, 30)}}
        self.steps, self.digits = iter(range(1, 50)), iter("123456789")
        self.chain, self.ticks, self.view = collections.ChainMap({{"n": 1}}), array.array("i", [1]), memoryview(bytearray(2))
        self.seeds, self.two = np.random.SeedSequence(3), Inner(0)
        self.ones, self.mode = [Inner(0), self.two], Inner(1)

    def step(self, x):
{globals}
        t = x
{body}
        return t
"""


@dataclass
class Data:
    n: int = 1
    more: list[int] = field(default_factory=list)


class Program:
    """A random program.

    Attributes
    ----------
    statements : list of str
    kept : bool
        Whether it keeps state that a replay cannot repeat.
    """

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        count = rng.randint(1, 5)
        groups = rng.choices([PURE, IN_PLACE, KEPT], weights=[3, 3, 2], k=count)
        self.statements = [rng.choice(group) for group in groups]
        self.kept = any(statement in KEPT for statement in self.statements)

    def make(self, driver: Any) -> Any:
        """Return the method of a new object, in globals of its own."""
        import array
        import collections
        import functools
        import itertools
        import threading
        import weakref

        def make(number: int, shape: Any = SHAPE) -> Any:
            return driver.asarray(np.random.default_rng(number).integers(-3, 4, shape).astype(np.float32))

        lines = [f"        {statement}" for statement in self.statements]
        named = {name for name in ("H", "N") if any(f"global {name}" in line for line in lines)}
        body = "\n".join(line.replace("global H; ", "").replace("global N; ", "") for line in lines)
        source = _SOURCE.format(shape=SHAPE, body=body, globals=f"        global {', '.join(sorted(named))}" if named else "")
        namespace: dict[str, Any] = {
            "__name__": "stateful_program",
            "asarray": driver.asarray,
            "array": array,
            "collections": collections,
            "Data": Data,
            "functools": functools,
            "handlepool": handlepool,
            "itertools": itertools,
            "make": make,
            "module": types.ModuleType("stateful_module"),
            "np": np,
            "random": random,
            "threading": threading,
            "weakref": weakref,
        }
        exec(source, namespace)
        return namespace["Net"]().step


def inputs(driver: Any) -> list[Any]:
    """Return an input for each call."""
    rng = np.random.default_rng(9)
    return [driver.asarray(rng.integers(-2, 3, SHAPE).astype(np.float32)) for _ in range(CALLS)]


def check(seed: int, lanes: int | None) -> str:
    """Check a random program on a host driver of its own: "accepted", or "refused"."""
    with substitute_default(handlepool.HandlePool(driver=HostDriver(scheduler="adversarial", seed=seed, strict=True))):
        return check_on(handlepool.default_pool().driver, seed, lanes)


def check_on(driver: Any, seed: int, lanes: int | None) -> str:
    """Record a random program and call it, on the default pool's driver: "accepted", or "refused".

    Raises
    ------
    AssertionError
        For another value than the plain function's, and for a program without state that is refused.
    """
    program = Program(seed)
    where = f"seed {seed}, lanes {lanes}: {program.statements}"
    _seed(seed)
    plain = program.make(driver)
    wanted = [plain(x).get() for x in inputs(driver)]
    _seed(seed)
    step = program.make(driver)
    xs = inputs(driver)
    try:
        recorded = handlepool.record(step, xs[0].copy(), lanes=lanes)
    except CaptureError as error:
        if not program.kept:
            raise AssertionError(f"{where}: refused without need") from error
        verdict, found = "refused", [step(x).get() for x in xs[1:]]
    else:
        verdict, found = "accepted", [recorded(x).get() for x in xs[1:]]
        recorded.close()
    for number, (one, other) in enumerate(zip(found, wanted[1:], strict=True), 1):
        assert np.array_equal(one, other), f"{where}: {verdict}, and call {number} gave {one}, not {other}"
    return verdict


def check_recorded(seed: int, lanes: int | None) -> str:
    """Call a recorded function of a random program on a host driver of its own: "accepted", or "refused".

    Raises
    ------
    AssertionError
        For another value than the plain function's, and for a program without state that runs eagerly.
    """
    driver = HostDriver(scheduler="adversarial", seed=seed, strict=True, check_order=True)
    with substitute_default(handlepool.HandlePool(driver=driver)), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        program = Program(seed)
        where = f"seed {seed}, lanes {lanes}: {program.statements}"
        _seed(seed)
        plain = program.make(driver)
        wanted = [plain(x).get() for x in inputs(driver)]
        _seed(seed)
        one, two = driver.create_stream(), driver.create_stream()
        with one:
            network, xs = handlepool.recorded(program.make(driver), lanes=lanes, instances=2), inputs(driver)
        values, streams = [], [one, one, two, one, two, two]
        for x, stream, former in zip(xs, streams, [one, *streams], strict=False):
            event = driver.create_event()
            driver.record_event(event, former.ptr)
            driver.wait_event(stream.ptr, event)
            with stream:
                values.append(network(x))
        with two:
            found = [y.get() for y in values]
        stats = network.stats()
        verdict = "accepted" if stats.programs else "refused"
        for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert np.array_equal(one, other), f"{where}: {verdict}, and call {number} gave {one}, not {other}"
        assert program.kept or (stats.programs and not stats.eager), f"{where}: {verdict} without need: {network.explain()}"
        network.clear()
    return verdict


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
