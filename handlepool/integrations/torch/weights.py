"""Detect whether the weights of modules have changed.

A program reads some weights in place, and holds values that were computed from other weights. So a call compares, for each
parameter and buffer, the object that is bound to its name, its address, and torch's count of writes to it. The comparisons run
in C, at about 0.1 µs for each weight.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, is_
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from handlepool.integrations.torch.refusals import NotTaken

_pointer = Tensor.data_ptr
_version = attrgetter("_version")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
_OWN = frozenset(vars(nn.Module()))
"""The names of the attributes that torch gives each module."""


def _compared(tensors: list[Tensor], pointers: list[int], places: list[int]) -> bool:
    return [*map(_pointer, tensors)] == pointers


# CUDA builds of torch have a C++ function for this comparison, which takes a tenth of the time.
_at: Any = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", _compared)
_INERT = ("conv", "linear", "pooling", "container", "flatten", "padding", "upsampling", "pixelshuffle", "channelshuffle", "fold")
"""Files of `torch.nn.modules` whose layers ignore training mode."""


def _trains(module: nn.Module) -> bool:
    """Return whether a module's ``training`` flag may change its results."""
    room, _, name = type(module).__module__.rpartition(".")
    if room != "torch.nn.modules":
        return True
    return name not in _INERT and type(module) not in (nn.ReLU, nn.SiLU, nn.GELU, nn.Sigmoid, nn.Hardswish, nn.LayerNorm)


def _is_single(key: str, value: object) -> bool:
    """Return whether ``value`` is a tensor of at most one element.

    The result is false for the counter of a batch norm, because the layer reads this counter only in training mode.
    """
    return isinstance(value, Tensor) and value.numel() < 2 and key != "num_batches_tracked"


class Versions:
    """Torch's counts of writes to tensors.

    Parameters
    ----------
    tensors : sequence of Tensor
        The tensors to watch. Inference tensors are left out, because torch does not count writes to them.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._counted = [each for each in tensors if not each.is_inference()]
        self.renew()

    def same(self) -> bool:
        """Return whether torch counted no write since the last `renew`."""
        return [*map(_version, self._counted)] == self._versions

    def renew(self) -> None:
        """Note the present counts, for later comparisons."""
        self._versions = [*map(_version, self._counted)]


class Weights:
    """The parameters, buffers, hooks and plain attributes of modules.

    Plain attributes hold numbers, texts and the like. Plain globals that a module's methods use count as its attributes. If a
    module's class is torch's own, ``training`` is the only plain attribute that counts.

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
        self._copies = [dict(each) for each in self._tables]
        entries = [*chain.from_iterable(map(dict.values, self._tables))]
        # A tensor in an ordinary attribute is a weight as well, although torch does not list it as a parameter or a buffer.
        self._held = [(space, key) for space in spaces for key, value in space.items() if isinstance(value, Tensor)]
        self._owned = [space[key] for space, key in self._held]
        self.tensors = [*dict.fromkeys(each for each in (*entries, *self._owned) if isinstance(each, Tensor))]
        # `bound` compares the tables by ``==``. For two tensors of one element and equal values, ``==`` is true although they are
        # two objects. So `bound` compares such tensors also by identity.
        single = [(table, key) for table in self._tables for key, value in table.items() if _is_single(key, value)]
        self._held += single
        self._owned += [table[key] for table, key in single]
        self._pointers = [*map(_pointer, self.tensors)]
        self._places = [*range(len(self.tensors))]
        # A launch may read a weight that the user has just replaced. These tensors keep the memory of the old weight alive.
        self._aliases = [each.detach() for each in self.tensors]
        self._spaces = [module.__dict__ for module in self.modules if _trains(module)]
        self._training = [space["training"] for space in self._spaces]
        self._hooks = [space[name] for space in spaces for name in ("_forward_hooks", "_forward_pre_hooks")]
        self._plain = [(space, key) for module in self.modules for space, key in _plain_places(module)]
        self._values = [space[key] for space, key in self._plain]
        self.versions = Versions(self.tensors)

    def bound(self) -> bool:
        """Return whether the modules are as they were at construction.

        Each name must be bound to the same object, each tensor must have the same address, training flags and plain attributes
        must have the same values, and no module may have a hook.
        """
        try:
            return (
                _at(self.tensors, self._pointers, self._places)
                # ``==`` of dictionaries compares entries by identity first. So only a replaced tensor is compared by its
                # values. The result is a tensor of several elements, which has no truth value. Python then raises RuntimeError,
                # and the method returns False.
                and self._tables == self._copies
                and [space["training"] for space in self._spaces] == self._training
                and not any(self._hooks)
                and all(space.get(key) is value for (space, key), value in zip(self._held, self._owned, strict=True))
                and self._same_values()
            )
        except RuntimeError:
            return False

    def check(self) -> None:
        """Raise for modules whose calls no program can repeat.

        Such modules are in training mode, have hooks, or have weights of other classes.

        Raises
        ------
        NotTaken
        """
        if any(space["training"] for space in self._spaces):
            raise NotTaken("the model is in training mode: call its eval()")
        for each in self.tensors:
            if type(each) not in (Tensor, nn.Parameter, nn.Buffer) or each.layout is not torch.strided:
                raise NotTaken(f"a weight is a {type(each).__name__} with the layout {each.layout}, and not a dense torch.Tensor")
        if any(self._hooks):
            raise NotTaken("the model has hooks, and a recorded program would not call them: remove the hooks")

    def derived(self) -> bool:
        """Return whether a weight requires a gradient."""
        return any(each.requires_grad for each in self.tensors)

    def _same_values(self) -> bool:
        now = [space.get(key, self) for space, key in self._plain]
        if all(map(is_, now, self._values)):
            return True
        if [(type(each), repr(each)) for each in now] != [(type(each), repr(each)) for each in self._values]:
            return False
        # The values are equal, but some are new objects. The new objects are kept, so that the next comparison by identity
        # succeeds.
        self._values = now
        return True


