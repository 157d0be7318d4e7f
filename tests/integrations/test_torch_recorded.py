"""Models of torch, recorded without dynamo: values, weights, aliases, and what is left to torch. On the host driver."""

import copy
import threading
import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed", exc_type=ImportError)

from harness.insides import version_of  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from handlepool import ArgumentError, CaptureError  # noqa: E402
from handlepool.integrations.torch import places, recorded, report  # noqa: E402

SCALE = 2.0


@pytest.fixture(autouse=True)
def place(pool, torch_host):
    torch.manual_seed(0)
    with torch.no_grad(), warnings.catch_warnings():
        # Torch's own export warns of its own use of trees.
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield


def same(one, other, tolerance=1e-5):
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def images(*shape):
    return torch.randn(shape or (2, 8, 8, 8)).contiguous(memory_format=torch.channels_last)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)
        self.norm.weight.normal_()
        self.norm.bias.normal_()

    def forward(self, x):
        return self.head(functional.relu(self.norm(self.conv(x)) + x).mean((2, 3)))


@pytest.fixture
def block():
    return Block().eval()


def check(model, *calls, tolerance=1e-5, **options):
    """Each call, twice by a recorded copy of the model, gives the model's own value."""
    ours = recorded(model, strict=True, **options)
    for args in (*calls, *calls):
        value = model(*args)
        same(ours(*args), value, tolerance)
    return ours


# Values


def test_g19_each_geometry_has_a_program_and_each_call_its_own_values(block):
    ours = recorded(block, strict=True)
    for size in (8, 6, 8, 6, 4):
        for x in (images(2, 8, size, size), torch.randn(2, 8, size, size)):
            same(ours(x), block(x))
    assert len(ours.programs) == 6
    assert all(each.recorded.stats().programs == 1 for each in ours.programs)


def test_keys_beyond_the_most_end(block):
    ours = recorded(block, programs=2)
    for size in (4, 5, 6, 7):
        x = images(1, 8, size, size)
        same(ours(x), block(x))
    assert len(ours.programs) == 2


def test_a_convolution_has_the_norm_the_residual_and_the_activation_in_it(block):
    ours = check(block, (images(),))
    (found,) = report(ours)
    assert found.kernels == {"conv2d_add_relu": 1, "mean2d": 1}
    # cuDNN multiplies float32 in TF32 alone.
    ((name, why),) = found.torch
    assert name == "linear"
    assert "GraphNotSupportedError" in why
    assert "conv2d_add_relu" in str(report(ours))


