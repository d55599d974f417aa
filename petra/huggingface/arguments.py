"""``TrainingArguments`` of ``transformers`` as settings of a pipeline, and what can't be mapped."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.state import AcceleratorState, PartialState
from transformers import TrainingArguments

from petra.errors import PetraError, located, require
from petra.huggingface.callbacks import GRADIENTS, names_in

ARGUMENTS = {
    "output_dir|do_.*|resume_from_checkpoint|log(?!ging_nan).*|disable_tqdm|report_to|run_name|project|eval_.*|metric_for_best_model|"
    "greater_is_better|save_.*|load_best_model_at_end|ignore_data_skip|restore_callback_states_from_checkpoint|"
    "include_num_input_tokens_seen|include_for_metrics|prediction_loss_only|label_names|remove_unused_columns|length_column_name|"
    "train_sampling_strategy|accelerator_config|dataloader_.*|num_train_epochs|max_steps|learning_rate|lr_.*|warmup_.*|"
    "weight_decay|adam_.*|optim|optim_args|label_smoothing_factor|(data_)?seed|full_determinism|use_cpu|tf32|use_cache|"
    "skip_memory_metrics|per_device_eval_batch_size": "as in `Trainer`",
    "per_device_train_batch_size": "rows of a microbatch",
    "gradient_accumulation_steps": "microbatches of an update",
    "max_grad_norm": "as in `Trainer` with methods that flush; of each stage with others",
    "bf16": "blocks compute under autocast; messages and weights keep their type",
    "activation_checkpointing(_kwargs)?|gradient_checkpointing(_kwargs)?": "blocks store their input (`method.keep=input`)",
    "logging_nan_inf_filter": "no effect: a loss or gradient that is not finite ends the run in an error",
    "average_tokens_across_devices": "as in `Trainer`, over replicas",
    "ddp_.*|local_rank|torch_empty_cache_steps": "no effect",
}
"""What becomes of an argument, by patterns of names. Any other must have its default."""
MAPPED = re.compile("|".join(ARGUMENTS))
REFUSED = {
    "optim": ".*(layerwise|lomo|galore|apollo|grokadamw|8bit|bnb).*",
    "train_sampling_strategy": "batch_rebalance",
}
"""Patterns of refused values of arguments of which not all are mapped."""
RECOMPUTED = {"use_reentrant", "preserve_rng_state", "determinism_check", "debug", "early_stop"}
"""Keys of ``activation_checkpointing_kwargs`` that change nothing where blocks store their input."""
OTHERS = ("activation_offloading",)
"""Arguments of subclasses that are refused."""
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Variable that torchrun sets for each of its processes."""
CALLED = (
    "compute_loss|log|evaluate|predict|train|prediction_step|get_.*_dataloader|_get_.*_sampler|_get_dataloader|"
    "create_optimizer|create_scheduler|get_decay_parameter_names|get_optimizer_cls_and_kwargs|_get_num_items_in_batch|"
    "_remove_unused_columns|_set_signature_columns_if_needed|_get_collator_with_removed_columns|_save|_save_checkpoint|save_model|"
    "_determine_best_metric|is_.*_process_zero|add_callback|pop_callback|remove_callback|floating_point_ops|store_flos|"
    "log_metrics|save_metrics|save_state|metrics_format|create_model_card|push_to_hub|init_hf_repo|_evaluate|_load_best_model|"
    "_load_from_checkpoint|_issue_warnings_after_load|num_examples|__init__|call_model_init|_validate_args"
)
"""Methods of ``Trainer`` that are called here, so that a subclass may override them."""


