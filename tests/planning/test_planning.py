"""Plans of a real cuDNN for a device that is described, where there is no GPU."""

from harness import planning

from handlepool.tensors.inference import dense_strides

NCHW, NHWC = (0, 1, 2, 3), (0, 2, 3, 1)
UNIT = {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1]}


def test_a_plan_for_a_described_device_needs_no_gpu_and_cannot_be_launched(cudnn):
    plan = cudnn("planning.planned.described")
    assert plan["engine"].startswith("eng")
    assert plan["candidates"] > 1
    assert plan["workspace"] >= 0
    assert plan["device"] == -1
    assert plan["output"] == [2, 32, 28, 28]
    assert plan["imported"] == []
    assert plan["said"] == (
        "convolve was planned for the description of NVIDIA H200, so it cannot be launched here; launch it in a process with "
        "that device"
    )


def test_plans_that_were_saved_are_made_again_and_in_the_place_of_another_refused(cudnn, tmp_path):
    said = cudnn("planning.planned.saved", str(tmp_path / "plans"))
    assert [plan[:3] for plan in said["loaded"]] == [plan[:3] for plan in said["built"]]
    assert [plan[3] for plan in said["built"] + said["loaded"] + said["swapped"]] == [False] * 8 + [True] * 8 + [False] * 8
    assert [plan[:3] for plan in said["swapped"]] == [plan[:3] for plan in said["built"]]
    # Eight that were not there, eight that were, and eight of another geometry behind a digest that is right.
    counts = {"missed": 8, "loaded": 16, "rejected": 8, "written": 24}
    assert said["counts"] == {f"plan_files_{name}": count for name, count in counts.items()}
    assert said["asked"] == [8, 0, 8]  # heuristics


def test_the_plan_that_was_kept_last_is_the_one_that_is_loaded(cudnn, tmp_path):
    (first, second, again), loaded = cudnn("planning.planned.chosen", str(tmp_path))
    assert first != second == again
    assert loaded == [False, False, True]


def test_what_the_frontends_own_engines_write_is_read_by_nobody(cudnn, tmp_path):
    assert cudnn("planning.planned.of_the_frontends_own", str(tmp_path)) == [False, 1]


def test_a_plan_that_was_loaded_can_be_kept_again(cudnn, tmp_path):
    assert cudnn("planning.planned.kept_again", str(tmp_path / "plans")) == [False, True, True, True]


def test_a_plan_that_takes_other_scratch_than_its_file_says_is_built_anew(cudnn, tmp_path):
    assert cudnn("planning.planned.of_other_scratch", str(tmp_path / "plans")) is False


def test_control_of_a_plan_behind_a_right_digest_operands_are_compared_and_operations_are_not(cudnn, tmp_path):
    found = cudnn("planning.planned.exchanged", str(tmp_path / "plans"))
    # docs/plans.md says so; where cuDNN came to tell the operations of a plan that it has read, they could be compared.
    assert found == {"other operations": True, "other operands": False}


def halves(*shapes):
    return ", ".join(f"float16 {shape}" for shape in shapes)


def convolved(padding, dilation=1):
    return f"conv_fprop(padding=[{padding}, {padding}], stride=[1, 1], dilation=[{dilation}, {dilation}])"


def test_a_plan_for_another_architecture_is_not_found_and_in_its_place_refused(cudnn, tmp_path):
    found = cudnn("planning.planned.of_another_architecture", str(tmp_path))
    assert found["loaded"] == [False, False, True, True]
    assert found["counts"] == {"plan_files_missed": 2, "plan_files_written": 2, "plan_files_loaded": 2}
    assert not found["swapped"]


def test_a_command_plans_what_a_module_lists_for_whoever_has_the_device(cudnn, tmp_path):
    found = cudnn("planning.planned.elsewhere", str(tmp_path))
    *lines, total = found["said"]
    assert found["status"] == 0
    assert [line.partition(":")[0] for line in lines] == [
        f"convolve over {halves('2x64x28x28', '32x64x3x3', '2x32x28x28')} by {convolved(1)}",
        f"conv2d over {halves('4x64x28x28', '32x64x3x3', '1x32x1x1', '4x32x28x28')} by {convolved(1)}"
        " -> pointwise(mode='bias') -> pointwise(mode='relu')",
        f"convolve over {halves('4x64x28x28', '32x64x3x3', '4x32x26x26')} by {convolved(0)}",
    ]
    assert total == "3 plans for NVIDIA H200, 0 refused"
    assert f"{lines[0].partition(': ')[2]}" == found["engine"]
    assert found["counts"] == {"plan_files_loaded": 1}
    assert sorted(found["files"]) == sorted(line.partition(": ")[2] for line in lines)


def test_plans_of_one_shape_are_told_apart_and_counted_one_by_one(cudnn, tmp_path):
    status, said, files = cudnn("planning.planned.of_one_shape", str(tmp_path))
    *lines, total = said
    shapes = "2x64x28x28", "32x64x3x3", "2x32x28x28"
    singles = halves(*shapes).replace("float16", "float32")
    assert [line.partition(":")[0] for line in lines] == [
        *(f"conv2d over {halves(*shapes)} by {convolved(padding, padding)}" for padding in (1, 2, 3)),
        f"conv2d over {singles} by {convolved(1)}",
        f"conv2d(deterministic=True) over {halves(*shapes)} by {convolved(1)}",
    ]
    assert (status, total, files) == (0, "5 plans for NVIDIA H200, 0 refused", 5)