OPERATIONS = {
    "depthwise": nn.Conv2d(8, 8, 3, groups=8, padding=1),
    "strided": nn.Sequential(nn.Conv2d(8, 4, 3, stride=2, dilation=2, padding=2), nn.SiLU()),
    "same": nn.Sequential(nn.Conv2d(8, 4, 3, padding="same"), nn.GELU()),
    "transposed": nn.ConvTranspose2d(8, 4, 3, stride=2, output_padding=1),
    "max": nn.MaxPool2d(3, 2, 1, ceil_mode=True),
    "average": nn.AvgPool2d(3, 2, 1, count_include_pad=False),
    "adaptive": nn.AdaptiveAvgPool2d(4),
    "uneven": nn.AdaptiveAvgPool2d(3),
    "layer": nn.LayerNorm([8, 8]),
    "group": nn.GroupNorm(4, 8),
    "instance": nn.InstanceNorm2d(8, affine=True),
    "norm first": nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)),
    "softmax": nn.Softmax(1),
    "reflect": nn.ReflectionPad2d(2),
    "zeros": nn.ZeroPad2d((1, 2, 0, 3)),
    "nearest": nn.Upsample(scale_factor=2),
    "bilinear": nn.Upsample(size=(11, 5), mode="bilinear", align_corners=True),
    "shuffle": nn.ChannelShuffle(4),
    "pixels": nn.PixelShuffle(2),
    "linear": nn.Sequential(nn.Flatten(), nn.Linear(512, 7), nn.Tanh()),
    "unfold": nn.Unfold(3),
    "lstm": nn.Sequential(nn.Flatten(2), nn.LSTM(64, 5, batch_first=True)),
    "attention": nn.Sequential(nn.Flatten(2), nn.TransformerEncoderLayer(64, 4, 32, batch_first=True)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_gives_torchs_value(name):
    check(OPERATIONS[name].eval(), (images(),), (torch.randn(2, 8, 8, 8),))


ROWS = {
    "strided": (nn.Conv1d(8, 4, 3, stride=2, padding=1), {"conv1d": 1}),
    "same": (nn.Conv1d(8, 4, 3, padding="same", dilation=2), {"conv1d": 1}),
    "grouped": (nn.Conv1d(8, 8, 3, groups=8, padding=1, bias=False), {"grouped": 1}),
    "single": (nn.Conv1d(8, 1, 1), {"conv1d": 1}),
    "normed": (nn.Sequential(nn.Conv1d(8, 4, 3, bias=False), nn.BatchNorm1d(4), nn.ReLU()), {"conv1d_relu": 1}),
    "transposed": (nn.ConvTranspose1d(8, 4, 4, stride=2, padding=1, output_padding=1), {"conv_transpose1d": 1}),
    "chain": (nn.Sequential(nn.Conv1d(8, 4, 3), nn.LeakyReLU(), nn.Conv1d(4, 8, 3)), {"conv1d": 2, "leaky_relu": 1}),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_convolved_as_images_of_height_one(name):
    model, kernels = ROWS[name]
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    for x in (torch.randn(2, 8, 13), torch.randn(2, 13, 8).transpose(1, 2), torch.randn(2, 8, 26)[..., ::2]):
        ours = check(model.eval(), (x,))
        found = report(ours)[0]
        assert found.kernels == kernels
        assert not found.torch


def test_rows_have_the_residual_in_the_convolution_and_stay_channels_last():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv1d(8, 8, 3, padding=1), nn.Conv1d(8, 8, 3, padding=1)

        def forward(self, x):
            return self.second(functional.relu(self.first(x))) + x

    x = torch.randn(2, 8, 13)
    ours = check(Residual().eval(), (x,))
    assert report(ours)[0].kernels == {"conv1d_relu": 1, "conv1d_add": 1}
    # Only x is copied, for each of its two readers, and the result, back into torch's layout.
    steps = [step.name.partition("[")[0] for step in ours.program(x).explain().steps]
    assert steps.count("to_channels_last") == 2
    assert steps.count("to_contiguous") == 1


POINTWISE = {
    "chain": lambda x: functional.hardswish(x) * torch.sigmoid(x) + functional.leaky_relu(x, 0.2) - 1.5,
    "clamped": lambda x: functional.relu6(x).clamp(min=0.1) / (x.abs() + 1),
    "chosen": lambda x: torch.where(x > 0.3, x, x.exp()).masked_fill(x < -1, 7.0),
    "elu": lambda x: functional.elu(x, 0.7) + functional.mish(x) + functional.gelu(x, approximate="tanh"),
    "broadcast": lambda x: x * torch.sigmoid(x.mean((2, 3), keepdim=True)) + x[:, :1],
    "rounded": lambda x: (x.half() * 2).float() - x,
    "scaled": lambda x: torch.add(x, x, alpha=3) - torch.sub(x, 1, alpha=2) + torch.rsub(x, 4),
    "integers": lambda x: (x * 10).to(torch.int32) + 3,
    "shapes": lambda x: torch.cat([x[:, 2:5].flatten(2), x.permute(0, 2, 3, 1).reshape(2, 8, 64)[:, ::2]], 1).sum(-1),
    "einsum": lambda x: torch.einsum("nchw,ncwk->nhk", x, x).roll(1, 2),
    "filled": lambda x: (x.new_full((8, 1, 1), 2.0) * x + torch.zeros_like(x).fill_(3)) * torch.ones_like(x[0]),
    "sorted": lambda x: torch.sort(x.flatten(1), 1),
    "top": lambda x: torch.topk(x.flatten(1), 3),
    "where": lambda x: x.argmax(1),
}


@pytest.mark.parametrize("gate", [nn.Sigmoid, nn.Hardsigmoid])
@pytest.mark.parametrize("inner", [nn.ReLU, nn.SiLU, nn.Identity])
def test_gates_of_channels_are_one_kernel(gate, inner):
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 2, 1), inner(), nn.Conv2d(2, 8, 1), gate())

        def forward(self, x):
            return x * self.layers(x) + 1

    ours = check(Gated().eval(), (images(),))
    assert report(ours)[0].kernels == {"squeeze_excite": 1, "add": 1}


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


