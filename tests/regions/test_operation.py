"""Operations: what is declared, what they read and write, what is refused, and what was written without being declared."""

import copy
import functools
import inspect
import pickle

import numpy as np
import pytest
from harness.hidden import hidden as unseen

import handlepool
from handlepool import ArgumentError, ContractError
from handlepool.order.operation import operation_of
from handlepool.order.reached import piece_of
from handlepool.tensors.layout import Token

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


def halve(y):
    y *= 0.5


@handlepool.operation(mutates="y")
def scaled(y, factor=2.0):
    """Scale in place."""
    y *= factor


@handlepool.operation
def plus_one(x):
    return x + 1


hidden = handlepool.operation(halve, mutates="y")


class Accumulator:
    def __init__(self, array):
        self.state = array
        self.weights = [array]
        self.plan = object()

    @handlepool.operation(mutates="self.state")
    def add(self, x):
        self.state += x

    @classmethod
    @handlepool.operation
    def of(cls, x):
        return cls(x)

    @staticmethod
    @handlepool.operation(mutates="y")
    def clear(y):
        y[...] = 0


@pytest.fixture
def array(pool):
    """Makes arrays of the default pool's driver, all of one value."""
    return lambda value=1.0, size=8: pool.driver.asarray(np.full(size, value))


@pytest.fixture
def memory(pool):
    """The memory of arrays."""
    return lambda *arrays: [piece_of(pool.driver, array) for array in arrays]


@pytest.fixture
def accesses(pool):
    """What a call of an operation reads, and what it writes."""

    def accesses(function, *args, **kwargs):
        found, given = operation_of(function, args)
        return found.accesses(pool.driver, given, kwargs)

    return accesses


# What is declared


def test_a_parameter_is_named_by_a_string_wherever_it_is_given(array, memory, accesses):
    x, y = array(), array()

    @handlepool.operation(mutates="y")
    def function(x, y=None):
        return x

    for reads, writes in (accesses(function, x, y), accesses(function, x, y=y), accesses(function, y=y, x=x)):
        assert {*memory(x, y)} == {*reads}
        assert writes == memory(y)
    assert accesses(function, x) == (memory(x), [])


@pytest.mark.parametrize(
    ("function", "entry"),
    [
        (lambda x, /, y: None, "y"),
        (lambda x, *, y: None, "y"),
        (lambda x, *ys, **others: None, "others"),
        (lambda x, **ys: None, "ys"),
    ],
    ids=["positional", "keyword alone", "rest", "all keywords"],
)
def test_every_kind_of_parameter_has_a_name(array, memory, accesses, function, entry):
    x, y = array(), array()
    assert accesses(handlepool.operation(function, mutates=entry), x, y=y)[1] == memory(y)


def test_the_positional_rest_is_an_entry(array, memory, accesses):
    x, y, z = array(), array(), array()
    assert accesses(handlepool.operation(lambda x, *ys: None, mutates="ys"), x, y, z)[1] == memory(y, z)


def test_a_default_counts(array, memory, accesses):
    y = array()
    assert accesses(handlepool.operation(lambda x=1, y=y: None, mutates="y"))[1] == memory(y)


def test_an_attribute_is_named_by_dots_and_what_is_none_is_nothing(array, memory, accesses):
    accumulator = Accumulator(array())
    reads, writes = accesses(accumulator.add, 1)
    assert {*reads} == {*writes} == {*memory(accumulator.state)}
    accumulator.state = None
    assert accesses(accumulator.add, 1)[1] == []
    deep = handlepool.operation(lambda accumulator: None, mutates="accumulator.state.state")
    assert accesses(deep, accumulator)[1] == []
    assert accesses(deep, None)[1] == []
    accumulator.state = Accumulator(array())
    assert accesses(deep, accumulator)[1] == memory(accumulator.state.state)


def test_what_an_object_has_is_read_by_its_methods_however_these_were_made(array, memory, monkeypatch):
    class Holder(Accumulator):
        @property
        @handlepool.operation
        def doubled(self):
            return self.state * 2

        @functools.wraps(halve)
        def wrapped(self):
            return inner(self)

    def halved(self):
        return self.state * 0.5

    Holder.halved = inner = handlepool.operation(halved)
    holder, found = Holder(array()), []
    accesses = handlepool.order.operation.Operation.accesses
    monkeypatch.setattr("handlepool.order.operation.Operation.accesses", lambda *call: found.append(accesses(*call)) or found[-1])

    def function(x):
        return holder.doubled, holder.halved(), holder.wrapped(), plus_one(x)

    handlepool.record(function, array(), lanes=2).close()
    assert [{*memory(holder.state)} == {*reads} for reads, _ in found[4:]] == [True, True, True, False]


