"""Stand-ins for tensors that other processes have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from petra.errors import ModelError, invalid
from petra.torch_private import tree_leaves

NAMES = (
    "shape dtype device ndim is_leaf grad grad_fn is_cuda is_cpu is_mps is_xpu is_meta is_sparse is_quantized layout nbytes "
    "itemsize _version size dim numel nelement stride element_size is_floating_point is_complex is_contiguous is_inference __len__"
)
"""What may be asked of a stand-in."""
ASKED = {f if callable(f) else f.__get__ for f in (getattr(Tensor, name) for name in NAMES.split())}


class Absent(Tensor):
    """A tensor whose shape, type and device are known. Reading its numbers is an error.

    Attributes:
        what: For the error: its name, what is expected of code that reads it, and what was found.
        trained: Whether it requires gradients.
    """

    what: tuple[str, str, str]
    trained: bool

    @staticmethod
    def of(
        shape: Sequence[int], dtype: torch.dtype, device: torch.device, what: tuple[str, str, str], *, trained: bool = False
    ) -> Absent:
        """Return a stand-in, with memory for one number."""
        made: Absent = torch.zeros((), dtype=dtype, device=device).expand(*shape).as_subclass(Absent)
        made.what, made.trained = what, trained
        return made

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """As its attribute says."""
        return self.trained

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if function in ASKED:
            return super().__torch_function__(function, types, arguments, named or {})  # type: ignore[no-untyped-call]
        if function is torch.cat and all(isinstance(each, Absent) for each in arguments[0]):
            first, *_ = arguments[0]
            shape = (sum(map(len, arguments[0])), *first.shape[1:])
            return Absent.of(shape, first.dtype, first.device, first.what)  # parts of one batch
        found = next(each for each in tree_leaves((arguments, named)) if isinstance(each, Absent))
        raise invalid(*found.what, ModelError)

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{self.what[0]}, {tuple(self.shape)}, in another process"


class AbsentWeights(dict[str, Any]):
    """Parameters of a module, by the names below it, whose stand-ins are made when they are asked for."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._device = module, device

    def items(self) -> Any:
        for name, weight in self._module.named_parameters():
            yield name, self._made(name, weight)

    def __contains__(self, name: object) -> bool:
        return name in self._module._parameters

    def __getitem__(self, name: str) -> Any:
        weight = self._module._parameters[name]
        return None if weight is None else self._made(name, weight)

    def _made(self, name: str, weight: Tensor) -> Absent:
        expected = "a loss of the model's outputs, since its weights are in the stages of a pipeline"
        what = (f"{name} in compute_loss", expected, "one that reads weights")
        return Absent.of(weight.shape, weight.dtype, self._device, what, trained=weight.requires_grad)
