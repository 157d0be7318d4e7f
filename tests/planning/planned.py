"""What a process with a cuDNN and no GPU is asked for; see `harness.planning.call`."""

import contextlib
import io
import json
import os
import resource
import sys
import time
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import cudnn
import numpy as np
from cudnn import _plan_serdes
from harness.planning import h200
from planning import listed

import handlepool
from handlepool import ArgumentError, ArraySpec, DriverNotAvailableError, GraphNotSupportedError
from handlepool.__main__ import main
from handlepool.drivers.cuda import planning
from handlepool.graphs.compile import build, save
from handlepool.graphs.signature import Recipe, Signature
from handlepool.graphs.trace import Request
from handlepool.pool.default import substitute_default
from handlepool.pool.plan_directory import PlanDirectory
from handlepool.tensors import frontend
from handlepool.tensors.device_properties import DeviceProperties
from handlepool.tensors.inference import axis_order, dense_strides, infer
from handlepool.tensors.layout import Layout


def version():
    return cudnn.backend_version()


def convolve(g, x, w):
    return g.relu(g.conv_fprop(x, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1]))


def convolution(batch=2, files=None, device=None):
    layouts = tuple(
        Layout(shape, tuple(2 * step for step in dense_strides(shape, (0, 2, 3, 1))), np.dtype(np.float16))
        for shape in ((batch, 64, 28, 28), (32, 64, 3, 3))
    )
    recipe = Recipe("convolve", convolve, Signature.of(convolve))
    described = planning.DescribedDevice(device or h200())
    return build(recipe, Request(layouts), described, lambda which, keep: None, files=files)


def of_another_architecture(folder):
    """Plan for an H200 and for a device of another architecture: what was counted, and whether the one's plan is the other's."""
    files = PlanDirectory(folder)
    other = h200(deviceVer=800, deviceName="another")
    plans = [convolution(files=files, device=device) for device in (h200(), other, h200(), other)]
    loaded, counts = [plan.executable.untried for plan in plans], files.counts()
    files.save(plans[1].key, files.load(plans[0].key))
    swapped = convolution(files=files, device=other)
    return {"loaded": loaded, "counts": counts, "swapped": swapped.executable.untried}


def saved(folder):
    """Build plans, load them again, and load each in the other's place: what they say, and the seconds that it took."""
    files, told, proposed = PlanDirectory(folder), [], []
    propose = cudnn.pygraph.create_execution_plans
    cudnn.pygraph.create_execution_plans = lambda graph, modes: (proposed.append(len(told)), propose(graph, modes))
    for _ in range(2):
        start = time.perf_counter()
        plans = [convolution(batch, files) for batch in range(1, 9)]
        seconds = time.perf_counter() - start
        told.append([[plan.engine, plan.workspace_size, plan.candidates, plan.executable.untried] for plan in plans])
    found = {file.key: file.plan for file in files.files()}
    for key, other in zip(found, [*list(found)[1:], *list(found)[:1]], strict=True):
        files.save(key, found[other])
    plans = [convolution(batch, files) for batch in range(1, 9)]
    told.append([[plan.engine, plan.workspace_size, plan.candidates, plan.executable.untried] for plan in plans])
    asked = [proposed.count(which) for which in range(3)]
    return {"built": told[0], "loaded": told[1], "swapped": told[2], "asked": asked, "counts": files.counts(), "seconds": seconds}


def chosen(folder):
    """Build a plan, and keep the next of its candidates instead: the engines of both, and of what is loaded then."""
    files, described, kept = PlanDirectory(folder), planning.DescribedDevice(h200()), []
    layouts = tuple(
        Layout(shape, tuple(2 * step for step in dense_strides(shape, (0, 2, 3, 1))), np.dtype(np.float16))
        for shape in ((2, 64, 28, 28), (32, 64, 3, 3))
    )
    recipe = Recipe("dilated", dilated, Signature.of(dilated))
    for index in (None, 1, None):
        kept.append(build(recipe, Request(layouts, options={"by": 1}), described, None, index, files=files))
        save(kept[-1], files)
    return [plan.engine for plan in kept], [plan.executable.untried for plan in kept]


def of_the_frontends_own(folder):
    """Put what an engine of the frontend's own would have written in a plan's place: whether it is read, and what read it."""
    files, read = PlanDirectory(folder), []
    plan = convolution(files=files)
    _plan_serdes.deserialize = lambda *given, **more: read.append(given)
    data = _plan_serdes.MAGIC + bytes(100)
    frontend.new_graph(device=h200()).deserialize(data)  # the control
    files.save(plan.key, replace(files.load(plan.key), data=data))
    return convolution(files=files).executable.untried, len(read)


