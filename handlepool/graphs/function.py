"""Graph functions: Python functions that build a cuDNN graph.

The graph is compiled once per geometry. The function is callable from any thread and stream.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import replace
from functools import partial, reduce, update_wrapper
from sys import modules
from typing import Any, Concatenate, TypeVar, Unpack, cast, overload

from handlepool._util.names import shown
from handlepool.drivers.operands import operand_name
from handlepool.errors import ArgumentError
from handlepool.graphs.annotations import ArrayCall, Graph, P, R_co
from handlepool.graphs.arrays import ConvertedArguments, convert, layout_of
from handlepool.graphs.comparison import compare
from handlepool.graphs.compile import OnDevice, build, build_for, save
from handlepool.graphs.launch import (
    GraphCall,
    check_arrays,
    hit,
    launch_new,
    misaligned_vectors,
    new_outputs,
    pieces_of_arrays,
    shortcut,
)
from handlepool.graphs.option_keys import identifies, kind_of_option, option_key
from handlepool.graphs.plan import Plan
from handlepool.graphs.signature import Given, Recipe, Settings, Signature, as_references, normalise
from handlepool.graphs.timing import SideStates
from handlepool.graphs.trace import Request
from handlepool.graphs.tuning import Tuning, tune_plan
from handlepool.order.places import lanes_for
from handlepool.pool.context import LAUNCHES, NOT_CACHED, BranchPlace, on_device, recordings
from handlepool.pool.default import current_pool
from handlepool.pool.deferred import deferred
from handlepool.pool.internals import PoolInternals
from handlepool.pool.plan_directory import VARIABLE as PLAN_DIRECTORY
from handlepool.tensors.device_properties import DeviceProperties
from handlepool.tensors.layout import Layout

R = TypeVar("R")
MOST_VARIANTS = 64
"""The maximum number of a function's variants that keep their plans.