def test_a_function_is_called_with_the_calls_arguments(array, memory, accesses):
    x, y = array(), array()

    @handlepool.operation(mutates=(lambda x, *, where: where["y"], "x"), reads=lambda x, *, where: HELD)
    def function(x, *, where):
        pass

    held = HELD[0] = array()
    reads, writes = accesses(function, x, where={"y": y})
    assert {*reads} == {*memory(x, y, held)}
    assert writes == memory(y, x)


HELD = {}


def test_lists_tuples_and_dictionaries_are_walked(array, memory, accesses):
    x, y, z = array(), array(), array()
    found = accesses(handlepool.operation(lambda values: None, mutates="values"), [x, (y, {"z": [z]}), None])
    assert found[1] == memory(x, y, z)


def test_what_is_no_array_is_a_token_by_identity(array, accesses):
    @handlepool.operation(mutates="plan", reads="file")
    def function(plan, file=None):
        pass

    class Equal:
        __hash__ = None

        def __eq__(self, other):
            return True

    one, other = Equal(), Equal()
    assert accesses(function, one, other) == ([Token(other)], [Token(one)])
    assert Token(one) != Token(other)
    assert accesses(function, [one, {1: other}])[1] == [Token(one), Token(other)]
    assert accesses(function, array(size=0)) == ([], [])


def test_it_reads_what_a_plain_function_reads(array, memory, accesses):
    x, y, z, held = array(), array(), array(), array()

    @handlepool.operation(mutates=())
    def function(x, y=y, *, z=z):
        return held

    assert {*accesses(function, {"x": [x]})[0]} == {*memory(x, y, z, held)}
    accumulator = Accumulator(array())
    accumulator.more = array()
    assert {*accesses(accumulator.add, x)[0]} == {*memory(x, accumulator.state, accumulator.more)}
    assert {*accesses(Accumulator.add, accumulator, x)[0]} == {*memory(x, accumulator.state, accumulator.more)}


def test_its_out_is_written(array, memory, accesses):
    x, y = array(), array()
    for function in (lambda x, out=None: out, lambda x, **options: x, lambda x, *, out=None: x):
        assert accesses(handlepool.operation(function), x, out=y)[1] == memory(y)
        assert accesses(handlepool.operation(function), x, out=(y, x))[1] == memory(y, x)
        assert accesses(handlepool.operation(function), x)[1] == []
    assert accesses(handlepool.operation(lambda x, out: out), x, y)[1] == memory(y)


def test_views_have_the_memory_that_they_share(array, memory, accesses):
    x = array(size=8)
    (start, stop, _), (whole, end, _) = accesses(scaled, x[2:4])[1][0], memory(x)[0]
    assert (start, stop) == (whole + 16, whole + 32)
    assert end == whole + 64


def test_arrays_of_other_libraries_count(accesses):
    values = np.ones((4, 6), np.float32)

    class Interface:
        __array_interface__ = values[:, ::2].__array_interface__

    class Nowhere:
        @property
        def __cuda_array_interface__(self):
            raise AttributeError("an array on the host")

        def __dlpack__(self):
            raise BufferError

    address = values.__array_interface__["data"][0]
    ((start, stop, strided),) = accesses(scaled, Interface())[1]
    assert (start, stop) == (address, address + 4 * 6 * 4 - 4)
    assert strided == (address, (4, 3), (24, 8), 4)
    nowhere = Nowhere()
    assert accesses(scaled, nowhere) == ([], [Token(nowhere)])


# What is refused


@pytest.mark.parametrize("entry", ["z", "", "Y", "z.state", "y.", "y..x", ".y", "y.0", ("x", "z"), "self"])
@pytest.mark.parametrize("what", ["mutates", "reads"])
def test_an_unknown_name_is_refused_at_decoration(what, entry):
    with pytest.raises(ArgumentError, match=rf"<lambda>: {what}='.*' is neither a parameter .*parameters are x, y"):
        handlepool.operation(lambda x, y: None, **{what: entry})


@pytest.mark.parametrize("entry", [3, ("x", None), [["x"]], np.ones(3), {"x"}])
def test_what_is_no_entry_is_refused_at_decoration(entry):
    with pytest.raises(
        ArgumentError, match=r"is no entry. Pass a parameter's name, a parameter's attribute such as 'self.state', or"
    ):
        handlepool.operation(lambda x: None, mutates=entry)


def test_a_name_is_refused_for_what_does_not_tell_its_parameters_and_a_function_is_taken(array, memory, accesses):
    class Kernel:
        __signature__ = "none"

        def __call__(self, *args):
            pass

    with pytest.raises(ArgumentError, match=r"its parameters are unknown. For any other value pass a function"):
        handlepool.operation(Kernel(), mutates="y")
    y = array()
    assert accesses(handlepool.operation(Kernel(), mutates=lambda grid, block, args: args), 1, 1, (y,))[1] == memory(y)


