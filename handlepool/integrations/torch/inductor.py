"""Compile with Inductor."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def compiled(model: nn.Module) -> Callable[..., Any]:
    """Return a module compiled by Inductor.

    Its weights are built into the kernels.

    Each call compiles anew, because a compiled function does not see changed weights.
    """

    def backend(graph: Any, inputs: Any) -> Any:
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx

        with config.patch(freezing=True):
            return compile_fx(graph, inputs)

    return torch.compile(model, backend=backend, dynamic=False)


def elsewhere(make: Callable[[], Any]) -> Any:
    """Call a function in a thread of its own, without gradients.

    Torch's compiler compiles nothing inside of a call of its own, as of this back end.
    """
    inference = torch.is_inference_mode_enabled()
    found: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            with torch.inference_mode(inference), torch.no_grad():
                found.append(make())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]
