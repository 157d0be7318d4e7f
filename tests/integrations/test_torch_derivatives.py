"""Forward derivatives and `torch.func` through the convolution of torch's dispatcher; everything else refuses tensors with these.

On the host driver. Skipped where torch is not installed.
"""

import pytest
from harness.insides import dynamo
from harness.process import as_default

import handlepool
from handlepool import ArgumentError, HandlePool, ParallelStateExecutor, ParallelStates

torch = pytest.importorskip("torch", reason="torch is not installed", exc_type=ImportError)

from torch.autograd import forward_ad  # noqa: E402

from handlepool.integrations.torch import conv2d  # noqa: E402 - imports torch
from handlepool.recording.tensors import elements  # noqa: E402

GEOMETRIES = [{"padding": 1}, {"groups": 2, "stride": 2, "padding": (1, 0)}]
INEXACT = pytest.mark.filterwarnings("ignore:Input #. requires gradient and is not a double")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*lr_scheduler")
"""Torch's own, of how it compiles its rules."""
transforms = torch.func


@pytest.fixture(autouse=True)
def pool(make_driver):
    with HandlePool(driver=make_driver()) as pool, as_default(pool):
        yield pool


@pytest.fixture(params=GEOMETRIES, ids=str)
def geometry(request):
    return request.param


def pair(*shape, seed=0):
    """A point and a direction."""
    return torch.randn((2, *shape), generator=torch.Generator().manual_seed(seed)).unbind()


