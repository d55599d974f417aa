"""Check on the first microbatch that the backward pass of each block fits its forward pass.

A block that stores its input must return the same output again. :mod:`petra.engine.options.checked_inverse` checks reversible ones.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import chain, product
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from petra.engine.block import BlockRunner, WrappedRunner
from petra.engine.stage import Stage
from petra.engine.weights import WeightVersion
from petra.engine.worker import Worker
from petra.errors import ModelError, invalid
from petra.reversible.replay import has_own_code, is_compiled
from petra.specs import Streams
from petra.torch_private import leaves_of, module_hooks, storage_key, tree_leaves, version_counter

log = logging.getLogger(__name__)
Samples = list[tuple[Tensor, Tensor]]
Marks = dict[tuple[str, str], tuple[Any, ...]]
Left = tuple[Worker, Marks, list[Tensor | None]]  # a worker, marks of its stage, and the gradients of its parameters


def unchecked(stage: Stage) -> Iterator[BlockRunner]:
    """Yield the runners of blocks that have not been checked, or that have changed since, and count them as checked."""
    for runner in stage.runners if stage.has_backward else ():
        while isinstance(runner, WrappedRunner):
            runner = runner.inner
        function = runner.function
        found = [(type(m), m.training, module_hooks(m)) for m in function.module.modules()]
        if function.checked != found and not isinstance(function, CheckedFunction):  # or its check is pending
            function.checked = found
            yield runner


class CheckedFunction:
    """Takes the place of a runner's :class:`BlockFunction` until one microbatch has passed forward and backward.

    Streams may differ by eps^0.6 of their largest entry, and gradients by eps^0.4 of their norm, where eps is that of the type in
    which the block computes (docs/own_model.md). Other differences raise a ModelError that names the block.
    """

    def __init__(self, runner: BlockRunner, autocast: torch.dtype | None, warned: set[str]) -> None:
        self.runner, self.function, self._autocast, self.warned = runner, runner.function, autocast, warned
        self._m: int | None = None
        runner.function = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)

    def __call__(self, m: int, x: Streams, version: WeightVersion | None) -> Streams:
        if self._m is None and has_own_code(self.module) and not is_compiled(self.module):  # a mode disables that
            from petra.engine.options.passed_tensors import watch_reads

            with watch_reads(id(self.warned), self.name, x):
                y = self.function(m, x, version)
        else:
            y = self.function(m, x, version)
        if self._m is None:
            self._m, self.version, self.x, self.y = m, version, samples(x), samples(y)
            types = [self._autocast, *(t.dtype for t in chain(x, y, self.parameters.values()))]
            self.eps = max(torch.finfo(kind).eps for kind in types if kind is not None and kind.is_floating_point)
            self._scale = max(entries.abs().max().item() for entries, _ in (*self.x, *self.y))
        if m == self._m and torch.is_grad_enabled():  # the backward pass differentiates this graph
            self.end(y, version)
            off = self.difference(samples(y), self.y)
            if version is self.version and off > self.eps**0.6:
                expected = "the same output for the same input again (random numbers from torch's global generators, no state)"
                raise invalid(self.name, expected, f"one that differs by {off:.1g} of its largest entry", ModelError)
        return y

    def end(self, y: Streams, version: WeightVersion | None) -> None:
        """Stop checking, and check the graph of an output and the attributes of the block."""
        self.runner.function = self.function
        own = [] if version is not None else self.parameters.values()
        for leaf in leaves_of(*y):
            if isinstance(leaf, nn.Parameter) and not any(leaf is p for p in own):
                expected = "a function of its input and its parameters, as attributes of modules"
                raise invalid(self.name, expected, f"one that reads another parameter {[*leaf.shape]}", ModelError)
        for key, module in self.module.named_modules():
            for attribute, value in vars(module).items():
                derived = any(name.startswith(f"{attribute}_") for name in module._parameters)  # as weight of weight_g and weight_v
                if not derived and any(isinstance(t, Tensor) and t.grad_fn is not None for t in tree_leaves(value)):
                    if not self.warned:
                        what = "from which no gradient comes back: only outputs carry gradients"
                        log.warning("%s: forward stores %s, %s", self.name, f"{key}.{attribute}".removeprefix("."), what)
                    self.warned.add(attribute)

    def difference(self, found: Samples, expected: Samples) -> float:
        pairs = [(a, b) for own, other in zip(found, expected, strict=True) for a, b in zip(own, other, strict=True)]
        off = max((a - b).abs().max().item() for a, b in pairs) / max(self._scale, 1e-300)
        return off if isfinite(off) else 0.0  # the update reports what is not finite


def samples(streams: Streams) -> Samples:
    """Return some entries of each stream, and the sums of up to 64 parts divided by the roots of their sizes, in float64."""
    found = []
    for stream in streams:
        parts = [part.flatten() for part in torch.split(stream.detach(), max(1, -(-len(stream) // 64)))]
        step = max(1, stream.numel() // 1024)
        entries = torch.cat([part[::step] for part in parts]).double()
        found.append((entries, torch.stack([part.sum(dtype=torch.float64) / max(1, part.numel()) ** 0.5 for part in parts])))
    return found


def left_by(workers: Iterable[Worker]) -> list[Left]:
    """Return what the stages of workers have."""
    return [(worker, marks_of(worker), [p.grad for p in worker.stage.gradients.parameters]) for worker in workers]


def marks_of(worker: Worker) -> Marks:
    """Return marks of a worker's stage by kind and name, which differ after a change; 64 entries show changes by ``.data``."""
    found, sampled = Marks(), dict[tuple[str, str], Tensor]()
    for block, root in ((runner.function.name, runner.function.module) for runner in worker.stage.runners):
        found |= {("modes", f"{block}, {name}, mode"): (part.training,) for name, part in root.named_modules()}
        for kind, (name, t) in chain(product(["parameters"], root.named_parameters()), product(["buffers"], root.named_buffers())):
            for key, own in (((kind, f"{block}, {name}"), t), (("gradients", f"{block}, {name}.grad"), t.grad)):
                found[key] = () if own is None else (id(own), storage_key(own), version_counter(own))
                if own is not None:
                    flat = own.detach().flatten()
                    sampled[key] = flat[:: max(1, len(flat) // 64)].contiguous().view(torch.uint8)  # bytes: NaN differs from NaN
    if sampled:  # one copy to the host, which waits for the device
        joint = torch.cat([t.to(flat.device) for t in sampled.values()]).cpu()
        parts = torch.split(joint, [*map(len, sampled.values())])
        found |= {key: (*found[key], part.tolist()) for key, part in zip(sampled, parts, strict=True)}
    return found