def exchanged(folder):
    """Put a plan under the key of one with other operations, and of one with other operands: whether it is loaded."""
    files, device = PlanDirectory(folder), planning.DescribedDevice(h200())

    def made(batch, dilation):
        layouts = tuple(
            Layout(shape, tuple(2 * step for step in dense_strides(shape, (0, 2, 3, 1))), np.dtype(np.float16))
            for shape in ((batch, 64, 28, 28), (32, 64, 3, 3))
        )
        recipe = Recipe("dilated", dilated, Signature.of(dilated))
        return build(recipe, Request(layouts, options={"by": dilation}), device, lambda which, keep: None, files=files)

    def taken(batch, dilation):
        files.save(made(batch, dilation).key, other)
        return made(batch, dilation).executable.untried

    key = made(2, 2).key
    (other,) = [file.plan for file in files.files() if file.key == key]
    return {"other operations": taken(2, 1), "other operands": taken(3, 2)}


def dilated(g, x, w, *, by):
    return g.conv_fprop(x, w, padding=[by, by], stride=[1, 1], dilation=[by, by])


def kept_again(folder):
    """Build a plan, and three times load it and keep it again: whether it was loaded."""
    files, loaded = PlanDirectory(folder), []
    for _ in range(4):
        plan = convolution(files=files)
        loaded.append(plan.executable.untried)
        save(plan, files)
    return loaded


def of_other_scratch(folder):
    """Say of a plan's file that it takes more scratch: whether it is loaded."""
    files = PlanDirectory(folder)
    convolution(files=files)
    (file,) = files.files()
    files.save(file.key, replace(file.plan, workspace_size=file.plan.workspace_size + 1))
    return convolution(files=files).executable.untried


def elsewhere(folder):
    """Have the command plan what a module lists: its status, what it printed, and the plans as who has the device finds them."""
    properties, plans = Path(folder) / "h200.json", str(Path(folder) / "plans")
    properties.write_text(h200(pciDeviceId=99).text)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        status = main(["plans", "build", "planning.listed", "--device-properties", str(properties), "--directory", plans])
    function, specs, options = listed.PLANS[0]
    with handlepool.HandlePool(driver="host", plan_directory=plans) as pool, substitute_default(pool):
        again = function.compile(*specs, device=h200(), **options)
        counts = {name: count for name, count in pool.stats().items() if name.startswith("plan_files_") and count}
    found = [file.plan.engine for file in PlanDirectory(plans).files()]
    return {"status": status, "said": said.getvalue().splitlines(), "engine": again.engine, "counts": counts, "files": found}


X, W = (ArraySpec(shape, "float16", "NHWC") for shape in ((2, 64, 28, 28), (32, 64, 3, 3)))


def command(folder, *entries):
    """Have the command plan what is listed: its status, the lines that it printed, and how many files there are."""
    properties, said = Path(folder) / "h200.json", io.StringIO()
    properties.write_text(h200().text)
    sys.modules["given"] = ModuleType("given")
    sys.modules["given"].PLANS = list(entries)
    with contextlib.redirect_stdout(said):
        status = main(["plans", "build", "given", "--device-properties", str(properties), "--directory", f"{folder}/plans"])
    return status, said.getvalue().splitlines(), len(list(Path(folder, "plans").iterdir()))


def of_one_shape(folder):
    """Plan convolutions that differ in their options, their type and their settings."""
    singles = [ArraySpec(spec.shape, "float32", "NHWC") for spec in (X, W)]
    dilated = [(handlepool.conv2d, (X, W), {"padding": padding, "dilation": padding}) for padding in (1, 2, 3)]
    exact = handlepool.conv2d, (X, W), {"padding": 1, "deterministic": True}
    return command(folder, *dilated, (handlepool.conv2d, singles, {"padding": 1}), exact)


@handlepool.graph
def by_objects(g, x, w):
    return g.conv_fprop(x, w, padding=np.array([1, 1], object), stride=[1, 1], dilation=[1, 1])


def unkept(folder):
    """Plan what has no key: what the command said, and what `compile` raised."""
    said = command(folder, (by_objects, (X, W)))
    with handlepool.HandlePool(driver="host", plan_directory=f"{folder}/plans") as pool, substitute_default(pool):
        try:
            by_objects.compile(X, W, device=h200())
        except ArgumentError as error:
            return {"command": said, "error": str(error)}
    return {"command": said, "error": ""}


def by_numpy(folder):
    """Plan a convolution whose padding is an array."""

    @handlepool.graph
    def padded(g, x, w):
        return g.conv_fprop(x, w, padding=np.array([1, 1]), stride=[1, 1], dilation=[1, 1])

    return command(folder, (padded, (X, W)))


def refused_early(folder):
    """Plan what the package has no shape for."""

    @handlepool.graph
    def joined(g, x, y):
        return g.concatenate(inputs=[x, y], axis=1)

    return command(folder, (joined, (X, X)))


Pair = namedtuple("Pair", "x w")


def of_named_arrays_and_too_large_ones(folder):
    """Plan a convolution of a named tuple, and one of 35 terabytes."""

    def of_pair(pair):
        return handlepool.conv2d(pair.x, pair.w, padding=1)

    large = ArraySpec((1 << 20, 64, 512, 512), "float16", "NHWC")
    return command(folder, (of_pair, (Pair(X, W),)), (handlepool.conv2d, (large, W)))


