"""``transformers.Trainer`` whose processes are the stages of a pipeline."""

from __future__ import annotations

import atexit
import math
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import TrainOutput, get_last_checkpoint, rotate_checkpoints, speed_metrics

from petra.distributed import all_gather_objects
from petra.engine.endpoints import Loss, Losses
from petra.engine.options.extension import Extension
from petra.engine.recipe import Recipe
from petra.errors import require
from petra.huggingface.arguments import WeightedLoss, check_arguments, optimizer, rates
from petra.huggingface.batches import Form, TrainBatches
from petra.huggingface.blocks import DECODERS, split
from petra.huggingface.inputs import FIELDS
from petra.huggingface.load import base_of, from_pretrained, report_untied, untie
from petra.method import Method
from petra.models.head_loss import LinearCrossEntropy, without_logits
from petra.pipeline import Pipeline
from petra.plan import make_plan
from petra.reversible import seeded
from petra.settings import Numerics, Runtime
from petra.specs import TensorSpec
from petra.training.checkpoint import Checkpoints, newest, restore
from petra.training.weight_files import gathered_blocks
from petra.update_rules import UpdateRules

STATE, PETRA = "trainer_state.json", "petra"
"""File and folder in a folder ``checkpoint-<step>``: the state of the trainer, and a checkpoint of the pipeline."""


