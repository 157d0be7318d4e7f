"""Kernels of our own compared with torch's, over torch's tensors. Collected only where torch is installed."""

import itertools

import numpy as np
import pytest

import handlepool
from handlepool import ParallelStates, add, avg_pool2d, concat, max_pool2d, mean2d

TOLERANCE = {"float16": 1e-3, "bfloat16": 1e-2, "float32": 1e-6}


@pytest.fixture
def tensor(torch):
    def make(*shape, dtype, layout, seed=0):
        values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * 9
        made = torch.from_numpy(values).to("cuda", getattr(torch, dtype))
        return made.contiguous(memory_format=torch.channels_last) if layout == "nhwc" else made

    return make


GEOMETRIES = [(3, 1, 1), (3, 2, 0), ((2, 5), (3, 1), (1, 2)), (7, 7, 3), (1, 2, 0)]


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_they_give_what_torch_gives(pool, torch, tensor, dtype, layout):
    functional = torch.nn.functional

    def same(y, expected, exact=False):
        assert (y.dtype, y.shape, y.device) == (expected.dtype, expected.shape, expected.device)
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": TOLERANCE[dtype] * 8, "atol": TOLERANCE[dtype] * 8}
        torch.testing.assert_close(y, expected, equal_nan=True, **tolerance)

    for channels in (24, 7):
        x, z = (tensor(3, channels, 15, 17, dtype=dtype, layout=layout, seed=seed) for seed in range(2))
        x[0, 1, 3, 3], x[1, 2, 5], x[2, 3, 0, 0] = float("nan"), -float("inf"), float("inf")
        for (window, stride, padding), up in itertools.product(GEOMETRIES, (False, True)):
            options = {"stride": stride, "padding": padding, "ceil_mode": up}
            y = max_pool2d(x, window, **options, pool=pool)
            same(y, functional.max_pool2d(x, window, **options), exact=True)
            assert y.stride() == functional.max_pool2d(x, window, **options).stride()
            for counted in (True, False):
                more = {**options, "count_include_pad": counted}
                same(avg_pool2d(z, window, **more, pool=pool), functional.avg_pool2d(z, window, **more))
        same(add(x, z, activation="relu", pool=pool), torch.relu(x.float() + z.float()).to(x.dtype))
        same(concat([x, z, x], 1, pool=pool), torch.cat([x, z, x], 1), exact=True)
        same(mean2d(z, pool=pool), z.float().mean((2, 3)).to(z.dtype))
        same(max_pool2d(x, 2, pool=pool), functional.max_pool2d(x, 2), exact=True)


def test_on_torchs_stream_in_branches_and_recorded(pool, torch, tensor):
    x, z = (tensor(2, 24, 14, 14, dtype="float16", layout="nhwc", seed=seed) for seed in range(2))

    def network(x, z, run=lambda function, *args, **kwargs: function(*args, **kwargs, pool=pool)):
        both = run(concat, [run(max_pool2d, x, 3, stride=1, padding=1), run(add, x, z)], 1)
        return run(mean2d, both)

    both = torch.cat([torch.nn.functional.max_pool2d(x, 3, stride=1, padding=1), x + z], 1)
    expected = both.float().mean((2, 3)).half()
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        found = [network(x, z)]
        with ParallelStates(3, pool=pool).fork() as fork:
            found.append(network(x, z, fork.run))
        torch.cuda.current_stream().synchronize()
    program = handlepool.record(lambda x, z: network(x, z), x, z, pool=pool)
    program.replay()
    torch.cuda.synchronize()
    for y in (*found, program.outputs):
        torch.testing.assert_close(torch.as_tensor(y, device="cuda"), expected, rtol=2e-3, atol=2e-3)
