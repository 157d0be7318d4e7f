"""Call a model through recorded programs.

A call replays a program, and does not pass through torch's compiler.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

import handlepool
from handlepool import ArgumentError, CaptureError, HandlePoolError
from handlepool.integrations.torch.capture import captured
from handlepool.integrations.torch.inductor import elsewhere
from handlepool.integrations.torch.modes import modes
from handlepool.integrations.torch.places import place_for
from handlepool.integrations.torch.program import Program
from handlepool.integrations.torch.refusals import NotNow, NotTaken, warn
from handlepool.integrations.torch.together import Together, together
from handlepool.integrations.torch.ways import microseconds
from handlepool.integrations.torch.weights import Weights

pytree = torch.utils._pytree


# One thread at a time makes a program or computes constants again, because torch's export is not safe for several threads.
# The lock's holder runs the model's own code, which may wait for another thread. So a thread that needs a new program meanwhile
# does not wait for the lock, but runs the model by torch (guarantee 15).
_making = threading.RLock()


MOST_RENEWED = 8
"""The maximum number of new recordings after a model's weights were replaced.

Beyond this number, torch runs each call whose weights are not the recorded weights."""


class RecordedModel:
    """A model with recorded programs, as `recorded` returns it.

    A call takes the model's own arguments. The first call with new shapes, strides or types traces, lowers and records the
    model.
    """

    def __init__(self, model: nn.Module, settings: "Settings") -> None:
        self.__wrapped__ = model
        self._model, self._settings = model, settings
        self._programs: OrderedDict[Any, Program | Together | str] = OrderedDict()
        self._said: set[str] = set()
        self._renewed = 0
        self._renew()

    def __repr__(self) -> str:
        return f"<recorded {type(self._model).__name__}, {len(self._programs)} keys>"

    def _renew(self) -> None:
        """Drop all programs, and note the model's present weights."""
        for each in [*self._programs.values()]:
            _end(each)
        self._programs.clear()
        self._weights = Weights([self._model])
        # The device type is None for a model without weights. Such a model runs on the device of its arguments.
        self._kind = self._weights.tensors[0].device.type if self._weights.tensors else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model: replay a program if possible, else use torch.

        Parameters
        ----------
        *args, **kwargs
            The model's own arguments.

        Returns
        -------
        object
            The model's value, in new tensors that are ready on torch's current stream.
        """
        leaves, structure = _flat(args, kwargs)
        try:
            return self._run(leaves, structure, args, kwargs)
        except NotTaken as why:
            self._say(str(why))
        return self._model(*args, **kwargs)

    def _run(self, leaves: Sequence[Any], structure: Any, args: Any, kwargs: Any) -> Any:
        if torch.is_grad_enabled() and (
            self._weights.derived() or any(isinstance(each, Tensor) and each.requires_grad for each in leaves)
        ):
            raise NotTaken("the model needs gradients: call it under torch.no_grad()")
        kind = self._kind or _kind_of(leaves)
        if kind == "cuda" and torch.cuda.is_current_stream_capturing():
            # The model's own kernels become a part of the caller's graph.
            return self._model(*args, **kwargs)
        key = _key(kind, leaves, structure)
        program = self._programs.get(key)
        if isinstance(program, Program) and not program.writes:
            # The launch comes before the comparison of the weights, so that the GPU works during the comparison. The program
            # writes only its own results. So if a weight has changed, this value is dropped, and the call goes on below.
            value = self._called(key, program, leaves)
            if self._weights.bound() and self._weights.versions.same():
                return value
        if not self._weights.bound():
            # The check raises for a model in training mode, before the programs are dropped. So the programs serve again after
            # the training.
            self._weights.check()
            if self._renewed >= MOST_RENEWED:
                raise NotTaken(f"the model's weights were replaced {MOST_RENEWED} times: write new values into the same tensors")
            self._renewed += 1
            self._renew()
            program = None
        elif not self._weights.versions.same():
            if not _making.acquire(blocking=False):
                return self._model(*args, **kwargs)
            try:
                self.refresh()
            finally:
                _making.release()
        if program is None:
            program = self._made(key, leaves, args, kwargs)
            if program is None:
                return self._model(*args, **kwargs)
        if isinstance(program, str):
            raise NotTaken(program)
        if isinstance(program, Together):
            return program(args)[0]
        value = self._called(key, program, leaves)
        if program.writes:
            self._weights.versions.renew()
        return value

    def _called(self, key: object, program: Program, leaves: Sequence[Any]) -> Any:
        """Call ``program``, the program of ``key``.

        If the program cannot be recorded, torch runs all later calls of the key.
        """
        try:
            return program(leaves)
        except NotNow:
            raise
        except NotTaken as why:
            self._programs[key] = str(why)
            raise

    def _made(self, key: object, leaves: Sequence[Any], args: Any, kwargs: Any) -> Program | Together | str | None:
        """Trace and lower the model for the arguments of a key.

        The result is the program, or the reason why torch has to run all calls of the key. It is None if torch has to run this
        call only.
        """
        made: Program | Together | str | None
        # A call inside of a trace or a transform becomes a part of that trace or transform.
        if _inside(leaves) or not _making.acquire(blocking=False):
            return None
        try:
            made = self._programs.get(key)
            if made is None:
                try:
                    made = self._new(leaves, args, kwargs)
                except NotTaken as why:
                    made = str(why)
                except HandlePoolError:
                    raise
                # The lowering may fail at a graph of an unforeseen form. Torch then runs the model, and a warning gives the
                # reason.
                except Exception as error:
                    if self._settings.strict:
                        raise
                    made = f"the model cannot be lowered ({type(error).__name__}: {error})"
                self._programs[key] = made
                while len(self._programs) > self._settings.programs:
                    _end(self._programs.popitem(last=False)[1])
        finally:
            _making.release()
        return made

    def _new(self, leaves: Sequence[Any], args: Any, kwargs: Any) -> Program | Together:
        settings = self._settings
        self._weights.check()
        device = device_of([*self._weights.tensors, *leaves])
        place = place_for(device)
        made = Program(
            captured(self._model, args, kwargs), place, device, type(self._model).__name__, settings.tune, settings.options()
        )
        made.settle(leaves)
        if settings.tune and place.kind == "cuda" and not made.writes:
            # Tuning needs a recorded program, and this call records it.
            made(leaves)
            made.tune(settings.seconds)
            if (
                settings.fallback == "inductor"
                and not kwargs
                and not torch.is_autocast_enabled("cuda")
                and (peer := self._peer(args)) is not None
            ):
                times = {"ours": microseconds(made, [leaves]), "inductor": microseconds(peer, [args])}
                made.times = times
                if times["inductor"] < times["ours"]:
                    _end(made)
                    return peer
        return made

    def _peer(self, args: Any) -> Together | None:
        """Record the model with Inductor's kernels.

        Return None if Inductor fails, or if nothing was recorded.
        """
        peer = together(self._model, kernels="inductor", **{**self._settings.options(), "lanes": 1})
        try:
            # `elsewhere` calls the peer in another thread, which has a current stream of its own. So the host waits here for this
            # thread's work, and below for the peer's work.
            torch.cuda.synchronize()
            elsewhere(lambda: [peer(args) for _ in range(3)])
            torch.cuda.synchronize()
        # A compiler may raise any error. The program is then kept without a comparison.
        except Exception:
            return None
        return peer if peer.recorded is not None and peer.recorded.stats().programs else None

    def refresh(self) -> None:
        """Compute again all values that programs computed from the weights.

        Call this method after a write that torch does not count, such as a write through ``weight.data``.
        """
        with _making:
            for each in [*self._programs.values()]:
                if isinstance(each, Program):
                    each.refresh()
            if self._kind == "cuda":
                # After `renew` below, a call on another stream computes nothing again, and does not wait for this stream. So the
                # host waits here for the new values.
                torch.cuda.current_stream().synchronize()
            self._weights.versions.renew()

    def program(self, *args: object, **kwargs: object) -> handlepool.Program:
        """Return the program for these arguments; record it if it is missing.

        The program is for ``explain``, ``draw`` and ``tune``. Calls of the model go on using it.

        Parameters
        ----------
        *args, **kwargs
            As in a call.

        Returns
        -------
        handlepool.Program

        Raises
        ------
        CaptureError
            If torch or Inductor's kernels run the model with these arguments.
        """
        self(*args, **kwargs)
        leaves, structure = _flat(args, kwargs)
        found = self._programs.get(
            _key(self._kind or _kind_of(leaves), leaves, structure),
            "torch ran this call, in a capture or a trace or while another thread recorded; call program again",
        )
        if isinstance(found, Together):
            found = "Inductor's kernels were quicker, so these kernels run the model; pass fallback=None to recorded"
        if isinstance(found, str):
            raise CaptureError(f"{self!r} has no program for these arguments: {found}")
        return found.program(leaves)

    @property
    def programs(self) -> list[Program | Together | str]:
        """The program of each key, or the reason for using torch."""
        return [*self._programs.values()]

    def _say(self, why: str) -> None:
        """Warn that torch runs the model; with ``strict`` raise instead.

        The warning comes once for each reason.
        """
        if self._settings.strict:
            raise CaptureError(f"{self!r} has no program: {why}")
        if why not in self._said:
            self._said.add(why)
            warn(type(self._model).__name__, why)


def _flat(args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[Sequence[Any], Any]:
    """Return the leaves of a call's arguments, and their nesting."""
    # A call with a single tensor is the usual case, and needs no walk over the arguments.
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
        return args, None
    leaves: tuple[Sequence[Any], Any] = pytree.tree_flatten((args, kwargs))
    return leaves


