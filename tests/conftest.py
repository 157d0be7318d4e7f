"""Fixtures that the tests of every layer share."""

import contextlib
import functools
import gc
import importlib
import os

import pytest
from harness import measuring, seeds
from harness.controls import CONTROLS
from harness.insides import abandoned, made_default
from harness.process import as_default, forget_deferred
from harness.scenes import Scene, Thread

import handlepool
from handlepool import HandlePool, drivers
from handlepool.drivers.host.driver import HostDriver
from handlepool.order import assumed, measured, places, plain_calls
from handlepool.pool import context, deferred
from handlepool.pool import default as defaults
from handlepool.spreading.worker import DeviceWorker

for name in list(os.environ):
    ours = ("HANDLEPOOL_EVERY_LINE", "HANDLEPOOL_EXAMPLES", "HANDLEPOOL_EXPRESSIONS", "HANDLEPOOL_SEED")
    if name.startswith("HANDLEPOOL_") and not name.startswith(("HANDLEPOOL_TEST_", *ours)):
        del os.environ[name]  # a test sets what it is about


def pytest_terminal_summary(terminalreporter, exitstatus):
    """A failed run names its seed, which repeats it."""
    if exitstatus:
        terminalreporter.write_line(f"HANDLEPOOL_SEED={seeds.SEED}")


def pytest_sessionfinish(session):
    """Where HANDLEPOOL_TEST_SKIPS is "none", a skipped test is a failure: what it needs was brought, and is not found."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")  # of pytest-xdist's workers none has one
    if os.environ.get("HANDLEPOOL_TEST_SKIPS") == "none" and reporter is not None and reporter.stats.get("skipped"):
        reporter.write_line("tests were skipped, and none may be", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


TIMEOUT = 60
"""Of barriers, events and threads that are expected to be met, set or done."""


@pytest.fixture(autouse=True)
def random_numbers_by_the_seed(request):
    """A test draws what the seed of the run and its own name decide, whichever tests ran before it."""
    seeds.begin(request.node.nodeid)


@pytest.fixture(autouse=True)
def garbage_of_its_own():
    """What was there before is no matter of a test's collections: at hundreds of them, one for each line, it costs ten times."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def nothing_deferred():
    """Each test begins with nothing left behind by another: of a backlog only some is settled at a time.

    What it lets go of never is let go of when it has ended.
    """
    deferred.deferred.clear()
    yield
    if abandoned():
        deferred.deferred.run(1000)
        abandoned().clear()
    forget_deferred()


LIMITS = {
    "handlepool.drivers.cuda.kernels": ("PLENTY",),
    "handlepool.drivers.host.scheduler": ("PATIENCE_SECONDS",),
    "handlepool.graphs.operand_forms": ("MOST_COPIED",),
    "handlepool.graphs.timing": ("ROUNDS", "MOST_LAUNCHES"),
    "handlepool.integrations.dask": ("MOST_PROGRAMS", "MOST_FUNCTIONS"),
    "handlepool.ops.gating": ("MOST_ANEW",),
    "handlepool.pool.plan_cache": ("MOST_RECOLLECTED",),
    "handlepool.recording.lane": ("LEFT_FREE",),
    "handlepool.recording.lanes": ("MOST_NODES",),
    "handlepool.recording.record": ("MOST_SECONDS",),
    "handlepool.recording.tuning": ("MOST_ROUNDS", "CLOSE"),
}
"""The limits that tests change, by the module that reads each."""


@pytest.fixture
def limits(monkeypatch):
    """Gives limits of the package other values during the test: ``limits(MOST_COPIED=1000)``."""
    homes = {name: module for module, names in LIMITS.items() for name in names}

    def limit(**values):
        for name, value in values.items():
            monkeypatch.setattr(importlib.import_module(homes[name]), name, value)

    return limit


@pytest.fixture
def without(monkeypatch):
    """Takes a part of the package away during the test: ``without("barriers")``. See `harness.controls`."""

    def take_away(name):
        for place, stand_in in CONTROLS[name].items():
            monkeypatch.setattr(place, stand_in)

    return take_away


@pytest.fixture
def no_gpu(monkeypatch):
    """The cuda driver is not available, and the host driver is."""
    monkeypatch.setattr(drivers, "available", lambda name: None if name == "host" else "there is no GPU")


@pytest.fixture
def public_calls(monkeypatch):
    """Notes the arguments and options of the calls of a public function: ``calls = public_calls("conv2d")``."""

    def note(name):
        calls, function = [], getattr(handlepool, name)

        def noting(*args, **options):
            calls.append((args, options))
            return function(*args, **options)

        monkeypatch.setattr(f"handlepool.{name}", noting)
        return calls

    return note


@pytest.fixture
def general_items(monkeypatch):
    """The items of a spread that go the general way, in a list that grows."""
    went, give = [], DeviceWorker._give
    monkeypatch.setattr(DeviceWorker, "_give", lambda *args: went.append(args) or give(*args))
    return went


