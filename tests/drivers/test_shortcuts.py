"""What a call of a graph function that is known launches at once on the cuda driver, and what it must not: no GPU is needed."""

import itertools
import random
import sys
import threading
from collections import OrderedDict
from functools import partial

import numpy as np
import pytest
from harness.graphs import both, double, plus
from harness.graphs import convolution as conv
from harness.insides import record_elsewhere

pytest.importorskip("cupy", reason="CuPy is not installed")
pytest.importorskip("handlepool.drivers.cuda.driver", reason="the cuda driver's packages are not installed")

import cupy
from harness.no_gpu import World, addresses
from harness.scenes import TIMEOUT, Thread

import handlepool
from handlepool import (
    ArgumentError,
    ArrayTypeError,
    DeviceMismatchError,
    GraphFunction,
    HandlePool,
    OwnershipError,
    PoolClosedError,
    concat,
    conv2d,
)
from handlepool.drivers.cuda import fast_launch as shortcuts
from handlepool.pool import context
from handlepool.pool.plan_cache import MOST_SHORTCUTS

pytestmark = pytest.mark.cupy


class LaunchError(Exception):
    pass


@pytest.fixture
def make_world(monkeypatch, make_default):
    """Makes worlds, of which the last one's pool is the default pool, and counts in ``world.prepared`` the slow calls."""
    worlds = []
    prepare = GraphFunction.prepare

    def count(*args, **kwargs):
        worlds[-1].prepared += 1
        return prepare(*args, **kwargs)

    def make(**options):
        world = World(**options)
        world.prepared = 0
        make_default(world.pool)
        worlds.append(world.__enter__())
        return world

    monkeypatch.setattr(GraphFunction, "prepare", count)
    yield make
    for world in reversed(worlds):
        world.__exit__()


@pytest.fixture(params=["raw entry", "public entry"])
def world(request, make_world):
    """A world whose executables have the raw entry, or not: then the shortcut is the one that every driver has."""
    world = make_world()
    world.driver.raw = request.param == "raw entry"
    return world


@pytest.fixture(params=["raw entry", "public entry"])
def devices(request, make_world):
    world = make_world(devices=2)
    world.driver.raw = request.param == "raw entry"
    return world


@pytest.fixture
def raw(make_world):
    """A world whose executables have the raw entry."""
    return make_world()


def again(world, function, *args, **kwargs):
    """The launch of a call that is known."""
    before = world.prepared
    launch = world.launched(function, *args, **kwargs)
    assert world.prepared == before, "the call was prepared"
    return launch


def known(world, function, *args, **kwargs):
    """Make a call known; the number of its plan."""
    function(*args, **kwargs)
    return again(world, function, *args, **kwargs).index


def refused(world, error, match, function, *args, **kwargs):
    """The call raises, and launches nothing."""
    before = len(world.driver.launches)
    with pytest.raises(error, match=match):
        function(*args, **kwargs)
    assert len(world.driver.launches) == before


# What is launched


def test_a_known_call_launches_its_plan_with_the_addresses_in_the_order_of_the_operands(world):
    x, y, z = world.array(), world.array(), world.array()
    first = world.launched(plus, x, y, out=z)
    assert world.prepared == 1
    a, b, c = world.array(), world.array(), world.array()
    second = again(world, plus, a, b, out=c)
    assert second.addresses == addresses(a, b, c)
    assert (second.index, second.handle, second.workspace) == (first.index, first.handle, 0)
    assert world.driver.compiled == 1


def test_it_runs_on_the_slot_of_the_current_stream_with_its_workspace(world):
    world.driver.workspace_size = 1000
    x, y = world.array(), world.array()
    known(world, double, x, out=y)
    for stream in [world.driver.create_stream() for _ in range(2)]:
        with stream:
            launch = again(world, double, x, out=y)
            slot = world.pool.internals.slot()
            assert launch.handle == slot.handle.backend_handle
            assert launch.workspace == slot.reserve(1000) != 0
    assert len({launch.handle for launch in world.driver.launches}) == 3
    assert len({launch.workspace for launch in world.driver.launches}) == 3


def test_the_workspace_grows_with_the_plan_that_needs_more(world):
    x, big = world.array(), world.array(4, 4)
    world.driver.workspace_size = 256
    known(world, double, x)
    small = world.pool.internals.slot().reserve(256)
    world.driver.workspace_size = 4096
    known(world, double, big)
    grown = world.pool.internals.slot().reserve(4096)
    assert grown != small
    assert again(world, double, x).workspace == again(world, double, big).workspace == grown


def test_an_output_that_is_not_given_is_a_new_array_as_the_first_call_made_it(world):
    x, y = world.array(), world.array()
    first = plus(x, y)
    made = []
    launch = again(world, lambda: made.append(plus(x, y)))
    assert launch.addresses == addresses(x, y, made[0])
    assert made[0].data.ptr != first.data.ptr
    assert (made[0].shape, made[0].strides, made[0].dtype) == (first.shape, first.strides, first.dtype)


