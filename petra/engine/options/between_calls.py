"""Notice what somebody else changed between two calls of ``train``: parameters, gradients, statistics and modes."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from itertools import chain

from torch import Tensor

from petra.engine.checks import Left, marks_of
from petra.engine.options.state import kinds_of
from petra.engine.worker import Worker
from petra.errors import ModelError, invalid

log = logging.getLogger(__name__)


def renew(left: Iterable[Left], *kinds: str) -> None:
    """Set the marks of some kinds again, after petra has changed what they mark. Gradients that are others are set aside."""
    for worker, marks, gradients in left:
        for p, own in zip(worker.stage.gradients.parameters, gradients, strict=True):
            p.grad = own  # also after zero_grad()
        if kinds:
            marks.update({key: mark for key, mark in marks_of(worker).items() if key[0] in kinds})


def notice_changes(left: Iterable[Left], noticed: set[str], *, modes: bool) -> None:
    """Set gradients aside that train did not leave, let other changes count, and name all in one warning per kind.

    Args:
        left: What the stages had at the end of the last call.
        noticed: Kinds of changes that need no warning, or had one.
        modes: Whether modes matter.

    Raises:
        ModelError: If a block has been set to evaluation mode, or gradients have been changed in the middle of an update.
    """
    for each in left:
        _notice(each, noticed, modes)
    renew(left, "parameters", "buffers", "gradients")


def _notice(left: Left, noticed: set[str], modes: bool) -> None:
    worker, marks, gradients = left
    stage, found = worker.stage, dict[str, list[str]]()
    others = {id(p) for p, own in zip(stage.gradients.parameters, gradients, strict=True) if not (p.grad is None or p.grad is own)}
    renew([left])
    for (kind, name), mark in marks_of(worker).items():
        if marks.get((kind, name), mark) != mark:
            found.setdefault(kind, []).append(name)
    if modes and "modes" in found:
        for runner in stage.runners:
            block, parts = runner.function.name, [*runner.function.module.named_modules()]
            if any(f"{block}, {name}, mode" in found["modes"] for name, _ in parts) and not any(part.training for _, part in parts):
                expected = "the mode in which train left it (call .train(); freeze layers before the pipeline is built)"
                raise invalid(block, expected, "evaluation mode", ModelError)
        _warn("modes", found["modes"], "training continues in them", noticed)
    blocks = [(r.function.name, r.function.module) for r in stage.runners]
    named = {f"{block}, {name}": t for block, own in blocks for name, t in chain(own.named_parameters(), own.named_buffers())}
    accumulated, edited = found.get("gradients", []), [*found.get("parameters", []), *found.get("buffers", [])]
    if accumulated and worker.microbatches_done % stage.gradients.k:
        expected = "that of a part of an update, as train left it (use torch.autograd.grad, or zero_grad() before backward())"
        raise invalid(accumulated[0], expected, "another one", ModelError)
    if accumulated:
        stage.gradients.zero()
    foreign = [f"{name}.grad" for name, p in named.items() if id(p) in others]
    _warn("gradients", accumulated + foreign, "which training sets aside", noticed)
    if edited:
        take_edits(worker, [named[name] for name in edited])
    _warn("parameters", found.get("parameters", []), "training continues from them", noticed)
    _warn("buffers", found.get("buffers", []), "training continues from them", noticed)


def _warn(kind: str, names: Collection[str], what: str, noticed: set[str]) -> None:
    if names and kind not in noticed:
        noticed.add(kind)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        log.warning("%s have changed since the last call of train, %s: %s%s", kind, what, min(names), more)


def take_edits(worker: Worker, tensors: Iterable[Tensor]) -> None:
    """Let changed parameters and buffers count: what was derived from their former values, such as master weights, starts again."""
    edited, kinds = {*tensors}, kinds_of(worker)
    kept = {kind: {p: t for p, t in own.items() if p not in edited} for kind, own in kinds.items()}
    previous = kinds["method/previous"]
    worker.stage.resume(worker.microbatches_done // worker.stage.gradients.k, previous | {p: p for p in edited & previous.keys()})
    for part in worker.update.parts:
        part.resume(kept)