@pytest.fixture
def torch_host(monkeypatch):
    """Torch's operations on the host run on the streams of the host driver."""
    from harness.torch_host import QueuedHost

    monkeypatch.setattr("handlepool.integrations.torch.places._host", QueuedHost)


@pytest.fixture
def torch_door(monkeypatch):
    """Lets modules of the package meet a stand-in for torch: ``torch_door(make, "order.undeclared")``."""

    def stand_in(make, *modules):
        for module in modules:
            monkeypatch.setattr(f"handlepool.{module}.integration", make)

    return stand_in


@pytest.fixture
def known(monkeypatch):
    """The writes that the package knows of plain functions: none at first."""
    monkeypatch.setattr(assumed, "_warned", set())
    monkeypatch.setattr(plain_calls, "_may_write", known := {})
    return known


@pytest.fixture(params=["threads", "adversarial"])
def scheduler(request):
    """Each of the host driver's schedulers in turn."""
    return request.param


@pytest.fixture
def make_driver(request):
    """Makes fresh host drivers that check the order of accesses: ``make_driver(scheduler="adversarial", seed=3)``.

    A control may be caught once.
    """
    drivers = []

    def make(*, check_order=True, **options):
        drivers.append(HostDriver(check_order=check_order, **options))
        return drivers[-1]

    yield make
    caught = [error for driver in drivers if driver.order for error in driver.order.found]
    assert len(caught) <= ("control" in request.node.name), caught


@pytest.fixture
def make_pool(make_driver):
    """Makes pools, each over a fresh host driver where none is given, and closes them after the test.

    ``make_pool(scheduler=..., seed=..., memory=..., devices=...)`` go to the driver, everything else to the pool.
    """
    pools = []

    def make(*, driver=None, scheduler="threads", seed=0, memory=1 << 30, devices=2, check_order=True, **options):
        if driver is None:
            driver = make_driver(scheduler=scheduler, seed=seed, memory=memory, devices=devices, check_order=check_order)
        pool = HandlePool(driver=driver, **options)
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture(autouse=True)
def asked_anew():
    """The module's `get_handle` asks for the default pool anew in each test, which may have another one."""
    defaults._unbind()
    yield
    defaults._unbind()


@pytest.fixture
def make_default():
    """Makes a pool the default one to the end of the test; with None, there is none yet: ``make_default(pool)``."""
    with contextlib.ExitStack() as former:
        yield lambda pool: former.enter_context(as_default(pool))


@pytest.fixture
def unused(make_default, monkeypatch):
    """No default pool yet, and what becomes one ended afterwards."""
    make_default(None)
    monkeypatch.setenv("HANDLEPOOL_DRIVER", "host")
    yield
    made = made_default()
    if made is not None:
        made.internals.is_shared = False
        made.close()


@pytest.fixture
def in_thread():
    """Runs a function in a new thread, to its end, and gives its value or raises its error: ``in_thread(fn, *args)``."""
    return lambda function, *args, **kwargs: Thread(functools.partial(function, *args, **kwargs)).finish()


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def each_pool(request, make_driver):
    """A pool on each driver in turn, the default one during the test, with a stream of the test's own current."""
    driver = request.param
    if driver == "cuda" and (problem := drivers.available("cuda")):
        pytest.skip(f"needs an NVIDIA GPU: {problem}")
    with HandlePool(driver=make_driver() if driver == "host" else "cuda") as pool, as_default(pool):
        stream = pool.driver.create_stream()
        with stream:
            yield pool
        pool.driver.synchronize_stream(stream.ptr)


@pytest.fixture
def driver(scheduler):
    """A host driver that does not check the order of accesses, with each scheduler in turn."""
    return HostDriver(scheduler=scheduler, memory=1 << 30)


@pytest.fixture
def scene(make_driver):
    """A scene with its stream current, whose pool is the default one."""
    with Scene(make_driver(scheduler="adversarial"), default=True) as scene:
        yield scene


@pytest.fixture
def pool(make_driver):
    """The default pool, on a host driver of two devices, with a stream of its own."""
    with HandlePool(driver=make_driver()) as pool, as_default(pool), pool.driver.create_stream() as stream:
        yield pool
        pool.driver.synchronize_stream(stream.ptr)


@pytest.fixture(autouse=True)
def nothing_measured(request):
    """Each test begins with nothing measured. One marked ``unmeasured`` takes all functions to write as declared."""
    measured.functions.clear()
    measured.awaited.answers.clear()
    # Of its own: where all tests had `monkeypatch` set up first, it would be undone after each other fixture.
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("unmeasured"):
            measuring.never(patch)
        yield


@pytest.fixture(autouse=True)
def no_books_stay_open():
    """Close the books of forks that a test left for good, as where a context was lost: later tests would ask them."""
    yield
    context.active.clear()
    places.books_of_thread.orders.clear()