@pytest.mark.parametrize("form", [tuple, list])
def test_several_outputs_given_and_not(world, form):
    x, y = world.array(), world.array()
    outs = form([world.array(), world.array()])
    known(world, both, x, y)
    known(world, both, x, y, out=outs)
    made = []
    launch = again(world, lambda: made.append(both(x, y)))
    assert isinstance(made[0], tuple)
    assert launch.addresses == addresses(x, y, *made[0])
    launch = again(world, lambda: made.append(both(x, y, out=outs)))
    assert made[1] is outs
    assert launch.addresses == addresses(x, y, *outs)


@pytest.mark.parametrize("what", ["an array over both", "an iterator"])
def test_what_is_no_tuple_is_not_several_outputs_the_second_time_either(world, what):
    """Unpacking would make two of it."""
    x, y, outs = world.array(), world.array(), (world.array(), world.array())

    def out():
        return world.array(2, 2, 4) if what == "an array over both" else iter(outs)

    with pytest.raises((ArgumentError, ArrayTypeError)) as first:
        both(x, y, out=out())
    known(world, both, x, y, out=outs)
    before = len(world.driver.launches)
    with pytest.raises(first.type):
        both(x, y, out=out())
    assert len(world.driver.launches) == before


@pytest.mark.parametrize("out", [5, 5.0, "out"])
def test_what_is_no_array_is_refused_the_second_time_as_the_first(world, out):
    x, y = world.array(), world.array()
    for function, outs in ((both, (world.array(), world.array())), (plus, world.array())):
        with pytest.raises((ArgumentError, ArrayTypeError)) as first:
            function(x, y, out=out)
        known(world, function, x, y, out=outs)
        with pytest.raises(first.type):
            function(x, y, out=out)


def test_a_tuple_of_the_one_output_is_returned_as_it_was_given(world):
    x, y = world.array(), world.array()
    known(world, double, x, out=y)
    known(world, double, x)
    outs = (y,)
    for _ in range(3):
        assert double(x, out=outs) is outs
        assert world.driver.launches[-1].addresses == addresses(x, y)


def test_given_and_not_given_do_not_meet(world):
    x, y = world.array(), world.array()
    known(world, double, x, out=y)
    made = []
    launch = world.launched(lambda: made.append(double(x)))
    assert launch.addresses == addresses(x, made[0])
    assert made[0] is not y
    known(world, double, x)
    assert again(world, double, x, out=y).addresses == addresses(x, y)


# What must not launch the known plan


OTHERS = {"shape": {"shape": (1, 4)}, "strides": {"strides": (4, 8)}, "dtype": {"dtype": "float16"}, "kind": {"dtype": "int32"}}


@pytest.mark.parametrize("given", [True, False], ids=["out given", "out made"])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("other", OTHERS)
def test_an_input_of_another_geometry_gets_a_plan_of_its_own(world, place, other, given):
    arrays = [world.array(), world.array()]
    kwargs = {"out": world.array()} if given else {}
    first = known(world, plus, *arrays, **kwargs)
    others = list(arrays)
    options = dict(OTHERS[other])
    others[place] = world.array(*options.pop("shape", (2, 4)), **options)
    # The output has the first input's type.
    outs = {"out": world.array(dtype=others[0].dtype)} if given else {}
    launch = world.launched(plus, *others, **outs)
    assert launch.index != first
    assert launch.addresses[:2] == addresses(*others)
    assert again(world, plus, *others, **outs).index == launch.index
    assert again(world, plus, *arrays, **kwargs).index == first


@pytest.mark.parametrize("other", OTHERS)
def test_an_output_of_another_geometry_never_gets_the_known_plan(world, other):
    x, y = world.array(), world.array()
    first = known(world, plus, x, y, out=world.array())
    options = dict(OTHERS[other])
    out = world.array(*options.pop("shape", (2, 4)), **options)
    before = len(world.driver.launches)
    for _ in range(2):
        try:
            assert plus(x, y, out=out) is out
        except ArgumentError:
            assert other != "strides"
    assert first not in [launch.index for launch in world.driver.launches[before:]]