@pytest.mark.parametrize("name", POINTWISE)
def test_functions_over_elements_and_shapes_give_torchs_value(name):
    check(Function(POINTWISE[name]).eval(), (images(),), (torch.randn(2, 8, 8, 8),), tolerance=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_types_give_torchs_value(block, dtype):
    model = copy.deepcopy(block).to(dtype)
    check(model, (images().to(dtype),), tolerance=2e-2 if dtype is torch.float16 else 1e-9)


def test_autocast_is_a_part_of_the_key(block):
    ours, x = recorded(block, strict=True), images()
    same(ours(x), block(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = ours(x)
        assert value.dtype is torch.bfloat16
        same(value, block(x), 5e-2)
    same(ours(x), block(x))
    assert len(ours.programs) == 2


def test_inference_mode_is_a_part_of_the_key(block):
    ours, x = recorded(block, strict=True), images()
    same(ours(x), block(x))
    with torch.inference_mode():
        x = images()
        for _ in range(3):
            value = ours(x)
            assert value.is_inference()
            same(value, block(x))


def test_containers_keywords_and_plain_arguments():
    def function(pair, scale=1.0, *, named, flag=True):
        return {"a": [pair[0] * scale + named["x"], pair[1]], "b": (flag, None, 3)} if flag else pair[0]

    model = Function(function).eval()
    ours = recorded(model, strict=True)
    for scale, flag in ((2.0, True), (3.0, True), (2.0, False), (2.0, True)):
        given = (torch.randn(3), torch.randn(2))
        named = {"x": torch.randn(3)}
        want = model(given, scale, named=named, flag=flag)
        got = ours(given, scale, named=named, flag=flag)
        torch.testing.assert_close(got, want) if not flag else same(got["a"][0], want["a"][0])
        if flag:
            assert got["a"][1] is given[1]
            assert got["b"] == (True, None, 3)


# Weights


class Divided(nn.Module):
    def forward(self, x, divisor, extra=None):
        return x / divisor


def test_g19_zeros_of_both_signs_are_two_keys():
    ours, x = recorded(Divided().eval(), strict=True), torch.ones(4)
    for divisor in (0.0, -0.0, 0.0, -0.0):
        same(ours(x, divisor), x / divisor)
    assert len(ours.programs) == 2


def test_an_argument_without_a_hash_leaves_the_call_to_torch():
    ours, x = recorded(Divided().eval()), torch.ones(4)
    with pytest.warns(RuntimeWarning, match="an argument is a set"):
        same(ours(x, 2.0, {1}), x / 2)
    assert ours.programs == []


def test_g19_weights_that_are_written_in_place_are_folded_again_and_nothing_is_recorded(block):
    ours, x = recorded(block, strict=True), images()
    ours(x)
    (program,) = ours.programs
    for weight in (*block.parameters(), *[each for each in block.buffers() if each.dtype.is_floating_point]):
        before = block(x)
        weight.mul_(1.5).add_(0.25)
        value = block(x)
        assert not torch.allclose(before, value)
        same(ours(x), value)
    assert [*ours.programs] == [program]
    assert program.recorded.stats().recorded == 1


def test_g19_another_weight_is_recorded_anew(block):
    ours, x = recorded(block, strict=True), images()
    ours(x)
    block.conv.weight = nn.Parameter(torch.randn_like(block.conv.weight))
    same(ours(x), block(x))
    block.norm.running_mean = torch.randn(8)
    same(ours(x), block(x))
    block.head = nn.Linear(8, 5).eval()
    same(ours(x), block(x))
    block.load_state_dict(Block().state_dict())
    same(ours(x), block(x))


def test_g19_an_equal_weight_of_one_element_is_another_weight():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([2.0]))

        def forward(self, x):
            return x * self.scale

    model, x = Scaled().eval(), torch.randn(3)
    ours = recorded(model, strict=True)
    same(ours(x), x * 2)
    model.scale = nn.Parameter(torch.tensor([2.0]))
    same(ours(x), x * 2)
    model.scale.add_(1)
    same(ours(x), x * 3)
    model.scale = nn.Parameter(torch.tensor([2.0]))
    model.scale.add_(3)
    same(ours(x), x * 5)


def test_g19_a_weight_whose_memory_was_replaced_is_recorded_anew(block):
    ours, x = recorded(block, strict=True), images()
    ours(x)
    block.conv.weight.data = torch.randn_like(block.conv.weight)
    same(ours(x), block(x))
    block.double()
    same(ours(x.double()), block(x.double()))


def test_refresh_covers_writes_that_torch_does_not_count(block):
    ours, x = recorded(block, strict=True), images()
    before = ours(x)
    block.conv.weight.data.mul_(2)
    same(ours(x), before)
    ours.refresh()
    same(ours(x), block(x))


def test_g19_plain_attributes_and_globals_are_seen(monkeypatch):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor, self.kind = 2.0, "add"

        def forward(self, x):
            return x * self.factor + SCALE if self.kind == "add" else x - SCALE

    model, x = Scaled().eval(), torch.randn(3)
    ours = recorded(model, strict=True)
    same(ours(x), model(x))
    model.factor = 5.0
    same(ours(x), model(x))
    model.kind = "sub"
    same(ours(x), model(x))
    monkeypatch.setitem(globals(), "SCALE", 11.0)
    same(ours(x), model(x))


# Aliases and writes


def test_outputs_that_are_inputs_views_or_twice_the_same_are_so():
    weight = nn.Parameter(torch.randn(4, 4))

    class Aliases(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = weight

        def forward(self, x):
            y = x + 1
            return x, x[1:], y, y, y.view(-1)[3:], self.weight, self.weight.t(), x.clone()

    model = Aliases().eval()
    ours = recorded(model, strict=True)
    for _ in range(3):
        x = torch.randn(4, 4)
        got, want = ours(x), model(x)
        same(got, want)
        assert got[0] is x
        assert got[1].data_ptr() == x[1:].data_ptr()
        assert got[2].data_ptr() == got[3].data_ptr()
        assert got[4].untyped_storage().data_ptr() == got[2].untyped_storage().data_ptr()
        assert got[5].data_ptr() == got[6].data_ptr() == weight.data_ptr()
        assert got[7].data_ptr() != x.data_ptr()


def test_strides_of_outputs_are_torchs(block):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(8, 4, 3)

        def forward(self, x):
            y = self.conv(x)
            return y, y.permute(0, 2, 3, 1), y.contiguous(), y[:, :2], y.sum(1, keepdim=True).expand(-1, 3, -1, -1)

    model = Mixed().eval()
    ours = recorded(model, strict=True)
    for x in (images(), torch.randn(2, 8, 8, 8)):
        for got, want in zip(ours(x), model(x), strict=True):
            same(got, want)
        for place in (0, 1, 2):
            assert ours(x)[place].stride() == model(x)[place].stride()


def test_twenty_outputs_that_are_kept_stay_as_they_were_over_a_hundred_calls(block):
    ours, kept = recorded(block, strict=True), []
    for number in range(100):
        x = images(1, 8, 3, 3)
        value = ours(x)
        if number < 20:
            kept.append((value, block(x)))
    for value, want in kept:
        same(value, want)


def test_arguments_and_buffers_that_the_model_writes():
    class State(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x, y):
            y.mul_(2)
            self.count += x
            return self.count * 2, y, y[:1], self.count

    mine, theirs = State().eval(), State().eval()
    ours = recorded(mine, strict=True)
    for _ in range(5):
        x, y = torch.randn(3), torch.randn(3)
        other, version = y.clone(), version_of(y)
        got, want = ours(x, y), theirs(x, other)
        same(got, want)
        same(y, other)
        same(mine.count, theirs.count)
        assert got[1] is y
        assert got[2].data_ptr() == y.data_ptr()
        assert got[3] is mine.count
        assert version_of(y) > version
    assert len(ours.programs) == 1


def test_an_argument_that_is_given_twice_or_overlaps():
    model = Function(lambda x, y: x * 2 + y).eval()
    ours = recorded(model, strict=True)
    for _ in range(3):
        x = torch.randn(6)
        same(ours(x, x), model(x, x))
        whole = torch.randn(8)
        same(ours(whole[:6], whole[2:]), model(whole[:6], whole[2:]))
        same(ours(x, whole[:6]), model(x, whole[:6]))


# What is left to torch


def left(model, *calls, match):
    """Torch's own values, with a warning that says why; an error with ``strict``."""
    ours = recorded(model)
    for number, args in enumerate(calls):
        state = torch.get_rng_state()
        want = copy.deepcopy(model)(*copy.deepcopy(args))
        torch.set_rng_state(state)
        if number:
            got = ours(*args)
        else:
            with pytest.warns(RuntimeWarning, match=match) as found:
                got = ours(*args)
            assert found[0].filename == __file__
        torch.testing.assert_close(got, want)
    with pytest.raises(CaptureError, match=match):
        recorded(model, strict=True)(*calls[0])


def two(*shape):
    return [(torch.randn(shape or (4, 4)),) for _ in range(2)]


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (lambda x: x + torch.rand_like(x), "random"),
        (lambda x: functional.dropout(x, 0.5, training=True), "random"),
        (lambda x: x * x.sum().item(), "item"),
        (lambda x: x + 1 if x.sum() > 0 else x - 1, "control flow|trace"),
        (lambda x: x[x > 0], "control flow|trace|shapes"),
        (lambda x: torch.nonzero(x > 0), "control flow|trace|shapes"),
    ],
)
def test_g19_random_and_synchronising_operations_are_torchs(function, match):
    left(Function(function).eval(), *two(), match=f"(?s){match}")


def test_training_is_torchs(block):
    block.train()
    ours, other = recorded(block), copy.deepcopy(block)
    x = images()
    with pytest.warns(RuntimeWarning, match="training"):
        same(ours(x), other(x))
    same(block.norm.running_mean, other.norm.running_mean)
    block.eval()
    other.eval()
    same(ours(x), other(x))
    assert not any(isinstance(each, str) for each in ours.programs)
    block.train()
    same(ours(x), other.train()(x))


def test_a_model_between_two_phases_of_training_keeps_its_programs(block):
    ours, x = recorded(block), images()
    ours(x)
    programs = [*ours.programs]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(12):
            block.train()
            ours(x)
            block.eval()
            same(ours(x), block(x))
    assert [*ours.programs] == programs


def test_weights_that_are_bound_anew_at_each_call_are_torchs(block):
    ours, x = recorded(block), images(1, 8, 3, 3)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(11):
            block.conv.weight = nn.Parameter(torch.randn_like(block.conv.weight))
            same(ours(x), block(x))
    assert any("weights were replaced" in str(each.message) for each in found)


def test_gradients_are_torchs(block):
    ours, x = recorded(block), images().requires_grad_()
    same(ours(x), block(x))
    with torch.enable_grad():
        with pytest.warns(RuntimeWarning, match="no_grad"):
            ours(x).sum().backward()
        assert x.grad is not None
        assert block.conv.weight.grad is not None
    same(ours(x), block(x))


def test_hooks_are_called(block):
    seen = []
    ours, x = recorded(block), images()
    ours(x)
    handle = block.conv.register_forward_hook(lambda *_: seen.append(1))
    with pytest.warns(RuntimeWarning, match="hooks"):
        same(ours(x), block(x))
    ours(x)
    assert len(seen) == 3
    handle.remove()
    same(ours(x), block(x))
    assert len(seen) == 3


def test_attributes_that_the_model_changes_are_changed_at_each_call():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls, self.kept = 0, []

        def forward(self, x):
            self.calls += 1
            self.kept.append(self.calls)
            return x * self.calls

    model = Counting().eval()
    ours, x = recorded(model), torch.ones(2)
    with pytest.warns(RuntimeWarning, match="attributes"):
        assert ours(x).tolist() == [1, 1]
    assert ours(x).tolist() == [2, 2]
    assert model.kept == [1, 2]


def test_a_number_in_a_cpu_tensor_is_taken():
    class Number(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("factor", torch.tensor(3.0))

        def forward(self, x):
            return x * self.factor

    model, x = Number().eval(), torch.randn(3)
    ours = check(model, (x,))
    model.factor.fill_(5)
    same(ours(x), x * 5)


def test_a_tensor_of_another_kind_is_torchs(block):
    class Own(torch.Tensor):
        pass

    ours, x = recorded(block, strict=True), images()
    same(ours(x.as_subclass(Own)).as_subclass(torch.Tensor), block(x))


def test_transforms_of_torch_are_torchs(block):
    ours, x = recorded(block, strict=True), images(3, 8, 4, 4)
    same(torch.func.vmap(lambda x: ours(x[None])[0])(x), block(x))


def test_a_model_on_another_device_is_torchs(block):
    model = copy.deepcopy(block).to("meta")
    with pytest.warns(RuntimeWarning, match="meta"):
        assert recorded(model)(torch.empty(2, 8, 8, 8, device="meta")).device.type == "meta"
    with pytest.warns(RuntimeWarning, match="2 devices"), pytest.raises(RuntimeError):
        recorded(block)(torch.empty(2, 8, 8, 8, device="meta"))


def test_without_a_place_for_torchs_operations_the_model_is_torchs(block, monkeypatch):
    monkeypatch.setattr(places, "_host", places.Host)
    x = images()
    with pytest.warns(RuntimeWarning, match="linear"):
        same(recorded(block)(x), block(x))
    whole = nn.Sequential(block.conv, block.norm, nn.ReLU()).eval()
    check(whole, (x,))


@pytest.mark.parametrize(
    ("given", "options", "match"),
    [
        (lambda x: x, {}, "Module"),
        (nn.ReLU(), {"lanes": 0}, "lanes"),
        (nn.ReLU(), {"outputs": "old"}, "outputs"),
        (nn.ReLU(), {"programs": 0}, "programs"),
        (nn.ReLU(), {"fallback": "jax"}, "fallback"),
        (nn.ReLU(), {"tune": 1}, "tune"),
        (nn.ReLU(), {"seconds": 0}, "seconds"),
        (nn.ReLU(), {"lane": 2}, "'lane'"),
    ],
)
def test_other_arguments_are_refused(given, options, match):
    with pytest.raises(ArgumentError, match=match):
        recorded(given, **options)


def test_report_refuses_other_objects():
    with pytest.raises(ArgumentError, match="int"):
        report(3)
    assert "call the model" in str(report(recorded(nn.ReLU().eval())))


def test_threads_get_their_own_values(block):
    ours, errors = recorded(block, instances=2), []

    def work(seed):
        try:
            with torch.no_grad(), warnings.catch_warnings():
                generator = torch.Generator().manual_seed(seed)
                for _ in range(10):
                    x = torch.randn(2, 8, 8, 8, generator=generator)
                    same(ours(x), block(x))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors[0]
