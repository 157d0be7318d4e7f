"""Define dispatcher operations with derivatives of every kind.

The derivatives are those of backward mode, of forward mode, and of the transforms of `torch.func`. `torch.library.custom_op`
drops the tangents of forward mode and has no derivatives under `torch.func`. So an operation here has a kernel for the key
``Autograd``, as torch's own operations have. The dispatcher calls the kernel once for each level of nested transforms, with the
tensors of that level. Each operation is linear in each of its first two arguments, which determines its forward derivative.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from handlepool import ArgumentError

Backward = Callable[[Tensor, Tensor, Sequence[Any], Sequence[bool], Tensor], tuple[Tensor | None, ...]]
"""Compute the gradients of an operation's leading arguments.

The function takes the operation's first two arguments, the geometry, a bool for each argument that says whether its gradient is
needed, and the output's gradient.
"""

_library = torch.library.Library("handlepool", "FRAGMENT")


def define(name: str, arguments: str, kernel: Callable[..., Tensor], fake: Callable[..., Tensor]) -> Any:
    """Define an operation without derivatives; `derive` adds them.

    Parameters
    ----------
    name : str
        Without the namespace, which is ``handlepool``.
    arguments : str
        The arguments in the operation's schema. The operation returns one tensor.
    kernel : callable
        Computes the operation on tensors in memory.
    fake : callable
        Returns a tensor of the output's shape and layout, for tensors without memory.

    Returns
    -------
    torch._ops.OpOverload
    """
    _library.define(f"{name}({arguments}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    # Torch calls the kernel from C++. Without this wrapper, Dynamo would trace the kernel's Python frames.
    # `torch.library.custom_op` wraps its kernels in the same way.
    _library.impl(name, torch._disable_dynamo(kernel), "CompositeExplicitAutograd")  # noqa: SLF001
    torch.library.register_fake(f"handlepool::{name}", fake, lib=_library)
    return getattr(torch.ops.handlepool, name).default


def derive(operation: torch._ops.OpOverload, backward: Backward, *, folds: bool) -> None:
    """Add an operation's derivatives, and its rule for `torch.vmap`.

    Parameters
    ----------
    operation : torch._ops.OpOverload
        The operation is linear in each of its first two arguments, which are tensors. Its third argument is a tensor that is
        added to the output's channels, None, or the output's shape.
    backward : callable
        Returns the gradients of the leading arguments, computed by operations that have derivatives themselves.
    folds : bool
        Whether the first axis of the first argument and of the output counts images. Then `torch.vmap` can merge its batch into
        that axis.
    """
    name = operation._schema.name.partition("::")[2]  # noqa: SLF001 - it has no public name
    _library.impl(name, partial(_with_derivatives, operation, backward), "Autograd", with_keyset=True)
    torch.library.register_vmap(f"handlepool::{name}", partial(_batched, operation, folds), lib=_library)


class _Call(NamedTuple):
    """Hold an operation that autograd calls, with torch's modes at the call."""

    operation: Any
    backward: Backward
    keyset: Any
    gradients: bool
    tangents: bool

    def below(self, *inputs: object) -> Tensor:
        """Call the dispatcher's next kernel.

        The next kernel is the operation's own kernel, or the kernel of the transform below. `torch.autograd.Function` switches
        derivatives off before it calls this method. The transform below needs derivatives, so this method switches them on
        again.
        """
        with (
            torch.set_grad_enabled(self.gradients),
            forward_ad._set_fwd_grad_enabled(self.tangents),  # noqa: SLF001 - it has no public name
            torch._C._AutoDispatchBelowAutograd(),  # noqa: SLF001 - as `torch.library.custom_op` does
        ):
            result: Tensor = self.operation.redispatch(self.keyset & torch._C._after_autograd_keyset, *inputs)  # noqa: SLF001
        return result


