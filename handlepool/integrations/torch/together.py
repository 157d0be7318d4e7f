"""Run several models at once, each on a lane of one program.

The models are not lowered. Each lane holds the kernels that torch or Inductor launches for a model. In the program, each model
is one operation, which reads the model's arguments and weights.
"""

import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import handlepool
from handlepool import ArgumentError, CaptureError
from handlepool.integrations.torch.capture import apart
from handlepool.integrations.torch.held import Held
from handlepool.integrations.torch.inductor import compiled
from handlepool.integrations.torch.modes import modes
from handlepool.integrations.torch.places import Place, place_for
from handlepool.integrations.torch.refusals import NotTaken, warn
from handlepool.integrations.torch.weights import Versions, Weights

pytree = torch.utils._pytree
KERNELS = ("torch", "inductor")
MOST_KEYS = 1024
"""The maximum number of tried geometries that a `Together` remembers."""


class _Untried(Exception):
    """No earlier call had arguments of this geometry."""


class Together:
    """Several models as one program, as `together` returns them.

    Attributes
    ----------
    recorded : RecordedFunction or None
        The recorded function that holds the programs, with ``stats``, ``explain`` and ``tune``. None before the first call.
    """

    def __init__(self, models: tuple[nn.Module, ...], kernels: str, strict: bool, options: dict[str, Any]) -> None:
        self._models = models
        self._kernels, self._strict, self._options = kernels, strict, options
        self._place: Place | None = None
        self._why: str | None = None
        self._said = False
        self._tried: dict[Any, None] = {}
        self.recorded: Any = None
        self._renew()

    def __repr__(self) -> str:
        return f"<{len(self._models)} models together: {', '.join(type(each).__name__ for each in self._models)}>"

    def __call__(self, *given: Any) -> tuple[Any, ...]:
        """Call all models.

        Parameters
        ----------
        *given
            A tuple of arguments for each model, or a single tuple for all models. A value that is no tuple is taken as the only
            argument.

        Returns
        -------
        tuple
            The value of each model, in new tensors that are ready on torch's current stream.
        """
        args = self._split(given)
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            # The caller captures the current stream. So torch runs the models, and their kernels become a part of the caller's
            # graph.
            return self._plain(args)
        shared = len(given) < len(self._models)
        try:
            if self._place is None:
                self._begin(args)
            if torch.is_grad_enabled() and (self._weights.derived() or any(each.requires_grad for each in _tensors(args))):
                raise NotTaken("the model needs gradients: call it under torch.no_grad()")
            while True:
                try:
                    values = self._called(args, shared)
                except _Untried:
                    return self._try(args, shared)
                # If a weight has changed, the program ran with the old weight. The program wrote only its own results. So these
                # results are dropped, and the call is repeated.
                if self._same():
                    return values
                self._weights.check()
                self._renew()
                self._begin(args)
        except NotTaken as why:
            self._say(str(why))
            return self._plain(args)

    @property
    def names(self) -> list[str]:
        """The classes of the models."""
        return [type(each).__name__ for each in self._models]

    @property
    def left(self) -> str:
        """The reason why torch runs the models; empty if a program does."""
        return self._why or ""

    def _split(self, given: tuple[Any, ...]) -> tuple[tuple[Any, ...], ...]:
        """Return a tuple of arguments for each model."""
        count = len(self._models)
        if len(given) not in (1, count):
            raise ArgumentError(
                f"{len(given)} tuples of arguments were given for {count} models: pass one tuple for each model, "
                f"or one tuple for all models"
            )
        args = tuple([each if type(each) is tuple else (each,) for each in given])
        return args if len(args) == count else args * count

    # The programs

    def _begin(self, args: tuple[Any, ...]) -> None:
        """Make the recorded function that calls each model as an operation.

        Raises
        ------
        NotTaken
        """
        if self._why is not None:
            raise NotTaken(self._why)
        devices = {each.device for each in (*self._weights.tensors, *_tensors(args))}
        if len(devices) != 1:
            raise NotTaken(
                f"the models' tensors are on {len(devices)} devices ({', '.join(sorted(map(str, devices)))}): "
                "move them to one device"
            )
        self._weights.check()
        place = place_for(devices.pop())
        nodes, weights = [], []
        for number, (model, call) in enumerate(zip(self._models, self._calls, strict=True)):
            nodes.append(place.operation(f"{type(model).__name__}_{number}", partial(_call, Held(call))))
            weights.append(tuple([place.array(each) for each in Weights([model]).tensors]))
        run = partial(_run, Held(weakref.WeakMethod(self._check)), tuple(nodes), tuple(weights))
        run.__name__ = run.__qualname__ = "together"  # type: ignore[attr-defined]
        self.recorded = handlepool.recorded(run, strict=self._strict, **self._options)
        self._place = place

    def _renew(self) -> None:
        """Drop all programs, and note the present state of the models."""
        if self.recorded is not None:
            self.recorded.clear()
        self._place = None
        self._tried.clear()
        self._weights = Weights(self._models)
        self._calls = [*map(compiled, self._models)] if self._kernels == "inductor" else [*self._models]

    def _same(self) -> bool:
        """Return whether a program still computes the models' values."""
        # Inductor builds the values of weights into its kernels, so a write to a weight counts as a change. Torch's kernels read
        # the weights in place, so with these kernels only a replaced weight counts.
        return self._weights.bound() and (self._kernels == "torch" or self._weights.versions.same())

    def _given(self, args: tuple[Any, ...], shared: bool) -> tuple[Any, ...]:
        """Return ``args`` in the form that the recorded function takes."""
        place: Any = self._place
        # The recorded function refuses arguments that share memory. So a tuple that all models share is passed once.
        return (modes(place.kind), *place.arrays(args[:1] if shared else apart(args)))

    def _called(self, args: tuple[Any, ...], shared: bool) -> tuple[Any, ...]:
        place: Any = self._place
        found: tuple[Any, ...] = place.tensors(self.recorded(*self._given(args, shared)))
        return found

    def _check(self, given: tuple[Any, ...]) -> None:
        """Raise `_Untried` for arguments whose geometry was not tried."""
        if _geometry(given) not in self._tried:
            raise _Untried

    def _try(self, args: tuple[Any, ...], shared: bool) -> tuple[Any, ...]:
        """Call the models by torch, and detect writes to buffers or arguments.

        If there is such a write, torch runs the models from then on.
        """
        key = _geometry(self._given(args, shared))
        written = Versions([*self._weights.tensors, *_tensors(args)])
        values = self._plain(args)
        if not written.same():
            self._why, self._place = "a model writes a buffer or an argument: pass this model to recorded", None
        if len(self._tried) >= MOST_KEYS:
            self._tried.clear()
        self._tried[key] = None
        return values

    def _plain(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple([call(*each) for call, each in zip(self._calls, args, strict=True)])

    def _say(self, why: str) -> None:
        """Warn once that torch runs the models; with ``strict`` raise."""
        if self._strict:
            raise CaptureError(f"{self!r} has no program: {why}")
        if not self._said:
            self._said = True
            warn(repr(self), why)


def _call(model: Held, weights: object, args: tuple[Any, ...]) -> Any:
    """Call a model.

    The weights are an argument, so that they count as memory that the operation reads.
    """
    return model.value(*args)


def _run(check: Held, nodes: tuple[Any, ...], weights: tuple[Any, ...], *given: Any) -> tuple[Any, ...]:
    """Call each model as an operation.

    `handlepool.recorded` records this function.
    """
    check.value()(given)
    _, *args = given
    args = args * len(nodes) if len(args) < len(nodes) else args
    return tuple([node(*each) for node, *each in zip(nodes, weights, args, strict=True)])


def _tensors(value: object) -> Iterator[Tensor]:
    return (each for each in pytree.tree_leaves(value) if isinstance(each, Tensor))


def _geometry(value: object) -> Any:
    """Return a key of ``value``, with the geometry of each array."""
    leaves, spec = pytree.tree_flatten(value)
    return repr(spec), tuple([_part(each) for each in leaves])


def _part(value: Any) -> Any:
    if hasattr(value, "shape"):
        strides = value.stride() if isinstance(value, Tensor) else value.strides
        return tuple(value.shape), tuple(strides), str(value.dtype)
    return type(value), repr(value)


def together(*models: nn.Module, kernels: str = "torch", strict: bool = False, **options: Any) -> Together:
    """Run several models at once, each on a lane of one program.

    Parameters
    ----------
    *models : Module
        In eval mode, all on one device.
    kernels : {"torch", "inductor"}
        The kernels of each model: torch's own, or Inductor's. Inductor builds the weights into its kernels, so the models are
        compiled again after each change of a weight.
    strict : bool
        Whether a call of the returned object raises an error if the models cannot be recorded. Otherwise torch runs the
        models, and a warning gives the reason.
    **options
        ``lanes``, ``instances``, ``programs`` and ``outputs`` of `handlepool.recorded`.

    Returns
    -------
    Together

    Raises
    ------
    ArgumentError
        For values that an option cannot have, and for objects that are no modules.
    """
    if not models:
        raise ArgumentError("together was given no model: pass one module or more")
    for each in models:
        if not isinstance(each, nn.Module):
            raise ArgumentError(
                f"together was given a {type(each).__name__}: pass a torch.nn.Module, such as a module that calls your function"
            )
    if kernels not in KERNELS:
        raise ArgumentError(f"together(kernels={kernels!r}): kernels must be 'torch' or 'inductor'")
    # Making a recorded function checks the options now, not only at the first call.
    handlepool.recorded(_call, strict=strict, **options)
    return Together(models, kernels, strict, options)
