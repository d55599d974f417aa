"""Inputs that blocks store in another format than that of their tensors, such as int8, between forward and backward."""

from __future__ import annotations

from dataclasses import replace

import torch

from petra.engine.block import BlockRunner, Stored, WrappedRunner
from petra.engine.checks import CheckedFunction
from petra.reversible import Gradients
from petra.specs import PackedPart, Streams, TensorSpec, in_own_memory, is_side


class FormattedInputs(WrappedRunner):
    """A block that stores its input in a format. Its backward pass starts from the rounded input.

    Args:
        inner: Runner of a block that stores its input.
        name: Name of the format.
    """

    def __init__(self, inner: BlockRunner, name: str) -> None:
        super().__init__(inner)
        self.name, self._part, self._specs = name, PackedPart(()), tuple[TensorSpec, ...]()

    def forward(self, m: int, x: Streams) -> Streams:
        y = super().forward(m, x)
        inputs = self.stored[m].inputs
        specs = tuple([TensorSpec(tuple(t.shape), t.dtype) for t in inputs])
        if specs != self._specs:
            formatted = (spec if is_side(spec) else replace(spec, message_format=self.name) for spec in specs)
            self._part, self._specs = PackedPart(tuple(formatted)), specs
        self.stored[m] = Stored(tuple([in_own_memory(t) for t in self._part.pack(inputs)]))
        return y

    def backward(self, m: int, y: Streams, dy: Streams) -> tuple[Streams, Streams, Gradients]:
        if isinstance(checked := self.inner.function, CheckedFunction) and self.stored[m].inputs:
            checked.eps = max(checked.eps, torch.finfo(torch.bfloat16).eps)  # the second output is one of a rounded input
        self.stored[m] = Stored(self._part.unpack(self.stored[m].inputs))
        return super().backward(m, y, dy)
