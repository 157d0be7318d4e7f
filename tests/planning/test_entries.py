"""The frontend's entries that take a built graph, in the version that is installed; the others are in `tests/tensors`."""

import re


def test_the_entries_that_launches_and_saved_plans_use_are_there(cudnn):
    """None of them is public: a frontend without them costs five times as much a launch, or has no plans on disk."""
    found = cudnn("planning.planned.entries")
    # The address of the pointers, their number, workspace, raw handle, plan index.
    assert re.fullmatch(r"_execute_with_raw_ptrs\(self, (\w+: int, ){4}\w+: int( = -1)?\) -> None", found["raw"]), found["raw"]
    assert found["taken"]
    assert found["uids"]
    assert found["index"] >= 0
    assert found["engine"] is None
    assert found["read"] == [[8, 8, 3, 3], [72, 1, 24, 8], True]
