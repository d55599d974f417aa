"""The losses of a ``Trainer`` on the last stage of its pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from petra.engine.metrics import count_targets
from petra.errors import ModelError, require
from petra.huggingface.blocks import kind_of
from petra.huggingface.inputs import next_tokens
from petra.huggingface.load import base_of
from petra.models.head_loss import LinearCrossEntropy
from petra.specs import IGNORED


class OfLogits:
    """Loss that takes the logits, or hidden states and the weights of the head, and what has travelled with them."""

    outputs, mean_over_targets = (2, 3, 4), True  # a share is one of as many equal targets as there are replicas

    def __init__(self, function: Callable[[Tensor, Tensor, Sequence[Tensor]], Tensor]) -> None:
        self._function = function

    def __call__(self, found: Tensor, *rest: Tensor) -> Tensor:
        *weights, side, _ = rest
        return self._function(found, side, weights)


class Chunked:
    """Loss without whole logits, of the targets that have travelled."""

    outputs, mean_over_targets = (3, 4), True

    def __init__(self, trainer: Any, loss: LinearCrossEntropy, *, training: bool) -> None:
        self._trainer, self._loss, self._training = trainer, loss, training

    def __call__(self, hidden: Tensor, weight: Tensor, *rest: Tensor) -> Tensor:
        *bias, side, _ = rest
        trainer = self._trainer
        batch, facts = trainer.form.unpack(side)
        (name, *_), size = trainer.label_names, trainer.form.size or 0
        require(name in batch, "loss_rows", f"None for rows without {name}", self._loss.rows, ModelError)
        labels = batch[name]
        if kind_of(base_of(trainer.model)) == "causal":
            targets = next_tokens(labels, size)
        else:
            targets = nn.functional.pad(labels, (0, size - labels.shape[1]), value=IGNORED).flatten()
        hidden = hidden[: len(targets)]
        count = count_targets(targets)
        # A mean of no targets is not finite.
        filling = self._training and not facts["count"]
        if filling or (not count and (not self._training or facts["items"] is not None)):
            mean = torch.stack([t.sum() for t in (hidden, weight, *bias)]).sum() * 0
        else:
            mean = self._loss(hidden, weight, *bias, targets)
        if not self._training:
            trainer.keep_part(batch, facts, torch.stack([mean * count, count.to(mean.dtype)])[None])
            return torch.zeros((), device=hidden.device)
        if filling:
            return mean
        whole: Tensor = mean * share_of(trainer, count, facts["items"], facts["of"]) * trainer.args.gradient_accumulation_steps
        return whole


def share_of(trainer: Any, count: Any, items: Any, of: int = 1) -> Any:
    """Return the factor of a mean over targets in the loss of an update, or of an evaluated batch, as ``Trainer`` computes it.

    Args:
        count: Number of targets of the mean.
        items: ``num_items_in_batch``, or None.
        of: Number of means in the loss.
    """
    if items is None:
        return 1 / of
    replicas = trainer.dp if trainer.args.average_tokens_across_devices else 1
    ignored = kind_of(base_of(trainer.model)) == "bert" and trainer.label_smoother is None  # BertForMaskedLM's own loss is a mean
    return replicas if ignored else count * replicas / items


def check_chunks(trainer: Any, rows: int, *, own: bool) -> None:
    """Check that :class:`Chunked` computes the loss that a trainer and its model ask for.

    Args:
        rows: Number of tokens of a chunk.
        own: Whether the trainer has a loss or a prediction of its own.

    Raises:
        ConfigError: If not.
    """
    base, args = base_of(trainer.model), trainer.args
    asked = own or (trainer.compute_metrics is not None and not args.prediction_loss_only)
    causal = kind_of(base) == "causal" and base.loss_function is ForCausalLMLoss
    for expected, refused in (
        ("None with a loss or a prediction of its own, or compute_metrics, which need logits", asked),
        ("None with a loss_is_scaled_for_ga", trainer.loss_is_scaled_for_ga is not None),
        ("None with another loss than that of tokens (ForCausalLM, BertForMaskedLM)", not causal and not hasattr(base, "cls")),
    ):
        require(not refused, "loss_rows", expected, rows)
