"""The private names of torch that petra uses, each with the reason and with what happens in a torch without it.

No other file uses private names of torch, so a new release of torch has to be compared with this file only
(``tests/test_torch_private.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # the documented way to see every operation
from torch.utils._pytree import tree_leaves as tree_leaves  # tensors in nested arguments of an operator

from petra.errors import PetraError

Tensors = Sequence[Tensor]
Hook = Callable[[Any], Any]
CAST = torch.ops.aten._to_copy.default
"""What ``Tensor.to`` calls; operators have no public names."""
DEVICE = torch.ops.prim.device.default
"""What ``Tensor.device`` calls if a tensor is fake."""


def foreach(name: str) -> Callable[..., Any]:
    """Return ``torch._foreach_<name>``, which applies an operation to many tensors with a few kernels.

    The public API has no such operations. torch's own optimizers call them by the same names.
    """
    operation: Callable[..., Any] = getattr(torch, f"_foreach_{name}")
    return operation


foreach_add, foreach_add_ = foreach("add"), foreach("add_")
foreach_mul, foreach_mul_ = foreach("mul"), foreach("mul_")
foreach_sub, foreach_sub_ = foreach("sub"), foreach("sub_")
foreach_copy_, foreach_lerp_, foreach_norm, foreach_zero_ = foreach("copy_"), foreach("lerp_"), foreach("norm"), foreach("zero_")


if TYPE_CHECKING:
    from torch.nn.modules.batchnorm import _NormBase

    NormBase = _NormBase
else:
    NormBase = next(c for c in reversed(nn.BatchNorm2d.__mro__) if "track_running_stats" in getattr(c, "__constants__", ()))
    """Class that defines parameters and running statistics of batch and instance normalisation, whatever torch calls it.

    InPlaceABN has the same parameters, buffers and state dictionary.
    """


def conv_forward(conv: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply a convolution with another weight and bias, with its stride, padding and padding mode.

    ``torch.func.functional_call`` does the same with more overhead, and runs hooks of the module; it is used otherwise.
    """
    method = getattr(conv, "_conv_forward", None)
    if method is not None:
        out: Tensor = method(x, weight, bias)
        return out
    parameters = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    out = torch.func.functional_call(conv, parameters, x)
    return out


def preserve_version_counter(tensors: tuple[Tensor, ...]) -> AbstractContextManager[None]:
    """Return a context in which writing to ``tensors`` does not invalidate autograd graphs that refer to them.

    PipeMare differentiates graphs whose weights were updated in between, which autograd otherwise refuses.

    Raises:
        PetraError: If this torch cannot do it.
    """
    found = getattr(torch.autograd, "_unsafe_preserve_version_counter", None)
    if found is None:
        raise PetraError(f"torch {torch.__version__} can't update weights of stored graphs: use method.keep=input or another torch")
    context: AbstractContextManager[None] = found(tensors)
    return context


autograd_engine = getattr(torch.autograd.Variable, "_execution_engine", None)


def vector_jacobian_products(outputs: Tensors, inputs: Tensors, gradients: Tensors) -> tuple[Tensor | None, ...]:
    """Return the vector-Jacobian products of ``outputs`` with respect to ``inputs``; None for inputs that were not used.

    ``torch.autograd.grad`` checks and converts its arguments in Python, which takes half as long as the backward pass of a small
    block. Autograd's engine checks shapes and types too. Without it, the public function is used.
    """
    if autograd_engine is None:
        return torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)
    found: tuple[Tensor | None, ...] = autograd_engine.run_backward(
        tuple(outputs), tuple(gradients), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )
    return found


def version(tensor: Tensor) -> int | None:
    """Return a number that grows when an operation writes to ``tensor``.

    None for inference tensors, and without the attribute: functions that write to their inputs are then not noticed.
    """
    return None if tensor.is_inference() else getattr(tensor, "_version", None)


def take_hooks(parameter: Tensor) -> Mapping[int, Hook]:
    """Remove the functions that ``register_hook`` has registered, and return them. Their handles remove them from the result.

    Autograd would call them at each backward pass. Without the attribute, it does.
    """
    hooks: Mapping[int, Hook] | None = getattr(parameter, "_backward_hooks", None)
    if not hooks:
        return {}
    parameter._backward_hooks = None
    return hooks


def hooks(parameter: Tensor) -> list[Hook]:
    """Return the functions that ``register_hook`` has registered; none without the attribute."""
    return [*(getattr(parameter, "_backward_hooks", None) or {}).values()]


def late_hooks(parameter: Tensor) -> list[Hook]:
    """Return the functions that ``register_post_accumulate_grad_hook`` has registered; none without the attribute."""
    return [*(getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()]


def storage_key(tensor: Tensor) -> int:
    """Return a number that identifies the tensor's storage. Fake tensors have one too, although they have no address.

    Without the attribute, it is the address, which tells real tensors apart.
    """
    storage = tensor.untyped_storage()
    return int(getattr(storage, "_cdata", None) or storage.data_ptr())


def holders(tensor: Tensor) -> tuple[int, int, int] | None:
    """Return how many objects refer to ``tensor``: in Python, in C++, and to its memory.

    None without the attributes, or for a tensor without memory of its own.
    """
    count = getattr(tensor, "_use_count", None)
    count_of_storage = getattr(torch._C, "_storage_Use_Count", None)
    if count is None or count_of_storage is None:
        return None
    try:
        key = storage_key(tensor)
    except (NotImplementedError, RuntimeError):
        return None
    return sys.getrefcount(tensor), count(), count_of_storage(key)


def _holders_of_a_new_tensor() -> tuple[int, int, int] | None:
    tensor = torch.empty(1)
    return holders(tensor)


ONE_HOLDER = _holders_of_a_new_tensor()
"""What :func:`holders` returns if one local variable of its caller refers to the tensor."""


def fake_tensor_mode() -> AbstractContextManager[Any]:
    """Return a context in which tensors have shapes but no data. Unlike on the meta device, autocast applies.

    Raises:
        PetraError: If this torch has no such mode. Memory can't be predicted then.
    """
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode
    except ImportError as error:
        raise PetraError(f"torch {torch.__version__} has no FakeTensorMode, so memory can't be predicted") from error
    mode: AbstractContextManager[Any] = FakeTensorMode()
    return mode


def set_recompile_limit(limit: int) -> None:
    """Set how many variants ``torch.compile`` may make of one code object. Without the setting, torch's own limit applies."""
    dynamo = getattr(torch, "_dynamo", None)
    if dynamo is not None and hasattr(dynamo.config, "recompile_limit"):
        dynamo.config.recompile_limit = limit


def default_group_timeout(device: torch.device) -> timedelta:
    """Return the timeout of the default process group on a device, which torch has no public function for.

    New groups must be given it. They would otherwise use torch's own, 30 minutes.

    Without these attributes, it is torch's own default.
    """
    group = dist.group.WORLD
    try:
        timeout: timedelta = group._get_backend(device).options._timeout  # type: ignore[union-attr]
    except AttributeError:
        timeout = dist.constants.default_pg_timeout
    return timeout


def default_store() -> Any:
    """Return the store of the default process group, or None if there is none or this torch doesn't give it out."""
    get = getattr(dist.distributed_c10d, "_get_default_store", None)
    if get is None or not dist.is_initialized():
        return None
    return get()


def skips_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``optimizer.step()`` does nothing if the tensor ``optimizer.found_inf`` is 1, without reading it.

    ``torch.amp.GradScaler`` relies on the same attribute. Without it, the host reads the flag and calls ``step()`` or not.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