class Snapshot:
    """A copy of the attributes of modules, to detect and undo changes.

    Lists and dictionaries among the attributes are copied as well.
    """

    def __init__(self, spaces: list[dict[str, Any]]) -> None:
        self._spaces = [(space, dict(space)) for space in spaces]
        held = [value for space in spaces for value in space.values()]
        self._lists = [(each, [*each]) for each in held if type(each) is list]
        self._dicts = [(each, dict(each)) for each in held if type(each) is dict]

    def restore(self) -> bool:
        """Restore the attributes; return whether a value changed.

        Torch's export may replace a tuple or a list by an equal object. The old object is restored, but this replacement does
        not count as a change.
        """
        changed = False
        for now, then in (*self._spaces, *self._dicts):
            if [*now] != [*then] or not all(map(is_, now.values(), then.values())):
                changed |= not _alike(now, then)
                now.clear()
                now.update(then)
        for entries, before in self._lists:
            if len(entries) != len(before) or not all(map(is_, entries, before)):
                changed |= not _alike(entries, before)
                entries[:] = before
        return changed


def _alike(one: Any, other: object) -> bool:
    """Return whether two values hold the same objects in equal containers."""
    if one is other:
        return True
    same: Any = other
    if type(one) is not type(same):
        return False
    if isinstance(one, dict):
        return [*one] == [*same] and all(map(_alike, one.values(), same.values()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(same) and all(map(_alike, one, same))
    return isinstance(one, _PLAIN) and repr(one) == repr(same)


def _plain_places(module: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the places of plain values that a module's code may read.

    A place is a dictionary of attributes or globals, and a key in the dictionary.
    """
    if type(module).__module__.startswith("torch."):
        return
    for key, value in module.__dict__.items():
        if key not in _OWN and _is_plain(value):
            yield module.__dict__, key
    for kind in type(module).__mro__:
        if kind.__module__.partition(".")[0] not in ("torch", "builtins"):
            for method in vars(kind).values():
                if isinstance(method, FunctionType):
                    names = [name for name in method.__code__.co_names if name in method.__globals__]
                    yield from ((method.__globals__, name) for name in names if _is_plain(method.__globals__[name]))


def _is_plain(value: object) -> bool:
    return isinstance(value, _PLAIN) or (type(value) is tuple and all(map(_is_plain, value)))
