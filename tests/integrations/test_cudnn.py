"""The frontend's functions are the pool's while `handlepool.integrations.cudnn` is installed, and its own afterwards."""

import copy
import inspect
import pickle
import re
import subprocess
import sys
import threading
from types import ModuleType, SimpleNamespace
from unittest import mock

import cudnn
import pytest
from cudnn import wrapper
from harness.insides import cudnn_binding, lowered
from harness.process import as_default

import handlepool
from handlepool import CaptureError, ContractError, DriverNotAvailableError, HandlePool, OwnershipError, StreamError
from handlepool.cli import info
from handlepool.integrations import cudnn as shim
from handlepool.integrations import cudnn_assumptions

NAMES = ("create_handle", "set_stream", "get_stream", "destroy_handle")


@pytest.fixture
def pool(make_driver):
    """The default pool, on a host driver; the frontend is left as it was found."""
    with HandlePool(driver=make_driver()) as pool, as_default(pool):
        yield pool
        shim.uninstall()
    assert not shim.is_installed()


@pytest.fixture
def installed(pool):
    """The same, with the frontend's functions replaced."""
    shim.install()
    return pool


@pytest.fixture
def binding(monkeypatch):
    """What the frontend's own functions told cuDNN; no library is there."""
    told = []
    numbers = iter(range(1, 1000))
    for name, function in {
        "create_handle": lambda: next(numbers),
        "get_stream": lambda handle: 0,
        "_raw_set_stream": lambda handle, stream: told.append(("bound", handle, stream)),
        "_raw_destroy_handle": lambda handle: told.append(("destroyed", handle)),
    }.items():
        monkeypatch.setattr(cudnn_binding(), name, function)
    return told


