"""Fixtures of the tests that plan with a real cuDNN and no GPU."""

import os
import shutil

import pytest
from harness import planning


@pytest.fixture(scope="session")
def stubs(tmp_path_factory):
    """The folder of the libraries that stand in for those that cuDNN loads."""
    if shutil.which("cc") is None:
        missing("needs a C compiler, for a libcuda without a GPU")
    folder = tmp_path_factory.mktemp("stubs")
    planning.compile_stubs(folder)
    return folder


@pytest.fixture(scope="session", params=planning.PINNED)
def cudnn(request, stubs):
    """Calls a function, by name, in a process with each pinned version of cuDNN in turn; see `harness.planning.call`."""
    folder = planning.installed().get(request.param)
    if folder is None:
        missing(f"needs cuDNN {request.param}: {planning.VARIABLE} names no folder that has it; docs/testing.md says how")

    def call(function, *arguments, timeout=120):
        return planning.call(stubs, folder, function, *arguments, timeout=timeout)

    call.version = request.param
    return call


def missing(why):
    """Skip; where continuous integration has said what there is, fail."""
    (pytest.fail if os.environ.get(planning.VARIABLE) else pytest.skip)(why)