A variant is the function with other settings, made by `GraphFunction.options`.
"""


class GraphFunction(ArrayCall[P, R_co]):
    """A callable over arrays, made from ``f(g, *tensors, **options)``.

    The function ``f`` builds a graph with the `cudnn.pygraph` ``g``. See `graph`.

    Parameters
    ----------
    function : callable
        The function that builds the graph. Several threads may call it at the same time, and one plan may need two calls.
    inputs, outputs : list of reference, optional
        As in `graph`.
    check : callable, optional
        ``check(layouts, outs, **options)`` is called before a build, to raise clearer errors than the graph could.
    copies : bool
        Whether a launch may copy operands into a form that cuDNN is known to compute rightly (`handlepool.graphs.forms`). Without
        copies, a graph with operands in another form is refused with `GraphNotSupportedError`.
    **settings
        As in `graph`.

    Notes
    -----
    A call takes one array for each tensor parameter, or for each entry of ``inputs=``, in that order. The keyword
    ``out`` is the array for the output, or a tuple of arrays for all outputs. The strides of these arrays decide the layout of
    the outputs. An array of ``out`` must share no element with an input or with another output. There is one exception: for a
    graph of pointwise nodes with one output, ``out`` may be the same array as an input. The other keywords are the function's own
    options. They are static, hashable, and a part of the plan's key. The call launches on the current stream. It returns ``out``,
    or new arrays, ready on that stream.

    A call raises `ArgumentError`, `ArrayTypeError` or `DeviceMismatchError` for arguments that it cannot take. It raises these
    errors before any launch. It raises `GraphNotSupportedError` if cuDNN has no plan.
    """

    def __new__(cls, *_: object, **__: object) -> GraphFunction[P, R_co]:
        """Make a `partial` of the function that a call runs."""

        # The object is a `partial` without arguments. Calling a `partial` is a C call that goes straight on to `call`. An
        # object with a method `__call__` costs 0.15 µs more per call, of a total of 2 µs.
        def call(*arrays: object, out: object = None, **options: object) -> Any:
            pool = current_pool()
            key = option_key(options) if options else ()
            result = hit(self, pool, None, arrays, out, key)
            if result is not NOT_CACHED:
                return result
            prepared = self.prepare(pool, arrays, out, options, key=key)
            return launch_new(pool, prepared)

        self: GraphFunction[P, R_co] = super().__new__(cls, call)
        return self

    def __init__(
        self,
        function: Callable[Concatenate[Any, P], R_co],
        *,
        inputs: object = None,
        outputs: object = None,
        check: Callable[..., None] | None = None,
        copies: bool = True,
        **settings: object,
    ) -> None:
        checked = normalise(settings)
        recipe = Recipe(
            _name(function, checked),
            function,
            Signature.of(function),
            as_references("inputs", inputs),
            as_references("outputs", outputs),
            checked,
            check,
            copies,
        )
        self._become(recipe, {checked: self})

    def _become(self, recipe: Recipe, variants: dict[Settings, GraphFunction[P, R_co]]) -> None:
        update_wrapper(self, recipe.function)
        self._recipe = recipe
        self._name = recipe.name
        # All functions made from one another by `options` share this dictionary.
        self.variants = variants

    def __repr__(self) -> str:
        settings = "".join(f", {name}={value}" for name, value in self._recipe.settings if name != "name")
        return f"<GraphFunction {self._name}{settings}>"

    # Calls

    def run(self, arrays: MutableMapping[Any, Any], /, **options: object) -> MutableMapping[Any, Any]:
        """Launch the graph on the current stream, with arrays named by references.

        Outputs may be among the arrays.

        Parameters
        ----------
        arrays : dict
            Each key is a reference (see `graph`), and the value is the array for that tensor. Every input needs an array. The
            call allocates each output that has no array.
        **options
            As in a call.

        Returns
        -------
        dict
            ``arrays`` itself, with the missing outputs added. The key of an added output is its reference in ``outputs=``, else
            its name, else ``node::port``.

        Raises
        ------
        ArgumentError
            If a reference fits no tensor or several tensors, if a tensor has two arrays, or if an input has no array. `run` also
            raises every error of a call.
        """
        pool = current_pool()
        try:
            references, given = tuple(arrays), tuple(arrays.values())
        except (AttributeError, TypeError):
            raise ArgumentError(
                f"{self._name}.run takes a dictionary with an array for each reference, not {shown(arrays)}"
            ) from None
        converted = convert(self._name, pool, given)
        if converted is not None:
            given = converted.arrays
        plan = self.plan(pool, given, (), options, (), references)
        inputs, places = len(plan.inputs), plan.places
        empty = pool.driver.empty if converted is None else converted.empty
        layouts = zip(places[inputs:], plan.outputs, strict=True)
        outs = tuple([empty(at.shape, at.strides, at.dtype) if place < 0 else given[place] for place, at in layouts])
        operands = tuple([given[place] for place in places[:inputs]])
        made = tuple([out for place, out in zip(places[inputs:], outs, strict=True) if place < 0])
        call: GraphCall = GraphCall(pool, plan, operands + outs, made, True)
        if converted is not None:
            call = converted.call(call, [place for place in places[inputs:] if place >= 0])
        made = launch_new(pool, call)
        arrays.update(zip([key for key, place in zip(plan.keys, places[inputs:], strict=True) if place < 0], made, strict=True))
        return arrays

    def prepare(
        self,
        pool: PoolInternals,
        arrays: tuple[Any, ...],
        out: object,
        options: dict[str, Any],
        settings: Settings = (),
        converted: ConvertedArguments | None = None,
        key: tuple[Any, ...] | None = None,
    ) -> GraphCall:
        """Return a call, with its plan and its outputs.

        The method finds or builds the plan. Without ``out``, the method allocates the outputs on the current stream. ``key`` is
        the option key. With ``key``, later calls find the plan by a `hit`.
        """
        try:
            outs = () if out is None else tuple(out) if isinstance(out, (tuple, list)) else (out,)
            if out is not None and not outs:
                raise ArgumentError(
                    f"{self._name}: out={shown(out)} holds no array; pass an array for each output, or None for new arrays"
                )
            natives = pool.driver.array_types
            if converted is None and any(type(array) not in natives for array in arrays + outs):
                return ConvertedArguments(self._name, pool, arrays, outs).prepare(self.prepare, out, options, settings)
            # A `hit` takes only the driver's own arrays, and needs a key that identifies the options. Else make no shortcut.
            if key is not None and (converted or not identifies(key, options)):
                key = None
            plan = self.plan(pool, arrays, outs, options, settings, option_key=key)
            if out is not None:
                return GraphCall(pool, plan, arrays + outs, out, True)
            recorded = recordings and converted is None
            lanes = lanes_for(pool, pool.driver.current_stream(plan.device).ptr) if recorded else None
            if lanes is not None:
                lanes.expect(lambda: pieces_of_arrays(pool.driver, arrays))
            try:
                made = new_outputs(pool, plan.outputs, pool.driver.empty if converted is None else converted.empty)
            finally:
                if lanes is not None:
                    lanes.expect(None)
            return GraphCall(pool, plan, arrays + made, made[0] if plan.single else made, False)
        except Exception as error:
            pool.status.diagnose(error)
            raise

    # Plans

    def plan(
        self,
        pool: PoolInternals,
        arrays: tuple[Any, ...],
        outs: tuple[Any, ...],
        options: dict[str, Any],
        settings: Settings = (),
        references: tuple[Any, ...] | None = None,
        option_key: tuple[Any, ...] | None = None,
    ) -> Plan:
        """Return the plan for these arrays, and build it if needed.

        With ``option_key``, later calls find the plan by a `hit`.
        """
        driver = pool.driver
        device = driver.current_device()
        try:
            key = (
                self,
                tuple([(array.shape, array.strides, array.dtype) for array in arrays]),
                tuple([(array.shape, array.strides, array.dtype) for array in outs]),
                frozenset([(name, value, kind_of_option(value)) for name, value in options.items()]) if options else None,
                settings,
                references,
                copied := misaligned_vectors(driver, arrays) if references is None else (),
            )
            plan = cast("Plan | None", pool.plans.get(device, key))
        # An object without a shape is no array. `check_arrays` raises a clear error for it.
        except AttributeError:
            check_arrays(self._name, driver, device, arrays, outs)
            raise
        # A value without a hash cannot be in a key. The checks below raise a clear error for it.
        except TypeError:
            self._recipe.check_static(options, references is not None)
            normalise(dict(settings))
            raise
        # A cached plan has passed these checks, so run them only before a build.
        if plan is None:
            self._recipe.check_static(options, references is not None)
            normalise(dict(settings))
            check_arrays(self._name, driver, device, arrays, outs)
            plan = self._build(pool, device, key, arrays, outs, options)
        if option_key is not None and not copied and plan.launches:
            pool.plans.add_shortcut(device, key, (self, option_key, arrays[0].shape), partial(shortcut, pool, arrays, outs))
        return plan

    def plan_for(self, *arrays: object, out: object = None, **options: object) -> Plan:
        """Return the plan of a call with these arguments, without a launch.

        The plan is built if there is none yet. Its ``engine``, ``workspace_size``, ``candidates`` and ``graph`` describe
        cuDNN's choice. `Plan.select` chooses another plan.

        Parameters
        ----------
        *arrays : array or ArraySpec
            Arrays, or any objects with a shape, strides and a type. Only these three matter.
        out, **options
            As in a call.

        Returns
        -------
        Plan
            The plan that calls with these arguments launch, as long as the pool's plan cache keeps it.

        Raises
        ------
        ArgumentError, ArrayTypeError, DeviceMismatchError, GraphNotSupportedError
            As in a call.
        """
        return self._plan_in(current_pool(), arrays, out, options)

    def _plan_in(self, pool: PoolInternals, arrays: tuple[Any, ...], out: object, options: dict[str, Any]) -> Plan:
        outs = () if out is None else tuple(out) if isinstance(out, (tuple, list)) else (out,)
        views = [
            layout_of(self._name, pool, operand_name(place, len(arrays), len(outs)), array)
            for place, array in enumerate((*arrays, *outs))
        ]
        return self.plan(pool, tuple(views[: len(arrays)]), tuple(views[len(arrays) :]), options)

    def tune(self, *arrays: object, states: SideStates | None = None, out: object = None, **options: object) -> Tuning:
        """Time the proposed plans while all states run them concurrently.

        The call keeps the quickest plan for these arguments. The plan that is quickest alone is not always quickest side by
        side. The plan used before stays unless another plan is quicker by 3 %. The call writes nothing to ``arrays`` or
        ``out``, because each state has copies and outputs of its own. The call waits for the GPU, for seconds if there are many
        plans. Any other work on the GPU affects the times.

        Parameters
        ----------
        *arrays : array
            As in a call.
        states : ParallelStates, optional
            The states that run each plan side by side, on the pool that owns them. Without states, each plan is timed on one
            stream alone.
        out, **options
            As in a call. The chosen plan is for calls with these arguments, so tune with ``out`` for calls with ``out``.
            Only the shape, strides and type of ``out`` matter.

        Returns
        -------
        Tuning
            The plans tried, the time of each plan alone and side by side, and the chosen plan; ``print`` shows a table. A plan is
            skipped if a setting excludes it, if it cannot be built, if its scratch finds no room, or if it is far too slow.

        Raises
        ------
        DriverNotAvailableError
            On the host driver, and without a GPU.
        CaptureError
            Inside a capture, a recording, a branch or a task.
        StateBusyError
            If too few side streams are free.
        GraphNotSupportedError
            If none of the plans can be timed. These arguments keep their plan, as with any error.
        ArgumentError, ArrayTypeError, DeviceMismatchError
            As in a call.

        Examples
        --------
        >>> print(conv.tune(x, w, states=handlepool.ParallelStates(4)))                                  # doctest: +SKIP
        """
        return tune_plan(self._name, arrays, states, lambda pool: self._plan_in(pool, arrays, out, options))

    def compile(self, *arrays: Any, out: Any = None, device: DeviceProperties | None = None, **options: Any) -> Plan:
        """Build the plan of a call with these arguments ahead of time.

        Nothing is launched, and no array is needed or allocated.

        Parameters
        ----------
        *arrays, out, **options
            As in `plan_for`.
        device : DeviceProperties, optional
            A device other than the current device. This machine needs neither that device nor any GPU. The plan goes into the
            pool's plan directory. A process with such a device and the same versions of cuDNN and its frontend finds it there.
            For some plans cuDNN compiles kernels, and CUDA's driver library takes these only on a machine with a GPU. Without a
            GPU such plans are refused here. They are built at their first use.

        Returns
        -------
        Plan
            As from `plan_for`. A plan for a described device has all attributes, but cannot be launched.

        Raises
        ------
        ArgumentError
            With ``device``: if the pool has no plan directory, if the directory cannot keep this plan, or if cuDNN refuses the
            properties.
        ArrayTypeError, DeviceMismatchError, GraphNotSupportedError
            As in a call.

        Examples
        --------
        >>> x = ArraySpec((8, 64, 56, 56), "float16", "NHWC")                                            # doctest: +SKIP
        >>> plan = conv.compile(x, ArraySpec((32, 64, 3, 3), "float16", "NHWC"))                         # doctest: +SKIP
        """
        if device is None:
            return self.plan_for(*arrays, out=out, **options)
        if not isinstance(device, DeviceProperties):
            raise ArgumentError(f"{self._name}.compile was given device={shown(device)}; pass DeviceProperties")
        files = current_pool().plan_files
        if files is None:
            raise ArgumentError(
                f"{self._name}.compile(device=...) puts the plan into the pool's plan directory, and the pool has none: name a "
                f"directory in HandlePool(plan_directory=...), or in {PLAN_DIRECTORY}"
            )
        outs = () if out is None else tuple(out) if isinstance(out, (tuple, list)) else (out,)
        self._recipe.check_static(options, False)
        return build_for(device, self._recipe, arrays, outs, dict(options), files)

    def _build(self, pool: PoolInternals, device: int, key: Any, arrays: Any, outs: Any, options: dict[str, Any]) -> Plan:
        *_, settings, references, copied = key
        # The plan keeps this request, so that the plan can be built again. So the request has layouts instead of arrays, which
        # would keep the caller's memory alive.
        request = Request(tuple(map(Layout.of, arrays)), tuple(map(Layout.of, outs)), references, dict(options), settings, copied)
        recipe = self._recipe
        against = partial(compare, pool) if pool.checked else None
        files = pool.plan_files

        def choose(which: int | Plan | None, keep: bool) -> Plan:
            if isinstance(which, Plan):
                plan = which
            else:
                with on_device(pool.driver, device):
                    builder = OnDevice(pool.device(device), pool.driver)
                    plan = build(recipe, request, builder, choose, which, against, files, anew=True)
            if keep:
                pool.plans.put(device, key, plan)
                if which is not None:
                    save(plan, files)
            return plan

        # Run the deferred work before taking locks: a new builder handle may need the memory that this work frees.
        deferred.run_all()
        builder = OnDevice(pool.device(device), pool.driver)
        make = partial(build, recipe, request, builder, choose, compare=against, files=files)
        return cast("Plan", pool.plans.get_or_build(device, key, make))

    # Variants

    def options(self, **settings: Unpack[Given]) -> GraphFunction[P, R_co]:
        """Return this function with other settings.

        The same settings give the same object, so that later calls find its plans again.

        Parameters
        ----------
        **settings
            As in `graph`; None for the default.

        Returns
        -------
        GraphFunction
            The function with these settings, to be called as this function is.

        Raises
        ------
        ArgumentError
            For an unknown setting, or for a value that is not allowed.

        Examples
        --------
        >>> y = conv.options(workspace_limit=0, allow_tf32=False)(x, w)                                  # doctest: +SKIP
        """
        recipe, variants = self._recipe, self.variants
        checked = normalise({**dict(recipe.settings), **settings})
        variant = variants.get(checked)
        if variant is None:
            variant = GraphFunction.__new__(GraphFunction)
            GraphFunction._become(variant, replace(recipe, name=_name(recipe.function, checked), settings=checked), variants)
            # Another thread may have added an equal variant meanwhile. Both threads then use that variant.
            variant = variants.setdefault(checked, variant)
            # A dictionary keeps the order of insertion, so the oldest variants go first.
            while len(variants) > MOST_VARIANTS:
                variants.pop(next(iter(variants)), None)
        return variant

    def __reduce__(self) -> Any:
        """Pickle by name, as Python pickles functions.

        A variant that `options` made is pickled as the original function's name and the variant's settings.
        """
        name = str(getattr(self, "__qualname__", self._name))
        try:
            found: Any = reduce(getattr, name.split("."), modules.get(self.__module__))
        except AttributeError:
            found = None
        if found is self:
            return name
        if isinstance(found, GraphFunction) and found.variants is self.variants:
            return _variant, (found, self._recipe.settings)
        raise ArgumentError(
            f"graph function {self._name} cannot be pickled: another process looks it up by name, but {self.__module__}.{name} "
            f"is not this function. Define the function at the top level of a module, under its own name"
        )

    def __copy__(self) -> GraphFunction[P, R_co]:
        return self

    def __deepcopy__(self, memo: object) -> GraphFunction[P, R_co]:
        return self

    def cache_clear(self) -> None:
        """Forget the plans of this function and of all its variants.

        A plan lives on while a program or other code still holds it.
        """
        mine = self.variants
        current_pool().plans.discard(lambda key: isinstance(key, tuple) and getattr(key[0], "variants", None) is mine)


def _as_branch(function: GraphFunction[..., Any], branch: BranchPlace, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Launch a call of ``function`` as ``branch`` of a fork."""
    options, out, key = kwargs, None, ()
    if kwargs:
        options = dict(kwargs)
        out = options.pop("out", None)
        key = option_key(options) if options else ()
    result = hit(function, branch.pool, branch.begin, args, out, key)
    if result is NOT_CACHED:
        return branch.run(function.prepare(branch.pool, args, out, options, key=key), (args, kwargs))
    return result