UNFIT = {
    "another library": (lambda world: np.zeros((2, 4), np.float32), ArrayTypeError, "host memory"),
    "misaligned": (lambda world: world.array(address=(1 << 29) + 4), ArgumentError, "begins 4 bytes past a multiple of 16"),
    "another device": (lambda world: world.array(device=1), DeviceMismatchError, "is on device 1 and the current device is 0"),
}


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("what", UNFIT)
def test_an_operand_that_cannot_be_taken_is_refused(devices, what, place):
    make, error, match = UNFIT[what]
    arrays = [devices.array(), devices.array(), devices.array()]
    known(devices, plus, *arrays[:2], out=arrays[2])
    arrays[place] = make(devices)
    refused(devices, error, match, plus, *arrays[:2], out=arrays[2])


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("forked", [False, True])
def test_an_array_of_the_host_drivers_is_refused_where_there_is_one_device(world, place, forked):
    """It has all that CuPy's arrays have, and an address that no GPU knows."""
    arrays = [world.array(), world.array(), world.array()]
    known(world, plus, *arrays[:2], out=arrays[2])
    with HandlePool(driver="host") as other:
        arrays[place] = other.driver.asarray(np.zeros((2, 4), np.float32))
        before = len(world.driver.launches)
        with world.states.fork() as fork, pytest.raises(ArrayTypeError):
            (partial(fork.run, plus) if forked else plus)(*arrays[:2], out=arrays[2])
    assert len(world.driver.launches) == before


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("given", [True, False], ids=["out given", "out made"])
def test_another_number_of_arrays_is_refused(world, count, given):
    x = world.array()
    kwargs = {"out": world.array()} if given else {}
    known(world, plus, x, x, **kwargs)
    refused(world, ArgumentError, None, plus, *[x] * count, **kwargs)


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_outputs_is_refused(world, count):
    x = world.array()
    known(world, both, x, x, out=(world.array(), world.array()))
    refused(world, ArgumentError, None, both, x, x, out=tuple(world.array() for _ in range(count)))


def test_a_misaligned_input_is_refused_where_the_output_is_made(world):
    x = world.array()
    known(world, plus, x, x)
    refused(world, ArgumentError, "begins 8 bytes past", plus, x, world.array(address=(1 << 29) + 8))


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("distance", [-16, 16], ids=["before", "behind"])
def test_an_output_partly_over_an_input_is_refused(world, place, distance):
    arrays = [world.array(), world.array()]
    known(world, plus, *arrays, out=world.array())
    out = world.array(address=arrays[place].data.ptr + distance)
    refused(world, ArgumentError, f"shares memory with argument {place}", plus, *arrays, out=out)


def test_outputs_over_each_other_are_refused(world):
    x = world.array()
    a, b = world.array(), world.array()
    known(world, both, x, x, out=(a, b))
    for other in (a, world.array(address=a.data.ptr + 16)):
        refused(world, ArgumentError, "shares memory with another output", both, x, x, out=(a, other))


@pytest.mark.parametrize("place", [0, 1])
def test_an_output_may_be_an_input_where_each_element_is_on_its_own(world, place):
    arrays = [world.array(), world.array()]
    known(world, plus, *arrays, out=world.array())
    assert again(world, plus, *arrays, out=arrays[place]).addresses == addresses(*arrays, arrays[place])


@pytest.mark.parametrize("place", [0, 1])
def test_an_output_of_several_may_not_be_an_input(world, place):
    arrays, a, b = [world.array(), world.array()], world.array(), world.array()
    known(world, both, *arrays, out=(a, b))
    for out in ((arrays[place], b), (a, arrays[place])):
        refused(world, ArgumentError, f"shares memory with argument {place}", both, *arrays, out=out)


def test_an_output_may_not_be_an_input_transposed(world):
    x = world.array(8, 8)
    known(world, double, x, out=world.array(8, 8).T)
    refused(world, ArgumentError, "shares memory with argument 0", double, x, out=x.T)


def test_an_output_that_only_touches_an_input_is_launched(world):
    x, y = world.array(address=1 << 29), world.array()
    known(world, plus, x, y, out=world.array())
    for distance in (-32, 32):  # an array has 32 bytes
        out = world.array(address=x.data.ptr + distance)
        assert again(world, plus, x, y, out=out).addresses == addresses(x, y, out)


@pytest.mark.parametrize("channels", [8, 16])
def test_slices_of_one_block_are_launched_at_once_where_they_share_no_element(world, channels):
    def image():
        return world.array(2, 8, 8, 24).transpose(0, 3, 1, 2)

    w = world.array(8, 8, 1, 1)

    def of(block):
        return block[:, :8], block[:, channels : channels + 8]

    known(world, conv2d, image()[:, :8], w, out=image()[:, :8])
    for _ in range(2):
        x, out = of(image())
        assert again(world, conv2d, x, w, out=out).addresses == addresses(x, w, out)
        for shared in (block := image())[:, 4:12], block[:, :8], block[:, :8, ::-1][:, :, ::-1]:
            refused(world, ArgumentError, "shares memory with argument 0", conv2d, block[:, :8], w, out=shared)


def test_a_concatenation_of_what_lies_in_its_place_is_launched_at_once(world):
    def image(channels):
        return world.array(2, 8, 8, channels).transpose(0, 3, 1, 2)

    def parts(whole):
        return [image(8), whole[:, 8:16]]

    whole = image(16)
    known(world, concat, parts(whole), 1, out=whole)
    for _ in range(2):
        whole = image(16)
        given = parts(whole)
        assert again(world, concat, given, 1, out=whole).addresses == addresses(*given, whole)
        refused(world, ArgumentError, "shares memory with argument 1", concat, [image(8), whole[:, :8]], 1, out=whole)
        refused(world, ArgumentError, "shares memory with argument 0", concat, [whole[:, 8:16], image(16)[:, :8]], 1, out=whole)


