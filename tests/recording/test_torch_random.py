"""Torch's random numbers inside a recording, by a made-up error of torch's text: on a GPU see `tests/gpu`."""

import pytest

import handlepool
from handlepool import CaptureError
from handlepool.pool.context import thread

DRAWN = "Attempt to increase offset for a CUDA generator not in capture mode."
ASKED = "Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture. Current cudaStreamCaptureStatus: Active"


class Torch:
    """Draws numbers as torch does, from a frame of torch's: not in another's capture."""

    def __init__(self, text=DRAWN):
        self.text, self.drawn = text, 0
        space = {"__name__": "torch.functional", "draw": self._draw}
        exec(compile("def rand():\n    if text := draw():\n        raise RuntimeError(text)", "torch.py", "exec"), space)
        self.rand = space["rand"]

    def _draw(self):
        if thread.recording is not None:
            return self.text
        self.drawn += 1
        return None


def drawing(scene, torch, *, node=False):
    """A function that draws, and the line where it does."""

    def draw(x):
        torch.rand()
        return scene.plus(x, 1)

    step = handlepool.operation(draw) if node else draw
    return lambda x: scene.plus(step(x), 1), f"{__file__}:{draw.__code__.co_firstlineno + 1}"


@pytest.mark.parametrize("lanes", [None, 1, 4])
@pytest.mark.parametrize("node", [False, True], ids=["plain", "operation"])
@pytest.mark.parametrize("text", [DRAWN, ASKED], ids=["drawn", "asked"])
def test_it_is_a_capture_error_that_names_the_line_and_both_remedies(scene, lanes, node, text):
    torch, x = Torch(text), scene.array(1)
    function, line = drawing(scene, torch, node=node)
    with pytest.raises(CaptureError, match="random number generator of torch's") as caught:
        handlepool.record(function, x, lanes=lanes)
    assert f"cannot be recorded: {line} uses" in str(caught.value)
    assert "pass them as an argument, and call eval() on a module that has dropout" in str(caught.value)
    assert str(caught.value.__cause__) == text
    assert torch.drawn == 1, "the first call is a real one, and draws"
    assert scene.read(function(x)) == 3, "and afterwards the function works as before"
    assert torch.drawn == 2


def test_it_is_told_where_the_function_raised_another_error_of_it(scene):
    torch, x = Torch(), scene.array(1)
    function, _ = drawing(scene, torch)

    def wrapped(x):
        try:
            return function(x)
        except RuntimeError as error:
            raise ValueError("no sample") from error

    with pytest.raises(CaptureError, match="random number generator of torch's"):
        handlepool.record(wrapped, x)


@pytest.mark.parametrize("error", [RuntimeError("CUDA generator"), ValueError(DRAWN)], ids=repr)
def test_control_other_errors_travel(scene, error):
    calls = []

    def function(x):
        calls.append(1)
        if len(calls) == 2:
            raise error
        return scene.plus(x, 1)

    with pytest.raises(type(error)) as caught:
        handlepool.record(function, scene.array(1))
    assert caught.value is error
