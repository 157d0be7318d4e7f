"""Programs of torch's tensors: `update` and a call copy into them, in order with torch's stream. Collected only with torch."""

import itertools

import numpy as np
import pytest
from harness.insides import torch_sleep, version_of

import handlepool
from handlepool import ArgumentError, ArrayTypeError

cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)

SIZE = 1 << 20


@pytest.fixture
def program(pool, stream, torch, make_default):
    """Doubles a tensor. CuPy's current stream is another than torch's."""
    make_default(pool)
    double = handlepool.operation(lambda x: x * 2)
    x = torch.ones(SIZE, device="cuda")
    torch.cuda.synchronize()
    with handlepool.record(double, x, lanes=2) as program:
        program.x = x
        yield program
        torch.cuda.synchronize()


@pytest.fixture
def theirs(torch, program):
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        yield torch.cuda.current_stream()
        torch.cuda.synchronize()


def test_a_call_takes_tensors_and_returns_tensors(program, torch):
    values = [program(torch.full((SIZE,), float(value), device="cuda")) for value in range(5)]
    assert [float(y.min()) for y in values] == [float(y.max()) for y in values] == [0, 2, 4, 6, 8]
    out = torch.empty(SIZE, device="cuda")
    assert program(values[1], out=out) is out
    assert bool((out == 4).all())
    assert bool((program.x == 2).all())
    assert version_of(program.x) > 0


def chained(program, torch, rounds=50):
    """How many values were wrong where torch makes each input late, on its own stream, and frees it at once."""
    wrong = []
    for value in range(rounds):
        torch_sleep(2_000_000)
        x = torch.full((SIZE,), float(value), device="cuda")
        if value % 2:
            y = program(x)
        else:
            program.update(x)
            y = program(None)
        del x
        torch.full((SIZE,), -1.0, device="cuda")  # in the memory that was freed
        wrong.append((y != 2 * value).any())
        del y
    return int(torch.stack(wrong).sum())


def test_g6_copies_are_in_order_with_torchs_current_stream(program, torch, theirs):
    assert chained(program, torch) == 0


def test_g6_control_without_the_order_values_are_wrong(program, torch, theirs, without):
    without("the order with torch's stream")
    assert chained(program, torch) > 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int8", "int64", "bool", "complex64", "complex128", "uint8"])
@pytest.mark.parametrize("layout", ["dense", "transposed", "channels last", "strided", "empty"])
def test_every_type_and_layout_is_copied_bit_for_bit(pool, stream, torch, dtype, layout, make_default):
    make_default(pool)
    stream.synchronize()

    def make(seed):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randint(-9, 9, (2, 4, 6, 8), generator=generator).to("cuda", getattr(torch, dtype))
        if layout == "transposed":
            return x.permute(3, 1, 0, 2)
        if layout == "channels last":
            return x.contiguous(memory_format=torch.channels_last)
        return x[:, ::2, :, ::3] if layout == "strided" else x[:0] if layout == "empty" else x

    x, y = make(1), make(2)
    torch.cuda.synchronize()
    with handlepool.record(lambda x: [x.clone(), torch.ones(4, device="cuda")], x) as program:
        (z, _) = program(y)
        torch.cuda.synchronize()
        assert torch.equal(z, y)
        assert torch.equal(x, y)
        assert z.dtype == y.dtype


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (lambda torch: torch.ones(SIZE // 2, device="cuda"), ArgumentError, "with shape"),
        (lambda torch: torch.ones(SIZE, device="cuda", dtype=torch.float16), ArgumentError, "with type torch.float32"),
        (lambda torch: torch.ones(SIZE), ArrayTypeError, "pass a tensor of the recorded shape and type"),
        (lambda torch: cupy.ones(SIZE, np.float32), ArrayTypeError, "pass a tensor of the recorded shape and type"),
        (lambda torch: torch.ones(2 * SIZE, device="cuda")[::2], ArgumentError, "with strides"),
    ],
)
def test_what_is_not_like_the_recorded_tensor_is_refused(program, torch, given, error, message):
    with pytest.raises(error, match=message):
        program(given(torch))
    with pytest.raises(error, match=message):
        program.update(given(torch))
    assert bool((program(None) == 2).all())