@pytest.fixture
def torch(monkeypatch):
    """As much of torch as says which of its streams is current."""

    class Stream:
        def __init__(self, pointer, device=0):
            self.cuda_stream = pointer
            self.device = SimpleNamespace(index=device)

    here = SimpleNamespace(stream=Stream(0))
    cuda = SimpleNamespace(
        Stream=Stream, is_initialized=lambda: True, current_stream=lambda: here.stream, current_device=lambda: 0
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    here.Stream = Stream
    return here


def test_functions_are_replaced_and_put_back(pool):
    before = [getattr(cudnn, name) for name in NAMES] + [wrapper.get_default_handle]
    shim.install()
    during = [getattr(cudnn, name) for name in NAMES] + [wrapper.get_default_handle]
    assert shim.is_installed()
    for old, new in zip(before, during, strict=True):
        assert new is not old
        assert inspect.unwrap(new) is old
        assert (new.__name__, inspect.signature(new)) == (old.__name__, inspect.signature(old))
    shim.uninstall()
    assert [getattr(cudnn, name) for name in NAMES] + [wrapper.get_default_handle] == before
    shim.uninstall()


def test_installing_twice_and_in_many_threads_replaces_once(pool, in_thread):
    before = cudnn.create_handle
    begin = threading.Barrier(4)

    def install():
        begin.wait(60)
        shim.install()
        return cudnn.create_handle

    threads = [threading.Thread(target=install) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert install().__wrapped__ is before
    for thread in threads:
        thread.join(60)
    assert cudnn.create_handle.__wrapped__ is before
    shim.uninstall()
    assert cudnn.create_handle is before


def test_of_several_contexts_the_last_one_ends_it_in_whatever_order(pool):
    first, second = shim.pooled_handles(), shim.pooled_handles()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert shim.is_installed()
    second.__exit__(None, None, None)
    assert not shim.is_installed()


def test_a_context_in_which_something_fails_ends_it_too(pool):
    with pytest.raises(KeyError), shim.pooled_handles():
        raise KeyError
    assert not shim.is_installed()


def test_install_and_a_context_end_when_both_have_ended(pool):
    shim.install()
    with shim.pooled_handles():
        shim.uninstall()
        assert shim.is_installed()
    assert not shim.is_installed()
    shim.install()
    with shim.pooled_handles():
        pass
    assert shim.is_installed()


UNKNOWN = ["1.31.0", "1.320.0", "2.0.0", "1.3"]


@pytest.mark.parametrize("version", UNKNOWN)
def test_another_version_that_passes_the_self_test_is_warned_of_and_works(pool, monkeypatch, version):
    monkeypatch.setattr(cudnn, "__version__", version)
    with pytest.warns(
        RuntimeWarning, match=rf"{version} is not one of the versions that handlepool knows, 1\.32\.\*; it passed"
    ) as caught:
        shim.install()
    assert [warning.filename for warning in caught] == [__file__]
    assert cudnn.create_handle().backend_handle == handlepool.get_handle().backend_handle
    found = info.collect()
    expected = {"installed": True, "frontend": version, "known": False, "known_versions": ["1.32"], "broken": None}
    assert found["integrations"]["cudnn"] == expected
    assert f"{version} is not known, and passed the self-test" in info.render(found)
    shim.uninstall()
    with pytest.warns(RuntimeWarning, match="it passed a self-test"), shim.pooled_handles():  # over methods that have stayed
        assert isinstance(cudnn.create_handle(), shim.PooledHandle)


def test_a_warning_of_a_version_that_is_an_error_changes_nothing(pool, monkeypatch):
    before = cudnn.create_handle
    monkeypatch.setattr(cudnn, "__version__", "1.33.0")
    with pytest.raises(RuntimeWarning):
        shim.install()
    assert cudnn.create_handle is before


def from_source(text, owner=cudnn):
    """A function that stands in a module of the frontend's."""
    space = {**vars(owner)}
    exec(text, space)
    return next(value for name, value in space.items() if name not in vars(owner) or value is not vars(owner)[name])


class HandleWithSlots:
    __slots__ = ("backend", "stream")

    def __init__(self, backend, ordinal=None, stream=None):
        self.backend, self.stream = backend, stream


BROKEN = {
    "cudnn.Handle is a class of handles": (cudnn, "Handle", HandleWithSlots),
    "cudnn.create_handle takes no argument": (cudnn, "create_handle", from_source("def f(device): return Handle(0)")),
    "cudnn.create_handle takes no argument, and makes": (cudnn, "create_handle", from_source("def f(): return 7")),
    r"cudnn.set_stream\(handle, stream\) binds": (cudnn, "set_stream", from_source("def f(h, s): h.stream = s")),
    "and sets nothing else": (
        cudnn,
        "set_stream",
        from_source(
            "def f(handle, stream):\n"
            " _pybind_module._raw_set_stream(handle.backend_handle, stream)\n"
            " handle.stream = stream; handle.device = 0; handle.backend_handle = 3"
        ),
    ),
    "cudnn.set_stream.*binds cuDNN's handle to the stream, then": (
        cudnn,
        "set_stream",
        from_source(
            "def f(handle, stream):\n handle.stream = stream\n _pybind_module._raw_set_stream(handle.backend_handle, stream)"
        ),
    ),
    "cudnn.set_stream.*NameError: name '_other' is not defined": (
        cudnn,
        "set_stream",
        from_source("def f(handle, stream): _other.bind(handle.backend_handle, stream)"),
    ),
    "cudnn.set_stream.*ImportError": (cudnn, "set_stream", from_source("def f(handle, stream):\n import ctypes\n ctypes.f()")),
    "cudnn.get_stream.*returns handle.stream": (cudnn, "get_stream", from_source("def f(handle): return 17")),
    "cudnn.destroy_handle.*then sets handle.backend_handle": (
        cudnn,
        "destroy_handle",
        from_source("def f(handle): _pybind_module._raw_destroy_handle(handle.backend_handle)"),
    ),
    "keeps the handle that it is made with as _handle": (cudnn.pygraph, "_handle", property(lambda self: None, lambda *_: None)),
    "reads backend_handle of the graph's handle at each lowering": (
        cudnn.pygraph,
        "_backend_handle_for_lowering",
        from_source("def f(graph, settings): return 1"),
    ),
    r"cudnn.pygraph.execute calls _execute\(": (
        cudnn.pygraph,
        "_execute",
        from_source("def f(graph, tensors, handle=None, workspace=None): pass"),
    ),
    "cudnn.pygraph.execute calls": (cudnn.pygraph, "execute", from_source("def f(graph, tensors): graph.launch(tensors)")),
    "cudnn.pygraph.execute_plan_at_index takes": (
        cudnn.pygraph,
        "execute_plan_at_index",
        from_source("def f(graph, tensors, index, workspace, handle): pass"),
    ),
    "a new cudnn.Graph has no handle and no workspace": (wrapper.Graph, "_Graph__handle", "auto"),
    "has no handle and no workspace, and keeps": (wrapper.Graph, "__init__", from_source("def f(self): self.graph = None")),
    "only if it has none": (
        wrapper.Graph,
        "__exit__",
        from_source("def f(self, *error): self._Graph__workspace = torch.empty()", wrapper),
    ),
    "a call of a cudnn.Graph executes its graph with": (
        wrapper.Graph,
        "__call__",
        from_source("def f(self, *tensors, **options): self._Graph__graph.execute({}, handle=options['handle'])"),
    ),
    "a cudnn.Graph asks cudnn.wrapper.get_default_handle": (wrapper, "get_default_handle", from_source("def f(device): pass")),
    "cudnn.Graph.__call__ exists": (wrapper.Graph, "__call__", None),
}


@pytest.mark.parametrize("assumption", BROKEN)
def test_another_version_of_which_an_assumption_does_not_hold_is_refused_with_that(pool, monkeypatch, assumption):
    monkeypatch.setattr(cudnn, "__version__", "1.33.0")
    monkeypatch.setattr(*BROKEN[assumption], raising=False)
    before = [getattr(cudnn, name) for name in NAMES]
    with pytest.raises(DriverNotAvailableError, match=f"1.33.0 cannot use .* an assumption of handlepool: .*{assumption}"):
        shim.install()
    assert [getattr(cudnn, name) for name in NAMES] == before
    assert not shim.is_installed()
    found = info.collect()
    assert not found["integrations"]["cudnn"]["installed"]
    assert re.search(assumption, found["integrations"]["cudnn"]["broken"])
    assert "not installed; nvidia-cudnn-frontend 1.33.0 is not known, and failed" in info.render(found)


def test_the_self_test_is_refused_nothing_by_the_version_that_is_known_and_changes_nothing(pool, binding):
    handle = cudnn.create_handle()
    before = {**vars(handle)}
    assert cudnn_assumptions.broken() is None
    assert (vars(handle), binding) == (before, [])


def test_a_frontend_without_a_name_that_is_replaced_is_refused_and_left_as_it_is(pool, monkeypatch):
    before = cudnn.create_handle
    for version in (cudnn.__version__, "1.33.0"):
        monkeypatch.setattr(cudnn, "__version__", version)
        for owner, name, called in (
            (cudnn, "get_stream", "cudnn.get_stream"),
            (cudnn.pygraph, "_execute", "cudnn.pygraph._execute"),
        ):
            with monkeypatch.context() as patch:
                patch.delattr(owner, name)
                with pytest.raises(DriverNotAvailableError, match=f"it breaks an assumption of handlepool: {called} exists"):
                    shim.install()
            assert cudnn.create_handle is before


@pytest.mark.parametrize("name", ["Handle", "pygraph"])
def test_the_integration_is_imported_and_refuses_also_where_a_class_of_the_frontends_is_missing(name):
    code = (
        f"import cudnn, cudnn.wrapper; del cudnn.{name}; cudnn.__version__ = '1.20.0'\n"
        f"from handlepool.integrations import cudnn as shim\n"
        f"try: shim.install()\n"
        f"except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("DriverNotAvailableError nvidia-cudnn-frontend 1.20.0 cannot use"), done.stderr
    assert f"cudnn.{name}" in done.stdout


def test_each_loaded_module_that_keeps_an_original_is_warned_of(pool, monkeypatch):
    for name, kept in (("kept_one", ["create_handle"]), ("kept_two", ["destroy_handle", "set_stream"])):
        module = ModuleType(name)
        for one in kept:
            setattr(module, f"my_{one}", getattr(cudnn, one))
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.warns(RuntimeWarning) as caught:
        shim.install()
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == 2
    assert "kept_one keeps the frontend's own create_handle, imported" in texts[0]
    assert "kept_two keeps the frontend's own destroy_handle, set_stream, imported" in texts[1]
    assert {warning.filename for warning in caught} == {__file__}
    shim.install()


def test_what_stands_for_a_module_and_has_no_names_or_raises_at_them_is_passed_over(pool, monkeypatch):
    class Lazy(ModuleType):
        def __getattribute__(self, name):
            raise RuntimeError(name)

    for name, module in {"lazy": Lazy("lazy"), "none": None, "no_module": object()}.items():
        monkeypatch.setitem(sys.modules, name, module)
    shim.install()
    assert isinstance(cudnn.create_handle(), shim.PooledHandle)


def test_a_warning_that_is_an_error_changes_nothing(pool, monkeypatch):
    module = ModuleType("kept")
    module.create_handle = before = cudnn.create_handle
    monkeypatch.setitem(sys.modules, "kept", module)
    with pytest.raises(RuntimeWarning):
        shim.install()
    assert cudnn.create_handle is before


def test_what_somebody_else_has_put_over_it_is_not_taken_away(pool, monkeypatch):
    shim.install()
    with monkeypatch.context() as patch:
        patch.setattr(cudnn, "set_stream", lambda handle, stream: None)
        with pytest.raises(OwnershipError, match=r"other code has replaced cudnn\.set_stream"):
            shim.uninstall()
        assert shim.is_installed()
    shim.uninstall()


@pytest.mark.parametrize("autospec", [None, True])
def test_what_a_patch_has_put_back_is_replaced_again_by_install_and_no_obstacle_to_uninstall(pool, autospec):
    before = [getattr(cudnn, name) for name in NAMES]
    for again in (False, True):
        with mock.patch.object(cudnn, "create_handle", autospec=autospec):
            shim.install()
        assert cudnn.create_handle is before[0]
        if again:
            shim.install()
            assert isinstance(cudnn.create_handle(), shim.PooledHandle)
            assert cudnn.create_handle.__wrapped__ is before[0]
        shim.uninstall()
        assert not shim.is_installed()
        assert [getattr(cudnn, name) for name in NAMES] == before


def test_names_that_a_user_has_put_back_are_replaced_again_by_install_and_contexts_and_the_others_stay(pool):
    kept, before = cudnn.set_stream, cudnn.create_handle
    shim.install()
    create_handle = cudnn.create_handle
    cudnn.set_stream = kept
    shim.install()
    assert (cudnn.set_stream.__wrapped__, cudnn.create_handle) == (kept, create_handle)
    cudnn.set_stream = kept
    with shim.pooled_handles():
        assert (cudnn.set_stream.__wrapped__, cudnn.create_handle) == (kept, create_handle)
    shim.uninstall()
    assert (cudnn.create_handle, cudnn.set_stream) == (before, kept)


def test_g1_one_handle_in_many_threads_is_another_of_the_pools_in_each(installed, in_thread):
    handle = cudnn.create_handle()
    assert isinstance(handle, cudnn.Handle)
    end = threading.Barrier(8)
    found = []

    def use():
        found.append(handle.backend_handle)
        end.wait(60)

    threads = [threading.Thread(target=use) for _ in range(7)]
    for thread in threads:
        thread.start()
    use()
    for thread in threads:
        thread.join(60)
    assert len(set(found)) == 8
    assert handle.backend_handle == handlepool.get_handle().backend_handle


def test_g1_control_a_handle_of_the_frontends_own_is_one_in_all_threads(pool, binding, in_thread):
    handle = cudnn.create_handle()
    assert in_thread(lambda: handle.backend_handle) == handle.backend_handle


def test_each_thread_has_the_stream_that_it_has_set(installed, in_thread):
    handle = cudnn.create_handle()
    mine, theirs = (installed.driver.create_stream() for _ in range(2))
    cudnn.set_stream(handle=handle, stream=mine.ptr)

    def other():
        cudnn.set_stream(handle, theirs.ptr)
        return cudnn.get_stream(handle), handle.actual().stream

    assert in_thread(other) == (theirs.ptr, theirs.ptr)
    assert (cudnn.get_stream(handle), handle.actual().stream) == (mine.ptr, mine.ptr)


def test_a_stream_that_was_not_set_is_the_current_one(installed):
    handle, stream = cudnn.create_handle(), installed.driver.create_stream()
    assert cudnn.get_stream(handle) == 0
    with stream:
        assert cudnn.get_stream(handle) == stream.ptr
        assert handle.actual() is handlepool.get_handle()


def test_a_handle_that_another_thread_has_bound_comes_with_its_stream(installed, in_thread):
    handle, stream, other = cudnn.create_handle(), installed.driver.create_stream(), installed.driver.create_stream()
    in_thread(cudnn.set_stream, handle, stream.ptr)
    assert handle.actual().stream == stream.ptr
    with other:
        assert handle.actual().stream == other.ptr


def test_a_set_stream_that_is_cupys_current_one_finds_the_slot_of_that(installed):
    handle, stream = cudnn.create_handle(), installed.driver.create_stream()
    cudnn.set_stream(handle, stream.ptr)
    with stream:
        assert handle.actual() is handlepool.get_handle()


def test_torchs_current_stream_counts_and_two_that_differ_are_an_error(installed, torch):
    handle, theirs, ours = cudnn.create_handle(), installed.driver.create_stream(), installed.driver.create_stream()
    torch.stream = torch.Stream(theirs.ptr)
    assert cudnn.get_stream(handle) == theirs.ptr
    with theirs:
        assert cudnn.get_stream(handle) == theirs.ptr
    with ours:
        with pytest.raises(StreamError, match=r"differ: .* cudnn\.set_stream"):
            cudnn.get_stream(handle)
        cudnn.set_stream(handle, ours.ptr)
        assert handle.actual() is handlepool.get_handle()


def test_default_handles_are_of_the_thread_and_device_and_bound(installed, torch, in_thread):
    first, second = (installed.driver.create_stream() for _ in range(2))
    handle = wrapper.get_default_handle(first.ptr)
    assert handle.actual().stream == first.ptr
    assert wrapper.get_default_handle(torch.Stream(second.ptr)) is handle
    assert handle.actual().stream == second.ptr
    torch.stream = torch.Stream(first.ptr)
    assert wrapper.get_default_handle().actual().stream == first.ptr
    assert wrapper.get_default_handle(torch.Stream(0, 1)) is not handle
    assert in_thread(wrapper.get_default_handle) is not handle
    cudnn.destroy_handle(handle)
    assert wrapper.get_default_handle().actual().stream == first.ptr
    assert wrapper._default_handle_registry == []


def test_a_default_handle_without_torch_is_refused_as_the_frontend_does(installed, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(wrapper, "torch", None)
    with pytest.raises(RuntimeError, match="PyTorch is not available"):
        wrapper.get_default_handle()


def test_what_is_no_stream_is_refused_as_the_frontend_does(installed):
    handle = cudnn.create_handle()
    with pytest.raises(TypeError):
        cudnn.set_stream(handle, "stream")
    with pytest.raises(TypeError, match=r"expects a cudnn.Handle"):
        cudnn.set_stream(1234, 0)
    with pytest.raises(TypeError, match=r"expects a cudnn.Handle"):
        cudnn.destroy_handle(1234)


def test_a_destroyed_handle_is_over_for_all_threads_and_costs_the_pool_nothing(installed, in_thread):
    handle = cudnn.create_handle()
    number = handle.backend_handle
    in_thread(cudnn.destroy_handle, handle)
    cudnn.destroy_handle(handle=handle)
    assert (handle.backend_handle, handle.stream) == (None, None)
    assert "destroyed" in repr(handle)
    with pytest.raises(OwnershipError, match=r"make another one with cudnn\.create_handle"):
        handle.actual()
    assert cudnn.create_handle().backend_handle == number
    assert installed.stats()["handles_destroyed"] == 0


def test_short_threads_leave_nothing(installed, in_thread):
    kept = []

    def use():
        handle = cudnn.create_handle()
        kept.append(handle)
        return handle.backend_handle

    for _ in range(50):
        in_thread(use)
    assert installed.stats()["handles_live"] <= 2


def test_handles_that_were_made_before_go_on_to_work(pool, binding):
    handle = cudnn.create_handle()
    shim.install()
    cudnn.set_stream(handle, 77)
    assert cudnn.get_stream(handle) == 77
    cudnn.destroy_handle(handle)
    assert binding == [("bound", 1, 77), ("destroyed", 1)]


def test_handles_that_are_in_use_go_on_to_work_when_it_ends(installed, binding, in_thread):
    handle, stream = cudnn.create_handle(), installed.driver.create_stream()
    number = handle.backend_handle
    shim.uninstall()
    assert handle.backend_handle == number != in_thread(lambda: handle.backend_handle)
    cudnn.set_stream(handle, stream.ptr)
    assert cudnn.get_stream(handle) == stream.ptr
    assert handle.actual().stream == stream.ptr
    cudnn.destroy_handle(handle)
    assert handle.backend_handle is None


def test_g2_a_kept_set_stream_binds_a_handle_of_the_pools_and_that_is_mended(pool, binding):
    kept = cudnn.set_stream
    shim.install()
    handle, stream = cudnn.create_handle(), pool.driver.create_stream()
    first = handle.backend_handle
    kept(handle, stream.ptr)  # the frontend's own: cuDNN is told, and then the handle
    assert binding == [("bound", first, stream.ptr)]
    assert handle.actual().stream == stream.ptr
    before = pool.stats()
    assert handlepool.get_handle().backend_handle == first
    assert (pool.stats() - before)["handles_repaired"] == 1
    assert handlepool.get_handle().stream == 0


def test_a_kept_destroy_handle_costs_the_pool_one_handle_which_it_makes_anew(pool, binding):
    kept = cudnn.destroy_handle
    shim.install()
    handle = cudnn.create_handle()
    number = handle.backend_handle
    kept(handle)
    assert binding == [("destroyed", number)]
    assert handle.backend_handle is None
    assert handlepool.get_handle().backend_handle not in (None, number)


def test_g9_a_handle_that_is_made_and_used_in_a_capture_harms_none(pool):
    stream = pool.driver.create_stream()
    stream.begin_capture("global")
    with stream:
        shim.install()
        handle = cudnn.create_handle()
        assert handle.actual().stream == stream.ptr
        cudnn.set_stream(handle, stream.ptr)
        assert handle.actual().stream == stream.ptr
        cudnn.destroy_handle(handle)
        shim.uninstall()
    stream.end_capture()


def test_g9_control_the_drivers_own_create_handle_ends_it(pool):
    stream = pool.driver.create_stream()
    stream.begin_capture("global")
    with pytest.raises(ContractError):
        pool.driver.create_handle()
    with pytest.raises(CaptureError):
        stream.end_capture()


def test_without_a_driver_a_handle_is_refused(monkeypatch, no_gpu, unused):
    monkeypatch.setenv("HANDLEPOOL_DRIVER", "cuda")
    with shim.pooled_handles(), pytest.raises(DriverNotAvailableError):
        cudnn.create_handle()


@pytest.fixture(autouse=True)
def hosts_handles_pass(monkeypatch):
    """The frontend hands out the address of its own handles alone."""
    monkeypatch.setattr("cudnn._pygraph.to_backend_handle", lambda handle: handle and handle.backend_handle)


class Lowered:
    """A built graph, as far as `cudnn.pygraph` launches it: what it was launched with."""

    def __init__(self):
        self.launches = []

    def _execute(self, pack, workspace, handle, *_):
        self.launches.append((handle, workspace))

    def _execute_plan_at_index(self, pack, workspace, index, handle, *_):
        self.launches.append((handle, workspace))

    def get_workspace_size(self, *_):
        return 1000

    def get_execution_plan_count(self):
        return 1


def built(handle=None):
    graph = cudnn.pygraph(handle=handle)
    lowers_with = graph._backend_handle_for_lowering({})
    graph._is_built, graph._lowered_graph = True, Lowered()
    graph._normalize = lambda *_: None
    graph._native_var_pack = lambda tensors, workspace: ({}, workspace)
    return graph, lowers_with


def test_graphs_are_built_with_a_handle_that_no_thread_has(installed, in_thread):
    handle = cudnn.create_handle()
    _, with_handle = built(handle)
    _, in_another = in_thread(built, handle)
    _, without = built()
    assert with_handle == in_another == without
    assert with_handle not in (handle.backend_handle, in_thread(lambda: handle.backend_handle))


def test_a_graph_runs_with_what_it_is_given_else_its_own_else_the_current_streams(installed, in_thread):
    handle, other = cudnn.create_handle(), cudnn.create_handle()
    stream = installed.driver.create_stream()
    cudnn.set_stream(other, stream.ptr)
    graph, _ = built(handle)
    alone, _ = built()
    graph.execute({})
    graph.execute({}, None, other)
    in_thread(graph.execute, {})
    graph.execute_plan_at_index({}, 77, 0)
    with stream:
        alone.execute({}, 88)
        mine = handlepool.get_handle().backend_handle
    first, second, third, fourth = lowered(graph).launches
    assert first == (handle.backend_handle, None)
    assert second == (other.backend_handle, None)
    assert third[0] not in (None, first[0])
    assert fourth == (handle.backend_handle, 77)
    assert lowered(alone).launches == [(mine, 88)]


def test_a_graph_that_was_read_runs_on_the_current_stream_or_with_what_execute_is_given(installed, monkeypatch):
    class Read(Lowered):
        def __init__(self, **how):
            super().__init__()

        def deserialize(self, *given):
            self.given = given

    monkeypatch.setattr(cudnn_binding(), "backend_graph", Read)
    handle, stream, other = cudnn.create_handle(), installed.driver.create_stream(), installed.driver.create_stream()
    cudnn.set_stream(handle, stream.ptr)
    graph = cudnn.pygraph()
    graph.deserialize(handle, b"a plan")
    assert lowered(graph).given == (handle.backend_handle, b"a plan")
    graph._normalize = lambda *_: None
    graph._native_var_pack = lambda tensors, workspace: ({}, workspace)
    with other:
        graph.execute({})
        graph.execute({}, None, handle)
        mine = handlepool.get_handle().backend_handle
    assert lowered(graph).launches == [(mine, None), (handle.backend_handle, None)]
    assert mine != handle.backend_handle


def test_a_graph_that_was_made_meanwhile_goes_on_with_the_pool(installed):
    handle = cudnn.create_handle()
    graph, _ = built(handle)
    alone, _ = built()
    shim.uninstall()
    graph.execute({})
    alone.execute({})
    assert lowered(graph).launches == lowered(alone).launches == [(handle.backend_handle, None)]


def test_a_graph_of_the_frontends_own_handles_is_left_to_it(pool, binding):
    handle = cudnn.create_handle()
    with shim.pooled_handles():
        graph, lowers_with = built(handle)
        graph.execute({}, None, handle)
    assert lowers_with == handle.backend_handle
    assert lowered(graph).launches == [(handle.backend_handle, None)]


def test_a_graph_is_not_launched_with_a_destroyed_handle(installed):
    handle = cudnn.create_handle()
    graph, _ = built(handle)
    cudnn.destroy_handle(handle)
    with pytest.raises(OwnershipError, match=r"was given to cudnn\.destroy_handle"):
        graph.execute({})
    assert lowered(graph).launches == []


def wrapped(graph, handle="auto", workspace=None):
    made = object.__new__(wrapper.Graph)
    for name, value in {"graph": graph, "handle": handle, "workspace": workspace, "tensor_in": {}, "tensor_out": {}}.items():
        setattr(made, f"_Graph__{name}", value)
    return made


@pytest.fixture
def built_wrapped(monkeypatch):
    """A `cudnn.Graph` over a graph that is built, left as `cudnn.Graph` leaves its ``with`` statement."""

    def make(handle="auto", workspace=None):
        graph, _ = built(None if handle == "auto" else handle)
        for name in ("validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans"):
            setattr(graph, name, lambda *_: None)
        graph.get_workspace_size = lambda: 1000
        graph.get_execution_plan_count = lambda: 1
        made = wrapped(graph, handle, workspace)
        for name in ("inputs", "outputs"):
            setattr(made, f"_Graph__{name}", [])
        made._Graph__heuristics, made._Graph__node_count = [], {}
        wrapper.Graph.__exit__(made, None, None, None)
        return made, lowered(graph).launches

    allocated = []
    torch = SimpleNamespace(empty=lambda size, **_: allocated.append(size) or 4242, uint8=None)
    monkeypatch.setattr(wrapper, "torch", torch)
    make.allocated = allocated
    return make


def test_g5_a_wrapped_graph_has_the_workspace_of_the_stream_that_it_runs_on(installed, torch, built_wrapped):
    made, launches = built_wrapped()
    streams = [installed.driver.create_stream() for _ in range(2)]
    for stream in streams:
        torch.stream = torch.Stream(stream.ptr)
        made({})
    first, second = launches
    assert first[0] != second[0]
    assert first[1] != second[1]
    for stream, (handle, workspace) in zip(streams, launches, strict=True):
        assert handle == handlepool.get_handle(stream.ptr).backend_handle
        assert workspace == installed.driver.array_pointer(handlepool.get_workspace(1000, stream.ptr))
    assert built_wrapped.allocated == []


def test_g5_control_a_wrapped_graph_of_the_frontends_own_has_one_workspace(pool, torch, binding, built_wrapped):
    made, launches = built_wrapped(cudnn.create_handle())
    made({})
    made({})
    assert [workspace for _, workspace in launches] == [4242, 4242]


def test_a_wrapped_graph_that_was_made_before_has_the_streams_workspace_while_it_lasts(pool, torch, binding, built_wrapped):
    made, launches = built_wrapped(cudnn.create_handle())
    with shim.pooled_handles():
        made({})
    made({})
    assert launches[0][1] == pool.driver.array_pointer(handlepool.get_workspace(1000))
    assert launches[1][1] == 4242


def test_a_wrapped_graph_that_was_made_meanwhile_has_the_streams_workspace_for_good(installed, torch, built_wrapped):
    made, launches = built_wrapped(cudnn.create_handle())
    shim.uninstall()
    made({})
    assert launches[0][1] == installed.driver.array_pointer(handlepool.get_workspace(1000))


def test_a_wrapped_graph_takes_the_callers_handle_and_workspace(installed, torch, built_wrapped):
    made, launches = built_wrapped(None)
    handle, stream = cudnn.create_handle(), installed.driver.create_stream()
    cudnn.set_stream(handle, stream.ptr)
    with pytest.raises(RuntimeError, match="Need to specify cudnn handle"):
        made({})
    made({}, handle=handle)
    made({}, handle=handle, workspace=99)
    assert [launch[0] for launch in launches] == [handle.backend_handle] * 2
    assert launches[0][1] == installed.driver.array_pointer(handlepool.get_workspace(1000, stream.ptr))
    assert launches[1][1] == 99
    made, _ = built_wrapped(handle, False)
    with pytest.raises(RuntimeError, match="Need to specify workspace"):
        made({})


def test_info_says_whether_it_is_installed(pool):
    assert "not installed; handlepool knows nvidia-cudnn-frontend 1.32.*" in info.render(info.collect())
    with shim.pooled_handles():
        assert info.collect()["integrations"]["cudnn"]["installed"]


def test_importing_handlepool_imports_no_integration():
    code = "import sys, handlepool; assert not [name for name in sys.modules if 'integrations' in name]"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_g13_no_graph_is_built_with_a_parents_handle_in_a_forked_child():
    code = """
import os, sys
import cudnn, handlepool
from handlepool import ForkedProcessError, HandlePool
from handlepool.integrations import cudnn as shim
from handlepool.pool import default
default._default = HandlePool(driver="host")
shim.install()
assert shim._builders.current() == shim._builders.current()
child = os.fork()
if not child:
    try:
        shim._builders.current()
    except ForkedProcessError:
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
shim._builders.current()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert not done.returncode, done.stderr


def test_a_copy_of_what_has_a_handle_has_the_same_handle_and_it_cannot_be_pickled(installed):
    layer = SimpleNamespace(handle=cudnn.create_handle())
    copies = [copy.copy(layer.handle), copy.deepcopy(layer).handle]
    cudnn.set_stream(layer.handle, 0)
    assert all(each is layer.handle for each in copies)
    assert copies[1].backend_handle == layer.handle.backend_handle
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(layer.handle)
