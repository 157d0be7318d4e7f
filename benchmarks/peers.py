"""torch beside handlepool: the same arrays, the same stream, in inference mode, which is torch's fastest."""

from collections.abc import Callable
from typing import Any

_open: list[Any] = []  # the inference mode, which ends with the process


def torch_beside(driver: Any, stream: Any) -> tuple[Any, str]:
    """The module torch with its current stream the script's; or None, and why."""
    if driver.name != "cuda":
        return None, "torch: compared on a GPU alone"
    try:
        import torch
    except ImportError as error:
        return None, f"torch: {error}"
    if not torch.cuda.is_available():
        return None, "torch: it sees no GPU"
    torch.cuda.set_stream(torch.cuda.ExternalStream(stream.ptr))
    mode = torch.inference_mode()
    mode.__enter__()
    _open.append(mode)
    return torch, ""


def tensor(torch: Any, array: Any) -> Any:
    """A torch tensor over the memory of a CuPy array."""
    return torch.from_dlpack(array)


def array_of(result: Any) -> Any:
    """Return a CuPy array over the memory of a torch tensor, and any other value unchanged."""
    if not type(result).__module__.startswith("torch"):
        return result
    import cupy

    return cupy.from_dlpack(result)


def over_streams(torch: Any, count: int, calls: list[Callable[[], object]], *, gathered: bool = False) -> Callable[[], object]:
    """Run calls over ``count`` side streams as a user writes it by hand, with every stream and event made beforehand.

    There is a context for each call, or, if ``gathered``, for each stream with its calls together. Torch's allocator is not
    told that other streams read the memory of a side stream (``record_stream``), which would cost more.
    """
    side = [torch.cuda.Stream() for _ in range(count)]
    begin = torch.cuda.Event()
    ends = [torch.cuda.Event() for _ in range(count)]
    placed = [(side[number % count], call) for number, call in enumerate(calls)]
    shares = [(stream, calls[number::count]) for number, stream in enumerate(side)]
    current_stream, on = torch.cuda.current_stream, torch.cuda.stream

    def region() -> list[object]:
        caller = current_stream()
        begin.record(caller)
        for stream in side:
            stream.wait_event(begin)
        results = []
        if gathered:
            for stream, share in shares:
                with on(stream):
                    results += [call() for call in share]
        else:
            for stream, call in placed:
                with on(stream):
                    results.append(call())
        for stream, end in zip(side, ends, strict=True):
            end.record(stream)
            caller.wait_event(end)
        return results

    return region


def graphed(torch: Any, region: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Capture a region as a torch CUDA graph; return the replay, and the region's results, which each replay writes."""
    for _ in range(3):
        region()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = region()
    replay = graph.replay

    def replayed(_kept: Any = (graph, kept)) -> None:
        replay()

    return replayed, kept


def graph_of(torch: Any, region: Callable[[], Any]) -> Callable[[], None]:
    """Capture a region as a torch CUDA graph; return the replay."""
    return graphed(torch, region)[0]
