"""Tell whether the weights of modules are as they were.

A program reads weights where they lie, and has values built in that were computed from weights. So a call compares, for each
parameter and buffer, the object that is bound to its name, its address, and torch's count of writes to it. The comparisons run in
C, at about 0.1 µs for each weight.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

_pointer = Tensor.data_ptr
_version = attrgetter("_version")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
_OWN = frozenset(vars(nn.Module()))
"""Attributes that torch gives each module."""


class Versions:
    """Torch's counts of writes to tensors.

    Parameters
    ----------
    tensors : sequence of Tensor
        Torch counts no writes to inference tensors, so these are left out.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._counted = [each for each in tensors if not each.is_inference()]
        self.renew()

    def same(self) -> bool:
        """Return whether torch counted no write since the last `renew`."""
        return [*map(_version, self._counted)] == self._versions

    def renew(self) -> None:
        """Compare with the counts of now from now on."""
        self._versions = [*map(_version, self._counted)]


class Weights:
    """The parameters, buffers and plain attributes of modules.

    Of a module whose class is torch's own, ``training`` counts, and no other plain attribute.

    Parameters
    ----------
    models : iterable of Module

    Attributes
    ----------
    modules : list of Module
        The models and all modules inside.
    tensors : list of Tensor
        The parameters and buffers, each once.
    versions : Versions
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self.modules = [*dict.fromkeys(each for model in models for each in model.modules())]
        spaces = [each.__dict__ for each in self.modules]
        tables = [space[name] for space in spaces for name in ("_parameters", "_buffers", "_modules")]
        self._tables = [each for each in tables if each]
        self._entries = [*chain.from_iterable(map(dict.values, self._tables))]
        self._sizes = [*map(len, self._tables)]
        self.tensors = [*dict.fromkeys(each for each in self._entries if isinstance(each, Tensor))]
        self._pointers = [*map(_pointer, self.tensors)]
        # A launch may read memory of weights that the user has just replaced. These references keep that memory.
        self._aliases = [each.detach() for each in self.tensors]
        self._spaces = spaces
        self._training = [space["training"] for space in spaces]
        self._plain = [(space, key) for space, module in zip(spaces, self.modules, strict=True) for key in _plain_names(module)]
        self._values = [space[key] for space, key in self._plain]
        self.versions = Versions(self.tensors)

    def bound(self) -> bool:
        """Return whether the same objects are bound, at the same addresses."""
        return (
            [*map(_pointer, self.tensors)] == self._pointers
            and [*map(len, self._tables)] == self._sizes
            and all(map(is_, chain.from_iterable(map(dict.values, self._tables)), self._entries))
            and [space["training"] for space in self._spaces] == self._training
            and self._same_values()
        )

    @property
    def training(self) -> bool:
        """Whether a module is in training mode."""
        return any(space["training"] for space in self._spaces)

    def _same_values(self) -> bool:
        now = [space.get(key, self) for space, key in self._plain]
        if all(map(is_, now, self._values)):
            return True
        if [(type(each), repr(each)) for each in now] != [(type(each), repr(each)) for each in self._values]:
            return False
        # Equal values are expected as the objects that they are now, so that the next comparison is quick again.
        self._values = now
        return True


def _plain_names(module: nn.Module) -> list[str]:
    """Return the names of a module's attributes with plain values."""
    if type(module).__module__.startswith("torch."):
        return []
    return [key for key, value in module.__dict__.items() if key not in _OWN and _is_plain(value)]


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (type(value) is tuple and all(map(_is_plain, value)))
