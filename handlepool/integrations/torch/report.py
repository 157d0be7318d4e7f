"""Report the kernels of a model."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from handlepool import ArgumentError
from handlepool.integrations.torch.backend import graphs_of
from handlepool.integrations.torch.door import RecordedModel
from handlepool.integrations.torch.program import HANDLEPOOL, TORCH, VIEW, Program
from handlepool.integrations.torch.together import Together


@dataclass(frozen=True, slots=True)
class ProgramReport:
    """The report on one program of a model.

    Attributes
    ----------
    kernels : dict
        Number of handlepool's kernels of each name.
    torch : dict
        Number of operations that torch computes, by name and reason.
    views : int
        Number of views, which cost nothing.
    nbytes : int
        Bytes of memory that the recorded programs hold.
    left : str
        The reason why torch runs the model; empty where a program runs it.
    times : dict
        Microseconds of a call by this program and by Inductor, if ``tune`` compared them.
    explained : str
        The text of `RecordedFunction.explain`, with the lanes and the critical path.
    """

    kernels: dict[str, int]
    torch: dict[tuple[str, str], int]
    views: int
    nbytes: int
    left: str
    times: dict[str, float]
    explained: str

    def __str__(self) -> str:
        if self.left:
            return f"left to torch: {self.left}"
        total = sum(self.kernels.values()) + sum(self.torch.values())
        lines = [f"handlepool computes {sum(self.kernels.values())} of {total} operations, and holds {self.nbytes:,} bytes"]
        lines += [f"  {count:4}  {name}" for name, count in sorted(self.kernels.items(), key=lambda each: -each[1])]
        lines += [f"  {count:4}  torch's {name}" + (f": {why}" if why else "") for (name, why), count in self.torch.items()]
        lines += [f"  {name}: {time:.0f} µs a call" for name, time in self.times.items()]
        return "\n".join(lines)


class Report(tuple[ProgramReport, ...]):
    """The reports on a model's programs; ``str`` gives the text of all."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "no program yet: call the model"


def report(model: object) -> Report:
    """Report which operations of a model handlepool computes, and which torch.

    Parameters
    ----------
    model : RecordedModel, Together or Module
        The result of `recorded`, `together` or `torch.compile`, or the module that was compiled.

    Returns
    -------
    Report
        One `ProgramReport` for each program, and for each key without a program.

    Raises
    ------
    ArgumentError
        For any other object.
    """
    if isinstance(model, RecordedModel):
        return Report(map(_of, model.programs))
    if isinstance(model, Together):
        return Report([_of(model)])
    if isinstance(model, nn.Module):
        graphs = graphs_of(model)
        return Report(_of(each) for graph in graphs if graph.model is not None for each in graph.model.programs)
    raise ArgumentError(f"report was given a {type(model).__name__}: pass a module, or the result of recorded() or together()")


def _of(program: Program | Together | str) -> ProgramReport:
    if isinstance(program, str):
        return ProgramReport({}, {}, 0, 0, program, {}, "")
    recorded = program.recorded
    stats = None if recorded is None else recorded.stats()
    explained = "" if recorded is None else recorded.explain()
    nbytes = 0 if stats is None else stats.nbytes
    if isinstance(program, Together):
        return ProgramReport({}, dict(_counted(program.names)), 0, nbytes, program.left, {}, explained)
    steps = program.steps
    kernels = Counter(step.name for step in steps if step.kind == HANDLEPOOL)
    torch = Counter((step.name, step.why) for step in steps if step.kind == TORCH)
    views = sum(step.kind == VIEW for step in steps)
    return ProgramReport(dict(kernels), dict(torch), views, nbytes, "", program.times, explained)


def _counted(names: Iterable[str]) -> Counter[tuple[str, str]]:
    return Counter((name, "") for name in names)