def _kind_of(leaves: Sequence[Any]) -> str:
    return next((each.device.type for each in leaves if isinstance(each, Tensor)), "cpu")


def _key(kind: str, leaves: Sequence[object], structure: object) -> Any:
    return modes(kind), structure, tuple([_part(each) for each in leaves])


def _end(program: Program | Together | str) -> None:
    """Drop the recordings of ``program``, which is called no more."""
    if not isinstance(program, str) and program.recorded is not None:
        program.recorded.clear()


def _inside(leaves: Sequence[Any]) -> bool:
    """Return whether torch traces or transforms this call.

    A call with tensors of other classes counts as such a call.
    """
    if torch._C._are_functorch_transforms_active() or torch.compiler.is_compiling():
        return True
    return any(isinstance(each, Tensor) and type(each) not in (Tensor, nn.Parameter) for each in leaves)


def device_of(values: list[Any]) -> torch.device:
    """Return the device that all tensors in ``values`` are on.

    Raises
    ------
    NotTaken
    """
    devices = {each.device for each in values if isinstance(each, Tensor)}
    if len(devices) != 1:
        raise NotTaken(
            f"the model's tensors are on {len(devices)} devices ({', '.join(sorted(map(str, devices)))}): move them to one device"
        )
    return devices.pop()