def test_an_output_may_not_be_an_input_of_a_convolution(world):
    x, w = world.array(1, 4, 8, 8), world.array(4, 4, 3, 3)
    known(world, conv, x, w, out=world.array(1, 4, 8, 8))
    for out in (x, world.array(1, 4, 8, 8, address=x.data.ptr + 16), world.array(1, 4, 8, 8, address=w.data.ptr)):
        refused(world, ArgumentError, "shares memory", conv, x, w, out=out)


# Several devices


def test_a_plan_is_launched_with_its_own_device_current_alone(devices):
    x, out = devices.array(), devices.array()
    known(devices, double, x, out=out)
    with devices.driver.device(1):
        refused(devices, DeviceMismatchError, "is on device 0 and the current device is 1", double, x, out=out)
        refused(devices, DeviceMismatchError, None, double, x)


def test_each_device_has_its_plan_and_its_slot(devices):
    plans = {}
    for device in (0, 1):
        with devices.driver.device(device):
            x = devices.array()
            plans[device] = known(devices, double, x), x
    assert plans[0][0] != plans[1][0]
    for device in (1, 0, 1):
        index, x = plans[device]
        with devices.driver.device(device):
            launch = again(devices, double, x)
            assert (launch.index, launch.handle) == (index, devices.pool.internals.slot().handle.backend_handle)


def test_the_null_stream_which_is_one_of_each_device_gets_the_slot_of_the_current_one(devices):
    handles = []
    for device in (0, 1, 0, 1):
        with devices.driver.device(device), devices.driver.null:
            x = devices.array()
            handles.append(devices.launched(double, x).handle)
            assert devices.pool.internals.slot().device == device
            assert again(devices, double, x).handle == handles[-1]
    assert handles[:2] == handles[2:]
    assert handles[0] != handles[1]


# Options


def test_options_that_are_equal_and_of_other_types_are_others(world):
    seen = []

    @handlepool.graph
    def scaled(g, x, *, factor):
        seen.append(factor)
        return g.add(x, x) if factor is True else g.mul(x, x)

    x = world.array()
    plans = [known(world, scaled, x, factor=factor) for factor in (1, True, 1.0)]
    assert list(map(repr, seen)) == ["1", "True", "1.0"]
    assert len(set(plans)) == 3
    assert [again(world, scaled, x, factor=factor).index for factor in (1.0, 1, True)] == [plans[2], plans[0], plans[1]]


def test_options_of_other_names_and_values_are_others(world):
    @handlepool.graph
    def chosen(g, x, *, a=0, b=0):
        return g.add(x, x) if a else g.mul(x, x)

    x = world.array()
    calls = [{}, {"a": 1}, {"b": 1}, {"a": 1, "b": 2}, {"a": 2, "b": 1}]
    plans = [known(world, chosen, x, **options) for options in calls]
    assert len(set(plans)) == len(calls)
    assert [again(world, chosen, x, **options).index for options in calls] == plans
    assert known(world, chosen, x, b=2, a=1) == plans[3]


def test_variants_by_settings_are_others(world):
    x = world.array()
    variant = double.options(workspace_limit=0)
    plans = known(world, double, x), known(world, variant, x)
    assert plans[0] != plans[1]
    assert (again(world, double, x).index, again(world, variant, x).index) == plans


def test_an_option_that_has_no_hash_is_refused_each_time(world):
    @handlepool.graph
    def chosen(g, x, *, axes):
        return g.add(x, x)

    x = world.array()
    known(world, chosen, x, axes=(1, 2))
    for _ in range(2):
        with pytest.raises(ArgumentError, match="cannot be hashed"):
            chosen(x, axes=[1, 2])


CALLS = {
    "plain": {},
    "padding": {"padding": 1},
    "stride": {"stride": 2},
    "activation": {"activation": "relu"},
    "mode": {"mode": "convolution"},
    "limit": {"workspace_limit": 1 << 20},
    "deterministic": {"deterministic": True},
    "tf32": {"allow_tf32": False},
}


def test_convolutions_with_other_options_are_others(world):
    x, w = world.array(1, 4, 8, 8, strides=(1024, 4, 128, 16)), world.array(4, 4, 3, 3, strides=(144, 4, 48, 16))
    bias = world.array(4)  # channels-last, where an activation is no launch of its own
    calls = [*CALLS.values(), *({**options, "bias": bias} for options in CALLS.values())]
    plans = [known(world, conv2d, x, w, **options) for options in calls]
    assert len(set(plans)) == len(calls)
    assert [again(world, conv2d, x, w, **options).index for options in calls] == plans


