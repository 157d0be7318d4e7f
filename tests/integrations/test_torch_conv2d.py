"""Convolution as an operation of torch's, on the host driver. Skipped where torch is not installed; on a GPU see `tests/gpu`."""

import threading

import numpy as np
import pytest
from harness.insides import dynamo
from harness.process import as_default

import handlepool
from handlepool import ArgumentError, ArrayTypeError, DeviceMismatchError, GraphNotSupportedError, HandlePool

torch = pytest.importorskip("torch", reason="torch is not installed", exc_type=ImportError)

from handlepool.integrations.torch import conv2d  # noqa: E402 - imports torch

GEOMETRIES = [
    {},
    {"padding": 1},
    {"stride": 2, "padding": (1, 0)},
    {"dilation": (2, 1), "padding": 2},
    {"groups": 2, "padding": 1},
    {"groups": 4, "stride": (1, 2)},
]
OPTIONS = ([2, 2], [1, 1], [1, 1], 1, None, None)
INEXACT = pytest.mark.filterwarnings("ignore:Input #. requires gradient and is not a double")


@pytest.fixture(autouse=True)
def pool(make_driver):
    with HandlePool(driver=make_driver()) as pool, as_default(pool):
        yield pool


def random(*shape, seed=0, layout="contiguous", grad=True):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if layout == "channels last":
        values = values.to(memory_format=torch.channels_last)
    elif layout == "with gaps":
        values = torch.randn((*shape[:-1], 2 * shape[-1]), generator=torch.Generator().manual_seed(seed))[..., ::2]
    elif layout == "expanded":
        values = values[:1].expand(shape)
    return values.requires_grad_(grad)


def case(layout="contiguous", groups=1, **_):
    return random(2, 4, 9, 8, layout=layout), random(8, 4 // groups, 3, 3, seed=1, layout=layout), random(8, seed=2)


@pytest.mark.parametrize("layout", ["contiguous", "channels last", "with gaps", "expanded"])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_values_gradients_and_layouts_are_torchs(layout, geometry):
    arguments = case(layout, **geometry)
    y, expected = conv2d(*arguments, **geometry), torch.nn.functional.conv2d(*arguments, **geometry)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    if layout in ("contiguous", "channels last"):
        assert y.stride() == expected.stride()
    dy = torch.randn_like(expected)
    for got, right in zip(torch.autograd.grad(y, arguments, dy), torch.autograd.grad(expected, arguments, dy), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("needed", [0, 1, 2])
def test_only_gradients_that_are_needed_are_computed(needed, public_calls):
    asked = [public_calls(name) for name in ("conv2d_input_grad", "conv2d_weight_grad")]
    arguments = [value.detach().requires_grad_(index == needed) for index, value in enumerate(case())]
    conv2d(*arguments).sum().backward()
    assert [len(calls) for calls in asked] == [needed == 0, needed == 1]
    assert [value.grad is not None for value in arguments] == [index == needed for index in range(3)]


def test_a_gradient_that_is_one_element_is_made_dense():
    x, w, _ = case()
    conv2d(x, w).sum().backward()
    other = x.detach().requires_grad_()
    torch.nn.functional.conv2d(other, w).sum().backward()
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-4, atol=1e-4)


@INEXACT
@pytest.mark.parametrize("geometry", [{"padding": 1, "stride": 2}, {"groups": 2}], ids=str)
def test_gradcheck_and_gradgradcheck(geometry):
    x, b = random(1, 2, 5, 5), random(4, seed=2)
    w = random(4, 2 // geometry.get("groups", 1), 3, 3, seed=1)

    def function(x, w, b):
        return conv2d(x, w, b, allow_tf32=False, **geometry)

    tolerance = {"eps": 1e-2, "atol": 1e-2, "rtol": 1e-2}
    assert torch.autograd.gradcheck(function, (x, w, b), **tolerance)
    assert torch.autograd.gradgradcheck(function, (x, w, b), **tolerance | {"atol": 1e-1})


@INEXACT
def test_control_gradcheck_sees_a_gradient_that_is_wrong(monkeypatch):
    right = handlepool.conv2d_weight_grad
    monkeypatch.setattr(handlepool, "conv2d_weight_grad", lambda *a, **k: right(*a, **k).mul_(1.1))
    x, w = random(1, 2, 5, 5), random(3, 2, 3, 3, seed=1)
    assert not torch.autograd.gradcheck(conv2d, (x, w), eps=1e-2, atol=1e-2, rtol=1e-2, raise_exception=False)


@pytest.mark.parametrize("layout", ["contiguous", "channels last", "with gaps"])
def test_opcheck(layout):
    x, w, b = case(layout)
    dy = torch.randn_like(conv2d(x, w, b, stride=2, padding=1)).requires_grad_()
    ops = torch.ops.handlepool
    for operation, arguments in (
        (ops.conv2d, (x, w, b)),
        (ops.conv2d, (x, w, None)),
        (ops.conv2d_input_grad, (dy, w, list(x.shape))),
        (ops.conv2d_weight_grad, (x, dy, list(w.shape))),
    ):
        assert set(torch.library.opcheck(operation, (*arguments, *OPTIONS)).values()) == {"SUCCESS"}


class Network(torch.nn.Module):
    """Two convolutions, with what torch has around them."""

    def __init__(self, convolve):
        super().__init__()
        torch.manual_seed(0)
        self.convolve = convolve
        self.first, self.second = torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 8, 3)
        self.norm, self.last = torch.nn.BatchNorm2d(8), torch.nn.Linear(8, 4)

    def forward(self, x):
        x = torch.relu(self.norm(self.convolve(x, self.first.weight, self.first.bias, padding=1)))
        return self.last(self.convolve(x, self.second.weight, self.second.bias, stride=2).mean((2, 3)))


def trained(network, steps=3, seed=0):
    """The losses of a few steps, and the parameters after them."""
    optimizer, losses = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9), []
    x = random(4, 3, 10, 10, seed=seed, grad=False)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(x), torch.arange(4))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [torch.stack(losses), *(parameter.detach() for parameter in network.parameters())]