@pytest.mark.parametrize("what", [3, property(lambda self: None), classmethod(lambda cls: None)])
def test_what_cannot_be_called_is_refused(what):
    with pytest.raises(ArgumentError, match=r"cannot be called: put @handlepool.operation right above the function"):
        handlepool.operation(what)


async def coroutine(x):
    pass


def generator(x):
    yield x


async def both(x):
    yield x


@pytest.mark.parametrize("late", [coroutine, generator, both])
def test_what_runs_after_its_call_is_refused(late):
    with pytest.raises(ArgumentError, match=f"operation {late.__name__} is a generator or a coroutine"):
        handlepool.operation(mutates="x")(late)


def test_an_attribute_that_is_not_there_is_refused_at_the_call(accesses):
    with pytest.raises(ArgumentError, match=r"self.state' is not found, because <object .*> has no attribute 'state'"):
        accesses(Accumulator.add, object(), 1)


def test_an_entrys_function_that_fails_is_named(accesses):
    function = handlepool.operation(lambda x: None, mutates=lambda x, y: y)
    with pytest.raises(ArgumentError, match=r"the function in mutates= failed. It gets the arguments of the call"):
        accesses(function, 1)


def test_one_that_says_nothing_returns_nothing_and_has_no_out_is_an_error_at_its_first_call(array):
    silent = handlepool.operation(halve)
    for _ in range(2):
        with pytest.raises(ContractError, match=r"operation halve declares nothing, returned nothing and was given no out="):
            silent(array())


def test_control_one_that_says_that_it_writes_nothing_or_is_given_an_out_is_called(array):
    assert handlepool.operation(halve, mutates=())(array()) is None
    assert handlepool.operation(halve, reads="y")(array()) is None
    assert handlepool.operation(lambda x, out=None: None)(1, out=array()) is None
    assert handlepool.operation(lambda x, **options: None)(1, out=array()) is None
    assert plus_one(1) == 2


# As a function


def test_called_alone_it_is_the_function(array):
    y = array(3.0)
    assert scaled(y) is None
    assert scaled(y, factor=2.0) is None
    assert (y == 12).all()
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'y'"):
        scaled()


def test_it_shows_itself_as_the_function():
    assert scaled.__name__ == "scaled"
    assert scaled.__doc__ == "Scale in place."
    assert scaled.__module__ == __name__
    assert inspect.signature(scaled) == inspect.signature(scaled.function) == inspect.signature(scaled.__wrapped__)
    assert str(inspect.signature(Accumulator(1).add)) == "(x)"
    assert repr(scaled) == "<Operation scaled>"
    assert repr(Accumulator.add) == "<Operation Accumulator.add>"


def test_a_method_is_bound_and_known_as_an_operation(array):
    accumulator = Accumulator(array(1.0))
    accumulator.add(array(2.0))
    Accumulator.add(accumulator, 3)
    assert (accumulator.state == 6).all()
    assert operation_of(accumulator.add, (1,)) == (Accumulator.add, (accumulator, 1))
    assert operation_of(Accumulator.add, (1,)) == (Accumulator.add, (1,))
    assert operation_of(halve, (1,)) is operation_of(accumulator.__init__, ()) is operation_of(len, ()) is None
    Accumulator.clear(accumulator.state)
    accumulator.clear(accumulator.state)
    assert (accumulator.state == 0).all()
    assert Accumulator.of(1).state == accumulator.of(1).state == 1


def test_what_wraps_is_seen_through(array, memory, accesses):
    def doubled(function):
        @functools.wraps(function)
        def twice(*args, **kwargs):
            function(*args, **kwargs)
            return function(*args, **kwargs)

        return twice

    x, y = array(), array()
    assert accesses(handlepool.operation(mutates="y")(doubled(lambda x, y: None)), x, y)[1] == memory(y)
    assert accesses(handlepool.operation(scaled, mutates="y"), y)[1] == memory(y)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_it_is_pickled_by_its_name(protocol):
    for each in (scaled, plus_one, Accumulator.add, Accumulator.clear):
        assert pickle.loads(pickle.dumps(each, protocol)) is each
    accumulator = Accumulator(3)
    accumulator.plan = None
    found = pickle.loads(pickle.dumps(accumulator.add, protocol))
    assert operation_of(found, ())[0] is Accumulator.add
    assert found.__self__.state == 3


