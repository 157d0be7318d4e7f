"""Plans by cuDNN, for a device that is there or that is only described. Needs libcudnn, and neither CuPy nor a GPU.

Where there is no GPU, cuDNN still loads CUDA's driver library by name and asks nothing of it but to take the kernels that it
compiles.
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
    """A graph with a plan that was built.

    Attributes
    ----------
    graph : cudnn.pygraph
        Of one that was read, what is beneath it.
    workspace_size : int
        Bytes of scratch for the graph, and behind them for the copies of operands.
    copies_at : int
        Where in it those begin.
    engine : str
        cuDNN's name of the engine and its knobs.
    candidates : int
        How many plans cuDNN proposed.
    uids : list of int
        Of the operands.
    raw : callable or None
        The entry beneath ``pygraph.execute``, which takes an array of pointers, and the plan's ``index`` for it.
    size : int
        Bytes of scratch for the graph alone.
    saved : SavedPlan or None
        What it was made of. cuDNN writes less of a plan that it has read than it wants to read.
    early : bool or None
        Whether its launches begin before what is before them has ended (`handlepool.drivers.cuda.early`); None, where
        that is not known, counts as yes.
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
        """Return the plan as cuDNN writes it; None for one of the frontend's own engines."""
        if self.saved is not None or self.graph.selected_engine is not None:  # what was read has no such thing
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
    """Have cuDNN propose plans for a graph, and build the first that can be built and that no setting excludes.

    Parameters
    ----------
    graph : cudnn.pygraph
        With a handle, or a description of a device. Every real tensor has shape, strides and type.
    operands : sequence of graph tensor
        Inputs, then outputs.
    copies : sequence of OperandCopy
        As in `handlepool.drivers.protocol.Driver.compile`, as are the settings.
    plan_index : int, optional
        The one of the proposed plans that is to be built, and no other.

    Raises
    ------
    ArgumentError
        For more operands than a launch takes.
    GraphNotSupportedError
        With cuDNN's own words.
    """
    if len(operands) > MOST_OPERANDS:
        raise ArgumentError(f"a graph of {len(operands)} real tensors; at most {MOST_OPERANDS} can be launched")
    notes = []
    # Products of 16-bit numbers are exact on tensor cores, and cuDNN multiplies matrices of them nowhere else.
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
    engine = str(graph.get_plan_name_at_index(graph._plan_index))  # noqa: SLF001 - the frontend tells it nowhere else
    uids = [int(tensor.get_uid()) for tensor in operands]
    raw, index = _raw_entry(graph, uids)
    size = int(graph.get_workspace_size())
    return Planned(graph, *_scratch(size, copies), engine, int(graph.get_execution_plan_count()), uids, raw, index, size)


def loaded(operands: Sequence[Any], copies: Sequence[OperandCopy], saved: SavedPlan, **device: object) -> Planned:
    """Make a plan of what `Planned.save` gave, maybe in another process.

    Operands and scratch are compared. Operations are not: cuDNN tells those of a plan that it has read in its own bytes alone.
    What is beneath ``pygraph`` reads it: ``pygraph.deserialize`` takes what the frontend's own engines write, too, which names
    modules to import and brings code along.

    Parameters
    ----------
    operands, copies
        As in `plan`, of a graph that is not planned.
    saved : SavedPlan
    **device
        ``handle``, as an integer, where the device is there, and else ``device_property``. A plan that was built with a handle
        is another one, with other scratch, where it is read for the same device's properties (a third of 200, cuDNN 9.19).

    Raises
    ------
    GraphNotSupportedError
        Where cuDNN does not take it, or its operands are not those of the graph: they lie elsewhere, say.
    """
    try:
        lowered = cudnn._pybind_module.backend_graph(**device)  # noqa: SLF001 - public nowhere
        lowered.deserialize(saved.data)
        for tensor in operands:
            found = lowered.query_tensor_attributes_of_uid(int(tensor.get_uid()))
            geometry = list(found.get_dim()), list(found.get_stride()), found.get_data_type()
            if geometry != (list(tensor.dim), list(tensor.stride), tensor.data_type):
                raise ValueError(f"its {tensor.name} is {geometry}")
        size = int(lowered.get_workspace_size())
        if size != saved.workspace_size:
            raise ValueError(f"it needs {size} bytes of scratch, not {saved.workspace_size}")
        uids = [int(tensor.get_uid()) for tensor in operands]
        raw = _raw(lowered, uids)
        if raw is None:
            raise ValueError("its operands are in another order")
    except Exception as error:  # whatever cuDNN, or the frontend, makes of what may be anything
        raise GraphNotSupportedError(f"what was saved is no plan of this graph: {error}") from error
    return Planned(lowered, *_scratch(size, copies), saved.engine, saved.candidates, uids, raw, -1, size, saved, saved.early)