@pytest.mark.parametrize("groups", [True, 1.0])
def test_what_is_no_number_of_groups_is_refused_the_second_time_as_the_first(world, groups):
    x, w = world.array(1, 4, 8, 8), world.array(4, 4, 3, 3)
    known(world, conv2d, x, w, groups=1)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="must be an integer"):
            conv2d(x, w, groups=groups)
        with pytest.raises(ArgumentError, match="must be an integer"), world.states.fork() as fork:
            fork.run(conv2d, x, w, groups=groups)


# Several geometries with one first shape


def test_more_geometries_of_one_first_shape_than_there_are_shortcuts(world):
    x = world.array(1, 4, 8, 8)
    filters = [world.array(count, 4, 3, 3) for count in range(1, MOST_SHORTCUTS + 5)]
    plans = [world.launched(conv, x, w).index for w in filters]
    assert len(set(plans)) == len(filters)
    for _ in range(2):
        for w, plan in zip(filters, plans, strict=True):
            launch = world.launched(conv, x, w)
            assert launch.index == plan
            assert launch.addresses[:2] == addresses(x, w)
    assert world.driver.compiled == len(filters)
    (attempts,) = world.pool.internals.plans.shortcuts.values()
    assert len(attempts) == MOST_SHORTCUTS
    assert again(world, conv, x, filters[-1]).index == plans[-1]


# The cache


def consistent(world):
    """Whether the shortcuts are those of the plans that the cache has."""
    plans = world.pool.internals.plans
    made = [entry.shortcuts for of_device in plans._plans.values() for entry in of_device.values()]
    belong = {id(shortcut) for shortcuts in made for shortcut in shortcuts.values()}
    there = [id(shortcut) for attempts in plans.shortcuts.values() for shortcut in attempts]
    return belong == set(there) and len(there) == len(belong)


@pytest.mark.parametrize("entries", ["raw", "public", "mixed"])
@pytest.mark.parametrize("seed", range(5))
def test_the_plan_that_goes_is_the_one_used_longest_ago_also_where_the_uses_were_hits(make_world, entries, seed):
    limit = 4
    world = make_world(plan_limit=limit)
    arrays = [world.array(2, size) for size in range(1, 8)]
    outs = [world.array(2, size) for size in range(1, 8)]
    expected = OrderedDict()  # (size, given) of the plans that should be there, the next one to go first
    uses = random.Random(seed)
    for _ in range(600):
        number, given = min(int(uses.expovariate(0.5)), 6), uses.random() < 0.5
        built = (number, given) not in expected
        expected[number, given] = None
        expected.move_to_end((number, given))
        if len(expected) > limit:
            expected.popitem(last=False)
        world.driver.raw = entries == "raw" or (entries == "mixed" and number % 2 == 0)
        before = world.driver.compiled
        if uses.random() < 0.2:  # so that it is no hit
            record_elsewhere()
        launch = world.launched(double, arrays[number], out=outs[number] if given else None)
        context.recordings.clear()
        context.active.clear()
        assert world.driver.compiled == before + built
        assert launch.addresses[0] == arrays[number].data.ptr
    assert consistent(world)


def test_an_evicted_plans_shortcut_goes_with_it(make_world):
    world = make_world(plan_limit=1)
    x, y = world.array(), world.array(4, 4)
    first = known(world, double, x)
    second = known(world, double, y)
    assert len(world.pool.internals.plans.shortcuts) == 1
    assert world.launched(double, x).index not in (first, second)


@pytest.mark.parametrize("clear", ["pool", "function", "variant"])
def test_what_forgets_plans_forgets_the_shortcuts_to_them(world, clear):
    x = world.array()
    variant = double.options(workspace_limit=0)
    plans = known(world, double, x), known(world, variant, x), known(world, plus, x, x)
    {"pool": world.pool, "function": double, "variant": variant}[clear].cache_clear()
    assert consistent(world)
    assert len(world.pool.internals.plans.shortcuts) == (0 if clear == "pool" else 1)
    assert world.launched(double, x).index not in plans
    assert world.launched(variant, x).index not in plans
    assert (world.launched(plus, x, x).index == plans[2]) is (clear != "pool")


def test_another_plan_that_was_selected_is_launched_from_then_on(world):
    x, y = world.array(), world.array()
    first = known(world, double, x), known(world, double, x, out=y)
    double.plan_for(x).select(2)
    assert consistent(world)
    launch = world.launched(double, x)
    assert launch.index not in first
    assert launch.index % 100 == 2
    assert again(world, double, x).index == launch.index
    assert again(world, double, x, out=y).index == first[1]


def test_pools_do_not_see_each_others_plans(make_world, make_default):
    one = make_world()
    x = one.array()
    first = known(one, double, x)
    two = make_world(driver=one.driver)
    launch = two.launched(double, x)
    assert two.prepared == 1
    assert launch.index != first
    assert launch.handle == two.pool.get_handle().backend_handle != one.pool.get_handle().backend_handle
    assert again(two, double, x).index == launch.index
    make_default(one.pool)
    with one.stream:
        back = again(two, double, x)
    assert (back.index, back.handle) == (first, one.driver.launches[0].handle)


