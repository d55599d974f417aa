"""``TrainingArguments`` of ``transformers`` as settings of a pipeline, and what can't be mapped."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import get_scheduler

from petra.engine.endpoints import Loss
from petra.errors import PetraError, located, require

MAPPED = re.compile(
    "output_dir|do_.*|resume_from_checkpoint|per_device_.*|gradient_accumulation_steps|num_train_epochs|max_steps|learning_rate|lr_.*|warmup_.*|"
    "optim|weight_decay|adam_.*|max_grad_norm|label_smoothing_factor|bf16|log.*|disable_tqdm|report_to|run_name|project|eval_.*|"
    "prediction_loss_only|metric_for_best_model|greater_is_better|save_.*|(data_)?seed|full_determinism|use_cpu|tf32|local_rank|"
    "ddp_(backend|timeout)|average_tokens_across_devices|dataloader_.*|remove_unused_columns|label_names|train_sampling_strategy|"
    "length_column_name|use_cache|accelerator_config"
)
"""Fields of ``TrainingArguments`` that are mapped, or change nothing here. Any other must have its default."""
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Variable that torchrun sets for each of its processes."""
UNMAPPED = ("model_init", "compute_loss_func", "compute_metrics", "optimizer", "lr_scheduler", "optimizer_cls_and_kwargs")
"""Attributes of a ``Trainer``, from arguments of its constructor, that must be None, and ``preprocess_logits_for_metrics``."""
VALUES = {
    "optim": "adamw_torch|adamw_torch_fused|sgd",
    "train_sampling_strategy": "random|sequential|group_by_length",
    "lr_scheduler_type": "(?!reduce_lr_on_plateau|greedy).*",
}
"""Patterns of the accepted values of arguments of which not all are mapped."""


def check_arguments(trainer: Any) -> None:
    """Check that a pipeline can do what the arguments of a ``Trainer`` ask for.

    Raises:
        ConfigError: If not. The message names every argument.
    """
    if ERROR_FILE in os.environ:
        sys.excepthook = _report_once
    args = trainer.args
    default = type(args)(output_dir=args.output_dir, use_cpu=args.use_cpu)
    names = [field.name for field in dataclasses.fields(args) if field.init and not MAPPED.fullmatch(field.name)]
    found = [f"{name}={getattr(args, name)}" for name in names if getattr(args, name) != getattr(default, name)]
    chosen = {name: str(getattr(value := getattr(args, name), "value", value)) for name in VALUES}
    found += [f"{name}={value}" for name, value in chosen.items() if not re.fullmatch(VALUES[name], value)]
    found += [name for name in (*UNMAPPED, "preprocess_logits_for_metrics") if getattr(trainer, name) is not None]
    require(not found, "PetraTrainer", "no argument that it can't map", ", ".join(found))
    started = int(os.environ.get("WORLD_SIZE", "1"))
    require(args.world_size == started, "use_cpu", f"true on a machine without GPUs, in {started} processes", args.use_cpu)
    require(args.n_gpu <= 1, "PetraTrainer", "a process for each GPU (torchrun --nproc-per-node)", f"{args.n_gpu} GPUs in one")


def _report_once(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Print an error of petra that ends the processes of torchrun in one line, once on each machine; any other as Python does."""
    if not isinstance(error, PetraError):
        sys.__excepthook__(kind, error, trace)
        return
    with suppress(FileExistsError):  # of the process that has reported it, in torchrun's folder for this start
        Path(os.environ[ERROR_FILE]).parents[1].joinpath("reported").touch(exist_ok=False)
        place = located(error)
        print(f"error: {error}" + (f" ({place})" if place else ""), file=sys.stderr, flush=True)


def rates(args: Any, steps: int) -> list[float]:
    """Return the learning rate of each of ``steps`` updates, from the scheduler of ``transformers``."""
    optimizer, found = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=args.learning_rate), []
    schedule = get_scheduler(args.lr_scheduler_type, optimizer, args.get_warmup_steps(steps), steps, args.lr_scheduler_kwargs)
    for _ in range(steps):
        found.append(float(schedule.get_last_lr()[0]))
        optimizer.step()
        schedule.step()
    return found


def optimizer(args: Any, module: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a stage, whose modules have in ``decayed`` the names of their own parameters with weight decay."""
    trained = {
        p: key in part.decayed  # type: ignore[operator]
        for part in module.modules()
        for key, p in part.named_parameters(recurse=False)
        if p.requires_grad
    }
    parts = ([p for p in trained if trained[p]], args.weight_decay), ([p for p in trained if not trained[p]], 0.0)
    groups = [{"params": params, "weight_decay": decay} for params, decay in parts if params]
    if args.optim == "sgd":
        return torch.optim.SGD(groups, lr=args.learning_rate)
    betas, fused = (args.adam_beta1, args.adam_beta2), args.optim == "adamw_torch_fused"
    return torch.optim.AdamW(groups, lr=args.learning_rate, betas=betas, eps=args.adam_epsilon, fused=fused)


class WeightedLoss:
    """Loss of training, times the weight of its microbatch: called for consecutive microbatches.

    Attributes:
        outputs: Numbers of outputs that the loss takes.
        weights: Weights of the microbatches to come.
    """

    def __init__(self, loss: Loss) -> None:
        self._loss, self.outputs, self.weights = loss, getattr(loss, "outputs", (1,)), deque[float]()

    def __call__(self, *tensors: Tensor) -> Tensor:
        return self._loss(*tensors) * self.weights.popleft()