def case(geometry):
    return pair(2, 4, 5, 4), pair(4, 4 // geometry.get("groups", 1), 3, 3, seed=1), pair(4, seed=2)


def check_torchs(run, geometry):
    """Compare what is computed through this convolution with what is through torch's."""

    def through(convolve):
        # It bends, so that second derivatives are none of zero.
        return run(lambda x, w, b=None: convolve(x, w, b, **geometry).sin())

    got, right = through(conv2d), through(torch.nn.functional.conv2d)
    torch.testing.assert_close(got, right, rtol=1e-3, atol=1e-3)
    assert any(float(value.abs().max()) > 1e-2 for value in torch.utils._pytree.tree_leaves(right))


def as_loss(convolve):
    return lambda *arguments: convolve(*arguments).square().sum()


# Forward


@pytest.mark.parametrize("moved", [(0,), (1,), (2,), (0, 1, 2)], ids=["x", "w", "bias", "all"])
def test_the_tangent_of_a_dual_tensor_is_torchs(geometry, moved):
    def run(convolve):
        with forward_ad.dual_level():
            given = [
                forward_ad.make_dual(point, tangent) if place in moved else point
                for place, (point, tangent) in enumerate(case(geometry))
            ]
            return tuple(forward_ad.unpack_dual(convolve(*given)))

    check_torchs(run, geometry)


@pytest.mark.parametrize("moved", [0, 1, 2], ids=["x", "w", "bias"])
def test_jvp_and_jacfwd_are_torchs(geometry, moved):
    points, tangents = zip(*case(geometry), strict=True)

    def run(convolve):
        def of_one(value):
            return convolve(*points[:moved], value, *points[moved + 1 :])

        along = transforms.jvp(of_one, (points[moved],), (tangents[moved],))
        return along, transforms.jacfwd(convolve, argnums=moved)(*points), transforms.jvp(convolve, points, tangents)

    check_torchs(run, geometry)


def test_of_operands_that_do_not_move_no_tangent_is_computed(public_calls):
    calls = public_calls("conv2d")
    (x, _), (w, tw), (b, tb) = case({})
    for moved, expected in (({1: tw}, 2), ({2: tb}, 1), ({1: tw, 2: tb}, 2)):
        calls.clear()
        with forward_ad.dual_level():
            given = [forward_ad.make_dual(v, moved[i]) if i in moved else v for i, v in enumerate((x, w, b))]
            conv2d(*given)
        assert len(calls) == expected


# By torch.func


def test_grad_vjp_and_jacrev_are_torchs(geometry):
    points, _ = zip(*case(geometry), strict=True)

    def run(convolve):
        y, back = transforms.vjp(convolve, *points)
        gradients = transforms.grad(as_loss(convolve), argnums=(0, 1, 2))(*points)
        return gradients, back(torch.ones_like(y)), transforms.jacrev(convolve, argnums=(1, 2))(*points)

    check_torchs(run, geometry)


@pytest.mark.parametrize("outer", ["jacfwd", "jacrev"])
@pytest.mark.parametrize("inner", ["jacfwd", "jacrev"])
def test_derivatives_of_derivatives_are_torchs_whichever_is_inside(geometry, outer, inner):
    points, _ = zip(*case(geometry), strict=True)

    def run(convolve):
        within = getattr(transforms, inner)(as_loss(convolve), argnums=(1, 2))
        return getattr(transforms, outer)(within, argnums=(0, 1))(*points)

    check_torchs(run, geometry)


def test_a_third_derivative_is_torchs(geometry):
    (x, _), (w, _), (b, _) = case(geometry)

    def run(convolve):
        def along(function):
            return lambda w: transforms.grad(function)(w).square().sum()

        return transforms.grad(along(along(lambda w: convolve(x, w, b).sum())))(w)

    check_torchs(run, geometry)


@pytest.mark.parametrize("many", [(0,), (1,), (2,), (0, 1), (0, 1, 2)], ids=["x", "w", "bias", "x and w", "all"])
def test_vmap_is_torchs_over_each_operand(geometry, many):
    given = [torch.stack(both, -1) if place in many else both[0] for place, both in enumerate(case(geometry))]
    axes = tuple(-1 if place in many else None for place in range(3))
    check_torchs(lambda convolve: transforms.vmap(convolve, in_dims=axes)(*given), geometry)


def test_vmap_in_vmap_is_torchs(geometry):
    xs, ws, (b, _) = case(geometry)

    def run(convolve):
        of_filters = transforms.vmap(convolve, in_dims=(None, 0, None))
        return transforms.vmap(of_filters, in_dims=(0, None, None))(torch.stack(xs), torch.stack(ws), b)

    check_torchs(run, geometry)


def test_gradients_of_each_sample_are_torchs_and_so_are_theirs(geometry):
    (xs, _), (w, _), (b, _) = case(geometry)

    def run(convolve):
        def loss(w, x):
            return as_loss(convolve)(x[None], w, b)

        def steep(w, x):
            return transforms.grad(loss)(w, x).square().sum()

        each = {"in_dims": (None, 0)}
        of_all = transforms.grad(lambda w: transforms.vmap(loss, **each)(w, xs).sum())(w)
        return (
            transforms.vmap(transforms.grad(loss), **each)(w, xs),
            transforms.vmap(transforms.grad(steep), **each)(w, xs),
            of_all,
        )

    check_torchs(run, geometry)


def test_a_batch_of_images_is_one_call_and_keeps_its_layout(public_calls):
    calls = public_calls("conv2d")
    (x, _), (w, _), _ = case({})
    xs = torch.stack([each.to(memory_format=torch.channels_last).permute(0, 2, 3, 1) for each in (x, -x)]).permute(0, 1, 4, 2, 3)
    assert xs[0].is_contiguous(memory_format=torch.channels_last)
    transforms.vmap(conv2d, in_dims=(0, None))(xs, w)
    assert [arguments[0].stride(1) for arguments, _ in calls] == [1]


def test_a_batch_of_no_samples_is_a_typed_error():
    (x, _), (w, _), _ = case({})
    with pytest.raises(ArgumentError, match=r"handlepool\.conv2d\S*: torch\.vmap was given a batch of no samples"):
        transforms.vmap(conv2d)(torch.stack([x])[:0], torch.stack([w])[:0])


def test_the_operations_of_the_gradients_are_derived_as_well(geometry):
    (x, tx), (w, tw), _ = case(geometry)
    with_defaults = {"stride": 1, "dilation": 1, "groups": 1, **geometry}
    dy, tdy = pair(*torch.nn.functional.conv2d(x, w, **with_defaults).shape, seed=3)
    numbers = [with_defaults[name] for name in ("stride", "padding", "dilation", "groups")]
    options = [[one, one] if isinstance(one, int) else list(one) for one in numbers[:3]] + numbers[3:]

    def check(operation, reference, first, second, shape):
        def ours(*operands):
            return operation(*operands, list(shape), *options, None, None)

        points, tangents = zip(first, second, strict=True)
        got = [transforms.jvp(ours, points, tangents), transforms.jacrev(ours)(*points)]
        right = [transforms.jvp(reference, points, tangents), transforms.jacrev(reference)(*points)]
        for axes in ((0, None), (None, 0), (0, 0)):
            many = [torch.stack(both) if axis == 0 else both[0] for both, axis in zip((first, second), axes, strict=True)]
            got.append(transforms.vmap(ours, in_dims=axes)(*many))
            right.append(transforms.vmap(reference, in_dims=axes)(*many))
        torch.testing.assert_close(got, right, rtol=1e-3, atol=1e-3)

    ops, theirs = torch.ops.handlepool, torch.nn.grad
    check(ops.conv2d_input_grad, lambda dy, w: theirs.conv2d_input(x.shape, w, dy, **with_defaults), (dy, tdy), (w, tw), x.shape)
    check(
        ops.conv2d_weight_grad, lambda x, dy: theirs.conv2d_weight(x, w.shape, dy, **with_defaults), (x, tx), (dy, tdy), w.shape
    )


@INEXACT
def test_gradcheck_of_every_mode(geometry):
    arguments = [point.requires_grad_() for point, _ in case(geometry)]

    def function(*arguments):
        return conv2d(*arguments, allow_tf32=False, **geometry)

    tolerance = {"eps": 1e-2, "atol": 1e-2, "rtol": 1e-2}
    batched = {"check_batched_grad": True, "check_batched_forward_grad": True}
    assert torch.autograd.gradcheck(function, arguments, check_forward_ad=True, **batched, **tolerance)
    assert torch.autograd.gradgradcheck(function, arguments, check_fwd_over_rev=True, **tolerance | {"atol": 1e-1})


def test_transforms_are_compiled_whole(geometry):
    points, tangents = zip(*case(geometry), strict=True)

    def run(convolve):
        def compiled(function):
            dynamo().reset()
            return torch.compile(function, fullgraph=True, backend="aot_eager")

        along = compiled(lambda w, t: transforms.jvp(lambda w: convolve(points[0], w), (w,), (t,)))
        return along(points[1], tangents[1]), compiled(transforms.grad(as_loss(convolve), argnums=(0, 1, 2)))(*points)

    check_torchs(run, geometry)


# Everything else refuses such tensors


def double(a):
    return a * 2


doubled = handlepool.operation(double)


@handlepool.operation(mutates="y")
def doubled_into(a, y):
    torch.mul(a.detach(), 2, out=y)


def in_branch(function):
    def call(*arguments):
        with ParallelStates(2).fork() as fork:
            return fork.run(function, *arguments)

    return call


def in_body(function):
    def call(*arguments):
        with ParallelStates(2).fork() as fork:
            fork.run(double, torch.ones(3))
            return function(*arguments)

    return call


def submitted(function):
    def call(*arguments):
        with ParallelStateExecutor(1) as executor:
            return executor.submit(function, *arguments).result()

    return call


REFUSE = {
    "graph function": lambda x: handlepool.mean2d(x),
    "out=": lambda x: handlepool.add(torch.ones(2, 4, 5, 4), torch.ones(2, 4, 5, 4), out=x),
    "branch": in_branch(double),
    "branch over a closure": lambda x: in_branch(lambda: double(x))(),
    "branch over a list": lambda x: in_branch(lambda xs: double(xs[0]))([x]),
    "branch of a graph function": in_branch(handlepool.mean2d),
    "branch of an operation": in_branch(doubled),
    "operation in the body of a fork": in_body(doubled),
    "operation that mutates": in_body(lambda x: doubled_into(x, torch.empty(2, 4, 5, 4))),
    "submit": submitted(double),
    "record": lambda x: handlepool.record(handlepool.mean2d, x),
    "record with lanes": lambda x: handlepool.record(doubled, x, lanes=2),
}


@pytest.mark.parametrize("call", REFUSE.values(), ids=REFUSE)
def test_a_tangent_is_refused_and_not_lost(call):
    (x, tangent), _, _ = case({})
    with forward_ad.dual_level(), pytest.raises(ArgumentError, match="has a tangent of torch's forward mode"):
        call(forward_ad.make_dual(x, tangent))
    with forward_ad.dual_level():
        accepted = [name for name in REFUSE if not name.startswith("record")]  # of tensors the host driver records no calls
        for name in accepted:
            REFUSE[name](forward_ad.unpack_dual(forward_ad.make_dual(x.clone(), tangent)).primal)


@pytest.mark.parametrize("call", REFUSE.values(), ids=REFUSE)
@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap"])
def test_a_tensor_of_a_transform_is_refused_in_words_of_our_own(call, transform):
    (x, tangent), _, _ = case({})
    under = {
        "grad": lambda: transforms.grad(lambda x: call(x).sum())(x),
        "jvp": lambda: transforms.jvp(call, (x,), (tangent,)),
        "vmap": lambda: transforms.vmap(call)(x[None]),
    }
    with pytest.raises(ArgumentError, match=r"is inside a transform of torch\.func"):
        under[transform]()


def test_what_a_program_copies_has_no_tangent():
    (x, tangent), _, _ = case({})
    driver = handlepool.default_pool().driver
    with forward_ad.dual_level(), pytest.raises(ArgumentError, match=r"argument 0, a torch\.Tensor: the tensor has a tangent"):
        elements(driver, "argument 0", forward_ad.make_dual(x, tangent))


def test_operations_outside_of_regions_are_torchs_own_with_their_derivatives():
    (x, tangent), _, _ = case({})
    torch.testing.assert_close(transforms.jvp(doubled, (x,), (tangent,)), (2 * x, 2 * tangent))


class Mean(torch.autograd.Function):
    """A graph function with a forward derivative, as the message says it is made."""

    @staticmethod
    def forward(x):
        return handlepool.mean2d(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def jvp(ctx, tangent):
        return Mean.apply(tangent)

    @staticmethod
    def vmap(info, in_dims, x):
        return torch.stack([Mean.apply(each) for each in x.movedim(in_dims[0], 0)]), 0


def test_graph_functions_work_in_a_function_of_autograd_with_a_jvp_and_a_vmap():
    (x, tangent), _, _ = case({})
    right = handlepool.mean2d(x), handlepool.mean2d(tangent)
    torch.testing.assert_close(transforms.jvp(Mean.apply, (x,), (tangent,)), right)
    torch.testing.assert_close(transforms.vmap(Mean.apply)(torch.stack([x, tangent])), torch.stack(right))
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(Mean.apply(forward_ad.make_dual(x, tangent)))
        torch.testing.assert_close(tuple(found), right)
