"""Compile modules with Inductor."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def compiled(model: nn.Module) -> Callable[..., Any]:
    """Compile a module by Inductor.

    Inductor builds the values of the weights into its kernels. A compiled module does not see later changes of the weights, so
    each call of this function compiles anew.
    """

    def backend(graph: Any, inputs: Any) -> Any:
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx

        with config.patch(freezing=True):
            return compile_fx(graph, inputs)

    return torch.compile(model, backend=backend, dynamic=False)


def elsewhere(make: Callable[[], Any]) -> Any:
    """Call ``make`` in a new thread, without gradients.

    While torch's compiler calls a back end in a thread, the compiler compiles nothing else in this thread. So ``make`` can
    compile only in another thread.
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