def check_arguments(trainer: Any, own: type) -> None:
    """Check that a pipeline can do what the arguments of a ``Trainer``, and the methods of a subclass, ask for.

    Args:
        own: Class of petra, whose subclasses' methods are checked.

    Raises:
        ConfigError: If not. The message names every argument and method.
    """
    if ERROR_FILE in os.environ:
        sys.excepthook = _report_once
    args = trainer.args
    default = _default(args)
    names = [field.name for field in dataclasses.fields(TrainingArguments) if field.init and not MAPPED.fullmatch(field.name)]
    found = [f"{name}={getattr(args, name)}" for name in names if getattr(args, name) != getattr(default, name)]
    chosen = {name: str(getattr(value := getattr(args, name), "value", value)) for name in REFUSED}
    found += [f"{name}=True" for name in OTHERS if getattr(args, name, False)]
    found += [f"{name}={value}" for name, value in chosen.items() if re.fullmatch(REFUSED[name], value)]
    keys = {*(getattr(args, "activation_checkpointing_kwargs", None) or getattr(args, "gradient_checkpointing_kwargs", None) or ())}
    found += [f"activation_checkpointing_kwargs with {key}" for key in sorted(keys - RECOMPUTED)]
    processes = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    found += ["save_on_each_node=True in several processes"] if args.save_on_each_node and processes > 1 else []
    require(not found, "PetraTrainer", "no argument that it can't map", ", ".join(found))
    check_methods(trainer, own)
    started = int(os.environ.get("WORLD_SIZE", "1"))
    require(processes == started, "use_cpu", f"true on a machine without GPUs, in {started} processes", args.use_cpu)
    require(args.n_gpu <= 1, "PetraTrainer", "a process for each GPU (torchrun --nproc-per-node)", f"{args.n_gpu} GPUs in one")


def check_methods(trainer: Any, own: type) -> None:
    """Check that a pipeline calls the methods that a subclass has, or that were set on the trainer itself.

    Raises:
        ConfigError: If not. The message names them.
    """
    overridden = {
        name
        for kind in type(trainer).__mro__[: type(trainer).__mro__.index(own)]
        for name, value in vars(kind).items()
        if callable(getattr(transformers.Trainer, name, None)) and not name.startswith("__") and callable(getattr(kind, name))
    }
    steps = overriding(type(trainer), own, "training_step")
    if all({"super", "training_step"} <= names_in(each) for each in steps):
        overridden.discard("training_step")
    reads = any(names_in(each) & {*GRADIENTS, "backward"} for each in steps)
    expected = "one that leaves gradients alone: the stages have made their steps"
    require(not reads, f"{type(trainer).__name__}.training_step", expected, "one that does not")
    overridden |= {name for name in vars(trainer) if callable(getattr(transformers.Trainer, name, None))}
    ignored = sorted(name for name in overridden if not re.fullmatch(CALLED, name))
    expected = "methods that a pipeline calls, such as compute_loss"
    require(not ignored, type(trainer).__name__, expected, f"its own {', '.join(ignored)}")


def overriding(kind: type, own: type, name: str) -> list[Any]:
    """Return the code of all methods of a name that precede that of ``own``."""
    return [getattr(vars(each)[name], "__code__", None) for each in kind.__mro__[: kind.__mro__.index(own)] if name in vars(each)]


def _default(args: Any) -> TrainingArguments:
    """Return arguments with their defaults. Making them resets the state that the accelerator of ``args`` reads."""
    states = [(each, {**each._shared_state}) for each in (PartialState, AcceleratorState)]
    default = TrainingArguments(output_dir=args.output_dir, use_cpu=args.use_cpu)
    for each, state in states:
        each._shared_state.clear()
        each._shared_state.update(state)
    return default


def _report_once(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Print an error of petra that ends the processes of torchrun in one line, once on each machine; any other as Python does."""
    if not isinstance(error, PetraError):
        sys.__excepthook__(kind, error, trace)
        return
    with suppress(FileExistsError):  # of the process that has reported it, in torchrun's folder for this start
        Path(os.environ[ERROR_FILE]).parents[1].joinpath("reported").touch(exist_ok=False)
        place = located(error)
        print(f"error: {error}" + (f" ({place})" if place else ""), file=sys.stderr, flush=True)