def test_a_pool_that_was_closed_launches_nothing(world):
    x = world.array()
    known(world, double, x)
    world.pool.close()
    before = len(world.driver.launches)
    with pytest.raises(PoolClosedError):
        double(x)
    assert len(world.driver.launches) == before
    assert not world.pool.internals.plans.shortcuts


# What else stands against it


def test_while_another_thread_records_calls_are_known(world):
    x, y = world.array(), world.array()
    index = known(world, double, x, out=y)
    known(world, double, x)
    before = world.prepared
    record_elsewhere()
    try:
        assert world.launched(double, x, out=y).index == index
        world.launched(double, x)
        assert world.prepared == before
    finally:
        context.recordings.clear()
        context.active.clear()
    assert again(world, double, x, out=y).index == index


def test_a_handle_that_its_caller_destroyed_is_replaced(world):
    x = world.array()
    known(world, double, x)
    former = world.pool.get_handle()
    number = former.backend_handle
    world.driver.destroy_handle(former)
    launch = world.launched(double, x)
    assert launch.handle not in (None, number)
    assert launch.handle == world.pool.get_handle().backend_handle
    assert world.pool.stats()["handles_repaired"] == 1


def test_a_handle_that_its_caller_bound_elsewhere_is_bound_again(world):
    x = world.array()
    known(world, double, x)
    handle = world.pool.get_handle()
    handle.stream = 12345
    assert again(world, double, x).handle == handle.backend_handle
    assert handle.stream == world.stream.ptr


@pytest.mark.parametrize("destroyed", [True, False], ids=["destroyed", "bound elsewhere"])
def test_a_side_slots_handle_is_made_sound_for_a_branch(world, destroyed):
    x = world.array()
    known(world, double, x)
    world.states.map(double, [x] * 4)
    sides = world.pool.internals.device(0).sides.free
    for slot in sides:
        if destroyed:
            world.driver.destroy_handle(slot.handle)
        else:
            slot.handle.stream = 12345
    before = len(world.driver.launches)
    world.states.map(double, [x] * 4)
    handles = {slot.handle.backend_handle for slot in sides}
    assert {launch.handle for launch in world.driver.launches[before:]} == handles
    assert None not in handles
    assert all(slot.handle.stream == slot.pointer for slot in sides)


@pytest.mark.parametrize("python", [True, False], ids=["python branch", "graph function"])
def test_a_side_stream_that_is_kept_after_its_fork_gets_a_slot_of_its_own(world, python):
    x = world.array()
    known(world, double, x)
    kept = []

    def branch():
        kept.append(world.driver.current_stream())
        double(x)

    with world.states.fork() as fork:
        fork.run(*(branch,) if python else (double, x))
    side = kept[0] if python else world.pool.internals.device(0).sides.free[0].side_stream
    with side:
        launch = again(world, double, x)
        assert launch.handle == world.pool.get_handle().backend_handle
    assert launch.handle != world.pool.internals.device(0).sides.free[0].handle.backend_handle


