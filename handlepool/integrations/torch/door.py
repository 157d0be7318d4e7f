"""Call a model by recorded programs, without torch's compiler in the call."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import handlepool
from handlepool import ArgumentError, CaptureError
from handlepool._util.names import kind_of
from handlepool.integrations.torch.capture import captured
from handlepool.integrations.torch.modes import modes
from handlepool.integrations.torch.places import Place, place_for
from handlepool.integrations.torch.program import Program
from handlepool.integrations.torch.refusals import NotTaken, warn
from handlepool.integrations.torch.weights import Versions, Weights

pytree = torch.utils._pytree  # noqa: SLF001 - the public form knows no classes that torch registers here


class RecordedModel:
    """A model with a pool of programs. Made by `recorded`.

    A call takes the model's own arguments. The first call of a geometry traces, lowers and records the model.
    """

    def __init__(self, model: nn.Module, strict: bool, programs: int, options: dict[str, Any]) -> None:
        self.__wrapped__ = model
        self._model, self._strict, self._most, self._options = model, strict, programs, options
        self._programs: OrderedDict[Any, Program | str] = OrderedDict()
        self._place: Place | None = None
        self._said: set[str] = set()
        self._renew()

    def __repr__(self) -> str:
        return f"<recorded {type(self._model).__name__}, {len(self._programs)} keys>"

    def _renew(self) -> None:
        for each in self._programs.values():
            if isinstance(each, Program):
                each.recorded.clear()
        self._programs.clear()
        self._weights = Weights([self._model])
        self._versions = Versions(self._weights.tensors)
        self._derived = any(each.requires_grad for each in self._weights.tensors)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model.

        Parameters
        ----------
        *args, **kwargs
            The model's own arguments.

        Returns
        -------
        object
            The model's value, in new tensors that are ready on torch's current stream.
        """
        leaves, structure = pytree.tree_flatten((args, kwargs))
        try:
            return self._run(leaves, structure, args, kwargs)
        except NotTaken as why:
            self._say(str(why))
        return self._model(*args, **kwargs)

    def _run(self, leaves: list[Any], structure: Any, args: Any, kwargs: Any) -> Any:
        grad = torch.is_grad_enabled()
        if grad and (self._derived or any(isinstance(each, Tensor) and each.requires_grad for each in leaves)):
            raise NotTaken("it needs gradients: call it under torch.no_grad()")
        if not self._weights.bound():
            self._renew()
        elif not self._versions.same():
            self._refresh()
        key = modes("cuda"), structure, tuple([_part(each) for each in leaves])
        program = self._programs.get(key)
        if program is None:
            program = self._made(key, leaves, args, kwargs)
        if isinstance(program, str):
            raise NotTaken(program)
        value = program(leaves)
        if program.writes:
            self._versions.renew()
        return value

    def _made(self, key: Any, leaves: list[Any], args: Any, kwargs: Any) -> Program | str:
        """Trace and lower the model for a geometry; return the reason where that cannot be."""
        made: Program | str
        try:
            if self._weights.training:
                raise NotTaken("it is in training mode: call its eval()")
            device = _device([*self._weights.tensors, *leaves])
            place = place_for(device)
            made = Program(captured(self._model, args, kwargs), place, device, self._options)
            made.settle(leaves)
        except NotTaken as why:
            made = str(why)
        self._programs[key] = made
        while len(self._programs) > self._most:
            _, old = self._programs.popitem(last=False)
            if isinstance(old, Program):
                old.recorded.clear()
        return made

    def _refresh(self) -> None:
        for each in self._programs.values():
            if isinstance(each, Program):
                each.refresh()
        self._versions.renew()

    def refresh(self) -> None:
        """Compute everything again that was made of weights.

        Call it after writes that torch does not count, as through ``weight.data``.
        """
        self._refresh()

    def _say(self, why: str) -> None:
        """Warn once for each reason that torch runs the model; with ``strict`` raise."""
        if self._strict:
            raise CaptureError(f"{self!r} has no program: {why}")
        if why not in self._said:
            self._said.add(why)
            warn(type(self._model).__name__, why)


def _device(values: list[Any]) -> torch.device:
    devices = {each.device for each in values if isinstance(each, Tensor)}
    if len(devices) != 1:
        raise NotTaken(f"its tensors are on {len(devices)} devices ({', '.join(sorted(map(str, devices)))})")
    return devices.pop()


def _part(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return type(value), value


def recorded(model: nn.Module | Callable[..., Any], *, programs: int = 16, strict: bool = False, **options: Any) -> RecordedModel:
    """Record a model by its calls, without torch's compiler in the call.

    Parameters
    ----------
    model : Module
        In eval mode, on one device.
    programs : int
        Most keys. The key that was used least recently ends beyond this number.
    strict : bool
        Whether a model that cannot be recorded raises an error.
    **options
        ``lanes``, ``instances`` and ``outputs`` of `handlepool.recorded`.

    Returns
    -------
    RecordedModel

    Raises
    ------
    ArgumentError
        For an object that is no module, and for values that an option cannot have.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"recorded was given a {kind_of(model)}: pass a torch.nn.Module")
    handlepool.recorded(_part, strict=strict, programs=programs, **options)
    return RecordedModel(model, strict, programs, {"strict": strict, **options})