def _part(value: Any) -> Any:
    """Return the entry of a program's key for the argument ``value``.

    Raises
    ------
    NotTaken
        If the value has no hash.
    """
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, (float, complex)):
        # Zeros of both signs are equal, but a quotient by zero differs.
        return type(value), repr(value)
    try:
        hash(value)
    except TypeError:
        raise NotTaken(
            f"an argument is a {type(value).__name__}, which has no hash: pass tensors, numbers, texts or other hashable values"
        ) from None
    return type(value), value


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of a recorded model. See `recorded`."""

    lanes: int | None = 8
    instances: int = 4
    programs: int = 16
    outputs: str = "new"
    strict: bool = False
    tune: bool = False
    seconds: float = 3.0
    fallback: str | None = None

    @classmethod
    def of(cls, name: str, given: dict[str, Any]) -> "Settings":
        """Check the options in ``given``, and return them as settings.

        Raises
        ------
        ArgumentError
        """
        known = [each.name for each in fields(cls)]
        for option in given:
            if option not in known:
                raise ArgumentError(f"{name} was given the option {option!r}; its options are {', '.join(known)}")
        if given.get("tune") and "fallback" not in given:
            given = {**given, "fallback": "inductor"}
        settings = cls(**given)
        if settings.fallback not in (None, "inductor"):
            raise ArgumentError(f"{name}: fallback={settings.fallback!r}; fallback must be 'inductor' or None")
        for option in ("tune", "strict"):
            if not isinstance(getattr(settings, option), bool):
                raise ArgumentError(f"{name}: {option}={getattr(settings, option)!r}; {option} must be True or False")
        if not isinstance(settings.seconds, (int, float)) or not settings.seconds > 0:
            raise ArgumentError(f"{name}: seconds={settings.seconds!r}; seconds must be a number above 0")
        # Making a recorded function checks the other options.
        handlepool.recorded(_part, programs=settings.programs, **settings.options())
        return settings

    def options(self) -> dict[str, Any]:
        """Return the settings that `handlepool.recorded` takes as options."""
        return {"lanes": self.lanes, "instances": self.instances, "outputs": self.outputs}


def recorded(
    model: nn.Module,
    *,
    lanes: int | None = 8,
    instances: int = 4,
    programs: int = 16,
    outputs: str = "new",
    strict: bool = False,
    **options: Any,
) -> RecordedModel:
    """Return a model that records its calls, and replays them later.

    A replay does not pass through torch's compiler.

    Parameters
    ----------
    model : Module
        In eval mode, on one device.
    lanes, instances, outputs
        As in `handlepool.recorded`.
    programs : int
        The maximum number of keys: geometries of arguments, with torch's modes. Beyond this number, the oldest key's program
        ends.
    strict : bool
        Whether a call that cannot be recorded raises an error. Otherwise torch runs it, and a warning gives the reason.
    **options
        With ``tune=True``, the first call of a key times the kernels, and then spends ``seconds`` on timing programs of
        different numbers of lanes. With ``fallback="inductor"``, the default if ``tune`` is set, the first call also records
        Inductor's kernels, and keeps these kernels if they are quicker.

    Returns
    -------
    RecordedModel

    Raises
    ------
    ArgumentError
        For an object that is no module, and for values that an option cannot have.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"recorded was given a {type(model).__name__}: pass a torch.nn.Module")
    named = {"lanes": lanes, "instances": instances, "programs": programs, "outputs": outputs, "strict": strict}
    return RecordedModel(model, Settings.of("recorded", {**named, **options}))
