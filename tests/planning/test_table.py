"""What cuDNN has plans for, version by version, is what the tables in the repository say."""

import json
import re

import pytest
from planning.table import CASES, GOLDEN, differences, golden, supported


@pytest.mark.slow
def test_cudnn_plans_what_the_table_says(cudnn):
    """A line for each call: its engines, how many plans were proposed, scratch. See docs/testing.md for how to make it again."""
    found = differences(cudnn("planning.table.described", timeout=280), golden(cudnn.version))
    assert not found, "\n".join([f"{len(found)} lines of {GOLDEN}/cudnn-{cudnn.version}.json differ:", *found[:30]])


def test_control_a_line_that_differs_is_told():
    table = golden("9.28")
    changed = json.loads(json.dumps(table))
    assert differences(changed, table) == []
    changed["conv2d"]["float16 NHWC"] = "no plan"
    del changed["ruled"]["matmul3 + dense"]
    assert differences(changed, table) == [
        f"conv2d, float16 NHWC: no plan; in the table {table['conv2d']['float16 NHWC']}",
        f"ruled, matmul3 + dense: nothing; in the table {table['ruled']['matmul3 + dense']}",
    ]


@pytest.mark.parametrize("version", ["9.19", "9.28"])
def test_every_operation_has_plans_but_for_what_is_known(version):
    table = golden(version)
    groups = [
        table[name]
        for name in ("conv2d", "gradients", "transposed", "attention", "products", "activations", "graphs", "networks")
    ]
    assert all(groups)
    without = {name for lines in groups for name, line in lines.items() if not supported(line)}
    views = {name for name in table["conv2d"] if " NCHW " in name and (" x a " in name or " out a " in name)}
    assert len(views) == 12
    assert without == views | {"matmul float32 allow_tf32=False"}


@pytest.mark.parametrize("version", ["9.19", "9.28"])
def test_g18_with_the_rules_more_is_planned(version):
    """Reductions are what cuDNN has hardly any plans for, as a GPU showed."""
    table = golden(version)

    def count(kind, outcome):
        families = {name: counts for name, counts in table[kind].items() if not name.startswith("reduction")}
        return sum(counts.get(outcome, 0) for counts in families.values())

    assert sum(sum(counts.values()) for counts in table["ruled"].values()) == CASES
    assert count("ruled", "planned") > 1.5 * count("raw", "planned")
    assert count("ruled", "unsupported") == {"9.19": 3, "9.28": 0}[version]


@pytest.mark.parametrize("version", ["9.19", "9.28"])
def test_no_plan_needs_more_scratch_than_its_limit(version):
    limited = {}
    for group in ("conv2d", "gradients", "products", "graphs"):
        limited |= {name: line for name, line in golden(version)[group].items() if "workspace_limit=" in name}
    assert len(limited) > 20
    for name, line in limited.items():
        needed = [int(count.replace(",", "")) for count in re.findall(r"([\d,]+) B", line)]
        assert max(needed, default=0) <= int(name.rpartition("=")[2]), (name, line)


@pytest.mark.parametrize("version", ["9.19", "9.28"])
def test_without_tf32_float32_gets_other_plans_and_what_is_exact_on_tensor_cores_the_same(version):
    table = golden(version)
    lines = table["conv2d"]
    assert lines["float32 NHWC allow_tf32=False"] != lines["float32 NHWC"]
    for layout in ("NHWC", "NCHW"):
        assert lines[f"float16 {layout} allow_tf32=False"] == lines[f"float16 {layout}"]
    assert table["products"]["matmul bfloat16 allow_tf32=False"] == table["products"]["matmul bfloat16 batch"]