class _Derived(torch.autograd.Function):  # type: ignore[misc]
    """Compute a call's derivatives at one level of transforms."""

    @staticmethod
    def forward(call: _Call, *inputs: object) -> Tensor:
        return call.below(*inputs)

    @staticmethod
    def setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.call, first, second, third, *ctx.geometry = inputs
        ctx.third = None if isinstance(third, Tensor) else third
        ctx.shape = output.shape
        ctx.save_for_backward(first, second)
        ctx.save_for_forward(first, second)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        _, *needed = ctx.needs_input_grad
        if gradient is None:
            return (None,) * (1 + len(needed))
        found = ctx.call.backward(*ctx.saved_tensors, ctx.geometry, needed, gradient)
        return None, *found, *[None] * (len(needed) - len(found))

    @staticmethod
    def jvp(ctx: torch.autograd.function.FunctionCtx, _: None, *tangents: Tensor | None) -> Tensor | None:
        of_first, of_second, of_third = tangents[:3]
        operation, third, geometry = ctx.call.operation, ctx.third, ctx.geometry
        # Before it calls `jvp`, torch switches off the tangents of this level and of all transforms below. The transforms below
        # need their tangents. So all tangents are switched on again, and only the tangents of this level are removed.
        with forward_ad._set_fwd_grad_enabled(ctx.call.tangents):  # noqa: SLF001 - it has no public name
            first, second = [forward_ad.unpack_dual(value, level=0).primal for value in ctx.saved_tensors]
            terms = []
            if of_first is not None:
                terms.append(operation(of_first, second, third, *geometry))
            if of_second is not None:
                terms.append(operation(first, of_second, third, *geometry))
            if of_third is not None:
                terms.append(of_third[:, None, None].expand(ctx.shape).clone())
            return reduce(torch.add, terms) if terms else None


def _has_tangent(tensor: Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None


def _with_derivatives(operation: object, backward: Backward, keyset: object, *inputs: object) -> Tensor:
    call = _Call(operation, backward, keyset, torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled())  # noqa: SLF001
    # A compiled `torch.func.jvp` makes tangents that `forward_ad.unpack_dual` does not see. So a call inside a transform always
    # gets derivatives.
    transforms = torch._C._are_functorch_transforms_active()  # noqa: SLF001 - `Function.apply` asks the same
    tensors = [value for value in inputs[:3] if isinstance(value, Tensor)]
    needed = call.gradients and any(value.requires_grad for value in tensors)
    if not (needed or transforms or any(map(_has_tangent, tensors))):
        return call.below(*inputs)
    # The dispatcher already calls each transform in turn. `_Derived.apply` would call the transforms a second time, so `apply`
    # of its base class is called.
    apply = super(torch.autograd.Function, _Derived).apply
    with enable_single_level_autograd_function() if transforms else nullcontext():
        result: Tensor = apply(call, *inputs)
    return result


def _batched(operation: Any, folds: bool, info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
    """Compute an operation for a batch of `torch.vmap`.

    If ``folds`` is set and only the first argument has a batch axis, all samples of the batch become images of one call.
    Otherwise each sample is computed by a call of its own.
    """
    first, second, third, *geometry = inputs
    shape = None if third is None or isinstance(third, Tensor) else third
    dims = (in_dims[0], in_dims[1], None if shape is not None else in_dims[2])
    if folds and dims[0] is not None and dims[1:] == (None, None):
        images = first.movedim(dims[0], 0)
        batch, count = images.shape[:2]
        if shape is not None:
            third = [batch * count, *shape[1:]]
        y = operation(images.flatten(0, 1), second, third, *geometry)
        return y.unflatten(0, (batch, count)), 0

    if not info.batch_size:
        raise ArgumentError(f"{operation}: torch.vmap was given a batch of no samples; pass a batch of at least one sample")

    def sample(index: int) -> list[Any]:
        pairs = zip((first, second, third), dims, strict=True)
        return [value if dim is None else value.select(dim, index) for value, dim in pairs]

    return torch.stack([operation(*sample(index), *geometry) for index in range(info.batch_size)]), 0