def test_training_is_torchs():
    torch.testing.assert_close(trained(Network(conv2d)), trained(Network(torch.nn.functional.conv2d)), rtol=1e-3, atol=1e-4)


def test_training_in_four_threads_at_once_is_torchs():
    found, begin = [None] * 4, threading.Barrier(4)

    def train(i):
        begin.wait(60)
        found[i] = trained(networks[i], seed=i)

    networks = [Network(conv2d) for _ in found]
    threads = [threading.Thread(target=train, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for i, got in enumerate(found):
        torch.testing.assert_close(got, trained(Network(torch.nn.functional.conv2d), seed=i), rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*lr_scheduler")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_whole_it_trains_as_before(dynamic):
    dynamo().reset()
    network = Network(conv2d)
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    torch.testing.assert_close(trained(compiled), trained(Network(conv2d)), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*lr_scheduler")
def test_what_is_refused_is_refused_as_it_is_compiled():
    dynamo().reset()
    x, w, _ = (value.detach() for value in case())
    compiled = torch.compile(lambda x, w: conv2d(x, w, groups=3), fullgraph=True, backend="aot_eager")
    with pytest.raises(dynamo().exc.TorchRuntimeError, match=r"conv2d: 4 channels in x and groups=3"):
        compiled(x, w)


def test_autocast_converts_as_torch_does():
    x, w, b = case()
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = conv2d(x, w, b, padding=1), torch.nn.functional.conv2d(x, w, b, padding=1)
    assert y.dtype is expected.dtype is torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    y.sum().backward()
    assert x.grad.dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_autocast_leaves_float64_and_integers_which_are_refused_as_without_it(dtype):
    x, w, b = (value.detach() for value in case())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.nn.functional.conv2d(x.to(dtype), w.to(dtype)).dtype is dtype
        with pytest.raises(ArgumentError, match=rf"x is {str(dtype).removeprefix('torch.')}; it must be one of"):
            conv2d(x.to(dtype), w.to(dtype))
        with pytest.raises(ArgumentError, match="bias is float64; it must be one of"):
            conv2d(x, w, b.double())


def test_options_that_are_not_given_are_torchs_when_it_runs(public_calls):
    calls = public_calls("conv2d")
    x, w, _ = case()
    for allowed in (False, True):
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=allowed, deterministic=not allowed):
            conv2d(x, w)
            conv2d(x, w, allow_tf32=not allowed, deterministic=allowed)
    asked = [(options["allow_tf32"], options["deterministic"]) for _, options in calls]
    assert asked == [(False, True), (True, False), (True, False), (False, True)]


def test_the_newer_name_of_torchs_precision_counts(public_calls):
    calls = public_calls("conv2d")
    own = getattr(torch.backends.cudnn, "conv", None)
    if own is None:
        pytest.skip("torch is older than 2.9")
    before = own.fp32_precision
    try:
        for precision in ("ieee", "tf32"):
            own.fp32_precision = precision
            conv2d(*case()[:2])
    finally:
        own.fp32_precision = before
    assert [options["allow_tf32"] for _, options in calls] == [False, True]


def test_bad_arguments_are_typed_errors():
    x, w, b = (value.detach() for value in case())
    for arguments, options, message in (
        ((x, w), {"stride": (1, 2, 3)}, r"stride is \(1, 2, 3\); give an integer of at least 1, or two"),
        ((x, w), {"padding": []}, r"padding is \[\]; give an integer of at least 0"),
        ((x, w), {"dilation": 5}, "empty result"),
        ((x, w), {"groups": 3}, "has 4 channels"),
        ((x, w), {"stride": 0}, "stride is 0; give an integer of at least 1"),
        ((x, w), {"stride": 1.5}, r"stride is 1\.5; give an integer of at least 1"),
        ((x, w), {"stride": (1.5, 1)}, r"stride is \(1\.5, 1\); give an integer of at least 1"),
        ((x, w), {"stride": True}, "stride is True; give an integer of at least 1"),
        ((x, w), {"padding": "ab"}, "padding is 'ab'; give an integer of at least 0"),
        ((x, w), {"dilation": None}, "dilation is None; give an integer of at least 1"),
        ((x, w), {"groups": 0}, "groups is 0; give an integer of at least 1"),
        ((x, w), {"groups": 1.0}, r"groups is 1\.0; give an integer of at least 1"),
        ((x[0], w), {}, "x has 3 axes and w has 4"),
        ((x, w[:, :3]), {}, "has 4 channels"),
        ((x, w.half()), {}, "w is float16 and x is float32"),
        ((x.double(), w.double()), {}, "float64"),
        ((x, w, b[:3]), {}, "bias of shape"),
    ):
        with pytest.raises(ArgumentError, match=message):
            conv2d(*arguments, **options)


@pytest.mark.parametrize("name", ["stride", "padding", "dilation"])
def test_integers_of_other_types_are_integers(name):
    x, w, _ = (value.detach() for value in case())
    expected = conv2d(x, w, **{name: 2})
    for value in (np.int64(2), (np.int8(2), 2), np.array([2, 2]), torch.Size([2, 2])):
        torch.testing.assert_close(conv2d(x, w, groups=np.int32(1), **{name: value}), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*lr_scheduler")
@pytest.mark.parametrize("dynamic", [False, True])
def test_integers_that_differ_from_call_to_call_are_compiled_whole(dynamic):
    dynamo().reset()
    x, w, _ = (value.detach() for value in case())
    compiled = torch.compile(
        lambda s, p, g: conv2d(x, w[:, : 4 // g], stride=s, padding=(p, 1), groups=g),
        fullgraph=True,
        backend="aot_eager",
        dynamic=dynamic,
    )
    for given in ((1, 0, 1), (2, 1, 1), (3, 2, 2)):
        s, p, g = given
        torch.testing.assert_close(compiled(*given), conv2d(x, w[:, : 4 // g], stride=s, padding=(p, 1), groups=g))


def test_tensors_without_memory_are_refused_as_others_are():
    x, w, b = (value.detach() for value in case())
    for arguments, options in (
        ((x, w), {"groups": 3}),
        ((x, w[:7, :2]), {"groups": 2}),
        ((x[:, :3], w), {}),
        ((x, w.half()), {}),
        ((x.double(), w.double()), {}),
        ((x, w, b[:3]), {}),
        ((x, w, b[:, None]), {}),
        ((x, w, b.half()), {}),
        ((x[0], w), {}),
        ((x, w), {"dilation": 5}),
    ):
        for device in ("cpu", "meta"):
            with pytest.raises(ArgumentError, match=r"^conv2d: "):
                conv2d(*(value.to(device) for value in arguments), **options)
    with pytest.raises(ArgumentError, match=r"^conv2d: groups is 0"):
        torch.ops.handlepool.conv2d(x.to("meta"), w.to("meta"), None, [1, 1], [0, 0], [1, 1], 0, None, None)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_empty_tensors_give_results_of_the_same_shape_with_and_without_memory(device):
    x, w, _ = (value.detach().to(device) for value in case())
    assert conv2d(x[:0], w, padding=1).shape == torch.nn.functional.conv2d(x[:0], w, padding=1).shape
    assert conv2d(x, w[:0]).shape == (*conv2d(x, w).shape[:1], 0, *conv2d(x, w).shape[2:])
    assert conv2d(x[:, :0], w[:, :0]).shape == conv2d(x, w).shape


def test_what_is_no_dense_tensor_or_on_another_device_is_a_typed_error_and_not_a_fake_result():
    x, w, b = (value.detach() for value in case())
    for arguments, error, message in (
        ((x.numpy(), w), ArrayTypeError, "x is a ndarray, and this function takes only torch tensors"),
        ((x, w.numpy()), ArrayTypeError, "w is a ndarray"),
        ((x, None), ArrayTypeError, "w is a NoneType"),
        ((x, w, b.numpy()), ArrayTypeError, "bias is a ndarray"),
        ((x.to_sparse(), w), ArgumentError, r"x has the layout torch\.sparse_coo; pass a dense tensor"),
        ((x, w.to("meta")), DeviceMismatchError, "w is on meta and x is on cpu"),
        ((x.to("meta"), w), DeviceMismatchError, "w is on cpu and x is on meta"),
        ((x, w, b.to("meta")), DeviceMismatchError, "bias is on meta and x is on cpu"),
    ):
        with pytest.raises(error, match=f"^conv2d: {message}"):
            conv2d(*arguments)


@pytest.mark.parametrize("refused", [1, 2], ids=["of the input", "of the weights"])
def test_a_gradient_that_there_is_none_of_is_a_typed_error_of_the_backward_pass_and_nothing_is_written(refused, pool):
    arguments = case()
    y = conv2d(*arguments).sum()
    pool.driver.fail_at(refused, "compile", GraphNotSupportedError("no plan"))
    with pytest.raises(GraphNotSupportedError, match="no plan"):
        y.backward()
    assert [value.grad for value in arguments] == [None] * 3


def test_tensors_without_memory_give_shape_and_layout():
    x, w, _ = case("channels last")
    y, expected = conv2d(x.to("meta"), w.to("meta"), padding=1), torch.nn.functional.conv2d(x, w, padding=1)
    assert (y.device.type, y.shape, y.stride()) == ("meta", expected.shape, expected.stride())


def test_a_gradient_of_a_gradient_is_torchs():
    x, w, b = case()
    (dx,) = torch.autograd.grad(conv2d(x, w, b).square().sum(), x, create_graph=True)
    (ddx,) = torch.autograd.grad(dx.square().sum(), x)
    (right,) = torch.autograd.grad(torch.nn.functional.conv2d(x, w, b).square().sum(), x, create_graph=True)
    (right,) = torch.autograd.grad(right.square().sum(), x)
    torch.testing.assert_close(ddx, right, rtol=1e-3, atol=1e-2)
