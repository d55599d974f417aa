"""Notice what somebody else changed between two calls of ``train``: parameters, gradients, statistics and modes."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from petra.engine.checks import marks_of
from petra.engine.options.state import kinds_of
from petra.engine.worker import Worker
from petra.errors import ModelError, invalid

log = logging.getLogger(__name__)


def notice_changes(
    worker: Worker, left: Mapping[str, tuple[Any, ...]], gradients: Sequence[Tensor | None], noticed: set[str]
) -> None:
    """Set gradients aside that train did not leave, let changed parameters count, and name all changes in one warning per kind.

    Args:
        left: Marks of the stage at the end of the last call.
        gradients: Its gradients then, in the order of its parameters.
        noticed: Kinds of changes that need no warning, or had one.

    Raises:
        ModelError: If a block has been set to evaluation mode, or gradients have been changed in the middle of an update.
    """
    stage = worker.stage
    others = {id(p) for p, own in zip(stage.gradients.parameters, gradients, strict=True) if not (p.grad is None or p.grad is own)}
    for p, own in zip(stage.gradients.parameters, gradients, strict=True):
        p.grad = own  # also after zero_grad()
    changed = {name for name, mark in marks_of(worker).items() if left.get(name, mark) != mark}
    for runner in stage.runners:
        block, modules = runner.function.name, dict(runner.function.module.named_modules())
        if any(f"{block}, {name}, mode" in changed for name in modules) and not any(m.training for m in modules.values()):
            expected = "the mode in which train left it (call .train(); freeze layers before the pipeline is built)"
            raise invalid(block, expected, "evaluation mode", ModelError)
    _warn("modes", [name for name in changed if name.endswith(", mode")], "training continues in them", noticed)
    if stage.resumed:  # from a checkpoint or a state dict
        return
    named = {f"{r.function.name}, {name}": p for r in stage.runners for name, p in r.function.module.named_parameters()}
    accumulated = [name for name in changed if name.endswith(".grad")]
    if accumulated and worker.microbatches_done % stage.gradients.k:
        expected = "that of a part of an update, as train left it (use torch.autograd.grad, or zero_grad() before backward())"
        raise invalid(accumulated[0], expected, "another one", ModelError)
    if accumulated:
        stage.gradients.zero()
    foreign = [f"{name}.grad" for name, p in named.items() if id(p) in others]
    _warn("gradients", accumulated + foreign, "which training sets aside", noticed)
    edited = [name for name in changed if name in named]
    if edited:
        take_edits(worker, [named[name] for name in edited])
    _warn("parameters", edited, "training continues from them", noticed)
    buffers = [name for name in changed if name not in named and not name.endswith((".grad", ", mode"))]
    _warn("buffers", buffers, "training continues from them", noticed)


def _warn(kind: str, names: Collection[str], what: str, noticed: set[str]) -> None:
    if names and kind not in noticed:
        noticed.add(kind)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        log.warning("%s have changed since the last call of train, %s: %s%s", kind, what, min(names), more)


def take_edits(worker: Worker, parameters: Iterable[nn.Parameter]) -> None:
    """Let changed parameters count: what was derived from their former values, such as master weights, starts again from them."""
    edited, kinds = {*parameters}, kinds_of(worker)
    kept = {kind: {p: t for p, t in tensors.items() if p not in edited} for kind, tensors in kinds.items()}
    previous = kinds["method/previous"]
    worker.stage.resume(worker.microbatches_done // worker.stage.gradients.k, previous | {p: p for p in edited & previous.keys()})
    for part in worker.update.parts:
        part.resume(kept)