def test_a_plan_that_cannot_be_kept_is_said_by_the_command_and_refused_by_compile(cudnn, tmp_path):
    found = cudnn("planning.planned.unkept", str(tmp_path))
    (status, said, files), error = found["command"], found["error"]
    assert said[1].startswith("by_objects over ")
    assert " cannot be kept: the graph has a value that no text identifies" in said[1]
    assert (status, said[2], files) == (1, "1 plans for NVIDIA H200, 0 refused", 0)
    assert error.startswith("by_objects.compile(device=...) cannot save the plan, because the graph has a value that no text ")


def test_a_padding_of_integers_of_numpys_is_kept(cudnn, tmp_path):
    status, said, files = cudnn("planning.planned.by_numpy", str(tmp_path))
    assert (status, said[1], files) == (0, "1 plans for NVIDIA H200, 0 refused", 1)


def test_what_is_refused_before_cudnn_is_asked_is_counted(cudnn, tmp_path):
    status, said, files = cudnn("planning.planned.refused_early", str(tmp_path))
    assert "joined cannot be planned: " in said[0]
    assert (status, said[1], files) == (1, "0 plans for NVIDIA H200, 1 refused", 0)


def test_a_named_tuple_of_arrays_is_one_and_too_large_arrays_are_said(cudnn, tmp_path):
    status, said, files = cudnn("planning.planned.of_named_arrays_and_too_large_ones", str(tmp_path))
    assert said[1].startswith("conv2d cannot be planned: its arrays do not fit into the memory of this machine: ")
    assert (status, said[2], files) == (1, "1 plans for NVIDIA H200, 1 refused", 1)


def test_what_a_command_plans_is_known_by_the_device_alone_where_the_environment_names_the_directory(cudnn, tmp_path):
    settings = [[], [], ["allow_tf32", "deterministic"]]
    assert cudnn("planning.planned.beside", str(tmp_path)) == [["NVIDIA H200", each] for each in settings]


def test_plans_that_no_room_is_left_for_are_told(cudnn, tmp_path):
    status, said = cudnn("planning.planned.nowhere", str(tmp_path))
    assert status == 1
    assert said[0] == f"3 plans could not be written to {tmp_path}/plans: the directory is full or read-only"
    assert said[1] == "3 plans for NVIDIA H200, 0 refused"


def test_plans_without_tf32_are_not_those_with_it(cudnn):
    with_it, without = cudnn("planning.planned.overridden", None), cudnn("planning.planned.overridden", "0")
    assert with_it["candidates"] > without["candidates"]
    assert with_it["made for"] != without["made for"]


def test_the_version_that_plans_is_the_one_that_was_asked_for(cudnn):
    number = cudnn("planning.planned.version")
    assert f"{number // 10000}.{number // 100 % 100}" == cudnn.version


def test_a_description_that_an_older_version_wrote_is_refused_by_the_missing_key(cudnn):
    said = cudnn("planning.planned.without", "memoryBusWidth")
    if cudnn.version == "9.19":
        assert said is None
    else:
        assert said.startswith(
            "cuDNN 92800 refuses the properties of 'NVIDIA H200' that cuDNN 91900 wrote because they lack 'memoryBusWidth'"
        )


def test_a_key_that_every_version_asks_for_is_missed_by_name(cudnn):
    assert "'warpSize'" in cudnn("planning.planned.without", "warpSize")


def case(operation, inputs, order, declared=None, **parameters):
    tensors = [(shape, dense_strides(shape, order)) for shape in inputs]
    return {"operation": operation, "inputs": tensors, "declared": declared, "parameters": UNIT | parameters}


def test_cudnn_plans_the_inferred_shapes_and_no_larger_ones(cudnn):
    wide, strided = {"padding": [1, 1]}, {"stride": [2, 2], "padding": [1, 1]}
    cases = []
    for order in (NCHW, NHWC):
        cases += [
            case("conv_fprop", [(4, 16, 14, 18), (32, 16, 3, 3)], order, **wide),
            case("conv_fprop", [(4, 16, 15, 18), (32, 16, 3, 3)], order, **strided),
            case("conv_fprop", [(4, 16, 15, 18), (32, 16, 3, 2)], order, dilation=[2, 3]),
            case("conv_fprop", [(4, 32, 14, 14), (32, 16, 3, 3)], order, **wide),
            case("conv_dgrad", [(4, 32, 14, 18), (32, 16, 3, 3)], order, **wide),
            case("conv_dgrad", [(4, 32, 8, 9), (32, 16, 3, 3)], order, [4, 16, 16, 18], **strided),
            case("conv_wgrad", [(4, 16, 14, 18), (4, 32, 14, 18)], order, [32, 16, 3, 3], **wide),
        ]
    for said, (right, larger) in zip(cases, cudnn("planning.planned.shapes", cases), strict=True):
        assert right is None, (said, right)
        assert larger is not None, said


def test_without_a_cudnn_there_is_none_to_plan_with(tmp_path, monkeypatch):
    monkeypatch.setenv(planning.VARIABLE, str(tmp_path))
    assert planning.installed() == {}