def nowhere(folder):
    """Have the command plan into a directory that takes nothing: its status, and the last two lines that it printed."""
    properties, said = Path(folder) / "h200.json", io.StringIO()
    properties.write_text(h200().text)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))  # as on a disk that is full
    with contextlib.redirect_stdout(said):
        status = main(
            ["plans", "build", "planning.listed", "--device-properties", str(properties), "--directory", f"{folder}/plans"]
        )
    return status, said.getvalue().splitlines()[-2:]


def beside(folder):
    """Have the command plan into the directory of the environment, twice for one device: its plans' devices and settings."""
    properties, plans = Path(folder) / "h200.json", str(Path(folder) / "plans")
    properties.write_text(h200().text)
    os.environ["HANDLEPOOL_PLAN_DIRECTORY"] = plans
    for _ in range(2):
        with contextlib.redirect_stdout(io.StringIO()):
            main(["plans", "build", "planning.listed", "--device-properties", str(properties)])
    keys = [json.loads(file.key) for file in PlanDirectory(plans).files()]
    return sorted([key["made for"]["device"]["deviceName"], sorted(key["settings"])] for key in keys)


def overridden(value):
    """Plan a convolution of float32 where the environment says what it says of TF32: its plans, and what they are known by."""
    if value is not None:
        os.environ["NVIDIA_TF32_OVERRIDE"] = value
    device = planning.DescribedDevice(h200())
    layouts = [
        Layout(shape, tuple(4 * step for step in dense_strides(shape)), np.dtype(np.float32))
        for shape in ((4, 64, 28, 28), (32, 64, 3, 3))
    ]
    plan = build(Recipe("convolve", convolve, Signature.of(convolve)), Request(tuple(layouts)), device, None)
    return {"candidates": plan.candidates, "made for": device.plan_environment()}


def described():
    """Build a plan for a described device: what it says, what was imported for it, and what a launch of it says."""
    plan = convolution()
    try:
        plan.executable.launch(None, (), 0)
    except DriverNotAvailableError as error:
        said = str(error)
    return {
        "engine": plan.engine,
        "candidates": plan.candidates,
        "workspace": plan.workspace_size,
        "device": plan.device,
        "output": plan.outputs[0].shape,
        "imported": [name for name in ("cupy", "cuda.bindings", "torch") if name in sys.modules],
        "said": said,
    }


def entries():
    """Say what the entries are that a built graph is launched and saved by."""
    graph = frontend.new_graph(io_dtype="float16", intermediate_dtype="float32", compute_dtype="float32", device=h200())
    half = cudnn.data_type.HALF
    x, w = (graph.tensor(dim=[8, 8, 3, 3], stride=[72, 1, 24, 8], data_type=half) for _ in range(2))
    y = convolve(graph, x, w)
    infer(graph, [y])
    made = planning.plan(graph, [x, w, y])
    lowered = graph._lowered_graph
    lowered._prepare_variant_pack_template()
    again = cudnn._pybind_module.backend_graph(device_property=h200().native)
    again.deserialize(graph.serialize(as_bytes=True))
    found = again.query_tensor_attributes_of_uid(x.uid)
    return {
        "raw": lowered._execute_with_raw_ptrs.__doc__.splitlines()[0],
        "uids": list(lowered._get_variant_pack_uids_sorted()) == made.uids,
        "index": graph._plans[graph._plan_index].cpp_index,
        "engine": graph.selected_engine,
        "taken": made.raw is not None,
        "read": [list(found.get_dim()), list(found.get_stride()), found.get_data_type() == half],
        "frontend": cudnn.__version__,
    }


def without(key):
    """Return what is said of a description that has a key less; None where it will do."""
    values = json.loads(h200().text)
    del values[key]
    try:
        _ = DeviceProperties(json.dumps(values)).native
    except ArgumentError as error:
        return str(error)
    return None


def shapes(cases):
    """For each case: what cuDNN answers to an output of the shape that was inferred, and to a larger one; None where it plans."""
    return [[_answer(case, surplus) for surplus in (0, 1)] for case in cases]


def _answer(case, surplus):
    half = cudnn.data_type.HALF
    graph = frontend.new_graph(io_dtype="float16", intermediate_dtype="float32", compute_dtype="float32", device=h200())
    inputs = [graph.tensor(dim=dim, stride=stride, data_type=half) for dim, stride in case["inputs"]]
    y = getattr(graph, case["operation"])(*inputs, **case["parameters"])
    if case["declared"]:
        y.set_dim(case["declared"])
    infer(graph, [y])
    if surplus:
        larger, order = [*y.dim[:-1], y.dim[-1] + surplus], axis_order(y.dim, y.stride)
        y.set_dim(larger).set_stride(list(dense_strides(larger, order)))
    try:
        planning.plan(graph, [*inputs, y])
    except GraphNotSupportedError as error:
        return str(error)
    return None