setattr(GraphFunction, LAUNCHES, _as_branch)


def _variant(function: GraphFunction[..., Any], settings: Settings) -> GraphFunction[..., Any]:
    """Return the variant of ``function`` with exactly ``settings``."""
    # Set every other setting to None, its default, so that no setting of ``function`` carries over to the variant.
    chosen: dict[str, Any] = dict.fromkeys(Given.__annotations__) | dict(settings)
    return function.options(**chosen)


def _name(function: Callable[..., Any], settings: Settings) -> str:
    return str(dict(settings).get("name") or getattr(function, "__name__", "graph"))


@overload
def graph(
    function: Callable[Concatenate[Graph, P], R], *, inputs: None = None, outputs: object = None, **settings: Unpack[Given]
) -> GraphFunction[P, R]: ...
@overload
def graph(
    *, inputs: None = None, outputs: object = None, **settings: Unpack[Given]
) -> Callable[[Callable[Concatenate[Graph, P], R]], GraphFunction[P, R]]: ...
# With ``inputs``, the length of that list is the number of arrays. Type checkers do not know the length, so the type leaves the
# number open.
@overload
def graph(
    function: Callable[Concatenate[Graph, ...], R], *, inputs: object, outputs: object = None, **settings: Unpack[Given]
) -> GraphFunction[Concatenate[Any, ...], R]: ...
@overload
def graph(
    *, inputs: object, outputs: object = None, **settings: Unpack[Given]
) -> Callable[[Callable[Concatenate[Graph, ...], R]], GraphFunction[Concatenate[Any, ...], R]]: ...
def graph(function: Callable[..., Any] | None = None, *, inputs: Any = None, outputs: Any = None, **settings: Any) -> Any:
    """Decorate a function that builds a cuDNN graph.

    The function is ``f(g, *tensors, **options)``. The decorated function is a callable over arrays. Positional arguments are
    arrays. f gets a graph tensor for each array, declared with its shape, strides and type, and named after f's parameter.
    Keyword arguments are f's own options, static and hashable. Only ``out`` belongs to the library. The graph is compiled once
    for (device, each array's shape, strides and type, options). It is launched on the current stream with this thread's handle
    and scratch, from any thread.

    f returns the graph tensor to output, or a tuple of graph tensors, or a mapping with the references ``"inputs"`` and
    ``"outputs"``. f returns nothing if ``outputs`` names the outputs, or if f marks them with ``set_output(True)``. f may
    declare tensors itself with ``g.tensor(name=…, dim=…, stride=…)``. ``inputs`` or `GraphFunction.run` gives the arrays for
    these tensors, and the arrays must match the declarations.

    Parameters
    ----------
    function : callable, optional
    inputs : list of reference, optional
        The tensors of the positional arrays, in order; by default f's parameters in their order. A reference is a graph tensor,
        its uid, a name, or ``"node::port"``. A name is the name of a parameter, or a name that f set. A port is given by its name
        in cuDNN (``"conv2d::Y"``), by the keyword of the method that made the node (``"conv2d::image"``), or by the position of
        an input (``"conv2d::0"``).
        Nodes without a name are called ``"conv_fprop.0"``, ``"relu.1"``.
    outputs : list of reference, optional
        The outputs, in order. A list with one entry gives an array, not a tuple.
    **settings
        ``name`` is for messages. ``io_dtype`` is the type of real tensors without a type (the first array's by default).
        ``intermediate_dtype`` is the type of tensors between nodes, and ``compute_dtype`` the type of the arithmetic (both
        float32). Each type is any value that NumPy takes for a type, or "bfloat16". ``workspace_limit`` is the maximum number of
        bytes of scratch of a plan. ``allow_tf32`` allows rounding of float32 to TF32 (True). ``deterministic`` allows only plans
        that give the same bits each time (False). ``heuristics`` names cuDNN's modes in the order to ask them ("A", "FALLBACK").
        The values in parentheses are the defaults.

    Returns
    -------
    GraphFunction

    Raises
    ------
    ArgumentError, ArrayTypeError
        If a setting is unknown, or has a value that is not allowed.

    Examples
    --------
    >>> @handlepool.graph                                                                                # doctest: +SKIP
    ... def conv_relu(g, x, w, *, padding):
    ...     return g.relu(g.conv_fprop(x, w, padding=[padding] * 2, stride=[1, 1], dilation=[1, 1]))
    >>> y = conv_relu(x, w, padding=1)                                                                   # doctest: +SKIP
    """
    if function is None:
        return lambda decorated: GraphFunction(decorated, inputs=inputs, outputs=outputs, **settings)
    return GraphFunction(function, inputs=inputs, outputs=outputs, **settings)
