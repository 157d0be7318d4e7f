"""Plan with cuDNN for a present or a described device.

This module needs libcudnn, and neither CuPy nor a GPU. Even without a GPU, cuDNN loads CUDA's driver library by name. cuDNN uses
that library here only to load kernels that it has compiled.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import cudnn

from handlepool.drivers.executable import ALIGNMENT, OperandCopy, SavedPlan, scratch_of
from handlepool.errors import ArgumentError, DriverNotAvailableError, GraphNotSupportedError
from handlepool.tensors import frontend
from handlepool.tensors.device_properties import DeviceProperties

MOST_OPERANDS = 64
_WITHOUT_A_GPU = "FAILED_CUDA_DRIVER", "RUNTIME_PREREQUISITE_MISSING"


@dataclass(frozen=True, slots=True)
class Planned:
    """Hold a graph with a built plan.

    Attributes
    ----------
    graph : cudnn.pygraph
        The graph. If the plan was read from a file, the frontend's lowered graph, which ``pygraph`` wraps.
    workspace_size : int
        Bytes of scratch: first for the graph, then for the copies of operands.
    copies_at : int
        Offset in bytes of the copies in the scratch.
    engine : str
        cuDNN's name of the engine and its knobs.
    candidates : int
        Number of plans that cuDNN proposed.
    uids : list of int
        The uids of the operands.
    raw : callable or None
        The entry beneath ``pygraph.execute``, which takes an array of pointers. None if there is no such entry.
    index : int
        The plan's index, which ``raw`` takes.
    size : int
        Bytes of scratch for the graph alone.
    saved : SavedPlan or None
        The saved plan that the graph was read from. If cuDNN reads a plan and writes it again, the result is incomplete, so the
        original is kept.
    early : bool or None
        Whether the plan's launches begin before earlier work on the stream has ended (`handlepool.drivers.cuda.early`). None
        means unknown, and counts as yes.
    """

    graph: Any
    workspace_size: int
    copies_at: int
    engine: str
    candidates: int
    uids: list[int]
    raw: Callable[..., None] | None
    index: int
    size: int
    saved: SavedPlan | None = None
    early: bool | None = None

    def save(self) -> SavedPlan | None:
        """Return the plan as cuDNN writes it.

        Returns None for a plan of the frontend's own engines.
        """
        # If cuDNN has read a plan from a file, cuDNN writes it incompletely, so the original is returned. A graph on one of the
        # frontend's own engines has no plan of cuDNN, so None is returned.
        if self.saved is not None or self.graph.selected_engine is not None:
            return self.saved
        data = bytes(self.graph.serialize(as_bytes=True))
        return SavedPlan(self.engine, self.size, self.candidates, data, self.early)


def plan(
    graph: cudnn.pygraph,
    operands: Sequence[Any],
    copies: Sequence[OperandCopy] = (),
    *,
    workspace_limit: int | None = None,
    allow_tf32: bool = True,
    deterministic: bool = False,
    heuristics: Sequence[str] = ("A", "FALLBACK"),
    plan_index: int | None = None,
) -> Planned:
    """Plan a graph with cuDNN, and build the first suitable plan.

    cuDNN proposes plans. The first plan that can be built and that no setting excludes is built.

    Parameters
    ----------
    graph : cudnn.pygraph
        With a handle, or a description of a device. Every real tensor has shape, strides and type.
    operands : sequence of graph tensor
        Inputs, then outputs.
    copies : sequence of OperandCopy
        As in `handlepool.drivers.protocol.Driver.compile`, which also describes the settings.
    plan_index : int, optional
        Index of the proposed plan to build. No other plan is tried.

    Raises
    ------
    ArgumentError
        For more operands than a launch takes.
    GraphNotSupportedError
        If cuDNN has no suitable plan. The text has cuDNN's message.
    """
    if len(operands) > MOST_OPERANDS:
        raise ArgumentError(
            f"the graph has {len(operands)} real tensors, and a launch takes at most {MOST_OPERANDS}. Split the graph"
        )
    notes = []
    # Without TF32, a float32 graph must not use tensor cores. A graph of 16-bit numbers may use them, because their products are
    # exact on tensor cores, and cuDNN multiplies 16-bit matrices only on tensor cores.
    if not allow_tf32 and any(tensor.data_type == cudnn.data_type.FLOAT for tensor in operands):
        notes.append(cudnn.numerical_note.TENSOR_CORE)
    if deterministic:
        notes.append(cudnn.numerical_note.NONDETERMINISTIC)
    try:
        graph.validate()
        graph.build_operation_graph()
        if workspace_limit is not None:
            graph.deselect_workspace_greater_than(workspace_limit)
        if notes:
            graph.deselect_numeric_notes(notes)
        graph.create_execution_plans([getattr(cudnn.heur_mode, mode) for mode in heuristics])
        if plan_index is not None:
            graph.select_plan(plan_index)
        graph.check_support()
        graph.build_plans()
    except (cudnn.cudnnGraphNotSupportedError, ValueError, RuntimeError, NotImplementedError) as error:
        raise GraphNotSupportedError(f"cuDNN {cudnn.backend_version()} answered: {error}") from error
    # The frontend has no public name for the index of the built plan.
    engine = str(graph.get_plan_name_at_index(graph._plan_index))  # noqa: SLF001
    uids = [int(tensor.get_uid()) for tensor in operands]
    raw, index = _raw_entry(graph, uids)
    size = int(graph.get_workspace_size())
    return Planned(graph, *_scratch(size, copies), engine, int(graph.get_execution_plan_count()), uids, raw, index, size)


def loaded(operands: Sequence[Any], copies: Sequence[OperandCopy], saved: SavedPlan, **device: object) -> Planned:
    """Restore a plan from `Planned.save`, maybe in another process.

    The function compares the plan's operands with the graph, and its scratch with ``saved``. It cannot compare operations,
    because cuDNN describes the operations of a loaded plan only in bytes of its own format. The lowered graph beneath ``pygraph``
    reads the plan. ``pygraph.deserialize`` would also take plans of the frontend's own engines, and such plans name modules to
    import and contain code.

    Parameters
    ----------
    operands, copies
        As in `plan`, of a graph that is not planned.
    saved : SavedPlan
    **device
        ``handle``, as an integer, if the device is present. Otherwise ``device_property``. If a plan was built with a handle and
        is read with the properties of the same device, it may differ and need other scratch (a third of 200 plans, cuDNN 9.19).

    Raises
    ------
    GraphNotSupportedError
        If cuDNN does not take the plan, or its operands differ from the graph's operands, for example in their strides.
    """
    try:
        # No public name makes a lowered graph.
        lowered = cudnn._pybind_module.backend_graph(**device)  # noqa: SLF001
        lowered.deserialize(saved.data)
        for tensor in operands:
            found = lowered.query_tensor_attributes_of_uid(int(tensor.get_uid()))
            geometry = list(found.get_dim()), list(found.get_stride()), found.get_data_type()
            if geometry != (list(tensor.dim), list(tensor.stride), tensor.data_type):
                raise ValueError(
                    f"tensor {tensor.name} has the sizes, strides and type {geometry} in the saved plan, and differs in the graph"
                )
        size = int(lowered.get_workspace_size())
        if size != saved.workspace_size:
            raise ValueError(f"the saved plan needs {size} bytes of scratch, and its file says {saved.workspace_size}")
        uids = [int(tensor.get_uid()) for tensor in operands]
        raw = _raw(lowered, uids)
        if raw is None:
            raise ValueError("the saved plan takes the operands in another order than the graph")
    except Exception as error:
        # The saved data may be anything, so cuDNN or the frontend may raise any error.
        raise GraphNotSupportedError(f"the saved bytes are no plan of this graph: {error}") from error
    return Planned(lowered, *_scratch(size, copies), saved.engine, saved.candidates, uids, raw, -1, size, saved, saved.early)


def _scratch(size: int, copies: Sequence[OperandCopy]) -> tuple[int, int]:
    """Return the scratch's size, and the copies' offset in it, in bytes.

    The scratch serves the graph and the copies.
    """
    copies_at = -(-size // ALIGNMENT) * ALIGNMENT
    return copies_at + scratch_of(copies) if copies else size, copies_at


def _raw_entry(graph: cudnn.pygraph, uids: list[int]) -> tuple[Callable[..., None] | None, int]:
    """Find the entry beneath ``pygraph.execute``, and its plan index.

    A launch by this raw entry takes a fifth of the time of ``execute``. If there is no such entry, return None in its place.
    """
    try:
        lowered, index = graph._lowered_graph, graph._plans[graph._plan_index].cpp_index  # noqa: SLF001
    except (AttributeError, IndexError):
        return None, -1
    raw = None if graph.selected_engine is not None else _raw(lowered, uids)
    return raw, -1 if raw is None or index is None else index


def _raw(lowered: Any, uids: list[int]) -> Callable[..., None] | None:
    """Return the raw entry of a lowered graph.

    The entry takes an array of pointers in ascending order of uid. So the operands' uids must ascend. If they do not, or if this
    frontend has no such entry, return None.
    """
    try:
        # No public name leads to these attributes. A test checks that they exist.
        lowered._prepare_variant_pack_template()  # noqa: SLF001
        order = list(lowered._get_variant_pack_uids_sorted())  # noqa: SLF001
        raw: Callable[..., None] = lowered._execute_with_raw_ptrs  # noqa: SLF001
    except AttributeError:
        return None
    return raw if order == uids else None


def plan_environment(device: Mapping[str, Any]) -> str:
    """Return the conditions of plans on a device, as JSON.

    They are the versions in this process and the properties of the device, which may be elsewhere. The graph is not part of them.

    The device is described like `handlepool.tensors.device_properties.DeviceProperties.kind`.
    """
    found = {"cudnn": cudnn.backend_version(), "frontend": cudnn.__version__, "device": dict(device)}
    # With NVIDIA_TF32_OVERRIDE=0, cuDNN proposes no plans with TF32, and refuses saved plans with TF32. So the setting is a
    # condition of plans.
    if override := os.environ.get("NVIDIA_TF32_OVERRIDE"):
        found["NVIDIA_TF32_OVERRIDE"] = override
    return json.dumps(found, sort_keys=True)


class DescribedDevice:
    """Describe a device by its properties alone.

    cuDNN plans for the device, and no graph can be launched on it.

    Parameters
    ----------
    properties : DeviceProperties

    Attributes
    ----------
    device : int
        Always -1, which is no ordinal.
    """

    device = -1

    def __init__(self, properties: DeviceProperties) -> None:
        self.properties = properties
        self._plan_environment = ""

    def new_graph(self, **settings: Any) -> Any:
        """Return an empty `cudnn.pygraph` to be planned for the device."""
        return frontend.new_graph(device=self.properties, **settings)

    def compile(
        self,
        graph: Any,
        operands: Sequence[Any],
        *,
        copies: Sequence[OperandCopy] = (),
        saved: SavedPlan | None = None,
        **settings: Any,
    ) -> "DescribedExecutable":
        """Plan and build a graph of `new_graph`; see `handlepool.drivers.protocol.Driver.compile`."""
        name, titles = settings.pop("name"), settings.pop("titles")
        try:
            if saved is None:
                planned = plan(graph, operands, copies, **settings)
            else:
                planned = loaded(operands, copies, saved, device_property=self.properties.native)
        except GraphNotSupportedError as error:
            if any(words in str(error) for words in _WITHOUT_A_GPU):
                raise GraphNotSupportedError(
                    f"cuDNN compiles a kernel for this graph, and CUDA's driver library cannot load the kernel without a GPU: "
                    f"let the first use on {self.properties.name} plan the graph. {error}"
                ) from error
            raise
        return DescribedExecutable(planned, name, titles, self.properties.name)

    def zeros(self, *_: object) -> NoReturn:
        """Raise, because no kernel of this package is planned ahead."""
        raise GraphNotSupportedError(
            "the graph has an empty operand, so a kernel of this package fills the output with zeros, and such kernels cannot be "
            f"planned ahead; let the first use on {self.properties.name} plan the graph"
        )

    def plan_environment(self) -> str:
        """Return the same as `CudaDriver.plan_environment` on the device itself."""
        self._plan_environment = self._plan_environment or plan_environment(self.properties.kind)
        return self._plan_environment


class DescribedExecutable:
    """Hold a built graph of a described device.

    The object is like `handlepool.drivers.executable.Executable`, but it has no device to be launched on.
    """

    def __init__(self, planned: Planned, name: str, titles: Sequence[str], device: str) -> None:
        self.planned = planned
        self.untried = planned.saved is not None
        self.save = planned.save
        self.name, self.titles = name, titles
        self.workspace_size, self.engine, self.candidates = planned.workspace_size, planned.engine, planned.candidates
        self._device = device

    def launch(self, *_: object) -> NoReturn:
        """Raise, because the device is only described."""
        raise DriverNotAvailableError(
            f"{self.name} was planned for the description of {self._device}, so it cannot be launched here; launch it in a "
            f"process with that device"
        )

    def shortcut(self, *_: object) -> None:
        """Return None, because nothing can be launched."""