def test_inputs_and_outputs_may_be_of_both_libraries(pool, stream, torch, make_default):
    make_default(pool)
    x, w = torch.ones(1, 16, 8, 8, device="cuda"), cupy.ones((16, 16, 1, 1), np.float32)
    torch.cuda.synchronize()

    def function(x, w):
        y = handlepool.conv2d(x, w)
        return {"torch": y, "cupy": handlepool.conv2d(w, w)}

    with handlepool.record(function, x, w, lanes=4) as program:
        values = program(torch.full_like(x, 2), cupy.full_like(w, 3))
        torch.cuda.synchronize()
        stream.synchronize()
        assert type(values["torch"]) is torch.Tensor
        assert bool((values["torch"] == 2 * 3 * 16).all())
        assert bool((values["cupy"] == 9 * 16).all())


def test_a_parameter_that_requires_grad_is_written_and_its_version_says_so(pool, stream, torch, make_default):
    make_default(pool)
    layer = torch.nn.Linear(64, 64, device="cuda")
    x = torch.ones(4, 64, device="cuda")
    torch.cuda.synchronize()

    @handlepool.operation
    def forward(weight, x):
        with torch.no_grad():
            return x @ weight.t()

    with handlepool.record(forward, layer.weight, x, lanes=2) as program:
        version = version_of(layer.weight)
        y = program(torch.full((64, 64), 0.5, device="cuda"), None)
        torch.cuda.synchronize()
        assert version_of(layer.weight) > version
        assert bool((y == 32).all())


@pytest.mark.parametrize("lanes", [None, 4])
@pytest.mark.parametrize("node", [False, True], ids=["plain", "operation"])
@pytest.mark.parametrize("kind", ["rand", "dropout", "normal_", "a generator of one's own"])
def test_torchs_random_numbers_are_refused_with_their_line_and_the_first_call_draws(
    pool, stream, torch, make_default, lanes, node, kind
):
    make_default(pool)
    x, own = torch.ones(SIZE, device="cuda"), torch.Generator("cuda")
    draws = {
        "rand": lambda x: x + torch.rand(SIZE, device="cuda"),
        "dropout": lambda x: torch.nn.functional.dropout(x, training=True),
        "normal_": lambda x: x.clone().normal_(),
        "a generator of one's own": lambda x: x + torch.rand(SIZE, device="cuda", generator=own),
    }
    drawn = []

    def draw(x):
        y = draws[kind](x)
        drawn.append(y)
        return y

    step = handlepool.operation(draw) if node else draw
    torch.cuda.synchronize()
    before = draws[kind](x)
    with pytest.raises(handlepool.CaptureError, match="random number generator of torch's") as caught:
        handlepool.record(lambda x: 2 * step(x), x, lanes=lanes)
    assert f"{__file__}:{draws[kind].__code__.co_firstlineno} uses" in str(caught.value)
    assert "CUDA generator not in capture mode" in str(caught.value.__cause__)
    assert len(drawn) == 1
    values = [before, *drawn, draws[kind](x)]
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(values, 2))


@pytest.mark.parametrize("lanes", [None, 4])
def test_random_numbers_that_were_drawn_before_are_an_argument_and_dropout_is_none_after_eval(
    pool, stream, torch, make_default, lanes
):
    make_default(pool)
    dropout = torch.nn.Dropout().eval()
    add = handlepool.operation(lambda x, noise: dropout(x) + noise)
    x, noise = torch.ones(SIZE, device="cuda"), torch.rand(SIZE, device="cuda")
    torch.cuda.synchronize()
    with handlepool.record(add, x, noise, lanes=lanes) as program:
        for _ in range(3):
            drawn = torch.rand(SIZE, device="cuda")
            assert bool((program(None, drawn) == 1 + drawn).all())
