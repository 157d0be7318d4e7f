"""Torch's CPU operations in the queues of the host driver, so that models are recorded without a GPU."""

import importlib.util
import pathlib
import re

import numpy as np
import torch

import handlepool
from handlepool.integrations.torch.held import Held
from handlepool.integrations.torch.places import Host, _numpy, _torch

pytree = torch.utils._pytree


class QueuedHost(Host):
    """A place whose operations run when their queue comes to them.

    Each gets raw memory, so order and lifetimes are the driver's.
    """

    def operation(self, name, function):
        driver, known, held, mine = self._driver, {}, Held(function), Held(self)

        def lies(args):
            """The structure of the function's value for such arguments, and the geometries of its tensors."""
            key = str(pytree.tree_map(mine.value._lie, args))
            if key not in known:
                with torch.no_grad():
                    made = held.value(*pytree.tree_map(mine.value._blank, args))
                flat, structure = pytree.tree_flatten(made)
                known[key] = structure, [(tuple(each.shape), each.stride(), _numpy(each).dtype) for each in flat]
            return known[key]

        def work(*args):
            structure, outs = lies(args)
            made = [driver.empty(shape, tuple(step * dtype.itemsize for step in steps), dtype) for shape, steps, dtype in outs]
            flat, given = pytree.tree_flatten(args)
            places = [place for place, each in enumerate(flat) if mine.value._takes(each)]
            plain = [None if place in places else each for place, each in enumerate(flat)]

            def run(*raw):
                values = [*plain]
                for place, each in zip(places, raw[len(made) :], strict=True):
                    values[place] = _over(each)
                with torch.no_grad():
                    found = pytree.tree_leaves(held.value(*pytree.tree_unflatten(values, given)))
                    for out, value in zip(raw, found, strict=False):
                        _over(out).copy_(value)

            driver.enqueue(driver.current_stream().ptr, run, writes=made, reads=[flat[place] for place in places], label=name)
            return pytree.tree_unflatten(made, structure)

        work.__name__ = work.__qualname__ = name
        return handlepool.operation(work, mutates=())

    def _takes(self, value):
        return isinstance(value, self._driver.array_types)

    def _lie(self, value):
        return (value.shape, value.strides, value.dtype) if self._takes(value) else value

    def _blank(self, value):
        """A tensor of zeros in place of an array, whose values may not be there yet."""
        if not self._takes(value):
            return value
        steps = [step // value.dtype.itemsize for step in value.strides]
        return torch.empty_strided(value.shape, steps, dtype=_torch(np.zeros((), value.dtype)).dtype).zero_()


def _over(raw):
    """A tensor over raw memory."""
    if raw.dtype.name == "bfloat16":
        return torch.from_numpy(raw.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(raw)


def torchvision():
    """The models of torchvision, also where its compiled operations cannot be loaded; None without torchvision."""
    found = importlib.util.find_spec("torchvision")
    if found is None:
        return None
    try:
        import torchvision
    except RuntimeError:
        # A build for CUDA beside torch's CPU build has no operations, whose shapes it describes all the same.
        text = pathlib.Path(found.submodule_search_locations[0], "_meta_registrations.py").read_text()
        _library.extend([torch.library.Library("torchvision", "DEF")])
        for name in dict.fromkeys(re.findall(r'(?:register_meta\(|register_fake\(\s*)"(?:torchvision::)?(\w+)"', text)):
            _library[0].define(f"{name}(Tensor x) -> Tensor")
        import torchvision
    return torchvision.models


_library = []
