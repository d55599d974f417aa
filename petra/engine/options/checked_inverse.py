"""Check of a reversible block on the first microbatch: its inverse, and its gradients."""

from __future__ import annotations

from functools import partial
from math import isfinite

import torch
from torch import Tensor, nn

from petra.engine.block import Stored
from petra.engine.checks import CheckedFunction, samples
from petra.engine.weights import WeightVersion
from petra.errors import ModelError, invalid
from petra.reversible import Gradients
from petra.specs import Streams


def own_buffers(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Return the buffers that passes may change, each with its module and name: all but those that a process has once."""
    parts = [part for part in module.modules() if not hasattr(part, "once_per_process")]
    return [(part, name, buffer) for part in parts for name, buffer in part.named_buffers(recurse=False)]


class CheckedInverse(CheckedFunction):
    """Function of a reversible block that checks its inverse and its gradients, by one more forward and backward pass.

    The input that it reconstructs is compared with that of the forward pass, and its gradients with those of plain autograd. The
    check needs no more memory than the ordinary backward pass and one input of the block: it frees gradients one by one, and puts
    those of ``inverse_vjp`` into ``.grad`` meanwhile, which is zero at the first microbatch of an update.
    """

    def inverse_vjp(self, m: int, y: Streams, dy: Streams, version: WeightVersion | None) -> tuple[Streams, Streams, Gradients]:
        x, dx, gradients = self.function.inverse_vjp(m, y, dy, version)
        self.runner.function = self.function
        buffers = [(buffer, buffer.clone()) for *_, buffer in own_buffers(self.module)]
        plain = self.runner.with_graph(m, x, version)
        self.end(plain.outputs, version)
        again, given, found = samples(plain.outputs), samples(y), samples(x)
        off = self.difference(again, given)
        if version is self.version:  # a reconstructed y differs from the true one, which may be amplified
            off = max(off, self.difference(found, self.x) - 100 * self.difference(given, self.y))
        hooks = "(hooks, changes of state or a forward of its own that inverse_vjp ignores?)"
        if off > self.eps**0.6:
            expected = f"inverse_vjp to reconstruct the input of forward {hooks}"
            raise invalid(self.name, expected, f"one that differs by {off:.1g} of the largest entry", ModelError)
        for name in self._wrong_gradients(plain, dy, dx, gradients, version):
            expected = f"inverse_vjp to return the gradients of plain autograd {hooks}"
            raise invalid(self.name, expected, f"another gradient of {name}", ModelError)
        for buffer, value in buffers:
            buffer.copy_(value)
        return x, dx, gradients

    def inverse(self, m: int, y: Streams) -> Streams:
        """Reconstruct the input with the parameters. Its output at the version that the forward pass used is not compared."""
        self.version = None
        return self.function.inverse(m, y)

    def _wrong_gradients(
        self, plain: Stored, dy: Streams, dx: Streams, gradients: Gradients, version: WeightVersion | None
    ) -> list[str]:
        """Return the names of the gradients that plain autograd does not give. It frees each one as soon as it is compared."""
        scale = max(t.norm().item() for t in (*dx, *gradients.values()))
        dense = {p: p.grad for p, g in gradients.items() if p.grad is not None and p.grad.dtype == g.dtype and not g.is_sparse}
        held = dict(pair for pair in dense.items() if not pair[1].any())
        for p, grad in held.items():
            gradients[p] = grad.copy_(gradients[p])
        wrong, missing = list[str](), {name: gradients[p] for name, p in self.parameters.items() if p in gradients}

        def compare(name: str, own: Tensor | None, gradient: Tensor) -> Tensor | None:
            missing.pop(name, None)
            off = gradient.norm().item() if own is None else _distance(gradient, own)
            if isfinite(off) and off > self.eps**0.4 * gradient.norm().item() + self.eps**0.6 * scale:
                wrong.append(name)
            return None if gradient.is_sparse else gradient.new_zeros(()).expand_as(gradient)

        weights = self.parameters if version is None else version
        handles = [weights[name].register_hook(partial(compare, name, gradients.get(p))) for name, p in self.parameters.items()]
        _, plain_dx, _ = self.runner.differentiate(plain, dy, version)
        for handle in handles:
            handle.remove()
        for name, own in missing.items():
            compare(name, own, torch.zeros_like(own))
        for i, (own, gradient) in enumerate(zip(dx, plain_dx, strict=True)):
            compare(f"input {i + 1}", own, gradient)
        for p, grad in held.items():
            gradients[p] = grad.clone()
            grad.zero_()
        return wrong


def _distance(a: Tensor, b: Tensor) -> float:
    """Return the norm of a difference, which is computed in parts."""
    size = 0 if a.is_sparse or b.is_sparse or not a.dim() else max(1, len(a) // 64)
    parts = zip(torch.split(a, size), torch.split(b, size), strict=True) if size else [(a, b)]
    return float(torch.stack([(x - y).norm() for x, y in parts]).norm())