def test_one_that_its_name_does_not_lead_to_cannot_be_pickled():
    for each in (hidden, handlepool.operation(lambda x: x)):
        with pytest.raises(ArgumentError, match="cannot be pickled: another process finds it by its name"):
            pickle.dumps(each)


def test_it_is_copied_as_functions_are():
    assert copy.copy(scaled) is copy.deepcopy(scaled) is scaled
    assert copy.deepcopy([hidden]) == [hidden]


def test_where_no_fork_is_open_it_asks_for_nothing(pool, monkeypatch, make_default):
    """No order, no driver, and no default pool where there is none."""
    y = np.ones(3)
    make_default(None)
    monkeypatch.setattr("handlepool.pool.default.HandlePool", None)
    for name in ("before", "pieces_of", "pieces_or_tokens"):
        monkeypatch.setattr(f"handlepool.order.operation.{name}", None)
    calls = pool.driver.calls.total()
    scaled(y)
    assert pool.driver.calls.total() == calls
    assert (y == 2).all()


# What was not declared


@pytest.fixture
def checked(make_pool, make_default):
    """A pool with checks that is the default one, and has a stream of its own current."""
    pool = make_pool(check=True)
    make_default(pool)
    stream = pool.driver.create_stream()
    with stream:
        yield pool
    pool.driver.synchronize_stream(stream.ptr)


def test_with_checks_an_argument_that_was_written_and_not_declared_is_named(checked):
    x, y, w = (checked.driver.asarray(np.ones(4)) for _ in range(3))

    @handlepool.operation(mutates="y")
    def function(x, y, **others):
        y += 1
        for each in others.get("a") or [w if x is None else x]:
            each[0] += 1

    with pytest.raises(
        ContractError, match=r"function wrote argument x without declaring it: declare the function.s writes, for example with"
    ):
        function(x, y)
    with pytest.raises(ContractError, match=r"function wrote argument others "):
        function(1, y, a=[x])
    with pytest.raises(ContractError, match=r"function wrote w of its closure "):
        function(None, y)
    with pytest.raises(ContractError, match=r"Touching.touch wrote self\.state "):
        Touching(x).touch()


class Touching(Accumulator):
    @handlepool.operation(mutates=())
    def touch(self):
        self.weights[0][:1] += 1


def test_with_checks_what_is_declared_may_change_and_its_views_too(checked):
    x = checked.driver.asarray(np.ones(4))

    @handlepool.operation(mutates="y")
    def function(x, y):
        y += 1

    function(x, x)
    function(x, x[:2])
    function(x[1:], x)
    scaled(x)
    handlepool.operation(np.add)(x, x, out=x)
    assert checked.driver.asnumpy(x)[0] == 16


def test_control_without_checks_nothing_is_compared(pool):
    x = pool.driver.asarray(np.ones(4))
    handlepool.operation(halve, mutates=())(x)
    assert (x == 0.5).all()


def test_with_checks_plain_and_foreign_arrays_are_compared_and_nan_is_itself(checked):
    class Interface:
        def __init__(self, values):
            self.values = values
            self.__array_interface__ = values.__array_interface__

    values = np.full(4, np.nan)
    same, change = handlepool.operation(lambda x: 1), handlepool.operation(lambda x: x.values.fill(1), mutates=())
    assert same(values) == same(Interface(values)) == 1
    with pytest.raises(ContractError, match="wrote argument x"):
        change(Interface(values))
    with pytest.raises(ContractError, match="wrote argument y"):
        handlepool.operation(halve, mutates=())(values)


def test_with_checks_the_comparison_orders_nothing_by_itself(checked):
    """The host waits to look, and the checker of order takes that for nothing: what is not ordered is found all the same."""
    driver = checked.driver
    x, y = driver.asarray(np.ones(4)), driver.asarray(np.ones(4))
    scaled(y)
    assert plus_one(x) is not None
    with driver.create_stream(), pytest.raises(ContractError, match="not ordered"):
        y += 1
    assert driver.order.found.pop()


def test_control_who_waits_on_the_host_is_ordered(checked):
    driver = checked.driver
    y = driver.asarray(np.ones(4))
    scaled(y)
    driver.asnumpy(y)
    with driver.create_stream() as other:
        y += 1
    driver.synchronize_stream(other.ptr)


def test_inside_a_capture_nothing_is_compared(checked):
    x = checked.driver.asarray(np.ones(4))
    function = handlepool.operation(lambda x: np.add(x, 1, out=x), mutates=())
    with pytest.raises(ContractError, match="wrote argument x"):
        function(x)
    calls = unseen([])

    def recorded(x):
        calls().append(1)
        return function(x) if len(calls()) > 1 else x + 1

    program = handlepool.record(recorded, x)
    assert len(calls()) == 2
    program.close()
