"""Torch's CPU operations in the queues of the host driver, so that models are recorded without a GPU."""

import torch

import handlepool
from handlepool.integrations.torch.places import Host, _numpy, _torch

leaves = torch.utils._pytree.tree_leaves


class QueuedHost(Host):
    """A place whose operations run when their queue comes to them. Each gets raw memory: order and lifetimes are the driver's."""

    def operation(self, name, function):
        driver, known = self._driver, {}

        def probed(args):
            """What the function returns for such arguments: its structure, and its tensors' geometries."""
            key = str(torch.utils._pytree.tree_map(lambda each: (each.shape, each.strides, each.dtype) if hasattr(each, "strides") else each, args))
            if key not in known:
                with torch.no_grad():
                    made = function(*torch.utils._pytree.tree_map(self._blank, args))
                flat, spec = torch.utils._pytree.tree_flatten(made)
                known[key] = spec, [(each.shape, each.stride(), _numpy(each).dtype) for each in flat]
            return known[key]

        def work(*args):
            spec, lies = probed(args)
            outs = [driver.empty(tuple(shape), tuple(step * dtype.itemsize for step in steps), dtype) for shape, steps, dtype in lies]
            flat, given = torch.utils._pytree.tree_flatten(args)
            places = [place for place, each in enumerate(flat) if isinstance(each, driver.array_types)]
            plain = [None if place in places else each for place, each in enumerate(flat)]

            def run(*raw):
                values = [*plain]
                for place, each in zip(places, raw[len(outs) :], strict=True):
                    values[place] = _over(each)
                with torch.no_grad():
                    made = leaves(function(*torch.utils._pytree.tree_unflatten(values, given)))
                    for out, value in zip(raw, made, strict=False):
                        _over(out).copy_(value)

            driver.enqueue(driver.current_stream().ptr, run, writes=outs, reads=[flat[place] for place in places], label=name)
            return torch.utils._pytree.tree_unflatten(outs, spec)

        work.__name__ = work.__qualname__ = name
        return handlepool.operation(work, mutates=())

    def _blank(self, value):
        """A tensor of zeros in place of an array, whose values may not be there yet."""
        if not isinstance(value, self._driver.array_types):
            return value
        size = value.dtype.itemsize
        dtype = _torch(__import__("numpy").zeros((), value.dtype)).dtype
        return torch.empty_strided(value.shape, [step // size for step in value.strides], dtype=dtype).zero_()


def _over(raw):
    """A tensor over raw memory."""
    if raw.dtype.name == "bfloat16":
        return torch.from_numpy(raw.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(raw)