@pytest.mark.parametrize("kind", [LaunchError, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("given", [True, False], ids=["out given", "out made"])
def test_an_error_of_the_entry_goes_on_as_it_is_and_the_next_call_works(world, kind, given):
    x = world.array()
    kwargs = {"out": world.array()} if given else {}
    index = known(world, double, x, **kwargs)
    world.driver.error = error = kind("cuDNN says no")
    with pytest.raises(kind) as raised:
        double(x, **kwargs)
    assert raised.value is error
    world.driver.error = None
    assert again(world, double, x, **kwargs).index == index


@pytest.mark.parametrize("region", ["run", "map"])
def test_an_error_of_the_entry_in_a_branch_comes_after_the_join(world, region):
    x = world.array()
    known(world, double, x)
    world.states.map(double, [x] * 6)
    world.driver.error = error = LaunchError("cuDNN says no")
    world.driver.log.clear()

    def run(x):
        with world.states.fork() as fork:
            fork.run(double, x)

    with pytest.raises(LaunchError) as raised:
        world.states.map(double, [x] * 6) if region == "map" else run(x)
    assert raised.value is error
    assert world.driver.log[-1] == ("wait", world.stream.ptr)
    assert world.pool.stats()["handles_leased"] == 0


def test_an_output_for_which_there_is_no_memory(raw, monkeypatch):
    x = raw.array()
    index = known(raw, double, x)
    missing, box = cupy.cuda.memory.OutOfMemoryError(32, 1 << 40), [True]
    space = next(iter(raw.pool.internals.plans.shortcuts.values()))[0].__globals__
    alloc = space["alloc"]

    def short(nbytes):
        if box:
            box.pop()
            raise missing
        return alloc(nbytes)

    monkeypatch.setitem(space, "alloc", short)
    with pytest.raises(MemoryError) as raised:
        double(x)
    assert raised.value is missing
    assert again(raw, double, x).index == index


# Threads, and what comes in between


def test_threads_with_streams_of_their_own_launch_their_own_addresses(world):
    threads, calls = 8, 400
    world.driver.workspace_size = 512
    known(world, plus, world.array(), world.array(), out=world.array())
    world.driver.launches.clear()
    interval, meeting = sys.getswitchinterval(), threading.Barrier(threads)

    def work():
        with world.driver.create_stream():
            slot = world.pool.internals.slot()
            arrays = [[world.array() for _ in range(3)] for _ in range(calls)]
            meeting.wait(TIMEOUT)
            for x, y, out in arrays:
                plus(x, y, out=out)
            return threading.get_ident(), [addresses(*three) for three in arrays], slot.handle.backend_handle, slot.reserve(512)

    sys.setswitchinterval(1e-6)
    try:
        found = [thread.finish() for thread in [Thread(work) for _ in range(threads)]]
    finally:
        sys.setswitchinterval(interval)
    for thread, expected, handle, workspace in found:
        mine = [launch for launch in world.driver.launches if launch.thread == thread]
        assert [launch.addresses for launch in mine] == expected
        assert {(launch.handle, launch.workspace) for launch in mine} == {(handle, workspace)}
    assert world.prepared == 1


def nested(world, moment, recording=False):
    """Whether a launch was refused that came inside another one on the same slot, at some moment of it, and harmed it not."""
    world.driver.workspace_size = 512
    outer, inner = [world.array() for _ in range(3)], [world.array() for _ in range(3)]
    known(world, plus, *outer[:2], out=outer[2])
    world.driver.launches.clear()
    caught = []

    def launch():
        try:
            plus(*inner[:2], out=inner[2])
        except OwnershipError as error:
            caught.append(error)

    setattr(world.driver, moment, launch)
    if recording:
        record_elsewhere()
    try:
        plus(*outer[:2], out=outer[2])
    finally:
        context.recordings.clear()
        context.active.clear()
    right = world.driver.launches[-1].addresses == addresses(*outer)
    assert again(world, plus, *inner[:2], out=inner[2]).addresses == addresses(*inner)
    return right and len(caught) == 1


@pytest.mark.parametrize("recording", [False, True], ids=["known", "prepared"])
@pytest.mark.parametrize("moment", ["reserving", "entering"])
def test_a_launch_inside_another_one_on_the_same_slot_is_refused(raw, moment, recording):
    assert nested(raw, moment, recording)


def test_a_launch_inside_another_one_on_the_same_slot_is_refused_without_the_raw_entry(make_world):
    world = make_world()
    world.driver.raw = False
    assert nested(world, "reserving")


def test_control_a_slot_that_is_not_busy_while_its_buffer_is_read_has_it_overwritten(raw, monkeypatch):
    text, kept = shortcuts._TEXT, "slot.busy = True\n"
    assert text.count(kept) == 1
    monkeypatch.setattr(shortcuts, "_TEXT", text.replace(kept, "pass\n"))
    assert not nested(raw, "entering")


def test_after_an_error_of_the_entry_the_slot_launches_again(raw):
    x = raw.array()
    known(raw, double, x)
    raw.driver.error = LaunchError("cuDNN says no")
    with pytest.raises(LaunchError):
        double(x)
    raw.driver.error = None
    again(raw, double, x)


# A pool that is closed meanwhile


def closed_at(world, k):
    """Close the pool in another thread at the k-th line of a known launch; whether there are so many, and who won.

    A destroy takes its time on a GPU, where the number can be read still: here it stays for good. So a launch with a number that
    was destroyed is one that came too late.
    """
    x, out, destroyed, left = world.array(), world.array(), [], k
    known(world, double, x, out=out)
    world.driver.destroy_handle = lambda handle: destroyed.append(handle.backend_handle)

    def trace(frame, event, _):
        nonlocal left
        if event == "line":
            left -= 1
            if left == 0:
                Thread(world.pool.close).finish()
        return trace if frame.f_code.co_filename == "<a plan's launch>" else None

    at_entry = []
    world.driver.entering = lambda: at_entry.extend(destroyed)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        double(x, out=out)
        outcome = "too late" if world.driver.launches[-1].handle in at_entry else "launched"
    except PoolClosedError:
        outcome = "refused"
    finally:
        sys.settrace(before)
    world.pool.close()
    assert len(destroyed) == len({*destroyed}) == world.pool.stats()["handles_created"]
    return left <= 0, outcome


def closed_at_every_line(make_world):
    found = set()
    for k in itertools.count(1):
        there, outcome = closed_at(make_world(), k)
        found.add(outcome)
        if not there:
            return found


def test_g1_a_close_at_every_line_of_a_launch_leaves_the_entry_no_handle_that_is_destroyed(make_world):
    assert closed_at_every_line(make_world) == {"launched", "refused"}


def test_g1_control_a_launch_that_reads_the_slots_handle_before_it_is_busy(make_world, monkeypatch):
    text, late = shortcuts._TEXT, "slot.handle.{bound}"
    assert text.count(late) == 1
    monkeypatch.setattr(shortcuts, "_TEXT", text.replace(late, "handle.{bound}"))
    assert "too late" in closed_at_every_line(make_world)


@pytest.mark.parametrize("careless", [False, True], ids=["in use", "control"])
def test_g1_a_close_inside_the_entry_leaves_it_its_handle(raw, monkeypatch, careless, without):
    x, destroyed = raw.array(), []
    number = again_handle(raw, x)
    if careless:
        without("a look at launches under way")
    monkeypatch.setattr(raw.driver, "destroy_handle", lambda handle: destroyed.append(handle.backend_handle))
    raw.driver.entering = lambda: Thread(raw.pool.close).finish() or destroyed.append("the entry goes on")
    double(x)
    assert (number in destroyed[: destroyed.index("the entry goes on")]) is careless
    with pytest.raises(PoolClosedError):
        double(x)
    assert number in destroyed


def again_handle(world, x):
    known(world, double, x)
    return again(world, double, x).handle


# Branches


def branches(world, region, given):
    """What six branches of a known graph function did, in order."""
    xs, outs = [world.array() for _ in range(6)], [world.array() for _ in range(6)]
    kwargs = {"out": outs[0]} if given else {}
    known(world, double, xs[0], **kwargs)
    world.states.map(double, xs)  # so that the side slots are there
    world.driver.log.clear()
    world.driver.launches.clear()
    before = world.prepared
    if region == "map":
        made = world.states.map(double, xs, out=outs if given else None)
    else:
        with world.states.fork() as fork:
            made = [fork.run(double, x, **({"out": out} if given else {})) for x, out in zip(xs, outs, strict=True)]
    assert world.prepared == before
    assert [launch.addresses for launch in world.driver.launches] == [addresses(x, y) for x, y in zip(xs, made, strict=True)]
    assert len({launch.handle for launch in world.driver.launches}) == 4
    assert not given or all(y is out for y, out in zip(made, outs, strict=True))
    return world.driver.log


@pytest.mark.parametrize("given", [True, False], ids=["out given", "out made"])
def test_g8_a_branchs_output_is_allocated_before_the_edge_that_starts_it(world, given):
    log = branches(world, "run", given)
    caller = world.stream.ptr
    sides = [step[1] for step in log if step[0] == "wait" and step[1] != caller]
    assert len(sides) == 6
    assert sides[:2] == sides[4:]
    expected = [step for side in sides for step in ["allocate"] * (not given) + [("record", caller), ("wait", side), "launch"]]
    assert log[: len(expected)] == expected
    assert log[len(expected) :] == [step for side in sides[:4] for step in (("record", side), ("wait", caller))]


@pytest.mark.parametrize("given", [True, False], ids=["out given", "out made"])
def test_g8_a_maps_outputs_are_allocated_before_the_one_edge_that_starts_its_branches(world, given):
    log = branches(world, "map", given)
    caller = world.stream.ptr
    sides = [step[1] for step in log if step[0] == "wait" and step[1] != caller]
    made = [] if given else ["allocate"] * (2 if world.driver.raw else 6)  # the first one's, and the others' as one block
    expected = [*made, ("record", caller), *(("wait", side) for side in sides)] + ["launch"] * 6
    expected += [step for side in sides for step in (("record", side), ("wait", caller))]
    assert len(sides) == 4
    assert log == expected


@pytest.mark.parametrize("function", [plus, both])
@pytest.mark.parametrize("size", [8, 25_000, 200_000])
def test_a_maps_outputs_share_a_block_where_they_are_small_and_no_bytes(make_world, function, size):
    world = make_world()
    xs = [world.array(size) for _ in range(6)]
    known(world, function, xs[0], xs[0])
    world.states.map(function, xs, xs)
    world.driver.log.clear()
    made = [y for ys in world.states.map(function, xs, xs) for y in (ys if isinstance(ys, tuple) else (ys,))]
    starts = sorted(y.data.ptr for y in made)
    assert all(later - earlier >= xs[0].nbytes for earlier, later in itertools.pairwise(starts))
    assert not any(start % 512 for start in starts)
    assert {(y.shape, y.strides, y.dtype) for y in made} == {(xs[0].shape, xs[0].strides, xs[0].dtype)}
    outputs = len(made) // 6
    shared = 5 * outputs * -(-xs[0].nbytes // 512) * 512 <= shortcuts.MOST_TOGETHER
    assert shared is (size < 200_000)
    assert world.driver.log.count("allocate") == outputs + (1 if shared else 5 * outputs)
    assert len({y.data.mem for y in made}) == world.driver.log.count("allocate")


def test_a_branch_with_arguments_that_are_refused_costs_no_state(world):
    x = world.array()
    known(world, double, x)
    with world.states.fork() as fork:
        for wrong in (np.zeros((2, 4), np.float32), world.array(address=(1 << 29) + 4)):
            with pytest.raises((ArgumentError, ArrayTypeError)):
                fork.run(double, wrong)
        fork.run(double, x)
