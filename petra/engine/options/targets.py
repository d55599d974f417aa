"""Targets that not every run has: padding rows of an evaluation, and those that do not fit a loss."""

from __future__ import annotations

from traceback import walk_tb

from torch import Tensor

from petra.errors import ModelError, PetraError, first_line, invalid, require
from petra.specs import IGNORED, Streams, TensorSpec, are_integers


def without_padding(output: Streams, targets: Tensor, rows: int, batch_size: int, count: int) -> tuple[Streams, Tensor]:
    """Return the first ``rows`` of ``batch_size`` rows of the first ``count`` outputs and of the targets. Other outputs stay."""
    for t in output[:count]:
        expected = f"{batch_size} or {len(targets)} rows, some of which are padding (or a batch size that needs none)"
        fits = t.dim() > 0 and len(t) in (batch_size, len(targets))
        require(fits, "output of the last block", expected, TensorSpec(tuple(t.shape), t.dtype), ModelError)
    kept = tuple(t[: len(t) * rows // batch_size] if i < count else t for i, t in enumerate(output))
    return kept, targets[: len(targets) * rows // batch_size]


def misfit(error: Exception, output: Tensor, targets: Tensor) -> PetraError | None:
    """Return an error of a loss that names the targets; None if they are not at fault."""
    *_, (innermost, _) = walk_tb(error.__traceback__)
    classes = range(output.shape[1] if output.dim() > 1 and are_integers(targets) and targets.is_cpu else 0)
    outside = bool(classes) and not {*targets.flatten().tolist()} <= {IGNORED, *classes}
    if "memory" in str(error) or not (outside or innermost.f_globals["__name__"].startswith(("torch.", "petra."))):
        return None
    span = f" from {targets.min()} to {targets.max()}" if targets.is_cpu and targets.numel() else ""
    forms = [str(TensorSpec(tuple(t.shape), t.dtype)) for t in (output, targets)]
    expected = f"some that fit {forms[0]}" + (f", from 0 to {classes[-1]}" if outside else "")
    return invalid("targets", expected, f"{forms[1]}{span} ({first_line(error)})", ModelError)
