"""The private names of torch that petra uses, each with the reason. All are in the oldest torch that petra accepts.

No other file uses private names of torch, so a new release of torch has to be compared with this file only
(``tests/test_torch_private.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # the documented way to see every operation
from torch.utils._pytree import tree_leaves as tree_leaves  # tensors in nested arguments of an operator

from petra.errors import ModelError, invalid

NormBase = _NormBase  # of batch and instance normalisations
Dropout = _DropoutNd  # of all kinds of dropout
Tensors = Sequence[Tensor]
Hook = Callable[[Any], Any]
DEVICE = torch.ops.prim.device.default
"""What ``Tensor.device`` calls if a tensor is fake; operators have no public names."""

foreach_add, foreach_add_, foreach_copy_ = (getattr(torch, f"_foreach_{n}") for n in ("add", "add_", "copy_"))
foreach_lerp_, foreach_mul, foreach_mul_, foreach_norm = (getattr(torch, f"_foreach_{n}") for n in ("lerp_", "mul", "mul_", "norm"))
foreach_sub, foreach_zero_ = (getattr(torch, f"_foreach_{n}") for n in ("sub", "zero_"))
any_autocast, set_grad_enabled = torch._C._is_any_autocast_enabled, torch._C._set_grad_enabled  # public ones take 5 µs longer


def preserve_version_counter(tensors: tuple[Tensor, ...]) -> AbstractContextManager[None]:
    """Return a context in which writing to ``tensors`` does not invalidate autograd graphs that refer to them.

    PipeMare differentiates graphs whose weights were updated in between, which autograd otherwise refuses.
    """
    context: AbstractContextManager[None] = torch.autograd._unsafe_preserve_version_counter(tensors)  # type: ignore[attr-defined]
    return context


def vector_jacobian_products(
    outputs: Tensors, inputs: Sequence[Tensor | GradientEdge], gradients: Tensors
) -> tuple[Tensor | None, ...]:
    """Return the vector-Jacobian products of ``outputs`` with respect to ``inputs``; None for inputs that were not used.

    ``torch.autograd.grad`` checks and converts its arguments in Python, which takes half as long as the backward pass of a small
    block. Autograd's engine checks shapes and types too.
    """
    try:
        return torch.autograd.Variable._execution_engine.run_backward(
            tuple(outputs), tuple(gradients), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
        )
    except RuntimeError as error:
        if "use_reentrant=True" not in str(error):
            raise
        raise invalid("torch.utils.checkpoint in a block", "use_reentrant=False", "use_reentrant=True", ModelError) from error


def leaves_of(*tensors: Tensor) -> list[Tensor]:
    """Return the leaves of the autograd graph of some tensors, each once: what their gradient could be added to."""
    found, seen = [t for t in tensors if t.is_leaf and t.requires_grad], set[Any]()
    nodes = [t.grad_fn for t in tensors if t.grad_fn is not None]
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):
                found.append(node.variable)
            nodes += [following for following, _ in node.next_functions if following is not None]
    return found


def version_counter(tensor: Tensor) -> int | None:
    """Return a number that grows when an operation writes to ``tensor``; None for inference tensors, which have none."""
    return None if tensor.is_inference() else tensor._version


def is_view(tensor: Tensor) -> bool:
    """Return whether a tensor is a view of another one, as autograd sees it."""
    return tensor._is_view()


def is_transformed() -> bool:
    """Return whether the code runs inside a transform of ``torch.func`` or is traced by ``torch.jit.trace``."""
    return torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state() is not None


def is_replica(module: nn.Module) -> bool:
    """Return whether ``nn.DataParallel`` has made a module, which has no parameters then."""
    return getattr(module, "_is_replica", False)


def module_hooks(module: nn.Module) -> list[Hook]:
    """Return the hooks of a module, which see its input, output or their gradients."""
    found = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return [hook for hooks in found for hook in hooks.values()]


def cast_leaf(tensor: Tensor) -> Tensor | None:
    """Return the leaf of which a tensor, or the tensor that it is a view of, is a cast; None if it is no cast of a leaf."""
    node = (tensor if tensor._base is None else tensor._base).grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return None
    leaf: Tensor | None = getattr(node.next_functions[0][0], "variable", None)
    return leaf


def inner_tensors(tensor: Tensor) -> dict[str, Tensor]:
    """Return the tensors that a tensor subclass without memory of its own consists of, by attribute; none for other tensors."""
    names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
    return {name: getattr(tensor, name) for name in names}


def take_hooks(parameter: Tensor) -> Mapping[int, Hook]:
    """Remove the functions that ``register_hook`` has registered, and return them. Their handles remove them from the result.

    Autograd would call them at each backward pass.
    """
    hooks: Mapping[int, Hook] | None = parameter._backward_hooks
    parameter._backward_hooks = None
    return hooks or {}


@contextmanager
def withheld_hooks(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Withhold the functions of ``register_hook`` inside the ``with`` block, in which autograd would call them once more."""
    taken = [(p, take_hooks(p)) for p in parameters if p._backward_hooks]
    try:
        yield
    finally:
        for p, hooks in taken:
            p._backward_hooks = hooks  # type: ignore[assignment]


def hooks_of(parameter: Tensor) -> tuple[list[Hook], list[Hook]]:
    """Return the functions that ``register_hook`` and ``register_post_accumulate_grad_hook`` have registered."""
    return [*(parameter._backward_hooks or {}).values()], [*(parameter._post_accumulate_grad_hooks or {}).values()]


def storage_key(tensor: Tensor) -> int:
    """Return a number that identifies the tensor's storage. Fake tensors have one too, although they have no address."""
    return int(tensor.untyped_storage()._cdata)


def set_recompile_limit(limit: int) -> None:
    """Set how many variants ``torch.compile`` may make of one code object."""
    import torch._dynamo  # takes a second

    torch._dynamo.config.recompile_limit = limit


def fake_tensor_mode() -> AbstractContextManager[Any]:
    """Return a context in which tensors have shapes but no data. Unlike on the meta device, autocast applies."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes a second

    return FakeTensorMode()


def eager() -> AbstractContextManager[Any]:
    """Return a context in which functions of ``torch.compile`` run without being compiled."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()  # it takes a second


def default_group_timeout(device: torch.device) -> timedelta:
    """Return the timeout of the default process group on a device, which new groups must be given; they would use torch's own.

    It is torch's own if another backend replaces gloo or NCCL.
    """
    try:
        timeout: timedelta = dist.group.WORLD._get_backend(device).options._timeout  # type: ignore[union-attr]
    except AttributeError:
        timeout = dist.constants.default_pg_timeout
    return timeout


def skips_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``optimizer.step()`` does nothing if the tensor ``optimizer.found_inf`` is 1, without reading it.

    ``torch.amp.GradScaler`` relies on the same attribute.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def cpp_compiler() -> str:
    """Return the C++ compiler that inductor uses on a CPU.

    Raises:
        Exception: If there is none, of a class that torch keeps private. Without this call, the first compilation raises it.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler

    return get_cpp_compiler()


def is_compiler_error(error: Exception) -> bool:
    """Return whether ``torch.compile`` has raised an error: its classes are private."""
    return type(error).__module__.startswith(("torch._dynamo.", "torch._inductor."))