def _scratch(size: int, copies: Sequence[OperandCopy]) -> tuple[int, int]:
    """Return the bytes of scratch with the copies of operands, and where these begin."""
    copies_at = -(-size // ALIGNMENT) * ALIGNMENT
    return copies_at + scratch_of(copies) if copies else size, copies_at


def _raw_entry(graph: cudnn.pygraph, uids: list[int]) -> tuple[Callable[..., None] | None, int]:
    """Find the entry beneath ``pygraph.execute``, a fifth of its cost, and the plan's index for it; None where there is none."""
    try:
        lowered, index = graph._lowered_graph, graph._plans[graph._plan_index].cpp_index  # noqa: SLF001
    except (AttributeError, IndexError):
        return None, -1
    raw = None if graph.selected_engine is not None else _raw(lowered, uids)
    return raw, -1 if raw is None or index is None else index


def _raw(lowered: Any, uids: list[int]) -> Callable[..., None] | None:
    """Return the entry of what is beneath a graph; None where this frontend has no such thing.

    It takes an array of pointers in ascending order of uid, which the operands' order is made to be.
    """
    try:
        # No public name leads there; a test holds what is used here.
        lowered._prepare_variant_pack_template()  # noqa: SLF001
        order = list(lowered._get_variant_pack_uids_sorted())  # noqa: SLF001
        raw: Callable[..., None] = lowered._execute_with_raw_ptrs  # noqa: SLF001
    except AttributeError:
        return None
    return raw if order == uids else None


def plan_environment(device: Mapping[str, Any]) -> str:
    """Return what plans depend on beside their graph, as JSON: what there is in this process, and the device, wherever it is.

    The device is as of `handlepool.tensors.device_properties.DeviceProperties.kind`.
    """
    found = {"cudnn": cudnn.backend_version(), "frontend": cudnn.__version__, "device": dict(device)}
    # With "0", cuDNN proposes no plans with TF32, and takes none that were saved; the others are slower.
    if override := os.environ.get("NVIDIA_TF32_OVERRIDE"):
        found["NVIDIA_TF32_OVERRIDE"] = override
    return json.dumps(found, sort_keys=True)


class DescribedDevice:
    """A device of which there are the properties alone: cuDNN plans for it, and nothing can be launched.

    Parameters
    ----------
    properties : DeviceProperties

    Attributes
    ----------
    device : int
        -1, which is no ordinal.
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
                    f"cuDNN compiles a kernel for this graph, and hands it to CUDA's driver library, which takes none without a "
                    f"GPU: leave it to its first use on {self.properties.name}. {error}"
                ) from error
            raise
        return DescribedExecutable(planned, name, titles, self.properties.name)

    def zeros(self, *_: object) -> NoReturn:
        """Raise: the kernel is our own, and needs no plan of cuDNN's."""
        raise GraphNotSupportedError("zeros are written by a kernel that is not planned ahead")

    def plan_environment(self) -> str:
        """Return what `CudaDriver.plan_environment` does where the device is."""
        self._plan_environment = self._plan_environment or plan_environment(self.properties.kind)
        return self._plan_environment


class DescribedExecutable:
    """A built graph of a described device, as `handlepool.drivers.executable.Executable`; there is nothing to launch it on."""

    def __init__(self, planned: Planned, name: str, titles: Sequence[str], device: str) -> None:
        self.planned = planned
        self.untried = planned.saved is not None
        self.save = planned.save
        self.name, self.titles = name, titles
        self.workspace_size, self.engine, self.candidates = planned.workspace_size, planned.engine, planned.candidates
        self._device = device

    def launch(self, *_: object) -> NoReturn:
        """Raise."""
        raise DriverNotAvailableError(
            f"{self.name} was built for a described {self._device}; it can be launched only where that device is"
        )

    def shortcut(self, *_: object) -> None:
        """None."""