class PetraTrainer(transformers.Trainer):  # type: ignore[misc]
    """Trains a model of ``transformers`` as ``Trainer`` does, over a pipeline whose stages are the processes of ``torchrun``.

    A microbatch has ``per_device_train_batch_size`` rows, and an update ``gradient_accumulation_steps`` microbatches. Every process
    must make the same calls, with the same model and data. Order of the data, learning rates, weight decay, the loss of an update
    (the mean over its targets where the model's own is one), events of callbacks, logs and folders of checkpoints are those of
    ``Trainer``. Differences:

    * If embedding and head share weights, they are trained apart, and the model is saved so.
    * An evaluation's loss is the mean over its targets. ``Trainer`` averages the means of samples.
    * Logs have no ``grad_norm``. With a method that doesn't flush, gradients are clipped by the norm of each stage, and callbacks
      of other processes than the first get the events of several updates at once.
    * ``Trainer`` counts the first token of a row among the targets of GPT-2, and adds up the losses of the batches of an update
      with ``BertForMaskedLM``. Here both losses are means, too.
    * Random numbers of dropout and of collators are others.

    Args:
        arguments, named: As for ``transformers.Trainer``.
        method: A name from :data:`petra.METHODS`, or a method. The default computes the same gradients as ``Trainer``.
        stages: Number of stages, or number of blocks in each: embedding, layers, head. None: one stage per process.
        max_length: Number of tokens of a row; shorter rows are padded. None: as many as in the first batch.
        loss_rows: Compute the loss in chunks of so many tokens, without whole logits (:mod:`petra.models.head_loss`); None: don't.
        extensions: What else acts in a run, such as remedies for stale gradients (:mod:`petra.staleness`).

    Raises:
        ConfigError: If an argument can't be mapped. The message names all that can't.
        ModelError: If the class of the model is not supported.
    """

    def __init__(
        self,
        *arguments: Any,
        method: str | Method = "1f1b",
        stages: int | Sequence[int] | None = None,
        max_length: int | None = None,
        loss_rows: int | None = None,
        extensions: Sequence[Extension] = (),
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        check_arguments(self)
        atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())  # gloo's threads could abort the process
        # Every process reads all batches: accelerate would divide them.
        config = self.accelerator.dataloader_config
        self.accelerator.prepare = partial(
            prepare_data_loader,
            num_processes=1,
            process_index=0,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=config.data_seed,
        )
        self._rates, self._last = [0.0], 0
        self._sum: Tensor | float = 0.0
        self.control: Any = self.control  # of Trainer
        base = base_of(self.model)
        report_untied(untie(base))
        self.form, inputs = self._probe(base, max_length)
        self.pipeline = self._pipeline(base, inputs, method, stages, loss_rows, extensions)
        names = ("gradient_accumulation_steps", "per_device_train_batch_size")
        self._facts = {name: getattr(self.args, name) for name in names} | {"method": self.pipeline.plan.method.name}

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: the pipeline copies the blocks of its stages."""

    def _probe(self, base: Any, max_length: int | None) -> tuple[Form, TensorSpec]:
        """Return the form of microbatches and the spec of their inputs, from the first rows of the data."""
        name, config, trains = type(base).__name__, base.config, self.train_dataset is not None
        data = self.train_dataset if trains else self.eval_dataset
        data = next(iter(data.values())) if isinstance(data, dict) else data
        sized = hasattr(data, "__len__") and hasattr(data, "__getitem__") and len(data) > 0
        require(sized, "train_dataset", "a data set with a length > 0, whose rows can be indexed", type(data).__name__)
        kind = getattr(config, "problem_type", None) or "single_label_classification"
        fits = "SequenceClassification" not in name or (config.num_labels > 1 and kind == "single_label_classification")
        require(fits, "model.config", "single_label_classification of at least 2 labels", f"{kind} of {config.num_labels}")
        loader = self.get_train_dataloader() if trains else self.get_eval_dataloader(data)
        rows = self.args.per_device_train_batch_size
        with seeded(self.args.seed):
            batch = loader.collate_fn([loader.dataset[i] for i in range(min(rows, len(data)))])
        fields = tuple(name for name in FIELDS if name in batch)
        size = (batch[FIELDS[0]].shape[1] if max_length is None else max_length) if FIELDS[0] in batch else None
        form = Form(rows, fields, size, self.label_names[0], name in (*DECODERS, "GPT2LMHeadModel"))
        pair = form.split(batch)[0]
        sums = all_gather_objects([float(t.double().sum()) for t in pair])
        require(all(own == sums[0] for own in sums), "train_dataset", "the same rows in every process", "others")
        return form, TensorSpec(tuple(pair[0].shape), pair[0].dtype)

    def _pipeline(
        self,
        base: Any,
        inputs: TensorSpec,
        method: str | Method,
        stages: int | Sequence[int] | None,
        loss_rows: int | None,
        extensions: Sequence[Extension],
    ) -> Pipeline:
        args, decayed = self.args, {*self.get_decay_parameter_names(self.model)}
        own = {id(p) for name, p in self.model.named_parameters() if name in decayed}
        for module in self.model.modules():  # copied into the pipeline with this attribute
            module.decayed = {key for key, p in module.named_parameters(recurse=False) if id(p) in own}
        parts = split(base.train(), self.form.fields or FIELDS[:1], None)
        self._tensors = {f"{name}.{key}": t for name, part in parts.items() for key, t in part.state_dict().items()}
        model, dtype = from_pretrained(self.model, fields=self.form.fields or FIELDS[:1]), torch.bfloat16 if args.bf16 else None
        losses: list[Loss] = [partial(F.cross_entropy, label_smoothing=args.label_smoothing_factor), F.cross_entropy]
        if loss_rows is not None:
            model = without_logits(model)
            losses = [LinearCrossEntropy(smoothing, loss_rows, dtype) for smoothing in (args.label_smoothing_factor, 0.0)]
        self._loss = WeightedLoss(losses[0])
        plan = make_plan(
            model,
            inputs,
            method=method,
            k=args.gradient_accumulation_steps,
            stages=args.world_size if stages is None else stages,
            processes=args.world_size,
            numerics=Numerics(dtype),
            device_type=args.device.type,
            metrics=0,
        )
        self._at_once = plan.method.flush or not any(plan.delays)
        if args.max_grad_norm and not self._at_once and len(plan.stages) > 1 and self.is_world_process_zero():
            print(f"max_grad_norm={args.max_grad_norm} of each stage: with {plan.method.name} they update apart", flush=True)
        rules = UpdateRules(clip=args.max_grad_norm or None, clip_globally=self._at_once and args.max_grad_norm > 0)
        recipe = Recipe(
            partial(optimizer, args),
            lambda t: self._rates[min((max(t, 1) - 1) // plan.k, len(self._rates) - 1)],
            Losses(self._loss, losses[1]),
            metrics={},
            seed=args.seed,
            rules=rules,
            extensions=extensions,
        )
        return Pipeline.from_plan(plan, recipe, Runtime(args.device))

    def train(self, resume_from_checkpoint: str | bool | None = None, **unmapped: Any) -> TrainOutput:
        """Train, log, evaluate and save as the arguments say. Can be called once.

        Args:
            resume_from_checkpoint: Folder ``checkpoint-<step>``, or whether to resume from the newest in the output folder.

        Raises:
            ConfigError: If the trainer has trained before, or the checkpoint has another method or other numbers of rows.
            DataError: If there is no such checkpoint.
        """
        require(not unmapped, "train", "no argument but resume_from_checkpoint", ", ".join(unmapped))
        require(not self.pipeline.microbatches_done, "train", "one call", "a second one")
        args, started, loader, k = self.args, time.time(), self.get_train_dataloader(), self.pipeline.plan.k
        per_epoch = math.ceil(len(loader) / k)
        steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
        require(
            steps > 0, "num_train_epochs", "a number > 0, and data with a batch: there would be no update", args.num_train_epochs
        )
        self._rates, self.state = rates(args, steps), TrainerState()
        self.state.compute_steps(args, steps)
        if resume_from_checkpoint:
            self._resume(get_last_checkpoint(args.output_dir) if resume_from_checkpoint is True else resume_from_checkpoint)
        self.state.init_training_references(self, steps, math.ceil(steps / per_epoch), None)
        self._last = first = self.state.global_step
        data = TrainBatches(
            loader,
            self.form,
            k,
            args.seed,
            weights=self._loss.weights,
            by_targets=self.model_accepts_loss_kwargs,
            reads=(0 in self.pipeline.stages, len(self.pipeline.plan.stages) - 1 in self.pipeline.stages),
            updates=first,
        )
        self.callback_handler.train_dataloader = loader
        self._batches_per_epoch, self._total = len(loader), 0.0
        self.control = self.callback_handler.on_train_begin(args, self.state, self.control)
        if args.eval_on_start:
            self.evaluate()
        while self.state.global_step < steps and not self.control.should_training_stop:
            step = self.state.global_step
            if step % per_epoch == 0:
                self.control = self.callback_handler.on_epoch_begin(args, self.state, self.control)
            epoch_end = step - step % per_epoch + per_epoch
            self._advance(data, min(self._next_drain(), epoch_end, steps) - step)
            self._evaluate_and_save()
            if self.state.global_step == epoch_end or self.control.should_training_stop:
                self.control = self.callback_handler.on_epoch_end(args, self.state, self.control)
                self._log()
                self._evaluate_and_save()
        done, rows = self.state.global_step - first, self.form.rows * k
        loss = (self._total + float(self._sum)) / max(done, 1)
        metrics = {**speed_metrics("train", started, num_samples=done * rows, num_steps=done), "train_loss": loss}
        self.log(metrics)
        self.control = self.callback_handler.on_train_end(args, self.state, self.control)
        return TrainOutput(self.state.global_step, loss, metrics)

    def _next_drain(self) -> int:
        """Return the number of the update after which the pipeline drains next."""
        args, state, step = self.args, self.state, self.state.global_step
        due = [(args.eval_strategy, state.eval_steps), (args.save_strategy, state.save_steps)]
        every = [1] if self._at_once else [int(steps) for strategy, steps in due if strategy == "steps"]
        return min((step - step % n + n for n in every), default=sys.maxsize)

    def _advance(self, data: TrainBatches, updates: int) -> None:
        """Train ``updates`` updates, and call the callbacks for each: at once in the first process, after all in the others."""
        reports: list[Tensor] = []
        losses: list[Tensor] = []
        wanted = [False, False]

        def updated(loss: Tensor | float) -> None:
            self._updated(loss)
            wanted[:] = [wanted[0] or self.control.should_evaluate, wanted[1] or self.control.should_save]

        def completed(report: Tensor) -> None:
            reports.append(report[1] / report[0].clamp(min=1))
            if len(reports) == self.pipeline.plan.k:
                losses.append(torch.stack(reports).mean())
                reports.clear()
                updated(losses[-1])

        first = self.pipeline.rank == 0
        self.pipeline.train(data, updates * self.pipeline.plan.k, completed if first else None)
        for loss in () if first else all_gather_objects([])[0]:
            updated(loss)
        if first:
            all_gather_objects([float(loss) for loss in losses])
        wanted.append(self.control.should_training_stop)
        found = [any(each) for each in zip(*all_gather_objects(wanted), strict=True)]
        self.control.should_evaluate, self.control.should_save, self.control.should_training_stop = found
        require(not self.control.should_epoch_stop, "callbacks", "none that sets should_epoch_stop", "one")

    def _updated(self, loss: Tensor | float) -> None:
        """Count an update, call the callbacks, and log if they ask for it."""
        args, state, k = self.args, self.state, self.pipeline.plan.k
        self.control = self.callback_handler.on_step_begin(args, state, self.control)
        state.global_step += 1
        epoch, update = divmod(state.global_step - 1, math.ceil(self._batches_per_epoch / k))
        state.epoch = epoch + min((update + 1) * k, self._batches_per_epoch) / self._batches_per_epoch
        self._sum = self._sum + loss
        self.control = self.callback_handler.on_step_end(args, state, self.control)
        self._log()

    def _log(self) -> None:
        """Log the mean loss since the last time, if a callback asks for it."""
        step = self.state.global_step
        if self.control.should_log and step > self._last:
            found = float(self._sum)
            logs = {"loss": found / (step - self._last), "learning_rate": self._rates[step - 1]}
            self._total, self._sum, self._last = self._total + found, 0.0, step
            self.log(logs)

    def _evaluate_and_save(self) -> None:
        """Evaluate and save the drained pipeline, if a callback asks for it."""
        if self.control.should_evaluate:
            best = self._determine_best_metric(self.evaluate(), None)
            if self.args.save_strategy == "best":
                self.control.should_save = best
        if self.control.should_save:
            self._save_checkpoint(self.model, None)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Return the mean loss over the targets of a data set, or of each of a dictionary, as ``Trainer`` does."""
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, dict):
            parts = [self.evaluate(each, None, f"{metric_key_prefix}_{name}") for name, each in data.items()]
            return {key: value for part in parts for key, value in part.items()}
        started = time.time()
        pairs = [pair for batch in self.get_eval_dataloader(data) for pair in self.form.split(batch)]
        loss = self.pipeline.evaluate(SimpleNamespace(inputs=lambda m: pairs[m][0], targets=lambda m: pairs[m][1]), len(pairs)).loss
        speed = speed_metrics(metric_key_prefix, started, num_samples=len(data), num_steps=len(pairs))
        metrics = {f"{metric_key_prefix}_loss": loss, **speed}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def predict(self, *arguments: Any, **named: Any) -> Any:
        """Refuse: only the stages have the trained weights.

        Raises:
            ConfigError: Always.
        """
        require(False, "PetraTrainer.predict", "save_model, and a Trainer of the saved model", "a call")

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the trained model as ``Trainer`` does. Every process must call it; the first writes."""
        for name, block in gathered_blocks(self.pipeline):
            for key, value in block.items():
                self._tensors[f"{name}.{key}"].copy_(value)
        if self.pipeline.rank == 0:
            super().save_model(output_dir, _internal_call)
        all_gather_objects(None)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write the model, and unless ``save_only_model``, what :meth:`train` resumes from, to ``checkpoint-<step>``."""
        args, folder = self.args, Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        self.save_model(str(folder), _internal_call=True)
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(folder)
        if not args.save_only_model:
            Checkpoints(folder / PETRA, keep=1).save(self.pipeline, self._facts)
        if args.should_save:
            self.state.save_to_json(str(folder / STATE))
            rotate_checkpoints(args.output_dir, args.save_total_limit, self.state.best_model_checkpoint, use_mtime=True)

    def _resume(self, folder: str | None) -> None:
        path = None if folder is None else newest(Path(folder) / PETRA)
        require(path is not None, "resume_from_checkpoint", f"a folder that PetraTrainer has saved, with {PETRA}/", folder)
        assert path is not None
        facts = restore(self.pipeline, path)
        for name, value in self._facts.items():
            require(facts.get(name, value) == value, name, f"{facts.get(name)}, as in {folder}", value)
        self.state = TrainerState.load_from_json(str(Path(str(folder)) / STATE))
