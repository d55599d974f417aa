"""Code of users inside the model of ``PetraTrainer`` that does not fit two evaluations of a block, and gradients of their own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import TrainerCallback

from petra import ModelError
from petra.huggingface import PetraTrainer
from tests.huggingface.models import tiny
from tests.huggingface.test_trainer import arguments, losses, rows


def late(module: Any, x: Any, y: Tensor) -> Tensor:
    """Draw a mask in some microbatches only."""
    return y if y.is_meta or y.sum() < 0 else F.dropout(y, 0.5)


@torch.no_grad()
def growing(module: Any, x: Any, y: Tensor) -> None:
    module.down_proj.weight.mul_(1.01)


class Saliency(TrainerCallback):
    """Leaves gradients after each step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        for p in (p for p in self.trainer.model.parameters() if p.requires_grad):
            p.square().sum().backward()


def steps(folder: Path, method: str, hook: Callable[..., Any] | None = None, callback: Any = None) -> Any:
    model = tiny("LlamaForCausalLM", torch.float32)
    if hook is not None:
        for layer in model.model.layers:
            layer.mlp.register_forward_hook(hook)
    args = arguments(folder / method, max_steps=5, gradient_accumulation_steps=2, warmup_steps=0)
    trainer = PetraTrainer(model, args, train_dataset=rows(24), stages=2, method=method, callbacks=[callback] if callback else [])
    if callback:
        callback.trainer = trainer
    trainer.train()
    return losses(trainer)


def test_late_masks_are_the_same_in_both_evaluations(tmp_path: Path) -> None:
    found, expected = (steps(tmp_path, method, late) for method in ("reversible", "backprop"))
    assert [row[0] for row in found] == pytest.approx([row[0] for row in expected], rel=1e-5)
    assert expected != steps(tmp_path, "backprop")


def test_a_hook_that_changes_weights_is_refused_where_blocks_are_evaluated_twice(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"expected parameters that a forward pass leaves as they are.*got a change of .*down_proj"
    ):
        steps(tmp_path, "dsp", growing)


def test_gradients_of_a_callback_are_set_aside_or_refused(tmp_path: Path) -> None:
    assert steps(tmp_path, "1f1b", callback=Saliency()) == steps(tmp_path, "1f1b")
